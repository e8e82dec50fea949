# SPDX-License-Identifier: Apache-2.0
"""Features that most pipelines do not use, each in a file or folder of its own.

The library below this folder loads a feature by name when an option or a stage asks for it
(``fpipe.actions.product.load_pass``). With a feature off none of its code is imported or run.
"""

# SPDX-License-Identifier: Apache-2.0
"""The command line: ``fpipe draw``, ``compare``, ``train``, ``doctor`` and ``profile``, and
``fpipe.launch``.
"""

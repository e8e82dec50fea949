# SPDX-License-Identifier: Apache-2.0
"""Steps that are recorded as graphs of kernels (``pipe.captured()``)."""

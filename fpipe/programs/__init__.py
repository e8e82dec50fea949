# SPDX-License-Identifier: Apache-2.0
"""From a stage function to its four programs: trace, split into F, B, I and W, simplify, compile.

``eager`` does the same on autograd's own graph. Nothing here knows ranks or schedules.
"""

from .fake import fake_tensors

__all__ = ["fake_tensors"]

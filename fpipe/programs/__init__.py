# SPDX-License-Identifier: Apache-2.0
"""From a stage function to its four programs: trace, split into F, B, I and W, simplify, compile.

What most stages do not need is in ``fpipe.passes`` and loaded by name. Nothing here knows ranks or
schedules.
"""

from .internals import setting
from .tensor_state import fake_tensors
from .wrappers import BLOCKS, RECORDING, Block, block, remat

__all__ = ["BLOCKS", "RECORDING", "Block", "block", "fake_tensors", "remat", "setting"]

# SPDX-License-Identifier: Apache-2.0
"""From a stage function to its four programs: trace, split into F, B, I and W, simplify, compile.

What most stages do not need is in ``fpipe.passes`` and loaded by name. Nothing here knows ranks or
schedules.
"""

from .internals import Fake, setting
from .wrappers import BLOCKS, RECORDING, Block, block, remat

__all__ = ["BLOCKS", "RECORDING", "Block", "Fake", "block", "remat", "setting"]

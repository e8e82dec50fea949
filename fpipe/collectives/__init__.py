# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks, and the messages and collectives between them.

``group`` is the protocol that other packages use; ``local``, ``c10d`` and the fakes of
``fpipe.testing`` implement it. This package must not know schedules, stages or plans.
"""

from .c10d import C10dGroup
from .capabilities import DTYPES, reduction, sending
from .codec import decode, encode
from .group import Group

__all__ = ["DTYPES", "C10dGroup", "Group", "decode", "encode", "reduction", "sending"]

# SPDX-License-Identifier: Apache-2.0
"""Devices as records: the differences between cpu, cuda, xpu, npu, hpu and mps.

``kinds`` is their table and their choice; ``streams`` are those of random numbers.
This package must not know groups or stages.
"""

from .allocator import keep_freed
from .kinds import KINDS, DeviceKind, cores, current, distrusted, kind, pick
from .lock import exclusive
from .streams import Streams, drawn, restore_streams, save_streams

__all__ = [
    "KINDS",
    "DeviceKind",
    "Streams",
    "cores",
    "current",
    "distrusted",
    "drawn",
    "exclusive",
    "keep_freed",
    "kind",
    "pick",
    "restore_streams",
    "save_streams",
]

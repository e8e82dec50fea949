# SPDX-License-Identifier: Apache-2.0
"""Devices as records: the differences between cpu, cuda, xpu, npu, hpu and mps.

``kinds`` is their table and their choice; ``lock`` lets one thread draw or trace at a time.
This package must not know groups or stages.
"""

from .allocator import keep_freed
from .kinds import KINDS, DeviceKind, cores, current, kind, pick
from .lock import exclusive

__all__ = [
    "KINDS",
    "DeviceKind",
    "cores",
    "current",
    "exclusive",
    "keep_freed",
    "kind",
    "pick",
]

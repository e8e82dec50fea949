# SPDX-License-Identifier: Apache-2.0
"""Devices as records: the differences between cpu, cuda, xpu, npu, hpu and mps.

``kinds`` is data; ``current`` uses ``torch.accelerator``; ``streams`` are those of random numbers.
This package must not know groups or stages.
"""

from .allocator import keep_freed
from .current import (
    Memory,
    cores,
    current,
    default_attention,
    distrusted,
    memory,
    pick,
    synchronize,
)
from .kinds import KINDS, DeviceKind, kind
from .streams import Streams, drawn, exclusive, restore_streams, save_streams

__all__ = [
    "KINDS",
    "DeviceKind",
    "Memory",
    "Streams",
    "cores",
    "current",
    "default_attention",
    "distrusted",
    "drawn",
    "exclusive",
    "keep_freed",
    "kind",
    "memory",
    "pick",
    "restore_streams",
    "save_streams",
    "synchronize",
]

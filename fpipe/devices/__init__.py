# SPDX-License-Identifier: Apache-2.0
"""Devices as records: the differences between cpu, cuda, xpu, npu, hpu and mps.

``kinds`` is data; ``current`` uses ``torch.accelerator``. This package must not know groups or stages.
"""

from .current import Memory, default_attention, distrusted, memory, pick, seed, synchronize
from .kinds import KINDS, DeviceKind, kind

__all__ = [
    "KINDS", "DeviceKind", "Memory", "default_attention", "distrusted", "kind", "memory", "pick", "seed", "synchronize",
]  # fmt: skip

"""Devices as records: what differs between cpu, cuda, xpu, npu, hpu and mps, and nothing that a rank would do there.

``kinds`` is data; ``current`` asks ``torch.accelerator``. Nothing here knows groups or stages.
"""

from .current import Memory, default_attention, distrusted, memory, pick, seed, synchronize
from .kinds import KINDS, DeviceKind, kind

__all__ = [
    "KINDS",
    "DeviceKind",
    "Memory",
    "default_attention",
    "distrusted",
    "kind",
    "memory",
    "pick",
    "seed",
    "synchronize",
]

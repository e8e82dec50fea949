# SPDX-License-Identifier: Apache-2.0
"""Devices as records: the differences between cpu, cuda, xpu, npu, hpu and mps.

``kinds`` is their table and their choice.
This package must not know groups or stages.
"""

from .kinds import KINDS, DeviceKind, cores, current, identity, keep_freed, kind, pick, wide

__all__ = [
    "KINDS",
    "DeviceKind",
    "cores",
    "current",
    "identity",
    "keep_freed",
    "kind",
    "pick",
    "wide",
]

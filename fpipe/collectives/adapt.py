# SPDX-License-Identifier: Apache-2.0
"""Rules for right results on every backend: pure functions from capabilities to a method.

mean            sum, then divide                                    integers: refused
max, min        native, else on the CPU's backend, else gather and reduce locally
bool            as uint8: sum and max are "any", min is "all"
16-bit and unsigned integers, fp8    in a wider dtype, then converted back
messages        as bytes; one process group per direction where a pair has one order; receives
                posted late where early ones deadlock; through the CPU where nothing else works
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import UnsupportedError
from .capabilities import DTYPES, Capabilities
from .group import OPS

_WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.bool: torch.uint8,
    **dict.fromkeys((*DTYPES["fp8"], *DTYPES["half"]), torch.float32),
}


class Reduction(NamedTuple):
    """The method of a reduction ``op``: the call to the backend, its dtype, on the CPU or not, and
    a division after.

    ``ask`` is "sum", "max", "min" or "gather" (gather, then reduce locally with ``op``).
    """

    op: str
    ask: str
    carry: torch.dtype
    staged: bool = False
    divide: bool = False


def reduction(
    can: Capabilities, op: str, dtype: torch.dtype, cpu: Capabilities | None = None
) -> Reduction:
    """The method of a reduction; ``cpu`` are the group's capabilities for CPU tensors, if it
    carries them too.

    >>> reduction(Capabilities.of("xpu", "xccl"), "mean", torch.float32)
    Reduction(op='mean', ask='sum', carry=torch.float32, staged=False, divide=True)
    >>> reduction(Capabilities.of("xpu", "xccl"), "max", torch.float32).ask
    'gather'
    """
    _check_defined(op, dtype)
    # a sum of 256 ones in uint8 would be 0
    asked = "max" if dtype == torch.bool and op == "sum" else op
    carry = dtype
    if dtype == torch.bool or (
        dtype in _WIDER and not can.can("sum" if op == "mean" else op, dtype)
    ):
        carry = _WIDER[dtype]
    ask = "sum" if asked == "mean" else asked
    divide = op == "mean"
    for where in (can, cpu):
        if where is not None and where.can(ask, carry):
            return Reduction(asked, ask, carry, where is not can, divide)
    if can.can("gather", carry) or can.can("gather", torch.uint8):
        return Reduction(asked, "gather", carry, divide=divide)
    raise UnsupportedError(
        f"{can.backend} on {can.device} is not known to do {op} of {carry}, nor to gather it, and "
        f"{_no_cpu(can)}"
    )


def _check_defined(op: str, dtype: torch.dtype) -> None:
    """Raise UnsupportedError for a reduction that has no result."""
    if op not in OPS:
        raise UnsupportedError(f"there is no reduction {op!r}; the reductions are {', '.join(OPS)}")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise UnsupportedError(
            f"a mean of {dtype} would be rounded or refused; convert to a floating dtype first"
        )
    if op in ("max", "min") and dtype.is_complex:
        raise UnsupportedError(f"{dtype} has no order, so no {op}; reduce its absolute value")
    if dtype == torch.uint64:
        raise UnsupportedError(
            "torch has no wider dtype to reduce uint64 in; convert to int64 first"
        )


def _no_cpu(can: Capabilities) -> str:
    return (
        "the group has no CPU backend to go through; start the group with "
        f"'cpu:gloo,{can.device}:{can.backend}'"
    )


class Sending(NamedTuple):
    """The method of messages, which are sent as bytes.

    ``staged``: through the CPU. ``early``: receives are posted before they are waited for.
    ``two_groups``: each direction of a pair has a process group.
    """

    staged: bool
    early: bool
    two_groups: bool


def sending(can: Capabilities, cpu: Capabilities | None = None) -> Sending:
    """The method of messages.

    >>> sending(Capabilities.of("cuda", "nccl"))
    Sending(staged=False, early=True, two_groups=True)
    >>> sending(Capabilities.of("mps", "gloo"), Capabilities.of("cpu", "gloo")).staged
    True
    """
    if can.can("p2p", torch.uint8):
        return Sending(False, can.habit("early"), not can.habit("crossed"))
    if cpu is not None:
        return sending(cpu)._replace(staged=True)
    raise UnsupportedError(
        f"{can.backend} is not known to carry tensors of {can.device}, and {_no_cpu(can)}"
    )

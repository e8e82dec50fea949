# SPDX-License-Identifier: Apache-2.0
"""Rules for right results on every backend: pure functions from capabilities to a method.

mean            sum, then divide, except on an allow-list           integers: refused
max, min        native, else on the CPU's backend, else gather and reduce locally
bool            as uint8: sum and max are "any", min is "all"
16-bit and unsigned integers, fp8    in a wider dtype, then converted back
messages        as bytes where the backend does not send the dtype; one process group per direction
where a pair has
                one order; receives posted late where early ones deadlock; through the CPU where
                nothing else works
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import UnsupportedError
from .capabilities import DTYPES, Capabilities

OPS = ("sum", "mean", "max", "min")
#: Backends whose average was tested to be right at every size and world size.
AVG_ALLOWED = frozenset({("cpu", "gloo")})
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

    ``ask`` is "sum", "avg", "max", "min" or "gather" (gather, then reduce locally with ``op``).
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
    if op not in OPS:
        raise UnsupportedError(f"there is no reduction {op!r}; the reductions are {', '.join(OPS)}")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise UnsupportedError(
            f"a mean of {dtype} would be rounded or refused; convert to a floating dtype first"
        )
    if op in ("max", "min") and dtype.is_complex:
        raise UnsupportedError(f"{dtype} has no order, so no {op}; reduce its absolute value")
    asked = (
        "max" if dtype == torch.bool and op == "sum" else op
    )  # a sum of 256 ones in uint8 would be 0
    carry = dtype
    if dtype == torch.bool or (
        dtype in _WIDER and not can.can("sum" if op == "mean" else op, dtype)
    ):
        carry = _WIDER[dtype]
    if dtype == torch.uint64:
        raise UnsupportedError(
            "torch has no wider dtype to reduce uint64 in; convert to int64 first"
        )
    return (
        _ask(can, op, asked, carry)
        or (_staged(cpu, op, asked, carry))
        or _gathered(can, op, asked, carry)
    )


def _ask(can: Capabilities, op: str, asked: str, carry: torch.dtype) -> Reduction | None:
    if asked == "mean":
        if can.can("avg", carry) and (can.device, can.backend) in AVG_ALLOWED:
            return Reduction(op, "avg", carry)
        return Reduction(op, "sum", carry, divide=True) if can.can("sum", carry) else None
    return Reduction(asked, asked, carry) if can.can(asked, carry) else None


def _staged(cpu: Capabilities | None, op: str, asked: str, carry: torch.dtype) -> Reduction | None:
    way = _ask(cpu, op, asked, carry) if cpu is not None else None
    return way._replace(staged=True) if way is not None else None


def _gathered(can: Capabilities, op: str, asked: str, carry: torch.dtype) -> Reduction:
    if can.can("gather", carry) or can.can("gather", torch.uint8):
        return Reduction(asked, "gather", carry, divide=op == "mean")
    raise UnsupportedError(
        f"{can.backend} on {can.device} is not known to do {op} of {carry}, nor to gather it, and "
        "the group has no CPU "
        f"backend to go through; start the group with 'cpu:gloo,{can.device}:{can.backend}'"
    )


class Sending(NamedTuple):
    """The method of messages: as bytes, through the CPU, receives posted early, one process group
    per direction.
    """

    bytes: bool
    staged: bool
    early: bool
    apart: bool


def sending(can: Capabilities, dtype: torch.dtype, cpu: Capabilities | None = None) -> Sending:
    """The method of messages of a dtype.

    >>> sending(Capabilities.of("cuda", "nccl"), torch.float8_e4m3fn)
    Sending(bytes=True, staged=False, early=True, apart=True)
    >>> sending(Capabilities.of("mps", "gloo"), torch.float32,
    ...     Capabilities.of("cpu", "gloo")).staged
    True
    """
    if can.can("p2p", dtype) or can.can("p2p", torch.uint8):
        return Sending(
            not can.can("p2p", dtype), False, can.habit("early"), not can.habit("crossed")
        )
    if cpu is not None:
        return sending(cpu, dtype)._replace(staged=True)
    raise UnsupportedError(
        f"{can.backend} is not known to carry tensors of {can.device}, and the group has no CPU "
        "backend to go through; "
        f"start the group with 'cpu:gloo,{can.device}:{can.backend}'"
    )

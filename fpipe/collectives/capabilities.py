# SPDX-License-Identifier: Apache-2.0
"""What each backend supports: a frozen table. Which method is right on it: pure functions.

A row has a device type and a backend, because one name may denote two libraries ("hccl" is Ascend's
and Habana's). What a row does not name is unknown, refused or computed wrongly, and is never asked
for. A backend without a row is refused: torch's "fake", for one, sends nothing. The row of gloo was
tested on torch 2.11 and 2.13; the others come from documentation, source code and issues.

mean            sum, then divide                                    integers: refused
max, min        native, else on the CPU's backend, else gather and reduce locally
bool            as uint8: sum and max are "any", min is "all"
16-bit and unsigned integers, fp8    in a wider dtype, then converted back
messages        as bytes; one process group per direction where a pair has one order; receives
                posted late where early ones deadlock; through the CPU where nothing else works
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ..errors import GroupError, UnsupportedError
from .group import OPS

#: dtype class -> its dtypes
DTYPES = {
    name: tuple(getattr(torch, dtype) for dtype in dtypes.split())
    for name, dtypes in {
        "float": "float32 float64",
        "half": "float16 bfloat16",
        "fp8": "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz",
        "complex": "complex64 complex128 complex32",
        "int": "uint8 int8 int32 int64",
        "odd": "int16 uint16 uint32 uint64",
        "bool": "bool",
    }.items()
}
_CLASS = {dtype: name for name, dtypes in DTYPES.items() for dtype in dtypes}
#: The dtype in which a backend is asked where it does not support another one.
_WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.bool: torch.uint8,
    **dict.fromkeys((*DTYPES["fp8"], *DTYPES["half"]), torch.float32),
}


def dtype_class(dtype: torch.dtype) -> str:
    """The class of a dtype in the table.

    >>> dtype_class(torch.bfloat16), dtype_class(torch.int16)
    ('half', 'odd')
    """
    return _CLASS.get(dtype, "odd")


class Capabilities(NamedTuple):
    """What one backend supports on one type of device.

    ``dtypes`` are the classes of dtypes, separated by blanks, of each reduction (sum, max, min) and
    each move (p2p, gather, and "parts": reduce-scatter). ``habits`` are properties of
    sending. "tags": a tag selects the message. "early": a receive may be posted before a send of
    the same rank. "crossed": both directions of a pair in one process group, in any order.

    >>> Capabilities.of("cpu", "gloo").can("max", torch.complex64)
    False
    >>> Capabilities.of("cpu", "gloo").habit("tags")
    True
    """

    device: str
    backend: str
    dtypes: Mapping[str, str]
    habits: str = ""

    @classmethod
    def of(cls, device: str, backend: str) -> Capabilities:
        """The row of the table. Backends of the CPU carry no tensors of another device."""
        for row in TABLE:
            if row.backend == backend:
                if row.device == device:
                    return row
                if row.device == "cpu":
                    return cls(device, backend, {})
        raise GroupError(
            f"fpipe does not know what backend {backend!r} does with tensors of {device}, and "
            "torch's 'fake' sends nothing; leave backend= out, or state what it does: "
            "fpipe.adopt(..., capabilities=)"
        )

    def can(self, what: str, dtype: torch.dtype) -> bool:
        """Whether the backend supports a reduction or a move of this dtype directly."""
        return dtype_class(dtype) in self.dtypes.get(what, "").split()

    def habit(self, what: str) -> bool:
        """Whether the backend has a property of sending."""
        return what in self.habits.split()


_MOVES = ("p2p", "gather")
_ALL = ("sum", "max", "min", *_MOVES)
_COMMON = "float half int"
_MOST = "float half complex int bool"
TABLE = (
    # A sum of bools is a logical or. Parts: all is reduced, and one part kept.
    Capabilities(
        "cpu",
        "gloo",
        {
            "sum": _MOST,
            **dict.fromkeys(("max", "min"), "float half int bool"),
            "p2p": " ".join(DTYPES),
            **dict.fromkeys(("gather", "parts"), _MOST),
        },
        "tags early crossed",
    ),
    # Averages were reported wrong for one rank. Tags are ignored. A pair has one stream: two
    # simultaneous sends deadlock.
    Capabilities(
        "cuda",
        "nccl",
        {
            "sum": "float half int complex",
            **dict.fromkeys(("max", "min", "parts"), _COMMON),
            **dict.fromkeys(_MOVES, _MOST),
        },
        "early",
    ),
    # Issues of torch-xpu-ops: #3020, averages divide twice for small or odd sizes; #3059, max and
    # min reported as sum. A receive before a send in one group deadlocks.
    Capabilities("xpu", "xccl", dict.fromkeys(("sum", *_MOVES), _COMMON)),
    # Messages are strictly ordered, paired and synchronous.
    Capabilities("npu", "hccl", dict.fromkeys(_ALL, _COMMON)),
    Capabilities("hpu", "hccl", dict.fromkeys(_ALL, _COMMON)),
    Capabilities("cpu", "mpi", dict.fromkeys(_ALL, "float int")),
)


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
    can: Capabilities,
    op: str,
    dtype: torch.dtype,
    cpu: Capabilities | None = None,
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
    if dtype == torch.uint64:
        raise UnsupportedError(
            "torch has no wider dtype to reduce uint64 in; convert to int64 first"
        )
    divide = op == "mean"
    ask = "sum" if divide else op
    carry = dtype
    if dtype == torch.bool:  # a sum of 256 ones in uint8 would be 0
        op = ask = "min" if op == "min" else "max"
        carry = torch.uint8
    elif dtype in _WIDER and not can.can(ask, dtype):
        carry = _WIDER[dtype]
    for where in (can, cpu):
        if where is not None and where.can(ask, carry):
            return Reduction(op, ask, carry, where is not can, divide)
    if can.can("gather", carry) or can.can("gather", torch.uint8):
        return Reduction(op, "gather", carry, divide=divide)
    raise UnsupportedError(
        f"{can.backend} on {can.device} is not known to do {op} of {carry}, nor to gather it, and "
        f"{_no_cpu(can)}"
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

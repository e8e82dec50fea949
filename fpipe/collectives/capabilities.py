# SPDX-License-Identifier: Apache-2.0
"""What each backend supports, refuses and computes wrongly: a frozen table of facts, each with its
source.

Keyed by (device type, backend), because one name may denote two libraries ("hccl" is Ascend's and
Habana's). Unknown counts as unsupported: a backend without facts is trusted with ``BASE`` only.
Facts of the source ``TRIAL`` were tested; the others come from source code and issues. This module
must not know workarounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch


class Status(Enum):
    """The result of an operation that a backend is asked for."""

    NATIVE = "native"
    REFUSED = "refused"
    WRONG = "wrong"
    UNKNOWN = "unknown"


NATIVE, REFUSED, WRONG, UNKNOWN = Status

#: dtype class -> its dtypes
DTYPES = {
    "float": (torch.float32, torch.float64),
    "half": (torch.float16, torch.bfloat16),
    "fp8": (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    "complex": (torch.complex64, torch.complex128, torch.complex32),
    "int": (torch.uint8, torch.int8, torch.int32, torch.int64),
    "odd": (torch.int16, torch.uint16, torch.uint32, torch.uint64),
    "bool": (torch.bool,),
}
_CLASS = {dtype: name for name, dtypes in DTYPES.items() for dtype in dtypes}

REDUCTIONS = ("sum", "avg", "max", "min")
MOVES = ("p2p", "broadcast", "gather", "parts")  # parts: reduce-scatter
#: Properties of sending, independent of the dtype. tags: a tag selects the message. batch:
#: batch_isend_irecv. early: a receive may be posted before a send of the same rank. crossed: both
#: directions of a pair in one process group, in any order.
HABITS = ("tags", "batch", "early", "crossed")
ALL = "float half fp8 complex int odd bool"


def dtype_class(dtype: torch.dtype) -> str:
    """The class of a dtype in the table.

    >>> dtype_class(torch.bfloat16), dtype_class(torch.int16)
    ('half', 'odd')
    """
    return _CLASS.get(dtype, "odd")


class Fact(NamedTuple):
    """The status of ``what`` (reductions, moves or habits, separated by blanks) for classes of
    dtypes on a backend.
    """

    device: str
    backend: str
    source: str
    what: str
    dtypes: str
    status: Status
    note: str = ""


def _facts(
    device: str,
    backend: str,
    source: str,
    *rows: tuple[str, str, Status] | tuple[str, str, Status, str],
) -> tuple[Fact, ...]:
    return tuple(
        Fact(device, backend, source, what, dtypes, status, *note)
        for what, dtypes, status, *note in rows
    )


#: What every backend of torch.distributed must support; the only facts about backends that are not
#: in the table.
BASE = _facts(
    "*",
    "*",
    "torch.distributed's documentation",
    ("sum", "float", NATIVE),
    ("p2p broadcast gather", "float int", NATIVE),
)
#: The source of facts that were tested.
TRIAL = "trial on torch 2.11 and 2.13, CPU, 2 processes"

TABLE: tuple[Fact, ...] = (
    *_facts(
        "cpu",
        "gloo",
        TRIAL,
        ("sum", "float half complex int bool", NATIVE, "a sum of bools is a logical or"),
        ("avg", "float half complex", NATIVE),
        ("avg", "int bool", REFUSED),
        ("max min", "float half int bool", NATIVE),
        ("max min", "complex", REFUSED),
        ("sum avg max min", "fp8 odd", REFUSED),
        ("p2p", ALL, NATIVE),
        ("broadcast gather", "float half complex int bool", NATIVE),
        ("parts", "float half complex int bool", NATIVE, "it reduces all and keeps one part"),
        ("broadcast gather parts", "fp8 odd", REFUSED),
        ("tags batch early crossed", "", NATIVE),
    ),
    *_facts(  # copied through the CPU
        "mps",
        "gloo",
        "gloo carries no mps tensors",
        (" ".join((*REDUCTIONS, *MOVES)), ALL, REFUSED),
    ),
    *_facts(
        "cuda",
        "nccl",
        "torch's ProcessGroupNCCL",
        ("sum max min", "float half int", NATIVE),
        ("avg", "float half", WRONG, "a report on torch: wrong at world size 1"),
        ("sum", "complex", NATIVE, "as pairs of floats"),
        ("sum avg max min", "odd", REFUSED),
        ("p2p broadcast gather", "float half complex int bool", NATIVE),
        ("parts", "float half int", NATIVE),
        ("tags", "", WRONG, "tags are ignored"),
        ("batch", "", WRONG, "can hang if the batches of both sides differ"),
        ("crossed", "", WRONG, "one stream per pair: two simultaneous sends deadlock"),
        ("early", "", NATIVE),
    ),
    *_facts(
        "xpu",
        "xccl",
        "torch-xpu-ops",
        ("sum", "float half int", NATIVE),
        ("avg", "float half", WRONG, "#3020: divides twice for small or odd sizes"),
        ("avg", "int bool", REFUSED, "#2361: raises on some paths"),
        ("max min", "float half int", WRONG, "#3059: reported as sum"),
        ("sum avg max min", "fp8 odd complex", REFUSED),
        ("p2p broadcast gather", "float half int", NATIVE),
        ("batch", "", WRONG, "#3022: reported corrupt on some cards"),
        ("early crossed", "", WRONG, "receive before send in one group deadlocks"),
    ),
    *_facts(
        "npu",
        "hccl",
        "Ascend's documentation",
        ("sum max min", "float half int", NATIVE),
        ("sum", "bool", WRONG, "computed as max, which is the logical or"),
        ("avg", "float half", NATIVE, "implemented as sum and division"),
        ("p2p broadcast gather", "float half int", NATIVE),
        ("early crossed", "", WRONG, "strictly ordered, paired and synchronous"),
        ("batch", "", WRONG, "one buffer per direction, peer and call"),
    ),
    *_facts(
        "hpu",
        "hccl",
        "Habana's documentation",
        ("sum max min", "float half int", NATIVE),
        ("avg", "float half int", REFUSED, "unsupported in older versions"),
        ("avg", "bool", REFUSED, "asserts"),
        ("p2p broadcast gather", "float half int", NATIVE),
    ),
    *_facts(
        "cpu",
        "mpi",
        "torch's ProcessGroupMPI",
        ("sum max min", "float int", NATIVE),
        (" ".join((*REDUCTIONS, *MOVES)), "half", REFUSED),
    ),
)


@dataclass(frozen=True)
class Capabilities:
    """The facts about one backend on one type of device.

    >>> Capabilities.of("cpu", "gloo").can("avg", torch.int64)
    False
    >>> Capabilities.of("cpu", "gloo").habit("tags")
    True
    """

    device: str
    backend: str
    facts: tuple[Fact, ...]

    @classmethod
    def of(cls, device: str, backend: str, table: tuple[Fact, ...] = TABLE) -> Capabilities:
        """From a table; anything that it does not mention is unknown."""
        facts = tuple(fact for fact in table if (fact.device, fact.backend) == (device, backend))
        return cls(device, backend, (*facts, *BASE))

    def fact(self, what: str, dtype: torch.dtype | None = None) -> Fact:
        """The first fact about an operation."""
        dtypes = "" if dtype is None else dtype_class(dtype)
        for fact in self.facts:
            if what in fact.what.split() and (not dtypes or dtypes in fact.dtypes.split()):
                return fact
        return Fact("*", "*", "no fact is known", what, dtypes, UNKNOWN)

    def can(self, what: str, dtype: torch.dtype) -> bool:
        """Whether the backend supports a reduction or a move of this dtype directly."""
        return self.fact(what, dtype).status is NATIVE

    def habit(self, what: str) -> bool:
        """Whether the backend has a property of sending."""
        return self.fact(what).status is NATIVE

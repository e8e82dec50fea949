# SPDX-License-Identifier: Apache-2.0
"""What each backend supports, refuses and computes wrongly: a frozen table of facts, each with its
source.

Keyed by (device type, backend), because one name may denote two libraries ("hccl" is Ascend's and
Habana's). Unknown counts as unsupported: a backend without facts is trusted with ``BASE`` only.
``tried`` marks facts that were tested on torch 2.11 and 2.13; the others come from source code and
issues. This module must not know workarounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

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

REDUCTIONS = ("sum", "avg", "premul", "max", "min", "product", "bits")
MOVES = ("p2p", "broadcast", "gather", "scatter", "exchange", "parts")  # parts: reduce-scatter
#: Properties of sending, independent of the dtype. tags: a tag selects the message. batch:
#: batch_isend_irecv. early: a receive may be posted before a send of the same rank. crossed: both
#: directions of a pair in one process group, in any order. self: a message to the same rank. poll:
#: ``is_completed`` is right before ``wait``. strided: tensors with gaps in memory.
HABITS = ("tags", "batch", "early", "crossed", "self", "poll", "strided")
ALL = "float half fp8 complex int odd bool"


def dtype_class(dtype: torch.dtype) -> str:
    """The class of a dtype in the table.

    >>> dtype_class(torch.bfloat16), dtype_class(torch.int16)
    ('half', 'odd')
    """
    return _CLASS.get(dtype, "odd")


@dataclass(frozen=True)
class Fact:
    """The status of ``what`` (reductions, moves or habits, separated by blanks) for classes of
    dtypes on a backend.
    """

    device: str
    backend: str
    what: str
    dtypes: str
    status: Status
    source: str
    tried: bool = False
    note: str = ""


_TRIAL = "trial on torch 2.11 and 2.13, CPU, 2 processes"
_PLAIN = "torch.distributed's documentation"
_NCCL = "torch's ProcessGroupNCCL"
_XCCL = "torch-xpu-ops"
_ASCEND = "Ascend's documentation"
_GLOO_MOVES = "broadcast gather scatter exchange parts"  # parts: it reduces all and keeps one part
_HABANA = "Habana's documentation"

#: What every backend of torch.distributed must support; the only facts about backends that are not
#: in the table.
BASE = (
    Fact("*", "*", "sum", "float", NATIVE, _PLAIN),
    Fact("*", "*", "p2p broadcast gather", "float int", NATIVE, _PLAIN),
    Fact(
        "*",
        "*",
        "self strided",
        "",
        REFUSED,
        _PLAIN,
        note="torch refuses it before it calls the backend",
    ),
)

TABLE: tuple[Fact, ...] = (
    # ---- gloo, on the CPU ----
    Fact(
        "cpu",
        "gloo",
        "sum",
        "float half complex int bool",
        NATIVE,
        _TRIAL,
        True,
        "a sum of bools is a logical or",
    ),
    Fact("cpu", "gloo", "avg", "float half complex", NATIVE, _TRIAL, True),
    Fact("cpu", "gloo", "avg", "int bool", REFUSED, _TRIAL, True),
    Fact("cpu", "gloo", "max min product", "float half int bool", NATIVE, _TRIAL, True),
    Fact("cpu", "gloo", "max min product", "complex", REFUSED, _TRIAL, True),
    Fact("cpu", "gloo", "bits", "int bool", NATIVE, _TRIAL, True),
    Fact("cpu", "gloo", "bits", "float half complex", REFUSED, _TRIAL, True),
    Fact("cpu", "gloo", "premul", ALL, REFUSED, _TRIAL, True),
    Fact("cpu", "gloo", "sum avg max min product bits", "fp8 odd", REFUSED, _TRIAL, True),
    Fact("cpu", "gloo", "p2p", ALL, NATIVE, _TRIAL, True),
    Fact("cpu", "gloo", _GLOO_MOVES, "float half complex int bool", NATIVE, _TRIAL, True),
    Fact("cpu", "gloo", _GLOO_MOVES, "fp8 odd", REFUSED, _TRIAL, True),
    Fact("cpu", "gloo", "tags batch early crossed", "", NATIVE, _TRIAL, True),
    Fact("cpu", "gloo", "self strided", "", REFUSED, _TRIAL, True),
    Fact(
        "cpu", "gloo", "poll", "", WRONG, _TRIAL, True, "is_completed is False until wait is called"
    ),
    # ---- gloo with tensors of the Apple GPU: they are copied through the CPU ----
    Fact(
        "mps", "gloo", " ".join((*REDUCTIONS, *MOVES)), ALL, REFUSED, "gloo carries no mps tensors"
    ),
    # ---- nccl ----
    Fact("cuda", "nccl", "sum max min product", "float half int", NATIVE, _NCCL),
    Fact(
        "cuda",
        "nccl",
        "sum max min product",
        "bool",
        UNKNOWN,
        _NCCL,
        note="bools are sent as uint8",
    ),
    Fact(
        "cuda", "nccl", "avg", "float half", WRONG, "report on torch", note="wrong at world size 1"
    ),
    Fact("cuda", "nccl", "premul", "float half", NATIVE, _NCCL),
    Fact("cuda", "nccl", "sum", "complex", NATIVE, _NCCL, note="as pairs of floats"),
    Fact("cuda", "nccl", "bits", ALL, REFUSED, _NCCL),
    Fact("cuda", "nccl", "sum avg max min product", "odd", REFUSED, _NCCL),
    Fact("cuda", "nccl", "p2p broadcast gather", "float half complex int bool", NATIVE, _NCCL),
    Fact("cuda", "nccl", "scatter exchange", "float half int", NATIVE, _NCCL),
    Fact("cuda", "nccl", "parts", "float half int", NATIVE, _NCCL),
    Fact("cuda", "nccl", "tags", "", WRONG, _NCCL, note="tags are ignored"),
    Fact(
        "cuda",
        "nccl",
        "batch",
        "",
        WRONG,
        _NCCL,
        note="can hang if the batches of both sides differ",
    ),
    Fact(
        "cuda",
        "nccl",
        "crossed",
        "",
        WRONG,
        _NCCL,
        note="one stream per pair: two simultaneous sends deadlock",
    ),
    Fact("cuda", "nccl", "early poll", "", NATIVE, _NCCL),
    # ---- xccl ----
    Fact("xpu", "xccl", "sum product", "float half int", NATIVE, _XCCL),
    Fact(
        "xpu",
        "xccl",
        "avg",
        "float half",
        WRONG,
        "torch-xpu-ops#3020",
        note="divides twice for small or odd sizes",
    ),
    Fact(
        "xpu", "xccl", "avg", "int bool", REFUSED, "torch-xpu-ops#2361", note="raises on some paths"
    ),
    Fact(
        "xpu",
        "xccl",
        "max min",
        "float half int",
        WRONG,
        "torch-xpu-ops#3059",
        note="reported as sum",
    ),
    Fact("xpu", "xccl", "sum avg max min product", "fp8 odd complex", REFUSED, _XCCL),
    Fact("xpu", "xccl", "p2p broadcast gather", "float half int", NATIVE, _XCCL),
    Fact(
        "xpu",
        "xccl",
        "batch",
        "",
        WRONG,
        "torch-xpu-ops#3022",
        note="reported corrupt on some cards",
    ),
    Fact(
        "xpu",
        "xccl",
        "early crossed",
        "",
        WRONG,
        "torch-xpu-ops",
        note="receive before send in one group deadlocks",
    ),
    # ---- hccl, Ascend ----
    Fact("npu", "hccl", "sum max min product", "float half int", NATIVE, _ASCEND),
    Fact(
        "npu",
        "hccl",
        "sum",
        "bool",
        WRONG,
        _ASCEND,
        note="computed as max, which is the logical or",
    ),
    Fact(
        "npu", "hccl", "avg", "float half", NATIVE, _ASCEND, note="implemented as sum and division"
    ),
    Fact("npu", "hccl", "bits premul", ALL, REFUSED, _ASCEND),
    Fact("npu", "hccl", "p2p broadcast gather", "float half int", NATIVE, _ASCEND),
    Fact(
        "npu",
        "hccl",
        "early crossed",
        "",
        WRONG,
        _ASCEND,
        note="strictly ordered, paired and synchronous",
    ),
    Fact(
        "npu", "hccl", "batch", "", WRONG, _ASCEND, note="one buffer per direction, peer and call"
    ),
    # ---- hccl, Habana ----
    Fact("hpu", "hccl", "sum max min", "float half int", NATIVE, _HABANA),
    Fact(
        "hpu",
        "hccl",
        "avg",
        "float half int",
        REFUSED,
        _HABANA,
        note="unsupported in older versions",
    ),
    Fact("hpu", "hccl", "avg", "bool", REFUSED, _HABANA, note="asserts"),
    Fact("hpu", "hccl", "p2p broadcast gather", "float half int", NATIVE, _HABANA),
    # ---- mpi ----
    Fact("cpu", "mpi", "sum max min product", "float int", NATIVE, "torch's ProcessGroupMPI"),
    Fact("cpu", "mpi", " ".join((*REDUCTIONS, *MOVES)), "half", REFUSED, "torch's ProcessGroupMPI"),
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
        return _find(self.facts, what, "" if dtype is None else dtype_class(dtype))

    def can(self, what: str, dtype: torch.dtype) -> bool:
        """Whether the backend supports a reduction or a move of this dtype directly."""
        return self.fact(what, dtype).status is NATIVE

    def habit(self, what: str) -> bool:
        """Whether the backend has a property of sending."""
        return self.fact(what).status is NATIVE


@lru_cache(maxsize=4096)
def _find(facts: tuple[Fact, ...], what: str, dtypes: str) -> Fact:
    for fact in facts:
        if what in fact.what.split() and (not dtypes or dtypes in fact.dtypes.split()):
            return fact
    return Fact("*", "*", what, dtypes, UNKNOWN, "no fact is known")

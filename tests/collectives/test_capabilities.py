"""The capability table as data, and the methods selected from it, without processes or backends."""

from __future__ import annotations

import pytest
import torch

from fpipe.collectives import capabilities
from fpipe.collectives.adapt import OPS, Reduction, Sending, reduction, sending
from fpipe.collectives.capabilities import (
    DTYPES,
    HABITS,
    MOVES,
    REDUCTIONS,
    TABLE,
    TRIAL,
    Capabilities,
    Status,
    dtype_class,
)
from fpipe.errors import UnsupportedError

F32, BF16, I64, I16, U8, BOOL = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
)
GLOO = Capabilities.of("cpu", "gloo")
NCCL = Capabilities.of("cuda", "nccl")
XCCL = Capabilities.of("xpu", "xccl")
NOBODY = Capabilities.of("cpu", "nobody")


# ---- the table ----
@pytest.mark.parametrize(
    "fact", TABLE, ids=lambda fact: f"{fact.device}:{fact.backend} {fact.what[:20]}"
)
def test_facts_speak_of_known_things_and_name_their_source(fact):
    known = {*REDUCTIONS, *MOVES, *HABITS}
    assert set(fact.what.split()) <= known
    assert set(fact.dtypes.split()) <= set(DTYPES)
    assert bool(fact.dtypes) == (not set(fact.what.split()) & set(HABITS))
    assert fact.source
    assert (fact.source == TRIAL) == ((fact.device, fact.backend) == ("cpu", "gloo")), (
        "only gloo was run"
    )
    assert fact.status is not Status.WRONG or fact.note, "a wrong result must have a note"


def test_no_two_facts_of_one_backend_say_different_things():
    statuses: dict = {}
    for fact in TABLE:
        for what in fact.what.split():
            for kind in fact.dtypes.split() or [""]:
                key = (fact.device, fact.backend, what, kind)
                assert statuses.setdefault(key, fact.status) is fact.status, key


def test_gloo_is_known_whole():
    """For the backend that was tested, nothing is unknown."""
    for kind, dtypes in DTYPES.items():
        for what in (*REDUCTIONS, *MOVES):
            assert GLOO.fact(what, dtypes[0]).status is not Status.UNKNOWN, (what, kind)
    for habit in HABITS:
        assert GLOO.fact(habit).status is not Status.UNKNOWN, habit


def test_one_name_may_stand_for_two_libraries():
    assert Capabilities.of("npu", "hccl").fact("avg", F32).status is Status.NATIVE
    assert Capabilities.of("hpu", "hccl").fact("avg", F32).status is Status.REFUSED


def test_unknown_counts_as_unsupported():
    assert NOBODY.can("sum", F32)
    assert not NOBODY.can("avg", F32)
    assert not NOBODY.habit("early")
    assert not NCCL.can("sum", torch.float8_e4m3fn)
    assert NOBODY.fact("max", F32).source == "no fact is known"


def test_every_dtype_has_a_class():
    for name in dir(torch):
        found = getattr(torch, name)
        if isinstance(found, torch.dtype):
            assert dtype_class(found) in DTYPES


# ---- reductions ----
@pytest.mark.parametrize(
    ("can", "op", "dtype", "way"),
    [
        (GLOO, "mean", F32, Reduction("mean", "sum", F32, divide=True)),
        (XCCL, "mean", F32, Reduction("mean", "sum", F32, divide=True)),  # divides twice
        (NCCL, "mean", BF16, Reduction("mean", "sum", BF16, divide=True)),
        (NOBODY, "mean", F32, Reduction("mean", "sum", F32, divide=True)),
        (XCCL, "max", F32, Reduction("max", "gather", F32)),  # reported as sum
        (GLOO, "max", BF16, Reduction("max", "max", BF16)),
        (GLOO, "sum", BOOL, Reduction("max", "max", U8)),  # a sum of 256 uint8 ones would be none
        (GLOO, "min", BOOL, Reduction("min", "min", U8)),
        (XCCL, "sum", BOOL, Reduction("max", "gather", U8)),
        (GLOO, "sum", I16, Reduction("sum", "sum", torch.int32)),
        (GLOO, "mean", torch.float8_e4m3fn, Reduction("mean", "sum", F32, divide=True)),
        (Capabilities.of("cpu", "mpi"), "mean", BF16, Reduction("mean", "sum", F32, divide=True)),
    ],
)
def test_methods_of_reductions(can: Capabilities, op: str, dtype: torch.dtype, way: Reduction):
    assert reduction(can, op, dtype) == way


def test_over_the_cpu_where_the_group_carries_it_too():
    assert reduction(XCCL, "max", F32, GLOO) == Reduction("max", "max", F32, staged=True)
    assert reduction(XCCL, "sum", F32, GLOO) == Reduction("sum", "sum", F32)
    assert reduction(Capabilities.of("mps", "gloo"), "sum", F32, GLOO).staged


@pytest.mark.parametrize(
    "can",
    [GLOO, NCCL, XCCL, NOBODY, Capabilities.of("npu", "hccl"), Capabilities.of("hpu", "hccl")],
)
@pytest.mark.parametrize("op", OPS)
def test_no_way_asks_for_what_is_not_known_to_be_right(can: Capabilities, op: str):
    for dtypes in DTYPES.values():
        for dtype in dtypes:
            try:
                way = reduction(can, op, dtype, GLOO)
            except UnsupportedError:
                continue
            asked = GLOO if way.staged else can
            assert way.ask == "gather" or asked.can(way.ask, way.carry)


@pytest.mark.parametrize(
    ("op", "dtype", "message"),
    [
        ("mean", I64, "a mean of torch.int64 would be rounded or refused; convert"),
        ("mean", BOOL, "a mean of torch.bool"),
        ("max", torch.complex64, "torch.complex64 has no order"),
        ("median", F32, "there is no reduction 'median'; the reductions are sum, mean, max, min"),
        ("sum", torch.uint64, "no wider dtype to reduce uint64"),
    ],
)
def test_what_has_no_answer(op: str, dtype: torch.dtype, message: str):
    with pytest.raises(UnsupportedError, match=message):
        reduction(GLOO, op, dtype)


def test_a_backend_that_cannot_and_no_other_way():
    mps = Capabilities.of("mps", "gloo")
    with pytest.raises(
        UnsupportedError,
        match="no CPU backend to go through; start the group with 'cpu:gloo,mps:gloo'",
    ):
        reduction(mps, "sum", F32)
    with pytest.raises(UnsupportedError, match="not known to carry tensors of mps"):
        sending(mps)


# ---- messages ----
@pytest.mark.parametrize(
    ("can", "cpu", "expected"),
    [
        (GLOO, None, Sending(staged=False, early=True, two_groups=False)),
        (NCCL, None, Sending(staged=False, early=True, two_groups=True)),
        (XCCL, GLOO, Sending(staged=False, early=False, two_groups=True)),
        (
            Capabilities.of("npu", "hccl"),
            None,
            Sending(staged=False, early=False, two_groups=True),
        ),
        (
            Capabilities.of("mps", "gloo"),
            GLOO,
            Sending(staged=True, early=True, two_groups=False),
        ),
        (NOBODY, None, Sending(staged=False, early=False, two_groups=True)),
    ],
)
def test_methods_of_messages(can: Capabilities, cpu: Capabilities | None, expected: Sending):
    assert sending(can, cpu) == expected


def test_the_table_cannot_be_changed():
    with pytest.raises(AttributeError):
        TABLE[0].status = Status.NATIVE  # type: ignore[misc]
    assert isinstance(capabilities.TABLE, tuple)

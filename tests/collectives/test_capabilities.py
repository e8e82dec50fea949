"""The capability table as data, and the methods selected from it, without processes or backends."""

from __future__ import annotations

import pytest
import torch

from fpipe.collectives.capabilities import (
    DTYPES,
    TABLE,
    Capabilities,
    Reduction,
    Sending,
    dtype_class,
    reduction,
    sending,
)
from fpipe.collectives.group import OPS
from fpipe.errors import GroupError, UnsupportedError

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
NOBODY = Capabilities("cpu", "nobody", {"sum": "float", "p2p": "float int", "gather": "float int"})


# ---- the table ----
@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.device}:{row.backend}")
def test_rows_speak_of_known_things(row):
    assert row.dtypes.keys() <= {"sum", "max", "min", "p2p", "broadcast", "gather", "parts"}
    for classes in row.dtypes.values():
        assert set(classes.split()) <= set(DTYPES)
    assert set(row.habits.split()) <= {"tags", "early", "crossed"}


def test_no_backend_has_two_rows():
    keys = [(row.device, row.backend) for row in TABLE]
    assert len(set(keys)) == len(keys)


def test_one_name_may_stand_for_two_libraries():
    assert Capabilities.of("npu", "hccl") != Capabilities.of("hpu", "hccl")


def test_unknown_counts_as_unsupported():
    assert NOBODY.can("sum", F32)
    assert not NOBODY.can("max", F32)
    assert not NOBODY.habit("early")
    assert not NCCL.can("sum", torch.float8_e4m3fn)


@pytest.mark.parametrize(("device", "backend"), [("cpu", "fake"), ("cuda", "nobody")])
def test_a_backend_without_a_row_is_refused(device: str, backend: str):
    with pytest.raises(GroupError, match=f"does not know what backend '{backend}' does .*{device}"):
        Capabilities.of(device, backend)


def test_gloo_carries_tensors_of_the_cpu_alone():
    for device in ("mps", "cuda", "newcomer"):
        assert Capabilities.of(device, "gloo") == Capabilities(device, "gloo", {})


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
        TABLE[0].habits = ""  # type: ignore[misc]
    assert isinstance(TABLE, tuple)

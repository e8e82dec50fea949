"""The wire format: values and strides arrive as they were sent, in as few buffers as possible."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from fpipe.collectives.local import LocalGroup, local
from fpipe.collectives.wire import ALIGN, ALONE, layout, wire_format
from fpipe.errors import DeadlockError, GroupError, MismatchError
from fpipe.tree import Spec, arriving, contiguous

CPU = torch.device("cpu")
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int64,
    torch.complex64,
    torch.complex128,
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype; permuted, sliced, expanded, with an offset, empty, or without axes."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    count = int(torch.tensor(shape).prod()) if shape else 1
    x = torch.arange(1, count * 8 + 9, dtype=torch.float32)
    x = (x % 2 == 0) if dtype is torch.bool else (x % 100).to(dtype)
    x = x[draw(st.integers(0, 3)) :][: count * 2]
    x = x[:: draw(st.sampled_from([1, 2]))][:count].view(shape)
    x = x.permute(draw(st.permutations(range(len(shape)))))
    if draw(st.booleans()) and x.dim():
        axis = draw(st.integers(0, x.dim() - 1))
        x = x.narrow(axis, 0, min(1, x.shape[axis])).expand(*x.shape) if x.shape[axis] else x
    return x


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


@given(st.lists(tensors(), max_size=5))
def test_what_is_packed_arrives(sent: list[torch.Tensor]):
    specs = tuple(map(Spec.of, sent))
    buffers = wire_format(specs).pack(tuple(sent), 0, 1)
    landing = wire_format(specs).empty(CPU)
    for buffer, place in zip(buffers, landing, strict=True):
        assert buffer.is_contiguous()
        place.view(-1).copy_(buffer.view(-1))  # the wire carries bytes, no shapes
    for before, after, spec in zip(
        sent, wire_format(specs).unpack(landing, CPU), specs, strict=True
    ):
        assert after.dtype == before.dtype and after.shape == before.shape
        assert torch.equal(bits(after), bits(before))
        assert after.stride() == spec.stride
        assert after.numel() == 0 or after.data_ptr() % ALIGN == 0


@given(tensors())
def test_dense_tensors_keep_their_strides_and_no_bytes_are_wasted(x: torch.Tensor):
    spec = Spec.of(x)
    spread = [size for size, step in zip(x.shape, x.stride(), strict=True) if step and size > 1]
    stored = int(torch.tensor(spread).prod()) if spread else 1
    assert spec.stored == (0 if 0 in x.shape else stored)
    if torch.empty_like(x).stride() == x.stride() and 0 not in x.shape:  # dense
        assert torch.equal(bits(x.as_strided(spec.shape, spec.stride, x.storage_offset())), bits(x))
    if x.is_contiguous():
        assert spec.stride == contiguous(x.shape)


def test_strides_that_arrive():
    assert arriving((2, 3, 4), (1, 2, 6)) == (1, 2, 6)  # dense, any order
    assert arriving((2, 3), (4, 1)) == (3, 1)  # gaps: contiguous
    assert arriving((2, 3), (1, 1)) == (3, 1)  # overlapping windows: contiguous
    assert arriving((2, 3, 4), (8, 0, 2)) == (4, 0, 1)  # gaps between what is stored
    assert arriving((1, 3), (99, 1)) == (3, 1)  # the stride of an axis of size one is arbitrary
    assert arriving((0, 3), (7, 7)) == (3, 1)
    assert arriving((), ()) == ()


def test_few_buffers():
    small, large = Spec((8,), (1,), torch.float32), Spec((ALONE,), (1,), torch.int8)
    none = Spec((0,), (1,), torch.float32)
    assert len(layout((small,) * 7)) == 1
    assert len(layout((small, large, small, large, none))) == 3
    assert layout((none,)) == () and layout(()) == ()
    assert wire_format((large,)).sizes == (ALONE,)


def test_a_large_tensor_is_not_copied():
    x = torch.zeros(ALONE)
    (buffer,) = wire_format((Spec.of(x),)).pack((x,), 0, 1)
    assert buffer.data_ptr() == x.data_ptr()


def test_planned_strides_win_over_real_ones():
    """Without a copy, a tensor whose strides differ from those of the fake run would arrive
    permuted.
    """
    x = torch.arange(6.0).view(2, 3)
    spec = Spec((2, 3), (1, 2), torch.float32)
    (buffer,) = wire_format((spec,)).pack((x,), 0, 1)
    assert buffer.view(torch.float32).tolist() == [0, 3, 1, 4, 2, 5]
    with pytest.raises(MismatchError, match=r"contiguous\(\)"):
        wire_format((Spec((2, 3), (0, 1), torch.float32),)).pack((x,), 0, 1)


def test_lazy_conjugates_are_made_real():
    x = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert wire_format((Spec.of(x),)).pack((x,), 0, 1)[0].resolve_conj().tolist() == [
        1 - 2j,
        3 + 4j,
    ]
    y = x.expand(3, 2)
    (buffer,) = wire_format((Spec.of(y),)).pack((y,), 0, 1)
    assert buffer.view(torch.complex64).tolist() == [1 - 2j, 3 + 4j]


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64)]
)
def test_what_does_not_fit_is_not_sent(wrong: torch.Tensor):
    with pytest.raises(MismatchError, match=r"rank 3 to rank 1 is .*expected float32\[2\]"):
        wire_format((Spec((2,), (1,), torch.float32),)).pack((wrong,), 3, 1)


# ---- the local group ----
def test_local_hands_over_by_reference_in_order():
    group = local(3)
    specs = (Spec((2,), (1,), torch.float32),)
    first, second = group.recv(specs, 0, 2), group.recv(specs, 0, 2)
    assert not first.done()
    a, b = torch.ones(2), torch.zeros(2)
    assert group.send((a,), 0, 2).done()
    assert first.done() and not second.done()
    group.send((b,), 0, 2)
    assert second.wait()[0] is b and first.wait()[0] is a


def test_local_wait_that_cannot_end():
    with pytest.raises(DeadlockError, match="rank 1 waits for a message of rank 0"):
        local(2).recv((), 0, 1).wait()


def test_local_refuses_what_does_not_fit():
    group = local(2)
    group.send((torch.zeros(3),), 0, 1)
    with pytest.raises(MismatchError, match=r"float32\[3\], expected float32\[2\]"):
        group.recv((Spec((2,), (1,), torch.float32),), 0, 1).wait()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks=0; give a whole number of ranks"),
        ({"ranks": -1}, "ranks=-1; give a whole number of ranks"),
        ({"ranks": 2.0}, "ranks=2.0; give a whole number of ranks"),
        ({"ranks": True}, "ranks=True; give a whole number of ranks"),
        ({}, "needs a number of ranks"),
        ({"devices": []}, "one device per rank"),
        ({"devices": "cpu"}, "one device per rank"),
        ({"ranks": 2, "devices": ["cpu"]}, "2 ranks on 1 devices"),
    ],
)
def test_local_says_what_is_wrong(arguments: dict, message: str):
    with pytest.raises(GroupError, match=message):
        local(**arguments)
    with pytest.raises(GroupError, match="rank 5 is not in a group of 2"):
        local(2).send((), 0, 5)


def test_local_moves_between_devices():
    group = local(devices=["cpu", "meta"])
    group.send((torch.ones(2),), 0, 1)
    (x,) = group.recv((Spec((2,), (1,), torch.float32),), 0, 1).wait()
    assert x.device.type == "meta"


def test_a_copy_to_the_cpu_is_complete_when_it_is_read():
    """A copy from an accelerator with ``non_blocking`` returns before the values are there."""
    calls: list[tuple[str, bool]] = []

    class Recorder(torch.Tensor):
        def to(self, device, non_blocking=False):
            calls.append((device.type, non_blocking))
            return self

    tensor = torch.ones(2).as_subclass(Recorder)
    group = LocalGroup((torch.device("cpu"), torch.device("meta")))
    group.send((tensor,), 0, 1)
    group.send((tensor,), 1, 0)
    assert calls == [("meta", True), ("cpu", False)]

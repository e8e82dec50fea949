"""The requirements of fpipe on a group, as a suite of cases that covers every member of the
protocol.

A case is a generator per rank: it yields the works that it waits for, so one suite serves ranks
that share a process and ranks of several processes. Values encode sender, message and position, so
that a misdirected message is detected. Only ``failed`` is not called: a group that failed stays
failed. This module must not know how groups are created.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import TypeAlias

import torch
from torch import Tensor

from fpipe.collectives.group import Group, Work
from fpipe.collectives.wire import ALONE
from fpipe.errors import DeadlockError, GroupError, MismatchError, UnsupportedError
from fpipe.tree import Spec

Steps: TypeAlias = Generator[Work, tuple[Tensor, ...], None]
Case: TypeAlias = Callable[[Group, int], Steps]
#: The tensors of a message, computed from its sender and the device.
Message: TypeAlias = Callable[[int, torch.device], tuple[Tensor, ...]]

_FLOATS = "float32 float64 bfloat16 float16 float8_e4m3fn float8_e5m2 complex64"
DTYPES = tuple(
    getattr(torch, name) for name in f"{_FLOATS} bool uint8 int8 int16 uint16 int32 int64".split()
)
#: Numbers of elements: those at which some backend computes a wrong average, and others.
SIZES = (1, 2, 3, 4, 8, 16, 28, 30, 31, 32, 33, 48, 257)


def conform(group: Group, cases: Sequence[Case] | None = None) -> list[str]:
    """Run the suite on a group; every process of it must call this.

    Args:
        group: a group of any kind.
        cases: of ``CASES``; by default all.

    Returns:
        The names of the cases, all passed.

    Raises:
        AssertionError: or the error of the group, with a note that names the case.

    >>> from fpipe.collectives.local import local
    >>> conform(local(3))[0]
    'attributes_are_consistent'
    """
    names = []
    for case in CASES if cases is None else cases:
        name = getattr(case, "__name__", repr(case))
        try:
            _drive([case(group, rank) for rank in group.here])
            group.flush()
            group.barrier()
        except Exception as error:
            error.add_note(f"in the conformance case {name!r} of {group!r}")
            raise
        names.append(name)
    return names


def _drive(parts: Sequence[Steps]) -> None:
    """Run the ranks of one process in turn; each continues when the work that it yielded is
    done.
    """
    waiting: list[tuple[Steps, Work | None]] = [(part, None) for part in parts]
    while waiting:
        able = [w is None or len(parts) == 1 or w.done() for _, w in waiting]
        if not any(able):
            raise DeadlockError(
                f"{len(waiting)} ranks of one process wait, and none of their works is done"
            )
        later = []
        for (part, work), go in zip(waiting, able, strict=True):
            if not go:
                later.append((part, work))
                continue
            with suppress(StopIteration):
                later.append((part, next(part) if work is None else part.send(work.wait())))
        waiting = later


def attributes_are_consistent(group: Group, rank: int) -> Steps:
    """Ranks of this process, devices, the time-out, and the journal; without messages, ``reset``
    changes nothing.
    """
    assert isinstance(group, Group)
    assert rank in group.here and set(group.here) <= set(range(group.size))
    assert list(group.here) == sorted(group.here)
    assert group.timeout > 0 and isinstance(group.at_once, bool) and isinstance(group.strict, bool)
    assert group.device(rank).type == group.device((rank + 1) % group.size).type
    for note in ("0F1", "0B1"):
        group.journal(rank, note)
        assert group.last_note(rank) == note
    assert all(isinstance(group.last_note(other), str) for other in range(group.size))
    group.reset()
    yield from ()


# ---- messages ----
def messages_keep_their_order(group: Group, rank: int) -> Steps:
    """The n-th receive gets the n-th send, with receives requested ahead of need, between all
    pairs, both ways.
    """

    def message(src: int, dst: int, number: int) -> tuple[Tensor]:
        positions = torch.arange(1 + number % 3, device=group.device(rank))
        return (positions + 1000 * number + 100 * src + 10 * dst,)

    others, numbers = [other for other in range(group.size) if other != rank], range(6)
    requested = {
        other: [group.recv(_specs(message(other, rank, n)), other, rank) for n in numbers]
        for other in others
    }
    sent = [group.send(message(rank, other, n), rank, other) for n in numbers for other in others]
    for other in reversed(others):
        for number, work in enumerate(requested[other]):
            expected = message(other, rank, number)
            _check_equal((yield work), expected, f"message {number} from rank {other}")
    for work in sent:
        assert (yield work) == ()


def every_dtype_and_layout_arrives(group: Group, rank: int) -> Steps:
    """Bits, shapes and strides of permuted, sliced, expanded, empty and scalar tensors, in every
    dtype.
    """
    for dtype in DTYPES:
        yield from _around(group, rank, str(dtype), partial(_layouts, dtype))


def messages_of_any_size_arrive(group: Group, rank: int) -> Steps:
    """Large, small and empty tensors of several dtypes in one message, one of empty tensors, and
    one without tensors.
    """

    def mixed(src: int, device: torch.device) -> tuple[Tensor, ...]:
        large = torch.arange(ALONE // 4 + 7, dtype=torch.float32, device=device) + src
        small = torch.full((3,), src, dtype=torch.int64, device=device)
        empty = torch.zeros(0, 4, device=device)
        return small, large, small.bool(), empty, large[:5].bfloat16(), large.double()

    def empty(_: int, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.zeros(0, 3, device=device),)

    def nothing(*_: object) -> tuple[Tensor, ...]:
        return ()

    yield from _around(group, rank, "a message of any size", mixed, empty, nothing)


def messages_arrive_in_announced_calls(group: Group, rank: int) -> Steps:
    """Messages keep their order from call to call, of one digest or two."""
    for digest in (7, 7, 8):
        if rank == group.here[0]:
            group.enter(digest, dict)
        yield from _around(
            group,
            rank,
            f"a message of a call {digest}",
            lambda src, device: (torch.full((2,), float(src), device=device),),
        )
        group.confirm()


def many_are_under_way(group: Group, rank: int) -> Steps:
    """More bytes are sent to a slow receiver than a group may buffer."""
    messages = [
        (torch.full((1 << 16,), number, dtype=torch.uint8, device=group.device(rank)),)
        for number in range(40)
    ]
    if rank == 0:
        for message in messages:
            for other in range(1, group.size):
                group.send(message, 0, other)
        return
    works = [group.recv(_specs(message), 0, rank) for message in messages]
    for number, (work, message) in enumerate(zip(works, messages, strict=True)):
        _check_equal((yield work), message, f"message {number} of many")


def mismatches_are_not_sent(group: Group, rank: int) -> Steps:
    """A tensor of another shape or dtype than planned is refused, and the group stays usable."""
    before, after = (rank - 1) % group.size, (rank + 1) % group.size
    planned = _specs((torch.zeros(4),))
    work = group.recv(planned, before, rank)
    if group.size > len(group.here):  # in one process the receiver checks
        one_wrong = (torch.zeros(5), torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2))
        for wrong in (*((tensor,) for tensor in one_wrong), ()):
            _check_raises(MismatchError, lambda w=wrong: group.send(w, rank, after, planned))
    right = torch.full((4,), float(rank), device=group.device(rank))
    sent = group.send((right,), rank, after, planned)
    assert (yield work)[0].tolist() == [before] * 4
    yield sent


def endpoints_carry_a_plan(group: Group, rank: int) -> Steps:
    """Endpoints as a plan uses them, up the ranks and down again: in order with ``send`` and
    ``recv`` of the channel, for single tensors and several; a message of another shape is refused.
    """
    single = _specs((torch.zeros(3),))
    several = _specs((torch.zeros(2, 2), torch.zeros(1, dtype=torch.int64)))
    forms = (single, single, several, single)

    def message(src: int, number: int) -> tuple[Tensor, ...]:
        return tuple(
            torch.full(spec.shape, 100.0 * src + number, device=group.device(rank)).to(spec.dtype)
            for spec in forms[number]
        )

    for step in (1, -1):
        before, after = rank - step, rank + step
        if 0 <= before < group.size:
            for number, specs in enumerate(forms):
                post, fetch = group.receiver(before, rank, specs)
                received = None if fetch is None else fetch()
                if received is None:
                    received = yield post()
                what = f"message {number} of rank {before}"
                _check_equal(received, message(before, number), what)
            received = yield group.recv(single, before, rank)
            _check_equal(received, message(before, 0), "the message of send")
        if 0 <= after < group.size:
            for number, specs in enumerate(forms):
                send = group.sender(rank, after, specs)
                if len(group.here) < group.size:
                    _check_raises(MismatchError, lambda send=send: send((torch.zeros(7),)))
                send(message(rank, number))
            group.send(message(rank, 0), rank, after)


def sends_are_settled(group: Group, rank: int) -> Steps:
    """What was received may be settled; a send ``at_once`` is done when it returns."""
    message = (torch.ones(2, device=group.device(rank)),)
    spec = _specs(message)
    if rank == 0:
        for other in range(1, group.size):
            works = [group.send(message, 0, other, spec) for _ in range(3)]
            assert not group.at_once or all(work.done() for work in works)
            yield group.recv(spec, other, 0)
            group.settle(other, 2)
        group.flush()
        return
    for _ in range(3):
        yield group.recv(spec, 0, rank)
    yield group.send(message, rank, 0, spec)


# ---- all ranks ----
def _once_per_process(case: Callable[[Group, int], None]) -> Case:
    """A case without messages, which the first rank of each process runs."""

    @wraps(case)
    def steps(group: Group, rank: int) -> Steps:
        if rank == group.here[0]:
            case(group, rank)
        yield from ()

    return steps


@_once_per_process
def every_rank_can_share(group: Group, rank: int) -> None:
    """The tensors of rank ``src`` arrive at all ranks."""
    device = group.device(rank)
    for src in range(group.size):
        wide = torch.full((2, 3), src, dtype=torch.bfloat16, device=device)
        tensors = (torch.arange(5, device=device) + src, wide.T)
        received = group.share(tensors if src in group.here else None, _specs(tensors), src)
        _check_equal(received, tensors, f"what rank {src} shared")


@_once_per_process
def objects_are_gathered(group: Group, rank: int) -> None:
    """By rank, several times; the ranks of one process contribute one object."""
    for number in range(4):
        gathered = group.gather_objects({"rank": rank, "number": number})
        ranks = [rank] * group.size if len(group.here) == group.size else range(group.size)
        assert gathered == [{"rank": r, "number": number} for r in ranks], gathered


@_once_per_process
def reductions_are_right(group: Group, rank: int) -> None:
    """Sum, mean, max and min at sizes and dtypes that some backend computes wrongly; the argument
    is not changed.
    """
    ranks, device = _processes(group), group.device(rank)

    def values(of: int, size: int, dtype: torch.dtype) -> Tensor:
        start = torch.arange(size, dtype=torch.float64, device=device) % 5
        return (start - 2 - 3 * of).to(dtype)

    for size in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int16):
            pieces = torch.stack([values(other, size, dtype).double() for other in ranks])
            results = {"sum": pieces.sum(0), "max": pieces.amax(0), "min": pieces.amin(0)}
            if dtype.is_floating_point:
                results["mean"] = pieces.mean(0)
            for op, right in results.items():
                argument = values(rank, size, dtype)
                result = group.all_reduce(argument, op)
                # every value and sum is exact in bfloat16; a mean is compared after rounding
                _check_equal((result,), (right.to(dtype),), f"the {op} of {size} {dtype}")
                unchanged = values(rank, size, dtype)
                _check_equal((argument,), (unchanged,), f"the argument of {op}")
    for op, rule in (("sum", any), ("max", any), ("min", all)):
        bools = torch.tensor([rank == 0, True, False], device=device)
        right = torch.tensor([rule(other == 0 for other in ranks), True, False], device=device)
        _check_equal((group.all_reduce(bools, op),), (right,), f"the {op} of bools")
    scalar = group.all_reduce(torch.tensor(float(rank + 1), device=device), "mean")
    assert scalar.shape == () and scalar.item() == sum(other + 1 for other in ranks) / len(ranks)


@_once_per_process
def started_collectives_are_right(group: Group, rank: int) -> None:
    """Sums and gathers started together, of several sizes and dtypes, and waited for in another
    order.
    """
    ranks, device = _processes(group), group.device(rank)
    me, size = ranks.index(rank), len(ranks)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for part in (1, 5, 257):
            values = [
                (torch.arange(part * size, device=device) % 7 + other).to(dtype)
                for other in range(size)
            ]
            mine = slice(me * part, (me + 1) * part)
            total = torch.stack(values).sum(0).to(dtype)
            gathered = torch.cat([value.split(part)[other] for other, value in enumerate(values)])
            memory = values[0].clone()
            memory[mine] = values[me][mine]
            works = [
                group.start_reduce(values[me].clone()),
                group.start_gather(memory),
                group.start_reduce(values[me].clone(), scatter=True),
            ]
            results = [work.wait()[0] for work in reversed(works)]
            _check_equal(results, (total[mine], gathered, total), f"parts of {part} {dtype}")
    _check_raises(MismatchError, lambda: group.start_gather(torch.ones(1, size)))


@_once_per_process
def undefined_reductions_are_refused(group: Group, rank: int) -> None:
    """A mean of integers, a maximum of complex numbers, an unknown reduction, a share without
    tensors.
    """
    if len(group.here) < group.size:
        _check_raises(UnsupportedError, lambda: group.all_reduce(torch.tensor([1, 2]), "mean"))
        _check_raises(UnsupportedError, lambda: group.all_reduce(torch.tensor([1j]), "max"))
    _check_raises(GroupError, lambda: group.all_reduce(torch.ones(1), "median"))
    _check_raises(GroupError, lambda: group.share(None, (), rank))


CASES: tuple[Case, ...] = (
    attributes_are_consistent,
    messages_keep_their_order,
    every_dtype_and_layout_arrives,
    messages_of_any_size_arrive,
    messages_arrive_in_announced_calls,
    many_are_under_way,
    mismatches_are_not_sent,
    endpoints_carry_a_plan,
    sends_are_settled,
    every_rank_can_share,
    objects_are_gathered,
    reductions_are_right,
    started_collectives_are_right,
    undefined_reductions_are_refused,
)


# ---- helpers ----
def _specs(tensors: Sequence[Tensor]) -> tuple[Spec, ...]:
    return tuple(map(Spec.of, tensors))


def _around(group: Group, rank: int, what: str, *messages: Message) -> Steps:
    """Each rank sends messages to the next one, and receives those of the one before."""
    before, after, device = (rank - 1) % group.size, (rank + 1) % group.size, group.device(rank)
    expected = [message(before, device) for message in messages]
    works = [group.recv(_specs(tensors), before, rank) for tensors in expected]
    sent = [group.send(message(rank, device), rank, after) for message in messages]
    for work, tensors in zip(works, expected, strict=True):
        _check_equal((yield work), tensors, what)
    for work in sent:
        assert (yield work) == ()


def _processes(group: Group) -> list[int]:
    """The first rank of each process."""
    return [group.here[0]] if len(group.here) == group.size else list(range(group.size))


def _layouts(dtype: torch.dtype, seed: int, device: torch.device) -> tuple[Tensor, ...]:
    values = (torch.arange(24, device=device) * 7 + seed) % 11
    values = values % 2 == 0 if dtype is torch.bool else values.to(torch.float32).to(dtype)
    x = values.view(2, 3, 4)
    return x, x.permute(2, 0, 1), x[:, 1:, ::2], x[0, 0, 0], x[:1, :, :1].expand(2, 3, 4), x[:0]


def _check_equal(received: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    """The same bits, with the strides of a message."""
    assert len(received) == len(expected), f"{what}: {len(received)} tensors, not {len(expected)}"
    for index, (got, right) in enumerate(zip(received, expected, strict=True)):
        same = got.dtype == right.dtype and got.shape == right.shape
        assert same and torch.equal(_bits(got), _bits(right)), (
            f"{what}: tensor {index} is {got}, not {right}"
        )
        assert got.stride() == Spec.of(right).stride, (
            f"{what}: tensor {index} has the strides {got.stride()}"
        )


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8)


def _check_raises(kind: type[Exception], call: Callable[[], object]) -> None:
    with suppress(kind):
        call()
        raise AssertionError(f"{kind.__name__} was expected and nothing was raised")

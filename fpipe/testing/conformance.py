"""What fpipe asks of a group, as a suite that any group can be put through.

A case is a generator per rank: it yields the works that it waits for, so that one suite serves ranks that share a
process and ranks that have one each. Values tell the sender, the message and the place, so that a message that went
astray is seen. Knows nothing of how a group is made.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..collectives.group import Group, Work
from ..collectives.wire import ALONE
from ..errors import DeadlockError, GroupError, MismatchError, UnsupportedError
from ..tree import Spec

Case: TypeAlias = Callable[[Group, int], Generator[Work, Any, None]]

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.complex64,
)
#: Numbers of elements at which an average was seen wrong somewhere, and some at which none was.
SIZES = (1, 2, 3, 4, 8, 16, 28, 30, 31, 32, 33, 48, 257)


def conform(group: Group, cases: Sequence[Case] | None = None) -> list[str]:
    """Put a group through the suite; every process of it must call this. The names of the cases, all passed.

    Raises AssertionError, or what the group raised, with a note that names the case.

    >>> from fpipe.collectives.local import local
    >>> conform(local(3))[0]
    'messages_keep_their_order'
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


def _drive(parts: Sequence[Generator[Work, Any, None]]) -> None:
    """Run the ranks of one process by turns; each goes on when the work it yielded is done."""
    waiting: list[tuple[Generator[Work, Any, None], Work | None]] = [(part, None) for part in parts]
    while waiting:
        moved, still = False, []
        for part, work in waiting:
            if work is not None and len(parts) > 1 and not work.done():
                still.append((part, work))
                continue
            moved = True
            with suppress(StopIteration):
                still.append((part, part.send(None if work is None else work.wait())))
        if not moved:
            raise DeadlockError(f"{len(still)} ranks of one process wait, and none of their works is done")
        waiting = still


# ---- messages -------------------------------------------------------------------------------------------------------
def messages_keep_their_order(group: Group, rank: int) -> Generator[Work, Any, None]:
    """The n-th receive gets the n-th send, with receives asked for ahead of need, between every pair, both ways."""
    count = 6

    def message(src: int, dst: int, number: int) -> tuple[Tensor]:
        return (torch.arange(1 + number % 3, device=group.device(rank)) + 1000 * number + 100 * src + 10 * dst,)

    others = [other for other in range(group.size) if other != rank]
    asked = {
        other: [group.recv(_specs(message(other, rank, n)), other, rank) for n in range(count)] for other in others
    }
    sent = []
    for number in range(count):
        for other in others:
            sent.append(group.send(message(rank, other, number), rank, other))
    for other in reversed(others):
        for number, work in enumerate(asked[other]):
            (came,) = yield work
            _equal(came, message(other, rank, number)[0], f"message {number} from rank {other}")
    for work in sent:
        assert (yield work) == ()


def every_dtype_and_layout_arrives(group: Group, rank: int) -> Generator[Work, Any, None]:
    """Bits, shapes and strides: permuted, sliced, expanded, empty and of no axes, in every dtype."""
    before, after = (rank - 1) % group.size, (rank + 1) % group.size
    for dtype in DTYPES:
        tensors = tuple(_layouts(dtype, rank, group.device(rank)))
        expected = tuple(_layouts(dtype, before, group.device(rank)))
        work = group.recv(_specs(expected), before, rank)
        sent = group.send(tensors, rank, after)
        came = yield work
        assert len(came) == len(expected)
        for index, (got, wanted) in enumerate(zip(came, expected, strict=True)):
            _equal(got, wanted, f"tensor {index} of {dtype}")
            assert got.stride() == Spec.of(wanted).stride, f"tensor {index} of {dtype}: strides {got.stride()}"
        yield sent


def large_and_small_travel_together(group: Group, rank: int) -> Generator[Work, Any, None]:
    """A message of large, small and empty tensors of several dtypes."""
    before, after = (rank - 1) % group.size, (rank + 1) % group.size
    device = group.device(rank)

    def message(src: int) -> tuple[Tensor, ...]:
        large = torch.arange(ALONE // 4 + 7, dtype=torch.float32, device=device) + src
        small = torch.full((3,), src, dtype=torch.int64, device=device)
        return small, large, small.bool(), torch.zeros(0, 4, device=device), large[:5].bfloat16(), large.double()

    work = group.recv(_specs(message(before)), before, rank)
    sent = group.send(message(rank), rank, after)
    came = yield work
    for got, wanted in zip(came, message(before), strict=True):
        _equal(got, wanted, "a tensor of the message")
    yield sent


def nothing_travels_too(group: Group, rank: int) -> Generator[Work, Any, None]:
    """A message of no tensors, and one of none but empty ones."""
    before, after = (rank - 1) % group.size, (rank + 1) % group.size
    empty = (torch.zeros(0, 3, device=group.device(rank)),)
    works = [group.recv((), before, rank), group.recv(_specs(empty), before, rank)]
    sent = [group.send((), rank, after), group.send(empty, rank, after)]
    assert (yield works[0]) == ()
    assert (yield works[1])[0].shape == (0, 3)
    for work in sent:
        assert (yield work) == ()


def a_rank_sends_to_itself(group: Group, rank: int) -> Generator[Work, Any, None]:
    """Handed over, in order."""
    first = group.recv(_specs((torch.zeros(2),)), rank, rank)
    for number in range(2):
        group.send((torch.full((2,), float(number), device=group.device(rank)),), rank, rank)
    second = group.recv(_specs((torch.zeros(2),)), rank, rank)
    assert (yield first)[0].tolist() == [0, 0]
    assert (yield second)[0].tolist() == [1, 1]


def many_are_under_way(group: Group, rank: int) -> Generator[Work, Any, None]:
    """More bytes sent to a slow receiver than a group may hold."""
    count, size = 40, 1 << 16
    if rank == 0:
        for number in range(count):
            for other in range(1, group.size):
                group.send((torch.full((size,), number, dtype=torch.uint8, device=group.device(0)),), 0, other)
        return
    works = [group.recv((Spec((size,), (1,), torch.uint8),), 0, rank) for _ in range(count)]
    for number, work in enumerate(works):
        (came,) = yield work
        assert bool((came == number).all()), f"message {number} came changed"


def what_does_not_fit_is_not_sent(group: Group, rank: int) -> Generator[Work, Any, None]:
    """A tensor of another shape or dtype than was planned is refused, and the group goes on."""
    before, after = (rank - 1) % group.size, (rank + 1) % group.size
    planned = _specs((torch.zeros(4),))
    work = group.recv(planned, before, rank)
    if group.size > len(group.here):  # in one process the receiver looks
        for wrong in (torch.zeros(5), torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2)):
            _raises(MismatchError, lambda wrong=wrong: group.send((wrong,), rank, after, planned))
        _raises(MismatchError, lambda: group.send((), rank, after, planned))
    sent = group.send((torch.full((4,), float(rank), device=group.device(rank)),), rank, after, planned)
    assert (yield work)[0].tolist() == [before] * 4
    yield sent


# ---- all ranks ------------------------------------------------------------------------------------------------------
def every_rank_can_share(group: Group, rank: int) -> Generator[Work, Any, None]:
    """What rank ``src`` has, everybody has after."""
    if rank != group.here[0]:
        return
    for src in range(group.size):
        device = group.device(rank)
        tensors = (torch.arange(5, device=device) + src, torch.full((2, 3), src, dtype=torch.bfloat16, device=device).T)
        found = group.share(tensors if src in group.here else None, _specs(tensors), src)
        for got, wanted in zip(found, tensors, strict=True):
            _equal(got, wanted, f"what rank {src} shared")
    yield from ()


def objects_are_gathered(group: Group, rank: int) -> Generator[Work, Any, None]:
    """By rank, several times; the ranks of one process speak as one."""
    if rank != group.here[0]:
        return
    for number in range(4):
        heads = [found["head"] for found in group.gather_objects({"head": group.here[0], "number": number})]
        expected = [group.here[0]] * group.size if len(group.here) == group.size else list(range(group.size))
        assert heads == expected, heads
    yield from ()


def reductions_are_right(group: Group, rank: int) -> Generator[Work, Any, None]:
    """Sum, mean, max and min at sizes and dtypes that are known to go wrong somewhere; the argument is left alone."""
    if rank != group.here[0]:
        return
    ranks = _processes(group)
    for size in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int16):
            _reduce_all(group, rank, ranks, size, dtype)
    for op, wanted in (("sum", any), ("max", any), ("min", all)):
        mine = torch.tensor([rank == 0, True, False], device=group.device(rank))
        found = group.all_reduce(mine, op)
        assert found.dtype == torch.bool
        truth = [wanted(other == 0 for other in ranks), True, False]
        assert found.tolist() == truth, f"{op} of bools: {found.tolist()}"
    scalar = group.all_reduce(torch.tensor(float(rank + 1), device=group.device(rank)), "mean")
    assert scalar.shape == () and scalar.item() == sum(other + 1 for other in ranks) / len(ranks)
    yield from ()


def _reduce_all(group: Group, rank: int, ranks: list[int], size: int, dtype: torch.dtype) -> None:
    def values(other: int) -> Tensor:
        start = torch.arange(size, dtype=torch.float64, device=group.device(rank)) % 5
        return (start - 2 - 3 * other).to(dtype)

    pieces = torch.stack([values(other).double() for other in ranks])
    wanted = {"sum": pieces.sum(0), "max": pieces.amax(0), "min": pieces.amin(0)}
    if dtype.is_floating_point:
        wanted["mean"] = pieces.mean(0)
    for op, truth in wanted.items():
        mine = values(rank)
        found = group.all_reduce(mine, op)
        # every value and every sum is exact in bfloat16 but a mean over 3 or 5: compare after rounding
        assert torch.equal(found, truth.to(dtype)), f"{op} of {size} {dtype}: {found.tolist()}"
        assert torch.equal(mine, values(rank)), f"{op} changed its argument"


def collectives_under_way(group: Group, rank: int) -> Generator[Work, Any, None]:
    """Sums and gathers begun together, of every size and dtype, waited for in another order."""
    if rank != group.here[0]:
        return
    ranks, device = _processes(group), group.device(rank)
    me, size = ranks.index(rank), len(ranks)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for each in (1, 5, 257):
            values = [(torch.arange(each * size, device=device) % 7 + other).to(dtype) for other in range(size)]
            total = torch.stack(values).sum(0)
            whole = values[0].clone()
            whole.narrow(0, me * each, each).copy_(values[me].narrow(0, me * each, each))
            works = [
                group.start_reduce(values[me].clone()),
                group.start_gather(whole),
                group.start_reduce(values[me].clone(), scatter=True),
            ]
            (part,), (found,), (summed,) = [work.wait() for work in reversed(works)]
            _equal(summed, total.to(dtype), f"the sum of {each} {dtype}")
            _equal(part, total.to(dtype)[me * each :][:each], f"part {me} of the sum of {each} {dtype}")
            wanted = torch.cat([values[other][other * each :][:each] for other in range(size)])
            _equal(found, wanted, f"what was gathered of {each} {dtype}")
    _raises(MismatchError, lambda: group.start_gather(torch.ones(1, size)))
    yield from ()


def what_has_no_answer_is_refused(group: Group, rank: int) -> Generator[Work, Any, None]:
    """A mean of integers, an order of complex numbers, an operation that is none."""
    if rank == group.here[0] and len(group.here) < group.size:
        _raises(UnsupportedError, lambda: group.all_reduce(torch.tensor([1, 2]), "mean"))
        _raises(UnsupportedError, lambda: group.all_reduce(torch.tensor([1j]), "max"))
    if rank == group.here[0]:
        _raises(GroupError, lambda: group.all_reduce(torch.ones(1), "median"))
        _raises(GroupError, lambda: group.share(None, (), rank))
    yield from ()


CASES: tuple[Case, ...] = (
    messages_keep_their_order,
    every_dtype_and_layout_arrives,
    large_and_small_travel_together,
    nothing_travels_too,
    a_rank_sends_to_itself,
    many_are_under_way,
    what_does_not_fit_is_not_sent,
    every_rank_can_share,
    objects_are_gathered,
    reductions_are_right,
    collectives_under_way,
    what_has_no_answer_is_refused,
)


# ---- helpers --------------------------------------------------------------------------------------------------------
def _specs(tensors: Sequence[Tensor]) -> tuple[Spec, ...]:
    return tuple(Spec.of(tensor) for tensor in tensors)


def _processes(group: Group) -> list[int]:
    """The first rank of each process."""
    return [group.here[0]] if len(group.here) == group.size else list(range(group.size))


def _layouts(dtype: torch.dtype, seed: int, device: torch.device) -> Iterator[Tensor]:
    values = (torch.arange(24, device=device) * 7 + seed) % 11
    x = (values % 2 == 0) if dtype is torch.bool else values.to(torch.float32).to(dtype)
    x = x.view(2, 3, 4)
    yield x
    yield x.permute(2, 0, 1)
    yield x[:, 1:, ::2]
    yield x[0, 0, 0]
    yield x[:1, :, :1].expand(2, 3, 4)
    yield x[:0]


def _equal(got: Tensor, wanted: Tensor, what: str) -> None:
    same = got.dtype == wanted.dtype and got.shape == wanted.shape and torch.equal(_bits(got), _bits(wanted))
    assert same, f"{what} came as {got}, not as {wanted}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _raises(kind: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was expected and nothing was raised")

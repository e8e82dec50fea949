# SPDX-License-Identifier: Apache-2.0
"""``Weave``: two or more lines of segments merged into one order, as data; what is expected of it,
and its listing.

A weave lists which line runs which of its segments next. A segment has a time, the transfers that
it starts and waits for, and the values that it reads and computes. One stream computes, one
transfers. All times are whole nanoseconds. Standard library only: nothing here knows tensors,
graphs or ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from ...actions.costs import Beside


class Transfer(NamedTuple):
    """A collective in flight: the value that it delivers, its kind, its communicator, how long it
    takes.
    """

    value: Hashable
    name: str
    members: str
    nanoseconds: int


@dataclass(frozen=True)
class Task:
    """A segment as the scheduler sees it.

    ``reads`` and ``writes`` are keys of values; ``starts`` begin at its end, ``waits`` are the
    values of transfers that it waits for at its start. A ``loose`` task may come at any time after
    what it reads; the others keep their line's order.
    """

    line: int
    name: str
    nanoseconds: int
    reads: tuple[Hashable, ...] = ()
    writes: tuple[Hashable, ...] = ()
    starts: tuple[Transfer, ...] = ()
    waits: tuple[Hashable, ...] = ()
    loose: bool = False


class Moment(NamedTuple):
    """When a segment runs, or a transfer is on its way."""

    start: int
    end: int


@dataclass(frozen=True)
class Weave:
    """An order of tasks, with what is expected of it.

    ``order`` are numbers into ``tasks``. ``peak`` is the most bytes that crossing values take, and
    ``alone`` the same one line after the other. ``reason`` says why nothing is woven, where nothing
    is.

    >>> a2a = Transfer("y", "all_to_all", "ep", 50)
    >>> first = Task(0, "dispatch", 10, writes=("y",), starts=(a2a,)), Task(0, "experts", 10,
    ...     ("y",), waits=("y",))
    >>> w = Weave(("1F3", "2B0"), (*first, Task(1, "mlp", 50)), (0, 2, 1))
    >>> w.total, w.compute, w.communication, w.one_after_another
    (70, 70, 50, 120)
    """

    lines: tuple[str, ...] = ()
    tasks: tuple[Task, ...] = ()
    order: tuple[int, ...] = ()
    peak: int = 0
    alone: int = 0
    reason: str = ""

    @cached_property
    def course(self) -> Course:
        """When its tasks and transfers are expected to run."""
        return play(self.tasks, self.order)

    @property
    def total(self) -> int:
        """The time expected, in nanoseconds."""
        return self.course.total

    @property
    def compute(self) -> int:
        """The time spent computing."""
        return sum(task.nanoseconds for task in self.tasks)

    @property
    def communication(self) -> int:
        """The time of all transfers."""
        return sum(t.nanoseconds for task in self.tasks for t in task.starts)

    @property
    def one_after_another(self) -> int:
        """The time expected without a weave: a program waits for each of its collectives at
        once.
        """
        return self.compute + self.communication

    def beside(self) -> Beside:
        """What the simulator needs of it, in microseconds."""
        carried = [
            (start / 1e3, end / 1e3, f"{transfer.name} over {transfer.members}")
            for transfer, (start, end) in self.course.transfers
        ]
        return Beside(self.total / 1e3, tuple(carried))

    def __str__(self) -> str:
        return "\n".join(_listing(self))


# ---- the clocks ----
class Clocks(NamedTuple):
    """How far an order has come: the stream that computes, and the one that transfers.

    ``arrivals`` has when each value of a transfer arrives.
    """

    compute: int = 0
    link: int = 0
    arrivals: Mapping[Hashable, int] = MappingProxyType({})

    def start(self, task: Task) -> int:
        """When a task can start: all that it waits for has arrived."""
        return max([self.compute, *(self.arrivals.get(value, 0) for value in task.waits)])

    def after(self, task: Task) -> Clocks:
        """The clocks once a task has run next."""
        compute = self.start(task) + task.nanoseconds
        link = self.link
        arrivals = dict(self.arrivals)
        for transfer in task.starts:
            link = arrivals[transfer.value] = max(compute, link) + transfer.nanoseconds
        return Clocks(compute, link, arrivals)

    def no_later(self, other: Clocks) -> bool:
        """Whether neither is past the other's."""
        return self.compute <= other.compute and self.link <= other.link


class Course(NamedTuple):
    """When tasks run in an order, and each transfer is on its way; ``total`` is when all have
    ended.
    """

    total: int
    moments: list[Moment]
    transfers: list[tuple[Transfer, Moment]]


def play(tasks: Sequence[Task], order: Sequence[int]) -> Course:
    """Run an order by two clocks."""
    clocks = Clocks()
    moments = []
    transfers = []
    for number in order:
        task = tasks[number]
        start = clocks.start(task)
        clocks = clocks.after(task)
        moments.append(Moment(start, clocks.compute))
        for transfer in task.starts:
            end = clocks.arrivals[transfer.value]
            transfers.append((transfer, Moment(end - transfer.nanoseconds, end)))
    return Course(max(clocks.compute, clocks.link), moments, transfers)


class Memory:
    """Bytes of the values that cross from segment to segment, by storage."""

    def __init__(self, tasks: Sequence[Task], sizes: Mapping[Hashable, tuple[Hashable, int]]):
        nbytes: dict[Hashable, int] = {}
        computed: dict[Hashable, int] = {}  # the mask of the task that computes it; 0: an input
        used: dict[Hashable, int] = {}  # of the tasks that use it, and one bit more if it is kept
        read = {value for task in tasks for value in task.reads}
        for number, task in enumerate(tasks):
            for value in (*task.writes, *task.reads):
                if value not in sizes:
                    continue
                storage, size = sizes[value]
                nbytes[storage] = max(size, nbytes.get(storage, 0))
                kept = value not in read
                used[storage] = used.get(storage, 0) | 1 << number | kept << len(tasks)
                if value in task.writes:
                    computed.setdefault(storage, 1 << number)
        self.storages = [
            (size, computed.get(storage, 0), used[storage]) for storage, size in nbytes.items()
        ]

    def during(self, number: int, done: int) -> int:
        """Bytes while a task runs; ``done`` is the mask of the tasks before it."""
        after = done | 1 << number
        held = [
            size
            for size, computed, used in self.storages
            if computed & after == computed and used & ~done
        ]
        return sum(held)

    def peak(self, order: Sequence[int]) -> int:
        """The most bytes that an order takes."""
        done = peak = 0
        for number in order:
            peak = max(peak, self.during(number, done))
            done |= 1 << number
        return peak


# ---- the listing ----
def _listing(weave: Weave) -> Iterator[str]:
    if weave.reason:
        yield f"fused actions, one after another: {weave.reason}"
        return
    yield (
        f"{' with '.join(weave.lines)}, woven: {_us(weave.total)} us expected; compute "
        f"{_us(weave.compute)}, communication {_us(weave.communication)}, one after another "
        f"{_us(weave.one_after_another)}; crossing values {weave.peak:,} bytes, one after another "
        f"{weave.alone:,}"
    )
    widths = [
        max(len(line), *(len(t.name) for t in weave.tasks if t.line == k))
        for k, line in enumerate(weave.lines)
    ]
    heads = [f"{line:{width}}" for line, width in zip(weave.lines, widths, strict=True)]
    yield "  ".join(["   start us", *heads, "on the way"])
    transfers = {
        transfer.value: (transfer.name, moment) for transfer, moment in weave.course.transfers
    }
    for number, (began, _) in zip(weave.order, weave.course.moments, strict=True):
        task = weave.tasks[number]
        cells = [f"{task.name if k == task.line else '':{width}}" for k, width in enumerate(widths)]
        events = [f"{transfers[value][0]} here" for value in task.waits if value in transfers]
        for transfer in task.starts:
            name, (start, end) = transfers[transfer.value]
            events.append(f"{name} goes, {_us(start)} to {_us(end)}")
        yield "  ".join([f"{_us(began):>11}", *cells, "; ".join(events)]).rstrip()


def _us(nanoseconds: int) -> str:
    return f"{nanoseconds / 1000:,.1f}"

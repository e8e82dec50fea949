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


@dataclass(frozen=True)
class Weave:
    """An order of tasks, with what is expected of it.

    ``order`` are numbers into ``tasks``. ``reason`` says why nothing is woven, where nothing is.

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
    def transfers(self) -> list[Transfer]:
        """The transfers, in the order in which they start."""
        return [transfer for number in self.order for transfer in self.tasks[number].starts]

    @property
    def communication(self) -> int:
        """The time of all transfers."""
        return sum(transfer.nanoseconds for transfer in self.transfers)

    @property
    def one_after_another(self) -> int:
        """The time expected without a weave: a program waits for each of its collectives at
        once.
        """
        return self.compute + self.communication

    def beside(self) -> Beside:
        """What the simulator needs of it, in microseconds."""
        carried = []
        for transfer in self.transfers:
            end = self.course.arrivals[transfer.value]
            name = f"{transfer.name} over {transfer.members}"
            carried.append(((end - transfer.nanoseconds) / 1e3, end / 1e3, name))
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


class Course(NamedTuple):
    """When each task starts in an order, and each value of a transfer arrives; ``total`` is when
    all has ended.
    """

    total: int
    starts: Sequence[int]
    arrivals: Mapping[Hashable, int]


def play(tasks: Sequence[Task], order: Sequence[int]) -> Course:
    """Run an order by two clocks."""
    clocks = Clocks()
    starts = []
    for number in order:
        starts.append(clocks.start(tasks[number]))
        clocks = clocks.after(tasks[number])
    return Course(max(clocks.compute, clocks.link), starts, clocks.arrivals)


# ---- the listing ----
def _listing(weave: Weave) -> Iterator[str]:
    if weave.reason:
        yield f"fused actions, one after another: {weave.reason}"
        return
    yield (
        f"{' with '.join(weave.lines)}, woven: {_us(weave.total)} us expected; compute "
        f"{_us(weave.compute)}, communication {_us(weave.communication)}, one after another "
        f"{_us(weave.one_after_another)}"
    )
    widths = [
        max(len(line), *(len(t.name) for t in weave.tasks if t.line == k))
        for k, line in enumerate(weave.lines)
    ]
    heads = [f"{line:{width}}" for line, width in zip(weave.lines, widths, strict=True)]
    yield "  ".join(["   start us", *heads, "on the way"])
    names = {transfer.value: transfer.name for transfer in weave.transfers}
    for number, began in zip(weave.order, weave.course.starts, strict=True):
        task = weave.tasks[number]
        cells = [f"{task.name if k == task.line else '':{width}}" for k, width in enumerate(widths)]
        events = [f"{names[value]} here" for value in task.waits if value in names]
        for transfer in task.starts:
            end = weave.course.arrivals[transfer.value]
            start = end - transfer.nanoseconds
            events.append(f"{transfer.name} goes, {_us(start)} to {_us(end)}")
        yield "  ".join([f"{_us(began):>11}", *cells, "; ".join(events)]).rstrip()


def _us(nanoseconds: int) -> str:
    return f"{nanoseconds / 1000:,.1f}"

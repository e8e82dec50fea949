# SPDX-License-Identifier: Apache-2.0
"""``Weave``: two or more lines of segments merged into one order, as data; what is expected of it,
and its listing.

A weave lists which line runs which of its segments next. A segment has a time, the transfers that
it starts and waits for, and the values that it reads and computes. One stream computes, one
transfers. All times are whole nanoseconds. Standard library only: nothing here knows tensors,
graphs or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...actions.costs import Beside
from ...errors import WeaveError


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

    def begin(self, clock: int, arrivals: Mapping[Hashable, int]) -> int:
        """When it can start: all that it waits for has arrived."""
        return max([clock, *(arrivals.get(value, 0) for value in self.waits)])


class Moment(NamedTuple):
    """When a segment runs by the scheduler's clock."""

    start: int
    end: int


@dataclass(frozen=True)
class Weave:
    """An order of tasks, with what is expected of it.

    ``order`` are numbers into ``tasks``; ``moments[k]`` is when the k-th of the order runs;
    ``carried`` are the transfers with their moments. ``peak`` is the most bytes that crossing
    values take, and ``alone`` the same one line after the other. ``reason`` says why nothing is
    woven, where nothing is.

    >>> a2a = Transfer("y", "all_to_all", "ep", 50)
    >>> first = Task(0, "dispatch", 10, writes=("y",), starts=(a2a,)), Task(0, "experts", 10,
    ...     ("y",), waits=("y",))
    >>> tasks = (*first, Task(1, "mlp", 50))
    >>> w = woven(("1F3", "2B0"), tasks, (0, 2, 1), Memory(tasks, {}))
    >>> w.total, w.compute, w.communication, w.one_after_another
    (70, 70, 50, 120)
    """

    lines: tuple[str, ...]
    tasks: tuple[Task, ...]
    order: tuple[int, ...]
    moments: tuple[Moment, ...]
    carried: tuple[tuple[Transfer, Moment], ...]
    peak: int = 0
    alone: int = 0
    reason: str = ""

    @property
    def total(self) -> int:
        """The time expected, in nanoseconds."""
        return max((m.end for m in (*self.moments, *(m for _, m in self.carried))), default=0)

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
        carried = tuple(
            (m.start / 1e3, m.end / 1e3, f"{t.name} over {t.members}") for t, m in self.carried
        )
        return Beside(self.total / 1e3, carried)

    def __str__(self) -> str:
        return "\n".join(_listing(self))


def woven(
    lines: tuple[str, ...], tasks: tuple[Task, ...], order: tuple[int, ...], memory: Memory
) -> Weave:
    """An order with what is expected of it."""
    _, moments, carried = play(tasks, order)
    peak = memory.peak(order)
    alone = memory.peak(range(len(tasks)))
    return Weave(lines, tasks, order, tuple(moments), tuple(carried), peak, alone)


# ---- the clock ----
def play(
    tasks: Sequence[Task], order: Sequence[int]
) -> tuple[int, list[Moment], list[tuple[Transfer, Moment]]]:
    """Run an order by two clocks: one that computes, one that carries."""
    clock = link_free = 0
    arrivals: dict[Hashable, int] = {}
    moments, carried = [], []
    for number in order:
        task = tasks[number]
        start = task.begin(clock, arrivals)
        clock = start + task.nanoseconds
        moments.append(Moment(start, clock))
        for transfer in task.starts:
            begin = max(clock, link_free)
            link_free = arrivals[transfer.value] = begin + transfer.nanoseconds
            carried.append((transfer, Moment(begin, link_free)))
    return max(clock, link_free), moments, carried


class Memory:
    """Bytes of the values that cross from segment to segment, by storage."""

    def __init__(self, tasks: Sequence[Task], sizes: Mapping[Hashable, tuple[Hashable, int]]):
        nbytes: dict[Hashable, int] = {}
        computed: dict[
            Hashable, int
        ] = {}  # storage -> mask of the task that computes it; 0: it is an input
        used: dict[
            Hashable, int
        ] = {}  # storage -> mask of the tasks that use it, and one bit more if it is kept
        read = {value for task in tasks for value in task.reads}
        for number, task in enumerate(tasks):
            for value in (*task.writes, *task.reads):
                if value in sizes:
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
        return sum(
            size
            for size, computed, used in self.storages
            if computed & after == computed and used & ~done
        )

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

    def us(ns):
        return f"{ns / 1000:,.1f}"

    yield (
        f"{' with '.join(weave.lines)}, woven: {us(weave.total)} us expected; compute "
        f"{us(weave.compute)}, "
        f"communication {us(weave.communication)}, one after another "
        f"{us(weave.one_after_another)}; crossing values "
        f"{weave.peak:,} bytes, one after another {weave.alone:,}"
    )
    widths = [
        max(len(line), *(len(t.name) for t in weave.tasks if t.line == k))
        for k, line in enumerate(weave.lines)
    ]
    yield "  ".join(
        [
            "   start us",
            *(f"{x:{w}}" for x, w in zip(weave.lines, widths, strict=True)),
            "on the way",
        ]
    )
    transfers = {transfer.value: (transfer.name, moment) for transfer, moment in weave.carried}
    for number, moment in zip(weave.order, weave.moments, strict=True):
        task = weave.tasks[number]
        cells = [f"{task.name if k == task.line else '':{w}}" for k, w in enumerate(widths)]
        events = [f"{transfers[value][0]} here" for value in task.waits if value in transfers]
        for name, (start, end) in (transfers[t.value] for t in task.starts):
            events.append(f"{name} goes, {us(start)} to {us(end)}")
        yield "  ".join([f"{us(moment.start):>11}", *cells, "; ".join(events)]).rstrip()


# ---- the option of a pipeline ----
@dataclass(frozen=True)
class Overlap:
    """How fused actions run: ``how`` is "weave", "sequential" or "function".

    ``refused`` is the reason why nothing must be woven.

    >>> Overlap.of("weave").how
    'weave'
    """

    how: str = "sequential"
    function: Callable[..., Any] | None = None
    refused: str = ""

    @classmethod
    def of(cls, option: object) -> Overlap:
        """From the user's option: a name or a function."""
        if isinstance(option, Overlap):
            return option
        if option == "weave" or option == "sequential":
            return cls(str(option))
        if callable(option):
            return cls("function", option)
        raise WeaveError(
            f"overlap={option!r}; give 'weave', 'sequential', a function of two parts that "
            "returns both results"
        )

# SPDX-License-Identifier: Apache-2.0
"""``Weave``: two or more lines of segments merged into one order, as data; what is expected of it, and its listing.

A weave says which line goes on with which of its segments. Of each segment is known how long it takes, which transfers
it starts and waits for, what it reads and what it makes; there is one stream that computes and one that carries. All
times are whole nanoseconds. Standard library only: nothing here knows tensors, graphs or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ...errors import WeaveError

Entry: TypeAlias = tuple[str | int, str | int]  # which line (by its number, its action or its letter), which segment


class Transfer(NamedTuple):
    """A collective under way: the value that it brings, who takes part, how long it takes."""

    value: Hashable
    name: str
    members: str
    nanoseconds: int


@dataclass(frozen=True)
class Task:
    """A segment as the scheduler sees it.

    ``reads`` and ``writes`` are keys of values; ``starts`` begin at its end, ``waits`` are the values of transfers that
    it waits for at its start. A ``loose`` task may come at any time after what it reads; the others keep their line's
    order.
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
    """When a segment runs by the scheduler's clock."""

    start: int
    end: int


@dataclass(frozen=True)
class Weave:
    """An order of tasks, with what is expected of it.

    ``order`` are numbers into ``tasks``; ``moments[k]`` is when the k-th of the order runs; ``carried`` are the
    transfers with their moments. ``peak`` is the most bytes that crossing values take, and ``alone`` the same one line
    after the other. ``reason`` says why nothing is woven, where nothing is.

    >>> a2a = Transfer("y", "all_to_all", "ep", 50)
    >>> first = Task(0, "dispatch", 10, writes=("y",), starts=(a2a,)), Task(0, "experts", 10, ("y",), waits=("y",))
    >>> w = by_hand(("1F3", "2B0"), (*first, Task(1, "mlp", 50)), [("F", 0), ("B", 0), ("F", 1)])
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
    by_hand: bool = False
    reason: str = ""

    @property
    def total(self) -> int:
        """The time expected, in nanoseconds."""
        ends = [m.end for m in self.moments] + [m.end for _, m in self.carried]
        return max(ends, default=0)

    @property
    def compute(self) -> int:
        """The time spent computing."""
        return sum(task.nanoseconds for task in self.tasks)

    @property
    def communication(self) -> int:
        """The time spent carrying."""
        return sum(t.nanoseconds for task in self.tasks for t in task.starts)

    @property
    def one_after_another(self) -> int:
        """The time expected without a weave: a program waits for each of its collectives at once."""
        return self.compute + self.communication

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The weave as data, such as ``fpipe.pipeline(..., overlap=...)`` takes."""
        return tuple((self.lines[self.tasks[k].line], self.tasks[k].name) for k in self.order)

    def __str__(self) -> str:
        return "\n".join(_listing(self))


def in_turn(lines: Sequence[str], tasks: Sequence[Task], reason: str = "") -> Weave:
    """The lines one after the other, and why."""
    made = woven(tuple(lines), tuple(tasks), tuple(range(len(tasks))), Memory(tuple(tasks), {}))
    return Weave(made.lines, made.tasks, made.order, made.moments, made.carried, reason=reason)


def woven(lines: tuple[str, ...], tasks: tuple[Task, ...], order: tuple[int, ...], memory: Memory) -> Weave:
    """An order with what is expected of it."""
    _, moments, carried = play(tasks, order)
    alone = memory.peak(range(len(tasks)))
    return Weave(lines, tasks, order, tuple(moments), tuple(carried), memory.peak(order), alone)


def by_hand(
    lines: Sequence[str], tasks: Sequence[Task], entries: Sequence[Entry],
    sizes: Mapping[Hashable, tuple[Hashable, int]] | None = None,
) -> Weave:  # fmt: skip
    """A weave that a person wrote, checked: every segment once, each line in its order, nothing read before it is made.

    >>> tasks = (Task(0, "a", 1, writes=("x",)), Task(0, "b", 1, reads=("x",)), Task(1, "c", 1))
    >>> by_hand(("0F1", "0B0"), tasks, [("F", "a"), ("B", "c"), ("F", "b")]).order
    (0, 2, 1)
    """
    tasks, lines = tuple(tasks), tuple(lines)
    if isinstance(entries, str) or not all(isinstance(e, (tuple, list)) and len(e) == 2 for e in entries):
        raise WeaveError(f"a weave is a list of (which program, which segment), not {entries!r}")
    order: list[int] = []
    makers = {value: k for k, task in enumerate(tasks) for value in task.writes}
    for place, entry in enumerate(entries):
        fault, found = _next(lines, tasks, order, makers, entry)
        if fault:
            raise WeaveError(_marked(lines, tasks, entries, place, fault))
        order.append(found)
    missing = [k for k in range(len(tasks)) if k not in order]
    if missing:
        task = tasks[missing[0]]
        fault = f"{lines[task.line]}'s segment {task.name!r} is missing; name every segment once"
        raise WeaveError(_marked(lines, tasks, entries, len(entries), fault))
    made = woven(lines, tasks, tuple(order), Memory(tasks, sizes or {}))
    return Weave(made.lines, tasks, made.order, made.moments, made.carried, made.peak, made.alone, by_hand=True)


def _next(
    lines: tuple[str, ...], tasks: tuple[Task, ...], order: Sequence[int], makers: Mapping[Hashable, int], entry: Entry
) -> tuple[str, int]:
    """What is wrong with the next entry, and the task that it names."""
    which, segment = entry
    line = _line(lines, which)
    if line is None:
        return f"{which!r} is none of the lines {', '.join(lines)}; name one, by its letter or its number", -1
    mine = [k for k, task in enumerate(tasks) if task.line == line]
    found = [k for k in mine if tasks[k].name == segment]
    if isinstance(segment, int) and -len(mine) <= segment < len(mine):
        found = [mine[segment]]
    if not found:
        names = ", ".join(tasks[k].name for k in mine)
        return f"{lines[line]} has no segment {segment!r}; it has {names}", -1
    (task_number,) = found
    task = tasks[task_number]
    if task_number in order:
        return f"{lines[line]}'s segment {task.name!r} comes twice; name every segment once", -1
    before = [k for k in mine if k < task_number and k not in order and not tasks[k].loose]
    if before and not task.loose:
        first = tasks[before[0]].name
        return f"{lines[line]} runs {first!r} before {task.name!r}; keep each program's order", -1
    unmade = [makers[v] for v in task.reads if v in makers and makers[v] not in order]
    if unmade:
        maker = tasks[unmade[0]].name
        return f"{lines[line]}'s {task.name!r} reads what {maker!r} makes; let that come before", -1
    return "", task_number


def _line(lines: Sequence[str], which: str | int) -> int | None:
    if isinstance(which, int):
        return which if 0 <= which < len(lines) else None
    found = [k for k, name in enumerate(lines) if name == which or which in _letters(name)]
    return found[0] if len(found) == 1 else None


def _letters(action: str) -> str:
    return "".join(c for c in action if c.isalpha())


def _marked(lines: Sequence[str], tasks: Sequence[Task], entries: Sequence[Entry], place: int, fault: str) -> str:
    """The fault, and the weave with the place marked."""
    shown = [f"  {'>>' if k == place else '  '} {k:3d}  {e[0]!s:8} {e[1]}" for k, e in enumerate(entries)]
    if place == len(entries):
        shown.append(f"  >> {place:3d}  (the end)")
    window = shown[max(0, place - 4) : place + 4]
    return f"entry {place} of the weave of {' and '.join(lines)}: {fault}\n" + "\n".join(window)


# ---- the clock ------------------------------------------------------------------------------------------------------
def play(tasks: Sequence[Task], order: Sequence[int]) -> tuple[int, list[Moment], list[tuple[Transfer, Moment]]]:
    """Run an order by two clocks: one that computes, one that carries."""
    clock = line_free = 0
    arrive: dict[Hashable, int] = {}
    moments, carried = [], []
    for number in order:
        task = tasks[number]
        start = max([clock, *(arrive.get(value, 0) for value in task.waits)])
        clock = start + task.nanoseconds
        moments.append(Moment(start, clock))
        for transfer in task.starts:
            begin = max(clock, line_free)
            line_free = arrive[transfer.value] = begin + transfer.nanoseconds
            carried.append((transfer, Moment(begin, line_free)))
    return max(clock, line_free), moments, carried


class Memory:
    """Bytes of the values that cross from segment to segment, by storage."""

    def __init__(self, tasks: tuple[Task, ...], sizes: Mapping[Hashable, tuple[Hashable, int]]):
        self.sizes: dict[Hashable, int] = {}
        self.readers: dict[Hashable, int] = {}  # storage -> mask of the tasks that look at it
        self.made: list[list[Hashable]] = [[] for _ in tasks]
        self.seen: list[set[Hashable]] = [set() for _ in tasks]
        self.kept: set[Hashable] = set()
        maker: dict[Hashable, int] = {}
        for number, task in enumerate(tasks):
            for value in (*task.writes, *task.reads):
                if value not in sizes:
                    continue
                root, nbytes = sizes[value]
                self.sizes[root] = max(nbytes, self.sizes.get(root, 0))
                self.readers[root] = self.readers.get(root, 0) | 1 << number
                self.seen[number].add(root)
                if value in task.writes and root not in maker:
                    maker[root] = number
                    self.made[number].append(root)
        read = {value for task in tasks for value in task.reads}
        self.kept = {sizes[v][0] for task in tasks for v in task.writes if v in sizes and v not in read}
        self.first = sum(size for root, size in self.sizes.items() if root not in maker)

    def step(self, number: int, done: int, live: int) -> tuple[int, int]:
        """Bytes while a task runs and after it; ``done`` is the mask of the tasks before it."""
        live += sum(self.sizes[root] for root in self.made[number])
        after, ended = live, done | 1 << number
        for root in self.seen[number]:
            if root not in self.kept and self.readers[root] & ~ended == 0:
                after -= self.sizes[root]
        return live, after

    def peak(self, order: Sequence[int]) -> int:
        """The most that an order takes."""
        live = peak = self.first
        done = 0
        for number in order:
            during, live = self.step(number, done, live)
            done |= 1 << number
            peak = max(peak, during)
        return peak


# ---- the listing ----------------------------------------------------------------------------------------------------
def _listing(made: Weave) -> Iterator[str]:
    if made.reason:
        yield f"fused actions, one after another: {made.reason}"
        return
    us = lambda ns: f"{ns / 1000:,.1f}"
    how = "by hand" if made.by_hand else "woven"
    yield (
        f"{' with '.join(made.lines)}, {how}: {us(made.total)} us expected; compute {us(made.compute)}, "
        f"communication {us(made.communication)}, one after another {us(made.one_after_another)}; crossing values "
        f"{made.peak:,} bytes, one after another {made.alone:,}"
    )
    widths = [max([len(line), *(len(t.name) for t in made.tasks if t.line == k)]) for k, line in enumerate(made.lines)]
    yield "  ".join(["   start us", *(f"{x:{w}}" for x, w in zip(made.lines, widths, strict=True)), "on the way"])
    arrivals = {transfer.value: (transfer, moment) for transfer, moment in made.carried}
    for number, moment in zip(made.order, made.moments, strict=True):
        task = made.tasks[number]
        cells = [f"{task.name if k == task.line else '':{w}}" for k, w in enumerate(widths)]
        told = [f"{arrivals[value][0].name} here" for value in task.waits if value in arrivals]
        told += [
            f"{t.name} goes, {us(arrivals[t.value][1].start)} to {us(arrivals[t.value][1].end)}" for t in task.starts
        ]
        yield "  ".join([f"{us(moment.start):>11}", *cells, "; ".join(told)]).rstrip()


# ---- what a pipeline is told ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Overlap:
    """How fused actions run: ``how`` is "weave", "sequential", "function" (``own``) or "data" (``entries``).

    ``refused`` says, by rank and position in its row, which fused actions must not be woven, and why.

    >>> Overlap.of("weave").how
    'weave'
    """

    how: str = "sequential"
    own: Callable[..., Any] | None = None
    entries: tuple[Entry, ...] = ()
    refused: Mapping[tuple[int, int], str] = field(default_factory=dict)

    @classmethod
    def of(cls, said: Any) -> Overlap:
        """From what a user says: a word, a function, or a weave as data."""
        if isinstance(said, str) and said in ("weave", "sequential"):
            return cls(said)
        if isinstance(said, Weave):
            return cls("data", entries=said.entries)
        if isinstance(said, Sequence) and not isinstance(said, str):
            return cls("data", entries=tuple(said))
        if callable(said):
            return cls("function", own=said)
        raise WeaveError(
            f"overlap={said!r}; give 'weave', 'sequential', a function of two parts that returns both results, or a "
            "weave as data: a list of (which program, which segment)"
        )


__all__ = ["Entry", "Memory", "Moment", "Overlap", "Task", "Transfer", "Weave", "by_hand", "in_turn", "play", "woven"]

"""``Timeline``: when each action ran and what each rank held, as a plain frozen value.

It does not know where its times come from: ``simulate`` computes them, a profiler measures them. Times and causes
lie in flat arrays, so that millions of actions fit; whatever can be derived from them is derived when asked for.
Pictures are drawn elsewhere, from this value.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from .actions import AnyAction, Placement, Row, needs, gives, Fact

#: activations that an action adds to what its rank holds
ACTIVATIONS = {"F": 1, "I": 0, "W": -1, "B": -1}


class Span(NamedTuple):
    """One action on one rank, from ``start`` to ``end``."""

    rank: int
    position: int
    action: AnyAction
    start: float
    end: float


class Wait(NamedTuple):
    """What a rank waited for before an action: where that action stands, and how long the rank was idle."""

    rank: int
    position: int
    time: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end of every action, and the figures that follow from them.

    ``memory[op]`` is what an action adds to the bytes held on its rank, one number per stage.
    """

    rows: tuple[Row, ...]
    starts: tuple[array[float], ...]
    ends: tuple[array[float], ...]
    placement: Placement
    microbatches: int
    waits: tuple[Mapping[int, Fact], ...] = field(repr=False)
    memory: Mapping[str, Sequence[float]] = field(default_factory=dict)
    boundary: Sequence[float] = ()
    name: str = ""

    # ---- constructors -------------------------------------------------------------------------------------------
    @classmethod
    def measured(cls, spans: Iterable[tuple[int, AnyAction, float, float]], *, name: str = "") -> Timeline:
        """From measured (rank, action, start, end), in any order."""
        by_rank: dict[int, list[tuple[float, float, AnyAction]]] = {}
        for rank, action, start, end in spans:
            by_rank.setdefault(rank, []).append((start, end, action))
        lanes = [
            sorted(by_rank.get(rank, ()), key=lambda lane: lane[:2]) for rank in range(max(by_rank, default=0) + 1)
        ]
        rows = tuple(tuple(action for _, _, action in lane) for lane in lanes)
        return cls(
            rows,
            tuple(array("d", [start for start, _, _ in lane]) for lane in lanes),
            tuple(array("d", [end for _, end, _ in lane]) for lane in lanes),
            Placement.from_rows(rows),
            max((part.microbatch for row in rows for action in row for part in action.parts), default=-1) + 1,
            waits=tuple({} for _ in lanes),
            name=name,
        )

    # ---- spans --------------------------------------------------------------------------------------------------
    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.rows)

    def __len__(self) -> int:
        return sum(map(len, self.rows))

    def __iter__(self) -> Iterator[Span]:
        for rank, (row, starts, ends) in enumerate(zip(self.rows, self.starts, self.ends, strict=True)):
            for position, action in enumerate(row):
                yield Span(rank, position, action, starts[position], ends[position])

    @property
    def spans(self) -> tuple[Span, ...]:
        """Every action with its start and end, rank by rank; iterate over the timeline itself to save memory."""
        return tuple(self)

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """The spans of one rank."""
        lane = zip(self.rows[rank], self.starts[rank], self.ends[rank], strict=True)
        return tuple(Span(rank, i, action, start, end) for i, (action, start, end) in enumerate(lane))

    # ---- time ---------------------------------------------------------------------------------------------------
    @cached_property
    def start(self) -> float:
        """When the first action of all started."""
        return min((starts[0] for starts in self.starts if starts), default=0.0)

    @cached_property
    def total(self) -> float:
        """From the first start to the last end, over all ranks."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0) - self.start

    @cached_property
    def windows(self) -> tuple[float, ...]:
        """Per rank, from its own first start to its own last end."""
        return tuple(e[-1] - s[0] if s else 0.0 for s, e in zip(self.starts, self.ends, strict=True))

    @property
    def span(self) -> float:
        """The longest window of a rank."""
        return max(self.windows)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Per rank, the time spent in actions."""
        return tuple(sum(e) - sum(s) for s, e in zip(self.starts, self.ends, strict=True))

    @property
    def idle(self) -> tuple[float, ...]:
        """Per rank, the time within its window that it waited."""
        return tuple(window - busy for window, busy in zip(self.windows, self.busy, strict=True))

    @property
    def bubble(self) -> float:
        """1 - work/span: the share of the span in which an average rank does nothing."""
        return 1 - sum(self.busy) / (self.ranks * self.span) if self.span else 0.0

    # ---- memory -------------------------------------------------------------------------------------------------
    @cached_property
    def peak(self) -> tuple[int, ...]:
        """Per rank, the most activations (of one stage and one microbatch) held at once, from F to W or B."""
        return tuple(
            max(accumulate(sum(ACTIVATIONS[p.op] for p in action.parts) for action in row), default=0)
            for row in self.rows
        )

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per rank, the most bytes held at once."""
        return tuple(max((held for _, held in self.curve(rank)), default=0) for rank in range(self.ranks))

    def curve(self, rank: int) -> tuple[tuple[float, float], ...]:
        """(time, bytes held from then on) of a rank."""
        held, points = 0.0, []
        for action, start in zip(self.rows[rank], self.starts[rank], strict=True):
            held += sum(self.memory[p.op][p.stage] if self.memory else ACTIVATIONS[p.op] for p in action.parts)
            points.append((start, held))
        return tuple(points)

    # ---- causes -------------------------------------------------------------------------------------------------
    @cached_property
    def _makers(self) -> dict[Fact, tuple[int, int]]:
        return {
            fact: (rank, position)
            for rank, row in enumerate(self.rows)
            for position, action in enumerate(row)
            for part in action.parts
            for fact in gives(part)
        }

    def waited_for(self, rank: int, position: int) -> Wait | None:
        """What held an action back after its rank was free, or None if it started at once."""
        fact = self.waits[rank].get(position)
        if fact is None or fact not in self._makers:
            return None
        before = self.ends[rank][position - 1] if position else self.start
        return Wait(*self._makers[fact], self.starts[rank][position] - before)

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The chain of actions that ends last, each held back by the one before it."""
        last = max((ends[-1], -rank) for rank, ends in enumerate(self.ends) if ends)
        rank, position = -last[1], len(self.rows[-last[1]]) - 1
        path: list[Span] = []
        while position >= 0:
            path.append(
                Span(rank, position, self.rows[rank][position], self.starts[rank][position], self.ends[rank][position])
            )
            wait = self.waited_for(rank, position)
            rank, position = (wait.rank, wait.position) if wait else (rank, position - 1)
        return tuple(reversed(path))

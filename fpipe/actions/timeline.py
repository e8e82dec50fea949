# SPDX-License-Identifier: Apache-2.0
"""``Timeline``: when each action ran and what each rank held, as a frozen value.

Its times come from ``simulate`` or from a profiler. Times and causes are flat arrays, so millions
of actions fit in memory. Other figures are computed when they are first read. ``pictures`` draws
this value.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, count, repeat
from math import fsum, inf, isfinite
from operator import itemgetter, sub
from os import PathLike
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from ..errors import ScheduleError
from .action import AnyAction, LazyRows, Placement, Row, size, unfused
from .action_kinds import KINDS
from .dependencies import Facts
from .product import load_product
from .routes import placement_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .columns import Columns


#: op -> what it adds to the memory of its rank, by stage
Held: TypeAlias = Mapping[str, Sequence[float]]


class Span(NamedTuple):
    """One action on one rank, from ``start`` to ``end``; ``position`` is its index in the rank's
    row.
    """

    rank: int
    position: int
    action: AnyAction
    start: float
    end: float


class Wait(NamedTuple):
    """What an action waited for: its rank and position, and how long the waiting rank was idle."""

    rank: int
    position: int
    time: float


class Carried(NamedTuple):
    """What a rank's link carries beside its computing, as predicted for a woven action."""

    start: float
    end: float
    what: str


@dataclass(frozen=True, repr=False)
class Timeline:
    """When each action ran and what each rank held, simulated or measured.

    Its fields:

    * ``rows``, ``starts``, ``ends``: the actions of each rank in order, and their times.
    * ``causes``: where a rank waited before an action; :meth:`waited_for` reads it.
    * ``memory``: what each kind of action adds to the memory of its rank, by stage.
    * ``boundary``: the bytes of a message between a stage and the next.
    * ``sizes``: a factor of both for each microbatch, if they differ.
    * ``unit``: of times; "" is that of the costs.
    * ``carried``: what the link of each rank carries, if that was predicted.
    * ``note``: a sentence for its picture.

    >>> from fpipe.schedule import Schedule
    >>> t = Schedule.parse("[0F0, 0F1, 0B0, 0B1]\\n[1F0, 1B0, 1F1, 1B1]").simulate()
    >>> t
    Timeline(2 ranks, 8 actions, total 9, bubble 33.3%)
    >>> t.peak, t.busy, t.waited_for(0, 2)
    ((2, 1), (6.0, 6.0), Wait(rank=1, position=1, time=2.0))
    >>> list(t)[2]
    Span(rank=0, position=2, action=0B0, start=4.0, end=6.0)
    """

    rows: Sequence[Row]
    starts: tuple[array[float], ...]
    ends: tuple[array[float], ...]
    placement: Placement
    microbatches: int
    causes: tuple[array[int], ...]
    memory: Held = field(default_factory=dict)
    boundary: Sequence[float] = ()
    name: str = ""
    unit: str = ""
    carried: tuple[tuple[Carried, ...], ...] = ()
    sizes: Sequence[float] = ()
    note: str = ""

    @classmethod
    def measured(
        cls,
        spans: Iterable[tuple[int, AnyAction, float, float]],
        *,
        name: str = "",
        unit: str = "s",
    ) -> Timeline:
        """The timeline of measured actions, each as ``(rank, action, start, end)``.

        Args:
            spans: in any order, all by one clock.
            name: what pictures call the timeline.
            unit: of times, such as ``"ms"``.

        Returns:
            A timeline whose ``start`` is the first start.

        Raises:
            ScheduleError: if there is no span, or a time is not finite.

        >>> from fpipe.actions.action import Action
        >>> t = Timeline.measured([(0, Action(0, "F", 0), 5.0, 6.5), (1, Action(1, "F", 0), 6.75,
        ...     8.0)])
        >>> t.start, t.total
        (5.0, 3.0)
        """
        ordered = sorted(spans, key=itemgetter(0, 2, 3))
        if not ordered or ordered[0][0] < 0:
            raise ScheduleError(
                "a timeline needs at least one span, and ranks counted from 0", rule="timeline"
            )
        ranks = range(ordered[-1][0] + 1)
        actions: list[list[AnyAction]] = [[] for _ in ranks]
        starts = [array("d") for _ in ranks]
        ends = [array("d") for _ in ranks]
        for rank, action, start, end in ordered:
            actions[rank].append(action)
            starts[rank].append(start)
            ends[rank].append(end)
        if not isfinite(sum(map(sum, starts + ends))):
            raise ScheduleError("every time of a timeline must be finite", rule="timeline")
        rows = tuple(map(tuple, actions))
        microbatches = max(part.microbatch for row in rows for part in unfused(row)) + 1
        placement = placement_of(rows)
        causes = _causes(rows, starts, ends, Facts(placement.stages, microbatches))
        times = tuple(starts), tuple(ends)
        return cls(rows, *times, placement, microbatches, causes, name=name, unit=unit)

    @property
    def slices(self) -> int:
        """How many slices each microbatch has; ``microbatches`` counts all of them."""
        return next((part.slices for row in self.rows for part in unfused(row)), 1)

    # ---- spans ----
    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.rows)

    def __repr__(self) -> str:
        name = self.name and f"{self.name}, "
        unit = self.unit and f" {self.unit}"
        total = f"total {self.total:g}{unit}, bubble {self.bubble:.1%}"
        return f"Timeline({name}{self.ranks} ranks, {len(self)} actions, {total})"

    def __len__(self) -> int:
        return size(self.rows)

    def __iter__(self) -> Iterator[Span]:
        return chain.from_iterable(map(self.of_rank, range(self.ranks)))

    @property
    def spans(self) -> tuple[Span, ...]:
        """Every action with its start and end, rank by rank.

        To iterate over the timeline takes less memory.
        """
        return tuple(self)

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """The actions of ``rank`` in order, each a ``Span`` with its start and end.

        >>> from fpipe import make_schedule
        >>> t = make_schedule("1F1B", 2, 2).simulate()
        >>> t.of_rank(1)[0]
        Span(rank=1, position=0, action=1F0, start=1.0, end=2.0)
        """
        return tuple(
            map(Span, repeat(rank), count(), self.rows[rank], self.starts[rank], self.ends[rank])
        )

    # ---- time ----
    @cached_property
    def start(self) -> float:
        """When the first action of all started."""
        return min((starts[0] for starts in self.starts if starts), default=0.0)

    @cached_property
    def total(self) -> float:
        """The makespan: the time from the first start to the last end, over all ranks."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0) - self.start

    @cached_property
    def windows(self) -> tuple[float, ...]:
        """Per rank, from its first start to its last end."""
        return tuple(
            e[-1] - s[0] if s else 0.0 for s, e in zip(self.starts, self.ends, strict=True)
        )

    @property
    def span(self) -> float:
        """The longest window of a rank: the time of a step without a barrier before the
        optimizer.
        """
        return max(self.windows)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Per rank, the time spent in actions."""
        lengths = (map(sub, *times) for times in zip(self.ends, self.starts, strict=True))
        return tuple(map(fsum, lengths))

    @property
    def bubble(self) -> float:
        """1 - work/span: the share of the longest window in which an average rank does nothing."""
        whole = self.ranks * self.span
        if whole:
            return 1 - sum(self.busy) / whole
        return 0.0

    # ---- memory ----
    @cached_property
    def peak(self) -> tuple[int, ...]:
        """Per rank, the most activations held at once. One is that of a stage and a microbatch,
        from F to W or B.
        """
        return tuple(map(int, self._most(self._activations)))

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per rank, the most that is held at once by the costs' ``saved`` and ``kept``."""
        return self._most(self.memory or self._activations, self.sizes)

    def _most(self, held: Held, sizes: Sequence[float] = ()) -> tuple[float, ...]:
        if isinstance(self.rows, LazyRows):
            return cast("Columns", self.rows).most(held, sizes)
        changes = (_changes(row, held, sizes) for row in self.rows)
        return tuple(max(accumulate(row, initial=0.0)) for row in changes)

    @property
    def _activations(self) -> Held:
        return {op: (kind.activations,) * self.placement.stages for op, kind in KINDS.items()}

    def curve(self, rank: int) -> tuple[tuple[float, float], ...]:
        """What ``rank`` holds over time, as pairs of a time and the amount that is held from then
        on. An action adds at its start and frees at its end.

        >>> from fpipe import make_schedule
        >>> t = make_schedule("1F1B", 2, 2).simulate()
        >>> t.curve(1)
        ((1.0, 1.0), (4.0, 0.0), (4.0, 1.0), (7.0, 0.0))
        """
        held = 0.0
        points = []
        spans = zip(self.starts[rank], self.ends[rank], strict=True)
        memory = self.memory or self._activations
        changes = _changes(self.rows[rank], memory, self.sizes)
        for time, change in zip(chain.from_iterable(spans), changes, strict=True):
            if change:
                held += change
                points.append((time, held))
        return tuple(points)

    # ---- messages ----
    @property
    def messages(self) -> int:
        """How many messages pass between different ranks."""
        return self._sent[0]

    @property
    def volume(self) -> float:
        """How many bytes pass between different ranks, by the costs' ``boundary``."""
        return self._sent[1]

    @cached_property
    def _sent(self) -> tuple[int, float]:
        """Messages between different ranks, and their bytes."""
        route = [self.placement.path_index(mb) for mb in range(self.microbatches)]
        kinds = list(zip(route, self.sizes or [1.0] * self.microbatches, strict=True))
        if isinstance(self.rows, LazyRows):
            actions = cast("Columns", self.rows).tally(kinds)
        else:
            actions = Counter(
                (kinds[mb], op, stage) for row in self.rows for stage, op, mb in unfused(row)
            )
        messages = 0
        amounts: list[float] = []
        for ((path_index, share), op, stage), times in actions.items():
            path = self.placement.paths[path_index]
            other = stage + KINDS[op].needs[-1][1]  # only the last fact is of another stage
            if 0 <= other < len(path) and path[other] != path[stage]:
                messages += times
                boundary = self.boundary[min(stage, other)] if self.boundary else 0.0
                amounts.append(times * share * boundary)
        return messages, fsum(amounts)

    # ---- causes ----
    @cached_property
    def _sources(self) -> dict[int, tuple[int, int]]:
        causes = set().union(*self.causes)
        facts = provided(Facts(self.placement.stages, self.microbatches), self.rows)
        return {fact: (rank, position) for fact, rank, position in facts if fact in causes}

    def waited_for(self, rank: int, position: int) -> Wait | None:
        """What ``rank`` waited for before the action at ``position`` of its row: the rank and the
        position of another action, and the time. None if it did not wait.

        >>> from fpipe import make_schedule
        >>> t = make_schedule("1F1B", 2, 2).simulate()
        >>> t.waited_for(1, 0)
        Wait(rank=0, position=0, time=1.0)
        """
        source = self._sources.get(self.causes[rank][position])
        if source is None:
            return None
        free = self.ends[rank][position - 1] if position else self.start
        return Wait(*source, self.starts[rank][position] - free)

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The chain of actions that determines the total. Each waited for the one before it, and
        no action ends after the last one.
        """
        ranks = [rank for rank, row in enumerate(self.rows) if row]
        rank = max(ranks, key=lambda rank: self.ends[rank][-1], default=0)
        position = len(self.rows[rank]) - 1
        path: list[Span] = []
        while position >= 0:
            start = self.starts[rank][position]
            end = self.ends[rank][position]
            path.append(Span(rank, position, self.rows[rank][position], start, end))
            wait = self.waited_for(rank, position) or (rank, position - 1)
            rank, position = wait[:2]
        return tuple(reversed(path))

    # ---- pictures ----
    def draw(self, width: int | None = None, color: bool | None = None) -> str:
        """The timeline as text: a line for each rank.

        Args:
            width: in characters; by default that of the terminal.
            color: whether to colour; by default where the output is a terminal.

        >>> from fpipe import make_schedule
        >>> t = make_schedule("1F1B", 2, 2).simulate()
        >>> "rank 1" in t.draw(width=60)
        True
        """
        return load_product("pictures").draw(self, width=width, color=color)

    def _repr_html_(self) -> str:
        """The picture that a notebook shows."""
        return load_product("pictures").figure(self)

    def plot(
        self,
        ax: Axes | None = None,
        style: str = "paper",
        *,
        memory: bool | None = None,
    ) -> Axes:
        """Draw the timeline with matplotlib, to be edited, combined and saved as its figures are.

        Args:
            ax: The axes to draw into. By default those of a new figure, of a size that suits.
            style: ``"paper"`` for print, without figures beside the lanes; ``"light"`` or
                ``"dark"`` for a screen.
            memory: Draw below each lane what its rank holds; by default for a screen.

        Returns:
            The axes. Time is along x, and rank r lies between r and r + 1 on y.

        Raises:
            FpipeError: matplotlib is missing, or no style has this name.

        >>> from matplotlib.figure import Figure
        >>> from fpipe import make_schedule
        >>> ax = make_schedule("1F1B", 2, 4).simulate().plot(Figure().subplots())
        >>> [label.get_text() for label in ax.get_yticklabels()]
        ['rank 0', 'rank 1']
        """
        pictures = load_product("pictures")
        return pictures.plot(self, ax, style, pictures.Look(memory))

    def save(
        self,
        path: str | PathLike[str],
        *,
        memory: bool = True,
        against: Timeline | None = None,
        dark: bool | None = None,
        width: float | None = None,
        full: bool = False,
    ) -> None:
        """Write a picture: ``.svg``, ``.png``, ``.pdf``, ``.html``, ``.txt`` or ``.json`` (a trace
        for Perfetto).

        Args:
            path: The file; its suffix selects the format.
            memory: Draw below each lane what its rank holds.
            against: Another timeline, drawn above this one, whose actions then have the colours of
                how much earlier or later they end than there.
            dark: Draw for dark paper. By default, ``.svg`` and ``.html`` follow their reader and
                others are light.
            width: The width in pixels. By default it follows from the number of actions.
            full: Draw all of a long steady state, of which still pictures leave the middle out.

        Raises:
            FpipeError: The suffix is not known, or matplotlib is missing for ``.png`` and
                ``.pdf``.

        >>> import pathlib, tempfile
        >>> from fpipe.generators import make_schedule
        >>> path = pathlib.Path(tempfile.mkdtemp(), "zbv.svg")
        >>> make_schedule("ZBV", 4, 8).simulate().save(path, width=390)
        >>> path.read_text()[:4]
        '<svg'
        """
        look = load_product("pictures").Look(memory, against is not None, dark, width, full=full)
        load_product("pictures").save(self if against is None else [against, self], path, look)


def _changes(row: Row, held: Held, sizes: Sequence[float]) -> Iterator[float]:
    """For each action two numbers: what it adds at its start, and what it frees at its end."""
    for action in row:
        changes = [
            held[op][stage] * sizes[mb] if sizes else held[op][stage]
            for stage, op, mb in action.parts
        ]
        yield sum([change for change in changes if change > 0])
        yield sum([change for change in changes if change < 0])


def _causes(
    rows: Sequence[Row], starts: Sequence[array[float]], ends: Sequence[array[float]], facts: Facts
) -> tuple[array[int], ...]:
    """The facts that measured actions waited for: of those that an action needs, the last one to
    arrive, if the rank was free before.
    """
    arrivals = {fact: ends[rank][position] for fact, rank, position in provided(facts, rows)}
    table = facts.table
    microbatches = facts.microbatches
    result = [array("q", [-1]) * len(row) for row in rows]
    for rank, row in enumerate(rows):
        free = -inf
        for position, action in enumerate(row):
            needed = [
                stage * microbatches + mb + by
                for stage, op, mb in action.parts
                for by in table[op][0]
            ]
            last = max(needed, key=lambda fact: arrivals.get(fact, -inf), default=-1)
            if free < arrivals.get(last, -inf) <= starts[rank][position]:
                result[rank][position] = last
            free = ends[rank][position]
    return tuple(result)


def provided(facts: Facts, rows: Sequence[Row]) -> Iterator[tuple[int, int, int]]:
    """(index, rank, position) of every fact that the rows provide."""
    table = facts.table
    microbatches = facts.microbatches
    for rank, row in enumerate(rows):
        for position, action in enumerate(row):
            for stage, op, microbatch in action.parts:
                for offset in table[op][1]:
                    yield stage * microbatches + microbatch + offset, rank, position

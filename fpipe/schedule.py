# SPDX-License-Identifier: Apache-2.0
"""``Schedule``: which rank computes what, in which order. Frozen, printable, and free of torch.

A schedule is only compute: lowering adds sends, receives, frees and reductions. This module holds
the value and its properties. The files of ``actions`` do the work: ``text`` parses and formats,
``check`` finds broken rules, and ``simulation`` computes time and memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Literal

from .actions import broken_rules
from .actions.action import Action, Fused, LazyRows, Placement, Row, Rows, joined, unfused
from .actions.check import Inspection, check_rows, inspect_rows
from .actions.costs import Costs, Per, as_costs
from .actions.product import load_pass, load_product
from .actions.routes import placement_of
from .actions.simulation import simulate_rows
from .actions.slices import sliced_rows
from .actions.text import format_csv, format_rows, parse_csv, parse_rows
from .actions.text_files import read_text, write_bytes
from .actions.timeline import Timeline
from .actions.unit import Slice
from .errors import ScheduleError

__all__ = ["Action", "Fused", "Placement", "Schedule", "Slice"]


@dataclass(frozen=True, repr=False)
class Schedule:
    """One tuple of actions per rank, and the rank of each stage.

    Two schedules are equal when their rows, placement and counts are.

    Args:
        rows: one tuple of actions for each rank, in the order in which they run.
        placement: which rank runs which stage; by default derived from the rows.
        microbatches: how many there are; by default derived from the rows.
        name: a label.
        slices: how many slices each microbatch has; by default derived from the rows.

    Raises:
        ScheduleError: if a row contains anything but actions, or no placement fits.

    >>> s = Schedule.parse("[0F0, 0F1, 0B0, 0B1]\\n[1F0, 1B0, 1F1, 1B1]")
    >>> s.ranks, s.microbatches, s.stages
    (2, 2, 2)
    >>> str(s[0][0]), Schedule.parse(str(s)) == s
    ('0F0', True)
    """

    rows: Sequence[Row]
    placement: Placement = field(default=None)  # type: ignore[assignment]  # derived from the rows
    microbatches: int = -1
    name: str = field(default="", compare=False)
    slices: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        rows = self.rows
        if not isinstance(rows, LazyRows):
            rows = tuple(tuple(row) for row in rows)
            types = set[type]().union(*(map(type, row) for row in rows))
            if not rows or not types <= {Action, Fused}:
                raise broken_rules.no_action(rows)
            object.__setattr__(self, "rows", rows)
        try:
            if self.placement is None:
                object.__setattr__(self, "placement", placement_of(rows))
            if not self.slices:
                first = next((part for row in rows for part in unfused(row)), None)
                object.__setattr__(self, "slices", 1 if first is None else first.slices)
            self._check_count("slices", 1)
            if self.microbatches == -1:
                last = max((part.microbatch for row in rows for part in unfused(row)), default=-1)
                object.__setattr__(self, "microbatches", last // self.slices + 1)
        except (TypeError, AttributeError):
            raise broken_rules.no_integers() from None
        self._check_count("microbatches", 0)

    def _check_count(self, name: str, least: int) -> None:
        count = getattr(self, name)
        if type(count) is not int or count < least:
            rule = "slices" if least else "range"
            raise ScheduleError(f"{name}={count!r} must be a count of {least} or more", rule=rule)

    def __repr__(self) -> str:
        name = f"{self.name}, " if self.name else ""
        slices = f", slices={self.slices}" if self.slices > 1 else ""
        return (
            f"Schedule({name}ranks={self.ranks}, microbatches={self.microbatches}, "
            f"stages={self.stages}{slices})"
        )

    # ---- questions ----
    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """How many stages there are in all."""
        return self.placement.stages

    @property
    def units(self) -> int:
        """How many units of work each stage has: the microbatches, or all their slices."""
        return self.microbatches * self.slices

    @property
    def output_rank(self) -> int:
        """The rank of the last stage, which computes the loss and the outputs. Of a stage with
        replicas it is the rank of the first one.

        >>> Schedule.parse("[0F0, 2F0]\\n[1F0]").output_rank
        0
        """
        return self.placement.rank_of(self.stages - 1)

    def __getitem__(self, rank: int) -> Row:
        return self.rows[rank]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @cached_property
    def digest(self) -> str:
        """A short hash of everything that two ranks must agree on."""
        head = f"{self.placement.paths}{self.placement.route}{self.microbatches}\n"
        return hashlib.sha256((head + format_rows(self.rows)).encode()).hexdigest()[:16]

    def __hash__(self) -> int:
        return hash(self.digest)

    # ---- text ----
    def __str__(self) -> str:
        return format_rows(self.rows)

    @classmethod
    def parse(cls, text: str, *, name: str = "") -> Schedule:
        """Read what ``str(schedule)`` writes: one line a rank.

        Args:
            text: one line for each rank.
            name: a label for the result.

        Returns:
            The schedule; not yet checked.

        Raises:
            ScheduleError: if the text cannot be read, with its line and column.

        >>> Schedule.parse("[0F0, 1F0, 1B0, 0B0]").placement
        Placement(0: [0, 1])
        """
        return cls(parse_rows(text), name=name)

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write the CSV that torch.distributed.pipelining reads.

        Args:
            path: of the file, which is replaced.

        Raises:
            ScheduleError: if the file cannot be written.

        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "plan.csv")
        >>> Schedule.parse("[0F0, 0B0]").to_csv(file)
        >>> file.read_text(), str(Schedule.from_csv(file))
        ('0F0,0B0\\n', '[0F0, 0B0]')
        """
        try:
            write_bytes(path, format_csv(self.rows).encode())
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ScheduleError(
                f"cannot write {str(path)!r}: {why}; give a path that can be written"
            ) from error

    @classmethod
    def from_csv(cls, path: str | PathLike[str]) -> Schedule:
        """Read a CSV of fpipe or of torch.distributed.pipelining, without communication actions.

        Args:
            path: of the file.

        Returns:
            The schedule, with the name of the file; not yet checked.

        Raises:
            ScheduleError: if the file cannot be read.

        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "mine.csv")
        >>> _ = file.write_text("0F0,0SEND_F0,0B0")
        >>> Schedule.from_csv(file)
        Schedule(mine, ranks=1, microbatches=1, stages=1)
        """
        return cls(parse_csv(read_text(path)), name=Path(path).stem)

    # ---- parts ----
    def only(self, ops: Iterable[str]) -> Schedule:
        """The same schedule with only the actions of these ops, in the same order. A fused action
        keeps its parts of these ops.

        Args:
            ops: such as ``"F"`` or ``"BIW"``.

        Returns:
            A schedule with the same placement.

        >>> str(Schedule.parse("[0F0, 0B0]").only("F"))
        '[0F0]'
        """
        wanted = frozenset(ops)
        parts = (
            ([part for part in action.parts if part.op in wanted] for action in row)
            for row in self.rows
        )
        rows = tuple(tuple(map(joined, filter(None, row))) for row in parts)
        return Schedule(rows, self.placement, self.microbatches, self.name)

    def sliced(self, slices: int) -> Schedule:
        """The same schedule for microbatches in slices of the sequence.

        Each action becomes one for each slice: in order for F, in reverse for B, I and W.

        Args:
            slices: how many slices each microbatch gets.

        Raises:
            ScheduleError: if the schedule has slices already, or the number is wrong.

        >>> print(Schedule.parse("[0F0, 0B0]").sliced(2))
        [0F0.0, 0F0.1, 0B0.1, 0B0.0]
        """
        if type(slices) is not int or slices < 1 or self.slices > 1:
            raise broken_rules.no_slicing(self.slices, slices)
        if slices == 1:
            return self
        rows = sliced_rows(self.rows, slices)
        return Schedule(
            rows, self.placement.sliced(slices), self.microbatches, self.name, slices=slices
        )

    # ---- work ----
    def check(self, *, training: bool = True, window: int | None = None) -> Schedule:
        """Check every rule of dependence, and that no rank waits for ever.

        Args:
            training: False for schedules of forwards alone.
            window: check also execution out of order: each rank runs what is ready among its next
                ``window`` actions. A send waits until the action that reads it is in the window of
                the receiver. No rank may then wait for ever.

        Returns:
            The schedule itself.

        Raises:
            ScheduleError: names rank, position, rule and remedy.

        >>> Schedule.parse("[0F0, 0B0]").check()
        Schedule(ranks=1, microbatches=1, stages=1)
        >>> Schedule.parse("[0B0, 0F0]").check()
        Traceback (most recent call last):
            ...
        fpipe.errors.ScheduleError: rank 0, position 0 (0B0): it needs the output of 0F0, which
        stands later on this rank, at position 1; move 0F0 before it
            rank 0 | 0B0 0F0
                     ^^^
        """
        check_rows(self._inspection, training=training)
        if window is not None:
            load_pass("ready.blocking").check(self._inspection.schedule, window)
        return self

    def simulate(
        self,
        costs: Costs | None = None,
        *,
        per: Per = "stage",
        jitter: float = 0.0,
        seed: int = 0,
        order: Literal["row", "ready"] = "row",
        window: int | None = None,
    ) -> Timeline:
        """When each action would run, and what each rank would hold.

        Args:
            costs: what actions cost; by default 1 each for F, I and W.
            per: whose costs these are: of each stage, or of all stages of a rank together. One
                number per stage is always that of the stage. The default here is ``"stage"``, that
                of the commands ``"rank"``: with two stages a rank, as in ZBV, each time here is
                twice as long.
            jitter: how much times vary: each action and each message takes its cost times the
                exponential of a normal draw with this standard deviation.
            seed: of these draws. They are the same in both orders.
            order: ``"row"``, or ``"ready"``: a rank runs what is ready within a window of its row.
            window: the number of actions in the window of ``order="ready"``; by default those of as
                many microbatches as there are ranks.

        Returns:
            A ``Timeline``, which a notebook draws.
            ``.total``: the time from the first start to the last end of all ranks.
            ``.span``: the longest time of one rank, from its first start to its last end.
            ``.bubble``: the idle share of the span.
            ``.peak_bytes``: by rank, the most that it holds.
            ``.draw()``, ``.save(path)``: a picture as text, or in a file.

        Raises:
            ScheduleError: if the schedule cannot end, or the costs do not fit its stages.

        >>> Schedule.parse("[0F0, 0B0]").simulate(Costs(F=1, I=2, W=3)).total
        6.0
        """
        costs = as_costs(costs, per, self.ranks / (self.stages or 1))
        if order == "row" and not jitter:
            return simulate_rows(self._inspection, costs, self.name)
        return load_pass("ready.simulated").timeline(
            self._inspection,
            costs,
            self.name,
            jitter=jitter,
            seed=seed,
            order=order,
            window=window,
        )

    def _repr_html_(self) -> str:
        """The picture that a notebook shows. F, I and W take 1 for all stages of a rank together. A
        schedule that cannot run is shown as text.
        """
        try:
            return load_product("pictures").figure(self.simulate(per="rank"))
        except ScheduleError as error:
            return load_product("pictures").folded(f"{self!r}\n{error}\n\n{self}")

    @cached_property
    def _inspection(self) -> Inspection:
        """The walk through the rows, which ``check`` and ``simulate`` share."""
        return inspect_rows(Rows(self.rows, self.placement, self.units, self.slices))

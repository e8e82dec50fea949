# SPDX-License-Identifier: Apache-2.0
"""``Explanation``: what is known of a call of a pipeline before it runs, from all of its processes;
and the page of it, as text and as HTML.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from html import escape
from inspect import signature, unwrap
from itertools import chain, groupby, pairwise
from math import inf
from os import PathLike
from textwrap import fill
from typing import Any, NamedTuple, TypeAlias

from ... import Costs, Pipeline, Schedule, Stage, Timeline
from ...actions import counted, number, readable, unfused
from ...errors import FpipeError
from ...tree import Tree, is_tensor, leaves
from .. import pictures
from ..pictures.html import page
from ..pictures.labels import aligned, percent, size_text
from ..pictures.output import Cell, curve as drawn_curve
from ..pictures.scene import Points
from ..search.auto import costs_of
from .reasons import MEASURE, advice, as_html, as_text, idle_of


class StageFacts(NamedTuple):
    """A stage of a rank: its name and engine, and its parameters in numbers and bytes."""

    stage: int
    name: str
    engine: str
    parameters: int
    nbytes: int


class Edge(NamedTuple):
    """The messages from a rank to another one, of one direction and one stage."""

    messages: int
    nbytes: int  # of all of them
    direction: str
    rank: int
    to: int
    stage: int


@dataclass(frozen=True)
class Facts:
    """What plans and parameters say; the same on all processes."""

    title: str
    schedule: Schedule
    costs: Costs  # given or estimated, with the bytes of the programs
    measured: bool
    devices: Mapping[int, str]
    stages: Mapping[int, Sequence[StageFacts]]  # by rank
    edges: Sequence[Edge]
    peaks: Mapping[int, int]  # of the plans, in bytes


def collect(pipe: Pipeline, params: Sequence[Tree], plans: Any, costs: Costs | None) -> Facts:
    """The facts of a call with these plans. Every process of the pipeline must call it."""
    every = pipe.gather(
        {
            "figures": plans.figures,
            "peaks": plans.peak,
            "devices": {rank: str(pipe.group.device(rank)) for rank in plans.peak},
            "stages": {rank: [*_stages_of(pipe, rank, params)] for rank in plans.peak},
            "edges": {rank: _edges(plan) for rank, plan in plans.by_rank.items()},
        }
    )

    def by_rank(name: str) -> Mapping[int, Any]:
        return ChainMap(*(one[name] for one in every))

    figures = {name: ChainMap(*(one["figures"][name] for one in every)) for name in plans.figures}
    estimated = costs_of(figures, pipe.stages)
    units = (part.microbatch for plan in plans.by_rank.values() for part in unfused(plan.row))
    number = max(units) // pipe.config.slices + 1
    schedule = pipe.schedule(number)
    return Facts(
        f"{schedule.name or 'a schedule'}: {counted(pipe.stages, 'stage')} on "
        f"{counted(schedule.ranks, 'rank')}, {counted(number, 'microbatch')}",
        schedule,
        estimated if costs is None else replace(costs, saved=estimated.saved, kept=estimated.kept),
        costs is not None,
        by_rank("devices"),
        by_rank("stages"),
        sorted(chain.from_iterable(by_rank("edges").values()), reverse=True),
        by_rank("peaks"),
    )


def _stages_of(pipe: Pipeline, rank: int, params: Sequence[Tree]) -> Iterator[StageFacts]:
    """The stages of a rank."""
    for stage in pipe.placement.stages_of(rank):
        function = pipe.config.functions[stage]
        tensors = [leaf for leaf in leaves(params[stage]) if is_tensor(leaf)]
        count = sum(leaf.numel() for leaf in tensors)
        nbytes = sum(leaf.nbytes for leaf in tensors)
        yield StageFacts(stage, _name(function), str(function.engine or ""), count, nbytes)


def _name(stage: Stage) -> str:
    """The name of a stage, or that of the function that its function wraps."""
    fn = stage.fn
    while isinstance(fn := unwrap(fn), partial):
        fn = fn.func
    return replace(stage, fn=fn).label.rpartition("<locals>.")[2]


def _edges(plan: Any) -> list[Edge]:
    """The messages that a rank sends between stages."""
    forwards = {key for ins in plan.keyed if ins.kind == "F" for key in ins.writes}
    sent: defaultdict[tuple[str, int, int, int], list[int]] = defaultdict(list)
    for ins in plan.keyed:
        if ins.kind != "SEND":
            continue
        source = getattr(ins.reads[0][0], "stage", -1)
        direction = "forward" if ins.reads[0] in forwards else "backward"
        edge = direction, plan.rank, ins.op.peer, source
        sent[edge].append(sum(spec.bytes for spec in ins.op.specs))
    return [Edge(len(sizes), sum(sizes), *edge) for edge, sizes in sent.items()]


ESTIMATES = f"estimates from shapes, good for their ratios alone; costs={MEASURE} has measured ones"
#: of two tables on a wide page
BESIDE = '<div style="flex:1 1 30em;min-width:0">'
COLUMNS = 24  #: of a curve of memory in text
_LEVELS = " .:-=+*#%@"
#: What heads and cells say, and the table.
Table: TypeAlias = tuple[Sequence[str], Sequence[Sequence[object]]]


def explain(
    pipe: Pipeline,
    params: Sequence[Tree],
    x: Tree,
    targets: Sequence[Tree],
    side: Mapping[str, Any],
    costs: Costs | None,
) -> Explanation:
    """The page of a call; see ``Pipeline.explain``."""
    if not (costs is None or isinstance(costs, Costs)):
        raise FpipeError(
            f"costs={costs!r:.100}; give fpipe.Costs, such as those of fpipe.measure_costs(pipe, "
            "params, x), or leave it out for estimates"
        )
    title = ""
    if not targets and _needs_targets(pipe.config.loss):
        pipe = type(pipe)(replace(pipe.config, loss=None))
        title = ", no targets, so no loss"
    facts = collect(pipe, params, pipe.plan(params, x, *targets, **side), costs)
    facts = replace(facts, title=facts.title + title)
    named = "costs" if facts.measured else MEASURE
    return Explanation(facts, advice(facts.schedule, facts.costs, named, pipe.schedule))


def _needs_targets(loss: Any) -> bool:
    """Whether a loss cannot be called with an output alone."""
    fn = loss.fn if isinstance(loss, Stage) else loss
    try:
        parameters = signature(getattr(fn, "forward", fn)).parameters.values()
    except (TypeError, ValueError):  # no loss, or a function of C without a signature
        return False
    required = [p for p in parameters if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    return len(required) > 1


@dataclass(frozen=True, eq=False)
class Explanation:
    """What a call will run, as one page that is printed and saved.

    ``timeline`` is the simulated step, ``advice`` what to change first.
    """

    facts: Facts
    advice: Sequence[str]

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step."""
        return self.facts.schedule.simulate(self.facts.costs)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the page as ``.html``, or as ``.txt``.

        Raises:
            FpipeError: the suffix is another one, or the file cannot be written.
        """
        pictures.write(
            "explanation",
            path,
            (".html", ".txt"),
            lambda suffix: (
                str(self) if suffix == ".txt" else page("fpipe explain", self._repr_html_())
            ),
        )

    def __str__(self) -> str:
        parts = [self.facts.title, fill(self._about, 80), *as_text(self.advice)]
        for title, (notes, rows) in self._tables.items():
            parts += [f"\n{title}", *(fill(note, 80) for note in notes), *aligned(rows)]
        return "\n".join(parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows: what to change first and the step, then why."""
        tables = "".join(
            f"{BESIDE}<h3>{title}</h3><p>{'<br>'.join(notes)}</p>{pictures.table(*rows)}</div>"
            for title, (notes, rows) in self._tables.items()
        )
        return (
            f"<h2>{escape(self.facts.title)}</h2><p>{pictures.with_code(self._about)}</p>"
            f"{as_html(self.advice)}"
            f"{pictures.figure(self.timeline, titled=False, unit='bytes')}"
            f'<div style="display:flex;flex-wrap:wrap;gap:0 2em">{tables}</div>'
        )

    # ---- its parts ----
    @property
    def _about(self) -> str:
        t = self.timeline
        unit, scale = readable(t.total, t.unit)
        source = "the given costs" if self.facts.measured else ESTIMATES
        return (
            f"A step takes {number(scale * t.total)} {unit or 'units of the costs'}, with a bubble "
            f"of {percent(t.bubble)}. Times are {source}."
        )

    @property
    def _tables(self) -> dict[str, Table]:
        edge = "direction", "of stage", "from rank to rank", "of each stage", "bytes of one"
        messages = []
        for (count, nbytes, direction), edges in groupby(self.facts.edges, lambda e: e[:3]):
            by_stage = sorted(edges, key=lambda e: (e.stage, e.rank))
            ends = by_stage[:: len(by_stage) - 1 or 1]  # the first and the last one
            stages = "-".join(dict.fromkeys(str(e.stage) for e in ends))
            ranks = " ... ".join(f"{e.rank} to {e.to}" for e in ends)
            messages.append((direction, stages, ranks, count, size_text(nbytes / count)))
        held = Cell("activations, @ the most", "activations over the step")
        memory = "rank", held, "peak, at % of step", "all at once"
        return {
            "What runs where": self._where,
            "Messages of a step": (
                (
                    "forward: the output of a stage; backward: the gradient of its input",
                    "Stages with equal messages are one row.",
                ),
                [edge, *messages],
            ),
            "Memory against time": (
                (
                    "peak: the most bytes of activations, and when in the step it is reached",
                    "all at once: most bytes without parameters and batch, with gradients too",
                ),
                [memory, *self._memory()],
            ),
            "Bubble by rank": (
                (
                    "Idle time as a share of the span, which is the longest time from a rank's "
                    "first start to its last end. The mean of all ranks is the bubble.",
                ),
                [("rank", "share", "cause"), *self._idle()],
            ),
        }

    @property
    def _where(self) -> Table:
        facts = self.facts
        costs = facts.costs.times(facts.schedule.stages)
        unit, scale = readable(max(max(costs[op]) for op in "FIW"), facts.costs.unit)
        rows = []
        for rank, stages in sorted(facts.stages.items()):
            for one in stages:
                took = [
                    number(scale * time, 3) if (time := costs[op][one.stage]) else "-"
                    for op in "FIW"
                ]
                name = f"{one.stage} {one.name}" + ", eager" * (one.engine == "eager")
                rows.append((rank, name, f"{one.parameters:,} ({size_text(one.nbytes)})", *took))
        heads = [Cell(f"{op} {unit}".rstrip(), f"{op}&nbsp;{unit}") for op in "FIW"]
        notes = (
            "F: forward; I and W: the parts of a backward, for inputs and for weights",
            "Times are those of one microbatch; -: none.",
            f"devices: {', '.join(sorted({*facts.devices.values()}))}",
            *["eager: runs on autograd, without a trace"]
            * any(", eager" in row[1] for row in rows),
        )
        return notes, [("rank", "stage", "parameters", *heads), *rows]

    def _memory(self) -> Iterator[Sequence[object]]:
        t = self.timeline
        most = max(t.peak_bytes, default=0.0)
        for rank, peak in sorted(self.facts.peaks.items()):
            curve = t.curve(rank)
            first = max(curve, key=lambda point: point[1], default=(t.start, 0.0))
            when = (first[0] - t.start) / (t.total or 1.0)
            held = f"{size_text(t.peak_bytes[rank])} at {when:.1%}"
            drawn = Cell(_line(curve, t, most), drawn_curve(t, rank, most))
            yield rank, drawn, held, size_text(peak)

    def _idle(self) -> Iterator[Sequence[object]]:
        for rank in range(self.timeline.ranks):
            causes = idle_of(self.timeline, rank) or [(0.0, "none")]
            shares = [share for share, _ in causes]
            count = sum(share >= sum(shares) / 10 for share in shares)
            others = sum(shares[count:]), "other causes"
            for place, (share, why) in enumerate([*causes[:count], others][: len(causes)]):
                yield "" if place else rank, f"{share:.1%}", why


def _line(curve: Points, t: Timeline, most: float) -> str:
    """What a rank holds at equal times: a character for each, from blank to @, which is the most of
    all ranks.
    """
    levels = [*pairwise([*curve, (inf, 0.0)])]
    marks = ""
    for part in range(COLUMNS):
        begin = t.start + t.total * part / COLUMNS
        end = t.start + t.total * (part + 1) / COLUMNS
        during = (held for (time, held), (after, _) in levels if time < end and after > begin)
        high = max(during, default=0.0)
        marks += _LEVELS[round((len(_LEVELS) - 1) * high / most)] if most else " "
    return f"[{marks}]"

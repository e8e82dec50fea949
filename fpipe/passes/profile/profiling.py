# SPDX-License-Identifier: Apache-2.0
"""``fpipe.profile``: a step of a pipeline as it ran, over the same step as it is simulated; and
what its parts cost.

``measure_costs`` returns the ``Costs`` with which any schedule over the same stages can be
simulated. Knows pipelines and recorded events; no backend.
"""

from __future__ import annotations

import os
import time
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from html import escape
from itertools import chain
from os import PathLike
from statistics import median
from textwrap import fill
from typing import TYPE_CHECKING, Any

from ...actions.action import Action, Row
from ...actions.action_kinds import OPS
from ...actions.costs import Costs
from ...actions.product import load_product
from ...actions.text import counted
from ...actions.timeline import Timeline
from ...devices import cores
from ...engine.gradients import value_and_grad
from ...engine.pipeline import Pipeline
from ...errors import FpipeError, StageError
from ...generators import make_schedule
from ...programs.cache import Spent, measured
from ...schedule import Schedule
from ...tree import Tree
from .costing import (
    MEANINGS,
    costs,
    delays,
    length,
    shares,
    shown,
    table,
    timeline,
    varies,
)
from .recording import Run, gathered, recording

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Profile:
    """A step whose instructions are timed, returned by ``fpipe.profile``. Its figures are those of
    all calls so far.
    """

    def __init__(self, step: Callable[..., Any] | None = None, *, name: str = ""):
        self.step = step
        self.name = name
        self._schedule = ""  # the name of that of the last step
        self.runs: list[tuple[Run, ...]] = []  # each by rank
        self.prepared = Spent()  # what this process spent to prepare plans
        self.in_turn = False  # whether one process ran the ranks of the last step after each other
        self._free = 0.0  # when the last runs were gathered
        self._open: list[AbstractContextManager[None]] = []

    # ---- recording ----
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the step, and gather the times of all ranks."""
        if self.step is None:
            raise FpipeError(
                "this profile has no step to call; say fpipe.profile(step), or use it with `with`"
            )
        with self:
            return self.step(*args, **kwargs)

    def __enter__(self) -> Profile:
        self._open.append(self._recorded())
        self._open[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        with recording() as logs, measured() as parts:
            yield  # after an error other ranks may not call what follows
        self.prepared = sum(parts, self.prepared)
        if not logs:
            return
        runs = defaultdict[int, list[Run]](list)
        for log in logs:
            runs[log.bound.plan.rank].append(log.run()._replace(free=self._free))
        group = logs[0].bound.group
        self._schedule = logs[0].bound.name
        self.name = self.name or self._schedule
        self.runs += gathered(group, dict(runs))
        self._free = time.perf_counter()
        self.in_turn = len(group.here) == group.size > 1
        self.__dict__.pop("costs", None)

    # ---- shown ----
    def _repr_html_(self) -> str:
        """What a notebook shows: what to change, the picture and the figures of the median step."""
        pictures = load_product("pictures")
        if not self.runs:
            return pictures.folded("a profile of no step yet\ncall it as the step itself")
        doubt, advice = self._found
        title, *lines = [*self._headline, *doubt]
        body = [f"<h3>{escape(title)}</h3><p>{'<br/>'.join(lines)}</p>"]
        body += map(load_product("explanation").as_html, advice)
        body.append(pictures.figure(self._drawn))
        for title, rows in self._tables.items():
            said = "<br/>".join(_meanings(rows))
            body.append(f"<p>{title}</p>{pictures.table(*rows)}<p>{said}</p>")
        body += [f"<p>{escape(line)}</p>" for line in self._sentences]
        return "".join(body)

    @property
    def _headline(self) -> list[str]:
        """What was profiled, and its measured and its simulated time."""
        count = len(self.runs)
        steps = "one step" if count == 1 else f"the median of {count} steps"
        real, would = self.timeline, self.simulated
        before = length(self._median) - real.total
        lasted, simulated, rest = shown(real.total, would.total, before)
        title = f"{self._called('profiled')}: {steps}"
        figures = f"bubble {would.bubble:.1%}, by median times of actions"
        if self.in_turn:
            return [
                title,
                f"simulated, ranks at once: {shown(would.total)[0]}, {figures}",
                f"measured: {lasted}, one rank after the other in this process",
            ]
        rest = f", and {rest} before and after" * (before > 0.01 * real.total)
        return [
            title,
            f"measured: {lasted}, bubble {real.bubble:.1%}{rest}",
            f"simulated: {simulated}, {figures}",
        ]

    @property
    def _drawn(self) -> list[Timeline]:
        """Of ranks in turn the simulation alone: their waiting is for the turns of others."""
        return [self.timeline, self.simulated][self.in_turn :]

    # ---- figures ----
    @property
    def timeline(self) -> Timeline:
        """The step of median time, measured, in seconds, of all that ran what the last one did; of
        several plans in one step the one that took longest.
        """
        return timeline(self._median, name=self._called("measured"))

    @property
    def _median(self) -> tuple[Run, ...]:
        steps = sorted(self._alike, key=length)
        return steps[(len(steps) - 1) // 2]

    @property
    def _last(self) -> tuple[Run, ...]:
        if not self.runs:
            raise FpipeError(
                "nothing was profiled yet; call the profile, with a step that runs a pipeline"
            )
        return self.runs[-1]

    def _called(self, what: str) -> str:
        return f"{self.name}, {what}" if self.name else what

    @cached_property
    def costs(self) -> Costs:
        """The costs of actions and messages in seconds: medians over all calls."""
        return self.priced(self._alike)

    @property
    def _alike(self) -> list[tuple[Run, ...]]:
        actions = _actions(self._last)
        return [runs for runs in self.runs if _actions(runs) == actions]

    @property
    def simulated(self) -> Timeline:
        """The same rows, simulated with the costs of that step."""
        name = "simulated" + ", ranks at once" * self.in_turn
        return replace(self._ran.simulate(self._price), name=self._called(name))

    @property
    def _price(self) -> Costs:
        return self.priced([self._median])

    def priced(self, steps: Sequence[Sequence[Run]], *held: tuple[float, ...]) -> Costs:
        """Their costs. Between ranks in turn a message is not on the way: it waits for a turn."""
        found = costs(steps, *held)
        return replace(found, comm=0.0) if self.in_turn else found

    @property
    def _ran(self) -> Schedule:
        real = self.timeline
        count = real.microbatches // real.slices
        return Schedule(real.rows, real.placement, count, self._schedule)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a picture of the measured step over the simulated one, of ranks in turn of the
        latter alone, with what to mend: see ``Timeline.save``.
        """
        first, *rest = self._drawn
        doubt, advice = self._found
        numbered = enumerate(chain(*advice), 1)
        said = [*doubt, *(f"{place}. {text.splitlines()[0]}" for place, text in numbered)]
        noted = replace(first, note="\n".join(said))
        load_product("pictures").save([noted, *rest], path)

    def plot(self, ax: Axes | None = None, style: str = "paper") -> Axes:
        """That picture in a figure of matplotlib: see ``Timeline.plot``."""
        return load_product("pictures").plot(self._drawn, ax, style)

    def draw(self, width: int | None = None, color: bool | None = None) -> str:
        """That picture as text."""
        return load_product("pictures").draw(self._drawn, width=width, color=color)

    def __repr__(self) -> str:
        return f"Profile({'; '.join(self._headline) if self.runs else 'of no step yet'})"

    def __str__(self) -> str:
        if not self.runs:
            return repr(self)
        doubt, advice = self._found
        lines = [fill(line, 80, subsequent_indent="  ") for line in (*self._headline, *doubt)]
        lines += chain.from_iterable(map(load_product("explanation").as_text, advice))
        for title, rows in self._tables.items():
            lines += ["", title, *load_product("pictures").aligned(rows), *_meanings(rows)]
        return "\n".join(lines + [f"\n{fill(sentence, 80)}" for sentence in self._sentences])

    @property
    def _tables(self) -> dict[str, list[Sequence[object]]]:
        """Title -> the rows of a table below its head."""
        ran = {one.op for row in self.timeline.rows for one in row if isinstance(one, Action)}
        price = self._price
        columns = {op: getattr(price, op) for op in OPS if op in ran}
        tables = [table("Median times of actions by stage", "stage", columns)]
        if not self.in_turn:
            parts = [shares(run) for run in self._median]
            times = {name: [part[name] for part in parts] for name in dict.fromkeys(chain(*parts))}
            tables.append(table("What each rank spends its time on", "rank", times))
        return dict(tables)

    @property
    def _found(self) -> tuple[list[str], list[Sequence[str]]]:
        """Why measured times may mislead; and what to change first, unless times vary too much.

        Waits for a core are not told from others: there too only the simulation counts.
        """
        would, steps, doubt = self.simulated, self._alike, list[str]()
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if len(self._last) < 2 or not all(run.events for run in self._last):
            return [], []
        if processes > cores():
            doubt = [
                f"{processes} processes share {counted(cores(), 'core')} of this machine: measured "
                "times include waits for a core."
            ]
        elif not self.in_turn and (vary := varies(steps, self.timeline.total, would.total)):
            return [vary], []
        steps = [] if self.in_turn or doubt else steps
        ran = self._ran
        again = partial(make_schedule, ran.name, ran.ranks, stages=ran.stages, slices=ran.slices)
        late = delays(steps, would.total)
        advice = load_product("explanation").advice
        return doubt, [advice(ran, self._price, "step.costs", again, late)]

    @property
    def _sentences(self) -> Iterator[str]:
        price = self._price
        figures = price.boundary, price.send, price.comm, price.receive
        links = zip(*(row for row in figures if isinstance(row, tuple)), strict=True)
        sizes = [*zip(*(link for link in links if link[0]), strict=True)]
        if sizes and not self.in_turn:
            size, *times = map(median, sizes)
            send, way, receive = (f"{1e6 * time:.0f} us" for time in times)
            yield (
                f"A message of {size:,.0f} bytes: sending {send}, on the way {way}, "
                f"receiving {receive}."
            )
        if self.prepared.seconds:
            yield f"Preparation, in this process: {self.prepared}."


def profile(step: Callable[..., Any] | None = None, *, name: str = "") -> Profile:
    """Time every instruction of a step of a pipeline, on all ranks. Without it there is no
    overhead.

    Call the step once before: the first call traces.

    Args:
        step: a function that calls a pipeline once, such as that of ``value_and_grad``; leave it
            out for ``with profile() as found:``.
        name: of the step, in pictures; by default that of its schedule.

    Returns:
        A function with the arguments and the result of ``step``, or a context manager; every
        process must use it. Its ``timeline`` is the step of median time, ``simulated`` that step
        with the median times of its actions, ``costs`` has those of all steps, and ``save(path)``
        draws both; of ranks in turn, in one process, it draws ``simulated``.

    Raises:
        FpipeError: if its results are read before a step ran.

    >>> from fpipe import local, pipeline
    >>> import torch
    >>> pipe = pipeline([lambda p, x: x * p] * 2, loss=lambda y: y.sum(), microbatches=2,
    ...     group=local(2))
    >>> step = profile(value_and_grad(pipe))
    >>> loss, grads = step([torch.ones(())] * 2, torch.ones(4))
    >>> [str(action) for action in step.timeline.rows[0]]
    ['0F0', '0F1', '0B0', '0B1']
    >>> step.costs.unit
    's'
    """
    return Profile(step, name=name)


def _meanings(rows: Sequence[Sequence[object]]) -> list[str]:
    """The lines about what these rows have."""
    return [line for line in MEANINGS.splitlines() if line.partition(":")[0] in chain(*rows)]


def _actions(runs: Sequence[Run]) -> list[tuple[tuple[str, Action | None], ...]]:
    return [tuple((event.kind, event.action) for event in run.events) for run in runs]


# ---- costs ----
def measure_costs(
    pipe: Pipeline, params: Tree, x: Tree, /, *targets: Tree, steps: int = 10, **side: Tree
) -> Costs:
    """The costs of each stage's F, I, W and B and of each boundary's messages; every process must
    call it.

    The costs include those of the runner. ``Costs.to_json`` writes them to a file.

    Args:
        pipe: a pipeline with a loss.
        params, x, targets, side: as for a call of the pipeline.
        steps: how many times it runs with whole backwards, and as often with split ones.

    Returns:
        ``Costs`` in seconds and bytes, the same on every process.

    Raises:
        StageError: if the pipeline has no loss.
        FpipeError: for fewer steps than 1.

    >>> from fpipe import local, make_schedule, pipeline
    >>> import torch
    >>> pipe = pipeline([lambda p, x: x * p] * 2, loss=lambda y: y.sum(), microbatches=2,
    ...     group=local(2))
    >>> found = measure_costs(pipe, [torch.ones(())] * 2, torch.ones(4), steps=1)
    >>> make_schedule("ZBH1", 2, 8).simulate(found).unit
    's'
    """
    if steps < 1:
        raise FpipeError(f"steps={steps}; give 1 or more")
    measuring = Measuring(pipe, params, x, *targets, **side)
    for _ in range(steps):
        measuring.step()
    return measuring.costs()


class Measuring:
    """``measure_costs`` one step at a time, so that other things can be measured in between."""

    def __init__(self, pipe: Pipeline, params: Tree, x: Tree, /, *targets: Tree, **side: Tree):
        if pipe.config.loss is None:
            raise StageError(
                "this pipeline has no loss, so no backward can be measured; say pipeline(..., "
                "loss=)"
            )
        self.pipe = pipe
        self._figures = pipe.plan(params, x, *targets, **side).figures
        schedule = pipe.schedule(pipe.call("grad", params, x, targets, side).microbatches)
        steps = [
            partial(value_and_grad(pipe.under(variant)), params, x, *targets, **side)
            for variant in (whole(schedule), split(schedule))
        ]
        for step in steps * 2:  # the first call traces, the second allocates memory
            step()
        self._profiles = list(map(Profile, steps))

    def step(self) -> None:
        """Run once with whole backwards and once with split ones; every process must call it."""
        for profiled in self._profiles:
            profiled()

    def costs(self) -> Costs:
        """Medians over the steps so far; every process must call it."""
        runs = [runs for profiled in self._profiles for runs in profiled.runs]
        return self._profiles[0].priced(runs, self._held("saved"), self._held("kept"))

    def _held(self, name: str) -> tuple[float, ...]:
        """The bytes of this name, by stage."""
        by_stage = ChainMap(*self.pipe.gather(self._figures[name]))
        return tuple(by_stage[stage] for stage in range(self.pipe.stages))


def whole(schedule: Schedule) -> Schedule:
    """The schedule with every backward in one piece, where its I stands.

    >>> str(whole(Schedule.parse("[0F0, 0I0, 0W0]")))
    '[0F0, 0B0]'
    """
    return _rewritten(schedule, {"I": "B", "W": ""})


def split(schedule: Schedule) -> Schedule:
    """The schedule with every backward in two pieces.

    >>> str(split(Schedule.parse("[0F0, 0B0]")))
    '[0F0, 0I0, 0W0]'
    """
    return _rewritten(schedule, {"B": "IW"})


def _rewritten(schedule: Schedule, ops: dict[str, str]) -> Schedule:
    """The schedule with other ops for some; fused actions become single ones."""

    def row(actions: Row) -> Row:
        return tuple(
            Action(stage, op, mb)  # type: ignore[arg-type]
            for action in actions
            for stage, old, mb in action.parts
            for op in ops.get(old, old)
        )

    rows = tuple(map(row, schedule))
    return Schedule(rows, schedule.placement, schedule.microbatches, schedule.name)

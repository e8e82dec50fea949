"""The programs of a pipeline's stages without a runner and without messages, in the order of its
schedule.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

import fpipe
from fpipe.actions.action import unfused
from fpipe.engine.calls import value_and_grad
from fpipe.engine.execute import WATCH
from fpipe.passes.profile.profiling import whole


class Alone:
    """The programs of the stages here on the values of a real step, with nothing around them."""

    def __init__(
        self, pipe: fpipe.Pipeline, params: Any, x: Any, t: Any, microbatches: int | None = None
    ):
        schedule = pipe.schedule(microbatches or x.shape[0])
        alone = pipe.under(whole(schedule))
        call = alone.call("grad", params, x, (t,), {})
        (lowered,) = alone.cache.plans_for(call).prepared.jobs.values()
        self.kinds, self.top = lowered.program_sets[0], pipe.stages - 1
        self.row = list(unfused(schedule[pipe.group.rank]))
        self.values: dict[int, dict[str, Any]] = {}
        self.times: dict[tuple[str, int], list[float]] = {}
        before = WATCH.set(self._watch)
        try:
            value_and_grad(call, alone.cache)
        finally:
            WATCH.reset(before)

    def _watch(self, bound: Any, phase: int | None) -> Iterable[tuple[int, Any]]:
        assert phase is None
        pairs = zip(bound.steps, bound.plan.instructions, strict=True)
        return enumerate([self._noting(step, ins) for step, ins in pairs])

    def _noting(self, step: Callable[[Any], Any], ins: Any) -> Callable[[Any], Any]:
        """Keep what programs of the first microbatch read."""
        if ins.program is None or ins.action.microbatch:
            return step
        loss = self.kinds.loss
        index = (
            self.top + 1
            if loss is not None and ins.program in (loss.f, loss.b)
            else ins.action.stage
        )

        def noting(r: Any) -> Any:
            known = self.values.setdefault(index, {})
            known.update(
                zip(ins.program.inputs, [r.slots[slot] for slot in ins.reads], strict=True)
            )
            return step(r)

        return noting

    def round(self, counts: bool) -> None:
        """Run the programs of every action of the rank here in their order, as a step does, and
        nothing else.
        """
        took: dict[tuple[str, int], list[float]] = {}
        for action in self.row:
            took.setdefault((action.op, action.stage), []).append(
                self._action(action.op, action.stage)
            )
        for key, times in took.items() if counts else ():
            self.times.setdefault(key, []).append(statistics.mean(times))

    def seconds(self) -> float:
        """The median time of the programs of a step."""
        medians = {key: statistics.median(times) for key, times in self.times.items()}
        return sum(medians[action.op, action.stage] for action in self.row)

    def _action(self, letter: str, index: int) -> float:
        loss, own = self.kinds.loss, self.kinds.programs[index]
        if index != self.top or loss is None or letter == "W":
            loss = None
        if letter == "F":
            return self._run(own, own.f, index) + (
                0.0 if loss is None else self._run(loss, loss.f, self.top + 1)
            )
        seconds = 0.0 if loss is None else self._run(loss, loss.b, self.top + 1)
        return seconds + self._run(own, own.i if letter == "I" else own.adding(letter), index)

    def _run(self, own: Any, program: Any, index: int) -> float:
        known = self.values[index]
        for name in program.inputs:
            if name not in known and name[0] == "g" and name[1:].isdigit():
                known[name] = torch.zeros_like(known[f"p{name[1:]}"])
        box = [known[name] for name in program.inputs]
        start = time.perf_counter()
        out = program.run(box)
        took = time.perf_counter() - start
        known.update(zip(program.outputs, out, strict=True))
        return took


def programs(pipe: fpipe.Pipeline, alone: Alone) -> dict[str, tuple[float, ...]]:
    """By letter, the median seconds of the programs of each stage; every rank calls it."""
    medians = {key: statistics.median(times) for key, times in alone.times.items()}
    by_op = {
        key: seconds
        for times in pipe.group.gather_objects(medians)
        for key, seconds in times.items()
    }
    return {op: tuple(by_op.get((op, index), 0.0) for index in range(pipe.stages)) for op in "FBIW"}

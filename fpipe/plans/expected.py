# SPDX-License-Identifier: Apache-2.0
"""What a step is expected to cost, from its plans: programs by their shapes, woven actions by their weaves.

For the simulator, in microseconds; what is known of the stages that live here stands in for the others. Knows programs
and weaves; it runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..programs.program import Program
from ..schedules.actions import AnyAction
from ..schedules.costs import Beside, Costs
from .plan import LoweringInput, Plan
from .weaving.estimates import nanoseconds
from .weaving.segments import collectives_of


def expected(jobs: Mapping[int, LoweringInput], plans: Mapping[int, Plan]) -> Costs:
    """Costs for ``schedule.simulate``: one number a stage, and a function for what is woven."""
    stages = next(iter(jobs.values())).stages
    times: dict[str, dict[int, float]] = {op: {} for op in "FBIW"}
    held: dict[str, dict[int, float]] = {"saved": {}, "kept": {}}
    for job in jobs.values():
        for stage, own in job.kinds[0].programs.items():
            for op, program in zip("FBIW", (own.f, own.b, own.i, own.w), strict=True):
                times[op][stage] = _microseconds(program)
            held["saved"][stage], held["kept"][stage] = own.saved_bytes, own.kept_bytes
    spread = {name: _spread(found, stages) for name, found in (times | held).items()}
    return Costs(**spread, overlap=predictor(plans), unit="us")


def predictor(plans: Mapping[int, Plan]) -> Callable[[AnyAction], Beside | None]:
    """From an action to what its weave takes and carries; None where it has none."""
    weaves = {action: made for plan in plans.values() for action, made in plan.weaves.items() if not made.reason}

    def overlap(action: AnyAction) -> Beside | None:
        made = weaves.get(str(action))
        if made is None:
            return None
        carried = tuple((m.start / 1e3, m.end / 1e3, f"{t.name} over {t.members}") for t, m in made.carried)
        return Beside(made.total / 1e3, carried)

    return overlap


def _microseconds(program: Program) -> float:
    return (sum(map(nanoseconds, program.nodes)) + sum(c.nanoseconds for c in collectives_of(program))) / 1e3


def _spread(found: Mapping[int, float], stages: int) -> tuple[float, ...]:
    middle = sum(found.values()) / max(len(found), 1)
    return tuple(found.get(stage, middle) for stage in range(stages))

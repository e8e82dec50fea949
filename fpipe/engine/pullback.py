# SPDX-License-Identifier: Apache-2.0
"""``fpipe.vjp``: the forwards of a schedule now, the backwards in a pullback. Knows calls and
plans; no schedules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import StageError
from ..lowering.instruction import Registers
from ..programs.internals import setting
from ..programs.tensor_state import RETAINED, versions
from ..tree import Tree
from . import calls
from .arguments import Call
from .cotangents import cotangents, on_replicas
from .feed import Feeder
from .outputs import RunResults
from .plan_cache import Cache
from .signatures import Pullback


def vjp(call: Call, cache: Cache) -> tuple[Tree, Pullback[Any, Any]]:
    """The forward phase now; the backward phase in the pullback."""
    with calls.announced(call, cache.announce) as (plans, number):
        results = calls.run_all(call, plans, phase=0)
        y = results.outputs()
        if call.state is not None:
            y = (y, results.states())
    kept = [results.regs]
    # slots that are filled before the backwards and that these read
    kept_slots = {rank: plan.kept_for_backward() for rank, plan in plans.prepared.plans.items()}
    before = _versions(kept_slots, results.regs)

    def pullback(dy: Tree, *, retain: bool = False) -> tuple[Any, Tree]:
        """Gradients of the parameters and the input for the outputs' cotangents."""
        if not kept:
            raise StageError(
                "this pullback was called before and what it needs is freed; call it with "
                "retain=True to keep it"
            )
        calls.refuse_surrounded()
        try:
            planned = [plans.prepared.output(mb) for mb in range(call.units)]
            rows = cotangents(call, planned, dy)
            if _versions(kept_slots, kept[0]) != before:
                raise StageError(
                    "a tensor that this pullback needs was changed in place since fpipe.vjp "
                    "returned: a parameter, the "
                    "batch, a side input or an output; call the pullback first, or change a copy"
                )
        except Exception as error:
            calls.refuse(call.config, error)
            raise
        again = partial(plans.announce, pullback=number)
        with calls.announced(call, again), setting(RETAINED, retain):
            regs = {rank: r.copy() for rank, r in kept[0].items()} if retain else kept.pop()
            rows = on_replicas(call, planned, rows)
            results = RunResults(plans.layout, regs, call, None, rows)
            calls.run(results, plans, lambda feeder, r: _fill(feeder, r, rows), phase=1)
            return results.param_grads(), results.input_grads()

    return y, pullback


def _fill(feeder: Feeder, r: Registers, cotangents: Sequence[Sequence[Any]]) -> None:
    """Write the cotangents of the outputs into the registers."""
    for slot, mb, index in feeder.cotangents:
        r.slots[slot] = cotangents[mb][index].detach().to(feeder.device)


def _versions(
    kept_slots: Mapping[int, tuple[int, ...]], regs: Mapping[int, Registers]
) -> list[list[int]]:
    """How often each tensor that the backwards need was written to."""
    return [
        versions([regs[rank].slots[slot] for slot in slots]) for rank, slots in kept_slots.items()
    ]

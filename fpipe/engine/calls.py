# SPDX-License-Identifier: Apache-2.0
"""The warm path: feed the plans of a call, run them, and read the results.

Nothing is kept between calls but the ``Cache`` of plans. Knows configurations, plans and registers;
no schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

import torch

from ..actions.product import feature
from ..errors import GroupError
from ..lowering.instruction import Registers
from ..programs.internals import transforming, without_autocast
from ..programs.signature import stage_that_runs
from ..tree import Tree
from . import mistakes
from .arguments import Call
from .config import Config
from .execute import DEBUGGING, WATCH, drive, execute
from .feed import Feeder
from .first_call import refused
from .outputs import Outputs, input_grads, of, outputs
from .plan_cache import Cache, CachedPlans
from .results import Results

AllRegisters: TypeAlias = dict[int, Registers]


# ---- what can be done with a call ----
def forward(call: Call, cache: Cache) -> Tree:
    """Loss or outputs, forward alone."""
    with call.config.claim:
        plans, _ = announced(call, cache)
        with Reported(call.config):
            results, returned = _run_all(call, plans)
            if call.config.loss is not None:
                return _value(call, results, returned)
            y = outputs(results) if call.each is None else feature("each").in_order(call, returned)
            return y if call.state is None else (y, of(results).states())


def value_and_grad(call: Call, cache: Cache, value: bool = True) -> tuple[Tree, tuple[Tree, ...]]:
    """The value, where it is wanted, and gradients in the order of ``call.wanted``."""
    with call.config.claim:
        plans, _ = announced(call, cache)
        with Reported(call.config):
            results, returned = _run_all(call, plans)
            loss = _value(call, results, returned) if value else results.leave_loss()
            by_argument = {0: results.param_grads, 1: lambda: input_grads(results)}
            grads = {n: by_argument[n]() for n in call.wanted}
            return loss, tuple(grads[n] for n in call.wanted)


def surrounded() -> bool:
    """Whether the caller is a stage, a loss or a torch.func transform, which differentiates a call
    as a function.
    """
    return transforming() or stage_that_runs() is not None


def refuse_surrounded() -> None:
    """Raise StageError inside a stage, a loss or a torch.func transform."""
    if surrounded():
        raise mistakes.surrounded(stage_that_runs())


def observed() -> bool:
    """Whether somebody watches single instructions: they must run."""
    return WATCH.get() is not None or DEBUGGING.get()


# ---- running ----
class Reported:
    """Around what follows the announcement of a call: an error of this rank is reported to the
    others, which wait.
    """

    __slots__ = ("config",)

    def __init__(self, config: Config):
        self.config = config

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            group = self.config.group
            copies = self.config.copies
            for each in (group,) if copies is None else (group, copies.group):
                each.failed(error)
            group.reset()


def refuse(config: Config, error: Exception) -> None:
    """Report that this rank raised before it announced a call, unless the group is in use by
    another one.
    """
    if not config.local and not surrounded():
        with suppress(GroupError), config.claim:
            refused(config, error)


def announced(call: Call, cache: Cache) -> tuple[CachedPlans, int]:
    """The plans of a call, and its number. From now on the other ranks expect its messages."""
    refuse_surrounded()
    return cache.announced(call)


def _run_all(call: Call, plans: CachedPlans) -> tuple[Results, dict[int, Any]]:
    """Run the whole schedule. Returns its results, and what ``each`` returned by microbatch."""
    weights = call.weights()
    regs: AllRegisters = {}
    kind = Outputs if call.wants_outputs else Results
    results = kind(plans.layout, regs, call, weights)
    returned: dict[int, Any] = {}
    each = None
    if call.each is not None:
        each = feature("each").caller(call, plans.prepared, of(results), returned)

    def feed(feeder: Feeder, r: Registers) -> None:
        feeder.fill(r, call, weights)
        r.send_loss, r.each = results.pipeline_loss, each

    run(call, plans, regs, feed)
    return results, returned


def run(
    call: Call,
    plans: CachedPlans,
    regs: AllRegisters,
    feed: Callable[[Feeder, Registers], None],
    phase: int | None = None,
) -> None:
    """Feed and drive the ranks of this process, wholly or in one of two phases."""
    group = call.config.group
    executables = plans.prepared.executables
    runs = {}
    for rank, executable in executables.items():
        if rank not in regs:
            regs[rank] = Registers([None] * executable.plan.slots, call.seed)
        feed(plans.feeders[rank], regs[rank])
        runs[rank] = execute(executable, regs[rank], phase)
    try:
        with torch.no_grad(), without_autocast():
            drive(runs, lambda rank: group.last_note(rank) or "waiting")
            group.confirm()
            group.flush()
        if phase != 0 and DEBUGGING.get():
            check_leaks = feature("debugging").check_leaks
            for rank, executable in executables.items():
                check_leaks(executable.plan, regs[rank])
    finally:
        for r in regs.values():
            r.send_loss = r.each = (
                None  # they refer to the registers: a cycle keeps gradients until a collection
            )


# ---- values ----
def _value(call: Call, results: Results, returned: dict[int, Any]) -> Tree:
    # first: it may be on its way, and what one rank sends is received in order
    loss = results.loss()
    extras: list[Any] = [of(results).aux()] if call.has_aux and call.each is None else []
    extras += [feature("each").in_order(call, returned)] if call.each is not None else []
    extras += [of(results).states()] if call.state is not None else []
    return (loss, *extras) if extras else loss

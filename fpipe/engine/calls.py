# SPDX-License-Identifier: Apache-2.0
"""Every call comes through here: get its plans, feed them, run them, and read the results.

Only the ``Cache`` of plans is kept between calls. Knows configurations, plans and registers; no
schedules.
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
from .outputs import Outputs
from .plan_cache import Cache, CachedPlans

AllRegisters: TypeAlias = dict[int, Registers]


# ---- the two kinds of calls ----
def forward(call: Call, cache: Cache) -> Tree:
    """Run the forwards alone, and return the loss or the outputs."""
    with call.config.claim:
        plans, _ = announce(call, cache)
        with ErrorReporter(call.config), without_autocast():
            results, returned = _run_all(call, plans)
            if call.config.loss is not None:
                return _value(call, results, returned)
            y = results.outputs() if call.each is None else feature("each").in_order(call, returned)
            return y if call.state is None else (y, results.states())


def value_and_grad(call: Call, cache: Cache, value: bool = True) -> tuple[Tree, tuple[Tree, ...]]:
    """Run the schedule, and return the value and the gradients of ``call.argnums``.

    Without ``value`` the caller drops the value, so it is not computed.
    """
    with call.config.claim:
        plans, _ = announce(call, cache)
        with ErrorReporter(call.config), without_autocast():
            results, returned = _run_all(call, plans)
            loss = _value(call, results, returned) if value else results.discard_loss()
            grads: dict[int, Tree] = {}
            for number in call.argnums:
                grads[number] = results.param_grads() if number == 0 else results.input_grads()
            return loss, tuple(grads[number] for number in call.argnums)


def surrounded() -> bool:
    """Whether the caller is a stage, a loss or a torch.func transform.

    These differentiate a call, which a plan does not support.
    """
    return transforming() or stage_that_runs() is not None


def refuse_surrounded() -> None:
    """Raise StageError inside a stage, a loss or a torch.func transform."""
    if surrounded():
        raise mistakes.surrounded(stage_that_runs())


def observed() -> bool:
    """Whether a profiler or ``fpipe.debug`` observes the instructions, so that each must run."""
    return WATCH.get() is not None or DEBUGGING.get()


# ---- running ----
class ErrorReporter:
    """Reports an error of this rank to the ranks that wait for it.

    A call that is announced runs in a ``with`` block of this.
    """

    __slots__ = ("config",)

    def __init__(self, config: Config):
        self.config = config

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        group = self.config.group
        group.failed(error)
        if self.config.copies is not None:
            self.config.copies.group.failed(error)
        group.reset()


def refuse(config: Config, error: Exception) -> None:
    """Report that this rank raised before it announced a call.

    Where another call uses the group, nothing is reported.
    """
    if not config.local and not surrounded():
        with suppress(GroupError), config.claim:
            refused(config, error)


def announce(call: Call, cache: Cache) -> tuple[CachedPlans, int]:
    """Announce a call to the other ranks, which then expect its messages.

    Returns its plans and its number.
    """
    refuse_surrounded()
    return cache.announce(call)


def _run_all(call: Call, plans: CachedPlans) -> tuple[Outputs, dict[int, Any]]:
    """Run the whole schedule.

    Returns its results, and what the function ``each=`` returned for each microbatch.
    """
    weights = call.weights()
    regs: AllRegisters = {}
    results = Outputs(plans.layout, regs, call, weights)
    returned: dict[int, Any] = {}
    each = None
    if call.each is not None:
        each = feature("each").caller(call, plans.prepared, results, returned)

    def feed(feeder: Feeder, r: Registers) -> None:
        feeder.fill(r, call, weights)
        r.send_loss = results.pipeline_loss
        r.each = each

    run(call, plans, regs, feed)
    return results, returned


def run(
    call: Call,
    plans: CachedPlans,
    regs: AllRegisters,
    feed: Callable[[Feeder, Registers], None],
    phase: int | None = None,
) -> None:
    """Feed the registers of the ranks of this process, and run their plans.

    With a ``phase``, run one of the two phases of ``fpipe.vjp``.
    """
    group = call.config.group
    executables = plans.prepared.executables
    runs = {}
    for rank, executable in executables.items():
        if rank not in regs:
            regs[rank] = Registers([None] * executable.plan.slots, call.seed)
        feed(plans.feeders[rank], regs[rank])
        runs[rank] = execute(executable, regs[rank], phase)
    try:
        with torch.no_grad():
            drive(runs, lambda rank: group.last_note(rank) or "waiting")
            group.confirm()
            group.flush()
        if phase != 0 and DEBUGGING.get():
            check_leaks = feature("debugging").check_leaks
            for rank, executable in executables.items():
                check_leaks(executable.plan, regs[rank])
    finally:
        # These functions refer to the registers: a cycle would keep gradients alive.
        for r in regs.values():
            r.send_loss = None
            r.each = None


# ---- values ----
def _value(call: Call, results: Outputs, returned: dict[int, Any]) -> Tree:
    """The loss or, with more results, a tuple of the loss and these."""
    # The loss is read first: it may be on its way, and messages of a rank arrive in order.
    value: list[Any] = [results.loss()]
    if call.each is not None:
        value.append(feature("each").in_order(call, returned))
    elif call.has_aux:
        value.append(results.aux())
    if call.state is not None:
        value.append(results.states())
    return tuple(value) if len(value) > 1 else value[0]

# SPDX-License-Identifier: Apache-2.0
"""Every call comes through here: get its plans, feed them, run them, and read the results.

Only the ``Cache`` of plans is kept between calls. Knows configurations, plans and registers; no
schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from ..actions.product import load_pass
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
from .outputs import RunResults
from .plan_cache import Cache, CachedPlans

T = TypeVar("T")


# ---- the two kinds of calls ----
def forward(call: Call, cache: Cache) -> Tree:
    """Run the forwards alone, and return the loss or the outputs."""
    with announced(call, cache.announce) as (plans, _):
        results = run_all(call, plans)
        if call.config.loss is not None:
            return _value(results)
        y = results.outputs() if call.each is None else load_pass("each").in_order(results)
        return y if call.state is None else (y, results.states())


def value_and_grad(call: Call, cache: Cache, value: bool = True) -> tuple[Tree, tuple[Tree, ...]]:
    """Run the schedule, and return the value and the gradients of ``call.argnums``.

    Without ``value`` the caller drops the value, so it is not computed.
    """
    with announced(call, cache.announce) as (plans, _):
        results = run_all(call, plans)
        loss = _value(results) if value else None
        grads = {0: results.param_grads, 1: results.input_grads}
        return loss, tuple(grads[number]() for number in call.argnums)


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
@contextmanager
def announced(call: Call, announce: Callable[[Call], T]) -> Iterator[T]:
    """Announce a call to the other ranks, which then expect its messages, and run it without
    autocast. An error of this rank is reported to the ranks that wait for it.

    Yields what ``announce`` returns.
    """
    config = call.config
    group = config.group
    with config.claim():
        refuse_surrounded()
        announcement = announce(call)
        try:
            with without_autocast():
                yield announcement
        except BaseException as error:
            group.failed(error)
            if config.copies is not None:
                config.copies.group.failed(error)
            group.reset()
            raise


def refuse(config: Config, error: Exception) -> None:
    """Report that this rank raised before it announced a call.

    Where another call uses the group, nothing is reported.
    """
    if not config.local and not surrounded():
        with suppress(GroupError), config.claim():
            refused(config, error)


def run_all(call: Call, plans: CachedPlans, phase: int | None = None) -> RunResults:
    """Run the whole schedule, or a phase of it, and return its results."""
    weights = call.weights()
    results = RunResults(plans.layout, {}, call, weights)
    each = None if call.each is None else load_pass("each").caller(results)

    def feed(feeder: Feeder, r: Registers) -> None:
        feeder.fill(r, call, weights)
        r.each = each

    run(results, plans, feed, phase)
    return results


def run(
    results: RunResults,
    plans: CachedPlans,
    feed: Callable[[Feeder, Registers], None],
    phase: int | None = None,
) -> None:
    """Feed the registers of the ranks of this process, and run their plans.

    With a ``phase``, run one of the two phases of ``fpipe.vjp``.
    """
    group = results.group
    regs = results.regs
    executables = plans.prepared.executables
    runs = {}
    for rank, executable in executables.items():
        if rank not in regs:
            regs[rank] = Registers([None] * executable.plan.slots, results.call.seed)
        feed(plans.feeders[rank], regs[rank])
        runs[rank] = execute(executable, regs[rank], phase)
    try:
        with torch.no_grad():
            drive(runs, lambda rank: group.last_note(rank) or "waiting")
            group.confirm()
            group.flush()
        if phase != 0 and DEBUGGING.get():
            check_leaks = load_pass("debugging").check_leaks
            for rank, executable in executables.items():
                check_leaks(executable.plan, regs[rank])
    finally:
        # These functions refer to the registers: a cycle would keep gradients alive.
        for r in regs.values():
            r.each = None


# ---- values ----
def _value(results: RunResults) -> Tree:
    """The loss or, with more results, a tuple of the loss and these."""
    call = results.call
    # The loss is read first: it may be on its way, and messages of a rank arrive in order.
    value: list[Any] = [results.loss()]
    value[0].__dict__.update(mistakes.LOSS)  # loss.backward() names value_and_grad
    if call.each is not None:
        value.append(load_pass("each").in_order(results))
    elif call.has_aux:
        value.append(results.aux())
    if call.state is not None:
        value.append(results.states())
    return tuple(value) if len(value) > 1 else value[0]

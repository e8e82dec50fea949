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
from ..errors import GroupError, StageError
from ..lowering.instructions import Registers
from ..programs.internals import retaining, transforming, versions, without_autocast
from ..programs.signature import stage_that_runs
from ..stage import Stage
from ..tree import Tree
from .arguments import Call
from .config import Config
from .cotangents import cotangents, on_replicas
from .execute import DEBUGGING, WATCH, drive, execute
from .feed import Feeder
from .microbatches import gradients, joined
from .plan_cache import Cache, CachedPlans, refused
from .results import Results
from .signatures import Pullback

AllRegisters: TypeAlias = dict[int, Registers]


# ---- what can be done with a call ----
def forward(call: Call, cache: Cache) -> Tree:
    """Loss or outputs, forward alone."""
    with call.config.claim:
        plans, _ = _announced(call, cache)
        with _Reported(call.config):
            results, returned = _run_all(call, plans)
            if call.config.loss is not None:
                return _value(call, results, returned)
            y = _outputs(results, call) if call.each is None else _returned_by_each(call, returned)
            return y if call.state is None else (y, results.states())


def value_and_grad(call: Call, cache: Cache, value: bool = True) -> tuple[Tree, tuple[Tree, ...]]:
    """The value, where it is wanted, and gradients in the order of ``call.wanted``."""
    with call.config.claim:
        plans, _ = _announced(call, cache)
        with _Reported(call.config):
            results, returned = _run_all(call, plans)
            loss = _value(call, results, returned) if value else results.leave_loss()
            by_argument = {0: results.param_grads, 1: lambda: _input_grads(results, call)}
            grads = {n: by_argument[n]() for n in call.wanted}
            return loss, tuple(grads[n] for n in call.wanted)


def vjp(call: Call, cache: Cache) -> tuple[Tree, Pullback[Any, Any]]:
    """The forward phase now; the backward phase in the pullback."""
    regs: AllRegisters = {}
    with call.config.claim:
        plans, number = _announced(call, cache)
        with _Reported(call.config):
            weights = call.weights()
            _run(call, plans, regs, lambda feeder, r: feeder.fill(r, call, weights), phase=0)
            results = Results(plans.layout, regs, call, weights)
            y = _outputs(results, call)
            y = y if call.state is None else (y, results.states())
    kept: list[AllRegisters] = [regs]
    before = _versions(plans, regs)

    def pullback(dy: Tree, *, retain: bool = False) -> tuple[Any, Tree]:
        """Gradients of the parameters and the input for the outputs' cotangents."""
        if not kept:
            raise StageError(
                "this pullback was called before and what it needs is freed; call it with "
                "retain=True to keep it"
            )
        _refuse_surrounded()
        try:
            units = [plans.prepared.output(mb) for mb in range(call.number)]
            rows = cotangents(call, units, dy)
            _check_unchanged(_versions(plans, kept[0]) == before)
        except Exception as error:
            refuse(call.config, error)
            raise
        with call.config.claim, retaining(retain):
            regs = {rank: r.copy() for rank, r in kept[0].items()} if retain else kept.pop()
            plans.announce(call, number)
            with _Reported(call.config):
                rows = on_replicas(call, units, rows)
                _run(call, plans, regs, lambda feeder, r: feeder.fill_cotangents(r, rows), phase=1)
                results = Results(plans.layout, regs, call, weights, rows)
                return results.param_grads(), _input_grads(results, call)

    return y, pullback


def _check_unchanged(same: bool) -> None:
    if not same:
        raise StageError(
            "a tensor that this pullback needs was changed in place since fpipe.vjp returned: a "
            "parameter, the "
            "batch, a side input or an output; call the pullback first, or change a copy"
        )


def _versions(plans: CachedPlans, regs: AllRegisters) -> list[list[int]]:
    """How often each tensor that the backwards need was written to."""
    return [
        versions([regs[rank].slots[slot] for slot in slots])
        for rank, slots in plans.carried.items()
    ]


def _outputs(results: Results, call: Call) -> Tree:
    """The outputs in the form of the batch."""
    parts = results.outputs()
    return None if parts is None else joined(parts, call.x.slices, call.x.uniform)


def _input_grads(results: Results, call: Call) -> Tree:
    """The gradient of x in the form of the batch."""
    parts = results.input_grads()
    return None if parts is None else joined(gradients(parts, call.x), 1, call.x.uniform)


def surrounded() -> bool:
    """Whether the caller is a stage, a loss or a torch.func transform, which differentiates a call
    as a function.
    """
    return transforming() or stage_that_runs() is not None


def _refuse_surrounded() -> None:
    if surrounded():
        stage = stage_that_runs()
        where = "a torch.func transform" if stage is None else f"stage {stage}"
        raise StageError(
            f"a plan cannot run inside {where}, which would not see its gradients; call the "
            "pipeline, fpipe.grad or "
            "fpipe.value_and_grad there, or torch.func's transforms of them"
        )


def observed() -> bool:
    """Whether somebody watches single instructions: they must run."""
    return WATCH.get() is not None or DEBUGGING.get()


def unrecordable(call: Call, cache: Cache) -> str:
    """The reason why steps like this call cannot be recorded, or nothing."""
    if call.each is not None:
        return "each= is a function of Python that every step calls"
    every = (*call.config.functions, call.config.loss)
    eager = next(
        (stage for stage in every if isinstance(stage, Stage) and stage.engine == "eager"), None
    )
    if eager is not None:
        return f'{eager.label} has engine="eager", whose Python runs in every step'
    plans = cache.plans_for(call).prepared.plans.values()
    programs = (ins.program for plan in plans for ins in plan.instructions)
    random = next((program for program in programs if program is not None and program.random), None)
    return "" if random is None else f"{random.stage or 'a stage'} draws random numbers"


# ---- running ----
class _Reported:
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
            group, copies = self.config.group, self.config.copies
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


def _announced(call: Call, cache: Cache) -> tuple[CachedPlans, int]:
    """The plans of a call, and its number. From now on the other ranks expect its messages."""
    _refuse_surrounded()
    return cache.announced(call)


def _run_all(call: Call, plans: CachedPlans) -> tuple[Results, dict[int, Any]]:
    """Run the whole schedule. Returns its results, and what ``each`` returned by microbatch."""
    weights = call.weights()
    regs: AllRegisters = {}
    results = Results(plans.layout, regs, call, weights)
    returned: dict[int, Any] = {}

    def each(mb: int, values: list[Any]) -> None:
        """Pass a microbatch's output, and what the loss returned, to the caller's function; keep no
        reference.
        """
        assert call.each is not None
        before = versions(values)
        returned[int(mb)] = call.each(
            mb, *plans.prepared.results(mb, results.apart(values, set()), call.has_aux)
        )
        if call.mode == "grad" and versions(values) != before:
            raise StageError(
                "it wrote into the output or the loss, which the backward needs; change a copy"
            )
        values.clear()

    def feed(feeder: Feeder, r: Registers) -> None:
        feeder.fill(r, call, weights)
        r.send_loss, r.each = results.pipeline_loss, each

    _run(call, plans, regs, feed)
    return results, returned


def _run(
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
    loss = (
        results.loss()
    )  # first: it may be on its way, and what one rank sends is received in order
    extras: list[Any] = [results.aux()] if call.has_aux and call.each is None else []
    extras += [_returned_by_each(call, returned)] if call.each is not None else []
    extras += [results.states()] if call.state is not None else []
    return (loss, *extras) if extras else loss


def _returned_by_each(call: Call, returned: dict[int, Any]) -> list[Any] | None:
    """What ``each`` returned, in microbatch order, where it was called; with outputs="everywhere",
    on every rank.
    """
    config = call.config
    if config.outputs == "everywhere" and not config.local:
        returned = {
            mb: value
            for part in config.group.gather_objects(returned)
            for mb, value in part.items()
        }
    return [returned.get(mb) for mb in range(call.number)] if returned else None

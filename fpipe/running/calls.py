# SPDX-License-Identifier: Apache-2.0
"""The warm path: look up or prepare the plans of a call, feed, run, and read the results.

Nothing is kept between calls but the ``Cache``. Knows configurations, plans and registers; no schedule by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch

from ..collectives.group import Facts
from ..errors import BatchError, GroupError, StageError
from ..plans.sharding import Shares
from ..programs.autocast import without_autocast
from ..programs.eager.autograd_split import retaining
from ..programs.internals import transforming, versions
from ..programs.signature import stage_that_runs
from ..tree import Tree
from .arguments import Call, Offers
from .config import Config
from .cotangents import cotangents
from .debugging import check_leaks, debugging
from .facts import facts, of_call, shared
from .feed import Feeder
from .handshake import agree, tag_of, together
from .interfaces import tree_data, tree_from_data
from .loop import drive, execute
from .microbatches import Microbatches, merge
from .prepare import Prepared, Request, prepare
from .registers import Registers
from .results import ResultLayout, Results

#: How many signatures' plans a pipeline caches; those of the least recent calls are dropped.
KEPT = 128
#: The word of a call that has no plans yet, and the number that stands for None in other words.
_NEW, _NONE = 1, -(2**60)

AllRegisters: TypeAlias = dict[int, Registers]
Pullback: TypeAlias = Callable[..., tuple[Tree, Tree]]


@dataclass(frozen=True, eq=False)
class CachedPlans:
    """Everything about one signature that later calls use again."""

    config: Config
    prepared: Prepared
    facts: Facts  # of the signature
    number: int  # of the call for which they were prepared, among those of the group
    misplaced: str | None  # set where a value is on a device that cannot be used

    def announce(self, call: Call, pullback: int = -1) -> int:
        """Announce a call that runs these plans, or the pullback of an earlier call; returns its number."""
        if self.config.local:
            return 0
        seed, scale = call.seed, call.scale
        # The hash of None is an address.
        word = hash((self.prepared.tag, pullback, _NONE if seed is None else seed, _NONE if scale is None else scale))
        return self.config.group.enter(word, self._described, (seed, scale, pullback))

    def _described(self, seed: int | None, scale: float | None, pullback: int) -> Facts:
        described = of_call(self.facts, seed, scale, f"those prepared for call {self.number}")
        return described if pullback < 0 else described | {"call": f"the pullback of call {pullback}"}

    @cached_property
    def feeders(self) -> Mapping[int, Feeder]:
        """Where fed values come from, by rank."""
        group = self.config.group
        return {r: Feeder(plan, self.prepared, group.device(r)) for r, plan in self.prepared.plans.items()}

    @cached_property
    def carried(self) -> Mapping[int, tuple[int, ...]]:
        """The slots that are filled before the backwards and that these read, by rank."""
        return {rank: plan.carried() for rank, plan in self.prepared.plans.items()}

    @cached_property
    def layout(self) -> ResultLayout:
        """Where the results are."""
        return ResultLayout(self.config, self.prepared)


class Cache:
    """What a pipeline keeps between calls: plans by signature, and the layouts of leaves that copies share."""

    def __init__(self, shares: Shares | None = None, agreed: bool = False):
        self.plans: dict[tuple[Any, ...], CachedPlans] = {}
        self.shares, self.agreed = shares, agreed
        self.modes: dict[bool, tuple[Config, Cache]] = {}  # of the same pipeline in training and in evaluation

    def in_mode(self, config: Config, training: bool) -> tuple[Config, Cache]:
        """The configuration with its stages in a mode, and the cache of that pipeline."""
        if training not in self.modes:
            cache = Cache(self.shares, self.agreed)
            cache.modes = self.modes
            functions = tuple(stage.in_mode(training) for stage in config.functions)
            self.modes[training] = replace(config, functions=functions), cache
        return self.modes[training]

    def plans_for(self, call: Call) -> CachedPlans:
        """The plans of a call, prepared for the first of its signature."""
        key = call.signature()
        cached = self._find(key)
        return self._prepared(call, key) if cached is None else cached

    def announced(self, call: Call) -> tuple[CachedPlans, int]:
        """The plans of a call that is about to run, and its number; it is announced to the other ranks."""
        try:
            key = call.signature()
            cached = self._find(key)
            misplaced = call.misplaced() if cached is None else cached.misplaced
            if misplaced is not None:
                raise BatchError(misplaced)
        except Exception as error:
            _refuse(call.config, error)
            raise
        if cached is not None:
            return cached, cached.announce(call)
        cached = self._prepared(call, key)
        return cached, cached.number

    def _find(self, key: tuple[Any, ...]) -> CachedPlans | None:
        try:
            cached = self.plans.get(key)
        except TypeError as error:
            raise BatchError(
                f"a leaf of the arguments is neither a tensor nor hashable ({error}); pass tensors, numbers, strings "
                'or None, or register its class (optree, namespace="fpipe")'
            ) from error
        if cached is not None and len(self.plans) > KEPT // 2:  # the last is the most recently used
            self.plans[key] = self.plans.pop(key)
        return cached

    def _prepared(self, call: Call, key: tuple[Any, ...]) -> CachedPlans:
        """Announce a call without plans, compare it with the other ranks, and prepare its plans."""
        config, number = call.config, 0
        self._agree(config)
        try:
            request = call.request(self.shares)
            known = {} if config.local else facts(config, request)
        except Exception as error:
            _refuse(config, error)
            raise
        if not config.local:
            described = of_call(known, call.seed, call.scale, "none yet")
            number = config.group.enter(_NEW, dict, (described,))
            schedule = request.schedule
            details = lambda fact: str(schedule) if fact == "schedule" else ""
            absent = agree(config.group, shared(described), details, call.absent)
            if any(absent):
                request = self._completed(call, absent)
                known = facts(config, request)
                agree(config.group, shared(known))
        # Two pipelines may be equal in all facts: each has plans that were prepared for a call of its own.
        prepared = prepare(config, request, tag_of({**shared(known), "number": str(number)}))
        cached = self.plans[key] = CachedPlans(config, prepared, known, number, call.misplaced())
        if len(self.plans) > KEPT:
            del self.plans[next(iter(self.plans))]
        return cached

    def _completed(self, call: Call, absent: Sequence[Sequence[str]]) -> Request:
        """The request of a call some of whose arguments only other processes have: these describe them."""
        names = [name for lacking in absent for name in lacking]
        offers = together(call.config.group, lambda: call.offered(names), _as_data, _from_data)
        return call.completed(absent, offers).request(self.shares)

    def _agree(self, config: Config) -> None:
        """Before the first step of all, copies of the pipeline compare their configurations."""
        if config.copies is not None and not self.agreed:
            self.agreed = True
            agree(config.copies.group, {
                "schedule": repr(config), "copies": config.copies.told, "tied parameters": str(config.tied),
                "the dtype of accumulation": str(config.accumulate), "the stages here": str(config.here),
            })  # fmt: skip


def _as_data(offers: Offers) -> dict[str, list[Any]]:
    return {name: list(map(tree_data, trees)) for name, trees in offers.items()}


def _from_data(offers: Any) -> Offers:
    return {name: tuple(map(tree_from_data, trees)) for name, trees in offers.items()}


# ---- what can be done with a call -----------------------------------------------------------------------------------
def forward(call: Call, cache: Cache) -> Tree:
    """Loss or outputs, forward alone."""
    with call.config.claim:
        plans, _ = _announced(call, cache)
        with _Reported(call.config):
            results, returned = _run_all(call, plans)
            if call.config.loss is not None:
                return _value(call, results, returned)
            y = joined(results.outputs(), call.x.uniform) if call.each is None else _returned_by_each(call, returned)
            return y if call.state is None else (y, results.states())


def value_and_grad(call: Call, cache: Cache, value: bool = True) -> tuple[Tree, tuple[Tree, ...]]:
    """The value, where it is wanted, and gradients in the order of ``call.wanted``."""
    with call.config.claim:
        plans, _ = _announced(call, cache)
        with _Reported(call.config):
            results, returned = _run_all(call, plans)
            by_argument = {0: results.param_grads, 1: lambda: joined(results.input_grads(), call.x.uniform)}
            grads = {n: by_argument[n]() for n in call.wanted}
            loss = _value(call, results, returned) if value else results.leave_loss()
            return loss, tuple(grads[n] for n in call.wanted)


def vjp(call: Call, cache: Cache) -> tuple[Tree, Pullback]:
    """The forward phase now; the backward phase in the pullback."""
    regs: AllRegisters = {}
    with call.config.claim:
        plans, number = _announced(call, cache)
        with _Reported(call.config):
            weights = call.weights()
            _run(call, plans, regs, lambda feeder, r: feeder.fill(r, call, weights), phase=0)
            results = Results(plans.layout, regs, call, weights)
            y = joined(results.outputs(), call.x.uniform)
            y = y if call.state is None else (y, results.states())
    kept: list[AllRegisters] = [regs]
    before = _versions(plans, regs)

    def pullback(dy: Tree, *, retain: bool = False) -> tuple[Tree, Tree]:
        """Gradients of the parameters and the input for the outputs' cotangents."""
        if not kept:
            raise StageError(
                "this pullback was called before and what it needs is freed; call it with retain=True to keep it"
            )
        _refuse_surrounded()
        try:
            rows = cotangents(call, [plans.prepared.output(mb) for mb in range(call.number)], dy)
            _check_unchanged(_versions(plans, kept[0]) == before)
        except Exception as error:
            refuse(call.config, error)
            raise
        with call.config.claim, retaining(retain):
            regs = {rank: r.copy() for rank, r in kept[0].items()} if retain else kept.pop()
            plans.announce(call, number)
            with _Reported(call.config):
                _run(call, plans, regs, lambda feeder, r: feeder.fill_cotangents(r, rows), phase=1)
                results = Results(plans.layout, regs, call, weights, rows)
                return results.param_grads(), joined(results.input_grads(), call.x.uniform)

    return y, pullback


def _check_unchanged(same: bool) -> None:
    if not same:
        raise StageError(
            "a tensor that this pullback needs was changed in place since fpipe.vjp returned: a parameter, the "
            "batch, a side input or an output; call the pullback first, or change a copy"
        )


def _versions(plans: CachedPlans, regs: AllRegisters) -> list[list[int]]:
    """How often each tensor that the backwards need was written to."""
    return [versions([regs[rank].slots[slot] for slot in slots]) for rank, slots in plans.carried.items()]


def joined(parts: Sequence[Tree] | None, whole: bool) -> Tree:
    """Results by microbatch in the form of the batch: one pytree where it was ``whole``, else Microbatches."""
    return None if parts is None else merge(parts) if whole else Microbatches(parts)


def surrounded() -> bool:
    """Whether the caller is a stage, a loss or a torch.func transform, which differentiates a call as a function."""
    return transforming() or stage_that_runs() is not None


def _refuse_surrounded() -> None:
    if surrounded():
        stage = stage_that_runs()
        where = "a torch.func transform" if stage is None else f"stage {stage}"
        raise StageError(
            f"a plan cannot run inside {where}, which would not see its gradients; call the pipeline, fpipe.grad or "
            "fpipe.value_and_grad there, or torch.func's transforms of them"
        )


# ---- running --------------------------------------------------------------------------------------------------------
class _Reported:
    """Around what follows the announcement of a call: an error of this rank is reported to the others, which wait."""

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
    """Report that this rank raised before it announced a call, unless the group is in use by another one."""
    if not config.local and not surrounded():
        with suppress(GroupError), config.claim:
            _refuse(config, error)


def _refuse(config: Config, error: Exception) -> None:
    with suppress(RuntimeError):  # of the group or the store: the next call raises it
        config.group.refuse(error)
    if config.copies is not None:
        config.copies.group.failed(error)  # other copies of the pipeline run, and wait for this one


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
        """Pass a microbatch's output, and what the loss returned, to the caller's function; keep no reference."""
        assert call.each is not None
        before = versions(values)
        returned[mb] = call.each(mb, *plans.prepared.results(mb, results.apart(values, set()), call.has_aux))
        if call.mode == "grad" and versions(values) != before:
            raise StageError("it wrote into the output or the loss, which the backward needs; change a copy")
        values.clear()

    def feed(feeder: Feeder, r: Registers) -> None:
        feeder.fill(r, call, weights)
        r.send_loss, r.each = results.pipeline_loss, each

    _run(call, plans, regs, feed)
    return results, returned


def _run(
    call: Call, plans: CachedPlans, regs: AllRegisters, feed: Callable[[Feeder, Registers], None],
    phase: int | None = None,
) -> None:  # fmt: skip
    """Feed and drive the ranks of this process, wholly or in one of two phases."""
    group = call.config.group
    executables = plans.prepared.executables
    runs = {}
    for rank, executable in executables.items():
        if rank not in regs:
            regs[rank] = Registers.empty(executable.plan.slots, call.seed)
        feed(plans.feeders[rank], regs[rank])
        runs[rank] = execute(executable, regs[rank], phase)
    try:
        with torch.no_grad(), without_autocast():
            drive(runs, lambda rank: group.last_note(rank) or "waiting")
            group.confirm()
            group.flush()
        if phase != 0 and debugging():
            for rank, executable in executables.items():
                check_leaks(executable.plan, regs[rank])
    finally:
        for r in regs.values():
            r.send_loss = None  # it refers to the registers


# ---- values ---------------------------------------------------------------------------------------------------------
def _value(call: Call, results: Results, returned: dict[int, Any]) -> Tree:
    loss = results.loss()  # first: it may be on its way, and what one rank sends is received in order
    extras: list[Any] = [results.aux()] if call.has_aux and call.each is None else []
    extras += [_returned_by_each(call, returned)] if call.each is not None else []
    extras += [results.states()] if call.state is not None else []
    return (loss, *extras) if extras else loss


def _returned_by_each(call: Call, returned: dict[int, Any]) -> list[Any] | None:
    """What ``each`` returned, in microbatch order, where it was called; with outputs="everywhere", on every rank."""
    config = call.config
    if config.outputs == "everywhere" and not config.local:
        returned = {mb: value for part in config.group.gather_objects(returned) for mb, value in part.items()}
    return [returned.get(mb) for mb in range(call.number)] if returned else None

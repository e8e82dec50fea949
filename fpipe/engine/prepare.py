# SPDX-License-Identifier: Apache-2.0
"""From a call's signature to executable plans: trace the local stages, exchange interfaces, lower,
bind.

This is the cold path, run once for every new signature; the pipeline caches the result. It uses the
group only to exchange the interfaces of stages between processes. Knows no values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from ..actions.action import Fused
from ..actions.dependencies import uncollected
from ..actions.product import feature
from ..actions.progress_line import noted
from ..lowering.builder import lower
from ..lowering.instruction import Machine
from ..lowering.job import LoweringInput
from ..lowering.plan import Feature, Plan
from ..lowering.value_graph import Interface
from ..programs.cache import timed
from ..programs.program import Programs
from ..tree import AbstractTree
from . import interfaces, unused
from .config import Config
from .execute import Executable, bind
from .handshake import together
from .kinds import TracedKind, advanced, in_turn, loss_programs
from .mistakes import no_report
from .option_checks import check_patterns
from .request import Request

S = TypeVar("S")
#: Interfaces of stages that a process found.
News: TypeAlias = Mapping[int, Interface]


@dataclass(frozen=True)
class Prepared:
    """Executable plans for the ranks of this process, and what is known of every stage."""

    request: Request
    executables: Mapping[int, Executable]
    inputs: Mapping[int, LoweringInput]
    interfaces: tuple[tuple[Interface, ...], ...]  # by kind
    loss: tuple[Programs | None, ...]  # by kind
    tag: int = 0  # identifies what all ranks agreed on

    @property
    def plans(self) -> dict[int, Plan]:
        """The plans by rank."""
        return {rank: executable.plan for rank, executable in self.executables.items()}

    def output(self, mb: int) -> AbstractTree:
        """What the last stage returns for a microbatch."""
        return self.interfaces[self.request.kind_of[mb]][-1].y


def silent(text: str) -> None:
    """Show nothing of what is being done."""


def prepare(
    config: Config,
    request: Request,
    tag: int,
    traced: list[TracedKind] | None = None,
    before: Sequence[Prepared] = (),
) -> Prepared:
    """Trace, exchange interfaces, lower and bind. ``tag`` identifies what the ranks agreed on
    before.

    ``traced``: what all ranks traced for the same expected interfaces. ``before``: the plans of the
    latest calls, which are reused for other sizes.
    """
    group = config.group
    copies = config.copies
    schedule = request.schedule
    if traced is None:
        with noted("tracing") if sys.stderr.isatty() else nullcontext(silent) as note:
            traced = traced_in_turn(config, request, note)
    inputs = lowering_inputs(config, request, traced, group.here, apart=not config.local)
    first = 0 if copies is None else copies.part * schedule.microbatches
    executables = {}
    with timed("lowering"), uncollected():
        for rank, plan in _lowered(inputs, _earlier(request, before)).items():
            machine = Machine(
                rank,
                group,
                group.device(rank),
                config.accumulate,
                feature("debugging").check if request.debug else None,
                first,
            )
            executables[rank] = bind(plan, machine)
    return Prepared(
        request,
        executables,
        inputs,
        tuple(kind.interfaces for kind in traced),
        tuple(kind.loss for kind in traced),
        tag,
    )


def lowering_inputs(
    config: Config,
    request: Request,
    traced: Sequence[TracedKind],
    ranks: Sequence[int],
    *,
    apart: bool,
) -> dict[int, LoweringInput]:
    """What the plans of ranks are made from; ``apart``: other ranks are in other processes."""
    group = config.group
    schedule = request.schedule
    if config.frozen or config.copies is not None:
        check_patterns(config, [interface.leaves for interface in traced[0].interfaces])
    inputs = {
        rank: LoweringInput(
            schedule,
            tuple(kind.on_rank(config, request, rank) for kind in traced),
            request.kind_of,
            training=request.mode != "forward",
            wide=config.accumulate,
            wants_dx=request.wants_dx,
            phased=request.mode == "vjp",
            wired=apart and not group.at_once,
            strict=group.strict,
        )
        for rank in ranks
    }
    features = tuple(_features(config, request, traced[0].interfaces, inputs, apart=apart))
    return {rank: replace(job, features=features) for rank, job in inputs.items()}


def _features(
    config: Config,
    request: Request,
    interfaces: Sequence[Interface],
    inputs: Mapping[int, LoweringInput],
    *,
    apart: bool,
) -> Iterator[Feature]:
    """The features of the plans, in the order in which they act."""
    tied = ()
    if request.each:
        yield feature("each").Each()
    ranks_of = request.schedule.placement.ranks_of
    if config.tied or any(len(ranks_of(stage)) > 1 for stage in range(config.stages)):
        sums = feature("ties").sums_of(config, request, interfaces)
        tied = sums.tied
        if sums.specs and request.mode != "forward":
            yield sums
    if config.copies is not None:
        yield feature("copies.gathering").OfCopies(config.copies, request.layouts, tied)
    if config.overlap != "sequential" and (
        any(isinstance(action, Fused) for row in request.schedule for action in row)
        or _starts_collectives(inputs)
    ):
        yield feature("weaving.fused").Weaving()
    if apart and sends_loss_early(config, request):
        yield feature("early_loss").EarlyLoss()
    for option in config.more:
        yield from option.features(request)


def sends_loss_early(config: Config, request: Request) -> bool:
    """Whether a rank that computes the whole loss sends it as soon as it can."""
    return config.group.at_once and request.mode != "vjp"


def _starts_collectives(inputs: Mapping[int, LoweringInput]) -> bool:
    """Whether a program of the ranks here starts a collective."""
    kinds = {id(kind): kind for job in inputs.values() for kind in job.kinds}.values()
    several = (
        each for kind in kinds for each in (*kind.programs.values(), kind.loss) if each is not None
    )
    return any(one.collective for each in several for one in (each.f, each.b, each.i, each.w))


def _lowered(
    inputs: Mapping[int, LoweringInput], earlier: Mapping[int, tuple[Plan, LoweringInput]]
) -> dict[int, Plan]:
    """The plans of the ranks here; plans of an earlier call are used again where only sizes
    differ.
    """
    known: dict[int, Plan] = {}
    if earlier:
        resized = feature("sizes.resizing").resized
        found = {rank: resized(*earlier[rank], job) for rank, job in inputs.items()}
        known = {rank: plan for rank, plan in found.items() if plan is not None}
    if _starts_collectives(inputs):
        return feature("weaving.collective_order").in_one_order(inputs, known)
    return {
        rank: known[rank] if rank in known else lower(job, rank) for rank, job in inputs.items()
    }


def _earlier(request: Request, before: Sequence[Prepared]) -> dict[int, tuple[Plan, LoweringInput]]:
    """The plans of the latest call with the same schedule and mode."""
    alike = (
        p
        for p in reversed(before)
        if (p.request.mode, p.request.kind_of) == (request.mode, request.kind_of)
    )
    found = next((p for p in alike if p.request.schedule == request.schedule), None)
    return (
        {}
        if found is None
        else {rank: (plan, found.inputs[rank]) for rank, plan in found.plans.items()}
    )


def traced_in_turn(
    config: Config, request: Request, note: Callable[[str], None]
) -> list[TracedKind]:
    """Trace the stages of this process, stage by stage, until every process knows the interfaces of
    all stages.
    """
    stages = request.schedule.stages
    chain = request.chain
    traced = [
        TracedKind(kind, each=request.each, slice=number % chain, slices=chain)
        for number, kind in enumerate(request.kinds)
    ]

    def advance(known: list[TracedKind]) -> tuple[list[TracedKind], list[News]]:
        found = in_turn(known, lambda kind, before: advanced(config, request, kind, before, note))
        return found, [
            dict(enumerate(new.interfaces[len(old.interfaces) :], len(old.interfaces)))
            for old, new in zip(known, found, strict=True)
        ]

    def with_loss(known: list[TracedKind]) -> tuple[list[TracedKind], list[News]]:
        return [replace(kind, loss=loss_programs(config, request, kind)) for kind in known], []

    def cut(known: list[TracedKind]) -> tuple[list[TracedKind], list[News]]:
        return unused.cut(config, request, known)

    while any(len(kind.interfaces) < stages for kind in traced):
        known = traced
        traced, reports = exchange(config, advance, known)
        news = [max((report[index] for report in reports), key=len) for index in range(len(traced))]
        if not any(news):
            first = min(len(kind.interfaces) for kind in known)
            raise no_report(first)
        traced = [
            replace(kind, interfaces=(*old.interfaces, *new.values()))
            for kind, old, new in zip(traced, known, news, strict=True)
        ]
    if config.loss is not None:
        note("the loss")
        traced, _ = exchange(config, with_loss, traced)
    if request.mode == "forward":
        return traced
    # Every process knows all interfaces, so all agree on whether another round is needed. What
    # carries lack is known on their processes alone.
    again = config.carries
    while again or any(kind.value_graph().lacking() for kind in traced):
        again = False
        traced, reports = exchange(config, cut, traced)
        for report in reports:
            traced = [kind.updated(new) for kind, new in zip(traced, report, strict=True)]
    return traced


def exchange(
    config: Config, step: Callable[[S], tuple[S, list[News]]], state: S
) -> tuple[S, list[list[News]]]:
    """Do a step of the preparation on every process.

    Returns:
        The state after it, and what each process reports to the others. Where one fails, all do.
    """
    if config.local:
        state, report = step(state)
        return state, [report]
    reached: list[S] = []

    def work() -> list[News]:
        after, report = step(state)
        reached.append(after)
        return report

    reports = together(config.group, work, interfaces.news_as_data, interfaces.news_from_data)
    return reached[0], reports

# SPDX-License-Identifier: Apache-2.0
"""From a call's signature to executable plans: trace the local stages, exchange interfaces, lower,
bind.

This runs once for each signature; the pipeline caches the result. The group is used only to
exchange the interfaces of stages between processes. Knows no values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

from ..actions.action import Fused
from ..actions.dependencies import uncollected
from ..actions.product import load_pass
from ..actions.progress_line import noted
from ..lowering.builder import lower
from ..lowering.instruction import Machine
from ..lowering.job import Job
from ..lowering.plan import Feature, Plan
from ..lowering.value_graph import Interface
from ..programs.cache import timed
from ..programs.program import Programs
from ..tree import AbstractTree
from . import unused
from .config import Config
from .execute import Executable, bind
from .kinds import Traced, TracedKind, exchange, trace_here
from .option_checks import check_patterns
from .preview import previewed
from .request import Request


@dataclass(frozen=True)
class Prepared:
    """Executable plans for the ranks of this process, and the interfaces of all stages."""

    request: Request
    executables: Mapping[int, Executable]  # by rank
    jobs: Mapping[int, Job]  # by rank
    interfaces: tuple[tuple[Interface, ...], ...]  # by kind of microbatch, then by stage
    loss: tuple[Programs | None, ...]  # by kind of microbatch

    @property
    def plans(self) -> dict[int, Plan]:
        """The plans by rank."""
        return {rank: executable.plan for rank, executable in self.executables.items()}

    def output(self, mb: int) -> AbstractTree:
        """The output of the last stage for a microbatch, in abstract form."""
        return self.interfaces[self.request.kind_of[mb]][-1].y


def silent(text: str) -> None:
    """A progress line that shows nothing."""


def prepare(
    config: Config,
    request: Request,
    kinds: Traced | None = None,
) -> Prepared:
    """Trace, exchange interfaces, lower and bind.

    With ``kinds`` all ranks have traced their stages for predicted interfaces, and there is
    nothing to exchange.
    """
    group = config.group
    copies = config.copies
    schedule = request.schedule
    if kinds is None:
        progress = noted("tracing") if sys.stderr.isatty() else nullcontext(silent)
        with progress as note:
            kinds = trace_stages(config, request, note)
    jobs = lowering_jobs(config, request, kinds, group.here, distributed=not config.local)
    first_microbatch = 0 if copies is None else copies.part * schedule.microbatches
    check = load_pass("debugging").check if request.debug else None
    executables = {}
    with timed("lowering"), uncollected():
        if _starts_collectives(jobs):
            plans = load_pass("weaving.collective_order").in_one_order(jobs)
        else:
            plans = {rank: lower(job, rank) for rank, job in jobs.items()}
        for rank, plan in plans.items():
            device = group.device(rank)
            machine = Machine(rank, group, device, config.accumulate, check, first_microbatch)
            executables[rank] = bind(plan, machine, schedule.name)
    return Prepared(
        request,
        executables,
        jobs,
        tuple(kind.interfaces for kind in kinds),
        tuple(kind.loss for kind in kinds),
    )


def lowering_jobs(
    config: Config,
    request: Request,
    kinds: Sequence[TracedKind],
    ranks: Sequence[int],
    *,
    distributed: bool,
) -> dict[int, Job]:
    """What the plans of ranks are lowered from.

    With ``distributed`` other ranks are in other processes.
    """
    group = config.group
    schedule = request.schedule
    if config.frozen or config.copies is not None:
        check_patterns(config, [interface.leaves for interface in kinds[0].interfaces])
    jobs = {
        rank: Job(
            schedule,
            tuple(kind.on_rank(rank) for kind in kinds),
            request.kind_of,
            training=request.mode != "forward",
            accumulate=config.accumulate,
            wants_dx=request.wants_dx,
            phased=request.mode == "vjp",
            wired=distributed and not group.at_once,
            staged=group.staged,
            strict=group.strict,
        )
        for rank in ranks
    }
    features = tuple(_features(config, request, kinds[0].interfaces, jobs))
    return {rank: replace(job, features=features) for rank, job in jobs.items()}


def _features(
    config: Config,
    request: Request,
    interfaces: Sequence[Interface],
    jobs: Mapping[int, Job],
) -> Iterator[Feature]:
    """The features of the plans, in the order in which they act."""
    if request.each:
        yield load_pass("each").Each()
    tied = ()
    if config.tied or request.schedule.placement.replicated:
        sums = load_pass("ties").sums_of(config, request, interfaces)
        tied = sums.tied
        if sums.specs and request.mode != "forward":
            yield sums
    if config.copies is not None:
        yield load_pass("copies.gathering").OfCopies(config.copies, request.layouts, tied)
    if config.overlap != "sequential":
        fused = any(isinstance(action, Fused) for row in request.schedule for action in row)
        if fused or _starts_collectives(jobs):
            yield load_pass("weaving.fused").Weaving()
    for option in config.more:
        yield from option.features(request)


def _starts_collectives(jobs: Mapping[int, Job]) -> bool:
    """Whether a program of the ranks of this process starts a collective."""
    kinds = {id(kind): kind for job in jobs.values() for kind in job.program_sets}.values()
    made = (programs for kind in kinds for programs in (*kind.programs.values(), kind.loss))
    return any(
        program.collective
        for programs in filter(None, made)
        for program in (programs.f, programs.b, programs.i, programs.w)
    )


def trace_stages(config: Config, request: Request, note: Callable[[str], None]) -> Traced:
    """Trace the stages of this process. Every process learns the interfaces of all stages.

    A stage is traced for the output of the stage before it. Where that may be on another process,
    the outputs of all stages are found first.
    """
    chain = request.chain
    kinds = [
        TracedKind(config, request, kind, slice=number % chain)
        for number, kind in enumerate(request.kinds)
    ]
    if not config.local:
        kinds = previewed(config, kinds, note)
    again = True
    while again:
        expected = [kind.outputs for kind in kinds]
        kinds, _ = exchange(config, partial(trace_here, note), kinds)
        again = not config.local and [kind.outputs for kind in kinds] != expected
    if request.mode == "forward":
        return kinds
    # Every process knows all interfaces, so all agree on whether another round is needed. Unused
    # carries are known only to the processes of their stages, so carries need a round in any case,
    # and one more after each that changed something.
    again = config.carries
    while again or any(kind.graph.lacks_cotangents() for kind in kinds):
        kinds, changed = exchange(config, unused.cut, kinds)
        again = config.carries and changed
    return kinds

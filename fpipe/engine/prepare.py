# SPDX-License-Identifier: Apache-2.0
"""From a call's signature to executable plans: trace the local stages, exchange interfaces, lower,
bind.

This is the cold path, run once for every new signature; the pipeline caches the result. It uses the
group only to exchange the interfaces of stages between processes. Knows no values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock, Timer
from typing import Any, TypeVar

from .. import tree
from ..actions.action import Fused
from ..actions.collector import uncollected
from ..actions.product import feature
from ..errors import MismatchError, StageError
from ..lowering.builder import lower
from ..lowering.instructions import Machine
from ..lowering.plan import Feature, LoweringInput, Plan
from ..lowering.value_graph import Interface
from ..programs.cache import timed
from ..programs.program import Programs
from ..tree import AbstractTree
from . import interfaces
from .config import Config
from .execute import Executable, bind
from .handshake import together
from .kinds import TracedKind, advanced, in_turn, loss_programs, recut
from .request import Request

T = TypeVar("T")


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

    def results(self, mb: int, values: Sequence[Any], has_aux: bool) -> tuple[Any, ...]:
        """What a function of the caller gets of a microbatch: the output and, with a loss, what
        that returned.
        """
        output, loss = self.output(mb), self.loss[self.request.kind_of[mb]]
        count = len(output.avals)
        y, rest = output.fill(values[:count]), values[count:]
        if loss is None:
            return (y,)
        if loss.extra is not None:
            return y, tuple(rest)
        return y, loss.outputs.y.fill(rest)


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
    group, copies, schedule = config.group, config.copies, request.schedule
    if traced is None:
        with shown_late("tracing") as note:
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
    group, schedule = config.group, request.schedule
    _check_patterns(config, traced[0].interfaces)
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
        weaving = feature("weaving.fused")
        yield weaving.Weaving(weaving.Overlap.of(config.overlap))
    if apart and sends_loss_early(config, request):
        yield feature("early_loss").EarlyLoss()


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
    while any(len(kind.interfaces) < stages for kind in traced):
        known = [len(kind.interfaces) for kind in traced]

        def advance(known: list[int] = known) -> list[dict[int, Interface]]:
            nonlocal traced
            traced = in_turn(
                traced, lambda kind, before: advanced(config, request, kind, before, note)
            )
            return [
                dict(enumerate(kind.interfaces[count:], count))
                for kind, count in zip(traced, known, strict=True)
            ]

        reports = _reports(config, advance, _as_data, _from_data)
        news = [max((report[index] for report in reports), key=len) for index in range(len(traced))]
        if not any(news):
            raise MismatchError(
                f"no process reported what stage {min(known)} returns; every process must run the "
                "same pipeline"
            )
        traced = [
            replace(kind, interfaces=(*kind.interfaces[:count], *new.values()))
            for kind, count, new in zip(traced, known, news, strict=True)
        ]
    if config.loss is not None:
        note("the loss")

        def with_loss(known: list[TracedKind] = traced) -> None:
            nonlocal traced
            traced = [replace(kind, loss=loss_programs(config, request, kind)) for kind in known]

        _reports(config, with_loss, lambda _: None, lambda _: None)
    return traced if request.mode == "forward" else _without_unused(config, request, traced)


def _without_unused(config: Config, request: Request, traced: list[TracedKind]) -> list[TracedKind]:
    """Trace again, from the last stage down, the stages of which an output has no cotangent.

    Zeros would not do: in a backward, zero times infinity is NaN. Every process knows all
    interfaces, so all agree on whether another round is needed.
    """
    first = config.carries  # what carries lack is known on their processes alone
    while first or any(kind.value_graph().lacking() for kind in traced):
        first = False

        def cut(known: list[TracedKind] = traced) -> list[dict[int, Interface]]:
            nonlocal traced
            traced = recut(config, request, known)
            pairs = [
                zip(old.interfaces, new.interfaces, strict=True)
                for old, new in zip(known, traced, strict=True)
            ]
            return [
                {stage: new for stage, (old, new) in enumerate(each) if new is not old}
                for each in pairs
            ]

        for report in _reports(config, cut, _as_data, _from_data):
            traced = [kind.updated(news) for kind, news in zip(traced, report, strict=True)]
    return traced


def _reports(
    config: Config,
    work: Callable[[], T],
    as_data: Callable[[T], Any],
    from_data: Callable[[Any], T],
) -> list[T]:
    """The results of work on every process; one that fails is raised on all."""
    return [work()] if config.local else together(config.group, work, as_data, from_data)


def _as_data(news: Sequence[Mapping[int, Interface]]) -> list[dict[int, Any]]:
    return [{stage: interfaces.as_data(new) for stage, new in each.items()} for each in news]


def _from_data(news: Any) -> list[dict[int, Interface]]:
    return [{stage: interfaces.from_data(new) for stage, new in each.items()} for each in news]


def _check_patterns(config: Config, interfaces: Sequence[Interface]) -> None:
    """A pattern that matches no leaf is a mistake: what it should freeze, for instance, would be
    trained.
    """
    names = [
        f"{stage}.{leaf}" for stage, interface in enumerate(interfaces) for leaf in interface.leaves
    ]
    for option, patterns in (
        ("frozen", config.frozen),
        ("own", config.copies.own if config.copies else ()),
    ):
        fault = tree.unmatched(patterns, names)
        if fault:
            raise StageError(f"{option}={fault}")


# ---- what a terminal shows ----
#: Seconds before the line appears.
DELAY = 1.0
_ERASE = "\r\x1b[2K"


@contextmanager
def shown_late(what: str) -> Iterator[Callable[[str], None]]:
    """Show ``what`` and the latest note on stderr once this takes long, if stderr is a terminal.

    >>> with shown_late("tracing") as note:
    ...     note("stage 1 of 2")
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    latest, lock, late = [""], Lock(), [False]

    def show() -> None:
        sys.stderr.write(f"{_ERASE}fpipe: {what} {latest[0]} ...")
        sys.stderr.flush()

    def begin() -> None:
        with lock:
            late[0] = True
            show()

    def note(text: str) -> None:
        with lock:
            latest[0] = text
            if late[0]:
                show()

    timer = Timer(DELAY, begin)
    timer.daemon = True
    timer.start()
    try:
        yield note
    finally:
        timer.cancel()
        with lock:
            if late[0]:
                sys.stderr.write(_ERASE)
                sys.stderr.flush()

# SPDX-License-Identifier: Apache-2.0
"""From a call's signature to executable plans: trace the local stages, exchange interfaces, lower, bind.

This is the cold path, run once for every new signature; the pipeline caches the result. It uses the group only to
exchange the interfaces of stages between processes. Knows no values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from .. import tree
from ..collectives.data import encode
from ..collectives.rendezvous import TRACING
from ..errors import FpipeError, MismatchError, StageError
from ..plans.builder import sum_of
from ..plans.collective_order import Before, lower_together
from ..plans.lowering import uncollected
from ..plans.plan import LoweringInput, Plan, ProgramSet
from ..plans.value_graph import Interface, ValueGraph, spec_of
from ..programs.losses import check_scalar, loss_stage
from ..programs.spent import timed
from ..programs.stage_programs import Programs
from ..programs.trace_cache import Signature, programs_of
from ..stage import Stage
from ..tree import AbstractTree, Aval, Spec
from . import interfaces
from .config import Config, tied_leaves
from .debugging import check
from .handshake import together
from .loop import Executable, bind
from .prediction import Seen, expected
from .progress import shown_late
from .request import Kind, Request
from .steps import Options

_NOTHING = tree.flatten(None)[1]


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
        """What a function of the caller gets of a microbatch: the output and, with a loss, what that returned."""
        output, loss = self.output(mb), self.loss[self.request.kind_of[mb]]
        count = len(output.avals)
        y, rest = output.fill(values[:count]), values[count:]
        if loss is None:
            return (y,)
        if loss.extra is not None:
            return y, tuple(rest)
        return y, loss.outputs.y.fill(rest)


def prepare(
    config: Config, request: Request, tag: int, ready: Ready | None = None, before: Sequence[Prepared] = ()
) -> Prepared:
    """Trace, exchange interfaces, lower and bind. ``tag`` identifies what the ranks agreed on before.

    ``ready``: what all ranks traced for the same expected interfaces. ``before``: the plans of the latest calls, which
    are reused for other sizes.
    """
    group, copies, schedule = config.group, config.copies, request.schedule
    traced = ready.traced if ready else _traced(config, request)
    _check_patterns(config, traced[0].interfaces)
    tied, specs = _ties(config, request, traced[0].interfaces)
    inputs = {
        rank: LoweringInput(
            schedule, tuple(kind.on_rank(config, request, rank) for kind in traced), request.kind_of,
            training=request.mode != "forward", tied=tied, grad_specs=specs, wide=config.accumulate,
            wants_dx=request.wants_dx, phased=request.mode == "vjp",
            wired=not config.local and not group.at_once,
            early_loss=not config.local and group.at_once and request.mode != "vjp",
            strict=group.strict, each=request.each, overlap=config.overlap, copies=copies, layouts=request.layouts,
        )
        for rank in group.here
    }  # fmt: skip
    first = 0 if copies is None else copies.part * schedule.microbatches
    options = Options(wide=config.accumulate, check=check if request.debug else None, first=first)
    with timed("lowering"), uncollected():
        executables = {
            rank: bind(plan, group, replace(options, device=group.device(rank)))
            for rank, plan in lower_together(inputs, _earlier(request, before)).items()
        }
    return Prepared(
        request, executables, inputs, tuple(kind.interfaces for kind in traced), tuple(kind.loss for kind in traced),
        tag,
    )  # fmt: skip


def _earlier(request: Request, before: Sequence[Prepared]) -> Before | None:
    """The plans of the latest call with the same schedule and mode."""
    alike = (p for p in reversed(before) if (p.request.mode, p.request.kind_of) == (request.mode, request.kind_of))
    found = next((p for p in alike if p.request.schedule == request.schedule), None)
    return None if found is None else {rank: (plan, found.inputs[rank]) for rank, plan in found.plans.items()}


@dataclass(frozen=True)
class _Traced:
    """One kind of microbatch: the interfaces of its first stages, and local programs by stage and device."""

    kind: Kind
    interfaces: tuple[Interface, ...] = ()
    programs: Mapping[tuple[int, torch.device], Programs] = field(default_factory=dict)
    loss: Programs | None = None
    each: bool = False  # whether the rank of the loss reads all outputs

    def output(self) -> AbstractTree:
        """The output of the last stage whose interface is known, or the batch."""
        return self.interfaces[-1].y if self.interfaces else self.kind[0]

    def updated(self, news: Mapping[int, Interface]) -> _Traced:
        """With other interfaces of some stages, or with that of the next one."""
        known = {**dict(enumerate(self.interfaces)), **news}
        return replace(self, interfaces=tuple(known[stage] for stage in sorted(known)))

    def on_rank(self, config: Config, request: Request, rank: int) -> ProgramSet:
        """What lowering needs on one rank."""
        device, stages = config.group.device(rank), request.schedule.placement.stages_of(rank)
        return ProgramSet(self.value_graph(), {s: self.programs[s, device] for s in stages}, self.loss)

    def value_graph(self) -> ValueGraph:
        """How values pass between the stages, all of whose interfaces are known."""
        batch, y = self.kind[0].tensors, self.output()
        if self.loss is not None:
            loss = Interface.of(self.loss)
            passed_on = {source for source in loss.ys if isinstance(source, int)}  # the loss returns its input
            takes = tuple(reads or leaf in passed_on or self.each for leaf, reads in enumerate(loss.takes_x))
            return ValueGraph(self.interfaces, loss.dxs, takes, batch)
        dxs = tuple((f"dx{j}", a) if a is not None and a.grad else None for j, a in enumerate(y.tensors))
        return ValueGraph(self.interfaces, dxs, (True,) * len(y.leaves), batch, has_loss=False)


@dataclass(frozen=True)
class Ready:
    """The stages of this process, traced for the interfaces that are expected of all stages."""

    traced: list[_Traced]

    @property
    def word(self) -> str:
        """The interfaces, as a digest: the expectation holds if that of every rank is the same."""
        data = [[interfaces.as_data(each) for each in kind.interfaces] for kind in self.traced]
        return hashlib.sha256(encode(data)).hexdigest()


def ready(config: Config, request: Request, before: Sequence[Prepared]) -> Ready | None:
    """The stages of this process, traced for the interfaces to expect after earlier calls; ``None``: expect nothing."""
    seen = [
        ((x, *targets), found) for each in before if each.request.mode == request.mode
        for (x, targets, _), found in zip(each.request.kinds, each.interfaces, strict=True)
    ]  # fmt: skip
    if len(seen) < 2:
        return None
    try:
        with shown_late("tracing") as note:
            return Ready([_expected(config, request, kind, seen, note) for kind in request.kinds])
    except (FpipeError, _UnexpectedError):
        return None  # the exchange of interfaces, which follows, raises what is a mistake


class _UnexpectedError(Exception):
    """A stage has another interface than the one that was expected."""


def _expected(
    config: Config, request: Request, kind: Kind, seen: Sequence[Seen], note: Callable[[str], None]
) -> _Traced:
    """A kind of microbatch with the interfaces that are expected, and with the stages of this process."""
    found = expected((kind[0], *kind[1]), seen)
    if found is None:
        raise _UnexpectedError
    traced = _Traced(kind, found, each=request.each)
    for stage, interface in enumerate(found):
        if _ranks_here(config, request, stage):
            note(f"stage {stage + 1} of {len(found)}")
            unused = frozenset(j for j in interface.y.wanted if not interface.dys[j])
            traced = _with_stage(config, request, traced, stage, unused)
    traced = replace(traced, loss=_loss_programs(config, request, traced) if config.loss is not None else None)
    lacking = request.mode != "forward" and traced.value_graph().lacking()
    if traced.interfaces != found or lacking:
        raise _UnexpectedError
    return traced


def _traced(config: Config, request: Request) -> list[_Traced]:
    """Trace the stages of this process, and show on a terminal which one if it takes long."""
    with shown_late("tracing") as note:
        return _traced_in_turn(config, request, note)


def _traced_in_turn(config: Config, request: Request, note: Callable[[str], None]) -> list[_Traced]:
    """Trace the stages of this process, stage by stage, until every process knows the interfaces of all stages."""
    stages = request.schedule.stages
    traced = [_Traced(kind, each=request.each) for kind in request.kinds]
    while any(len(kind.interfaces) < stages for kind in traced):
        known = [len(kind.interfaces) for kind in traced]

        def advance(known: list[int] = known) -> list[dict[int, Interface]]:
            nonlocal traced
            traced = [_advanced(config, request, kind, note) for kind in traced]
            return [dict(enumerate(kind.interfaces[count:], count)) for kind, count in zip(traced, known, strict=True)]

        reports = together(config.group, advance, _as_data, _from_data)
        news = [max((report[index] for report in reports), key=len) for index in range(len(traced))]
        if not any(news):
            raise MismatchError(
                f"no process reported what stage {min(known)} returns; every process must run the same pipeline"
            )
        traced = [
            replace(kind, interfaces=(*kind.interfaces[:count], *new.values()))
            for kind, count, new in zip(traced, known, news, strict=True)
        ]
    if config.loss is not None:
        note("the loss")

        def with_loss(known: list[_Traced] = traced) -> None:
            nonlocal traced
            traced = [replace(kind, loss=_loss_programs(config, request, kind)) for kind in known]

        together(config.group, with_loss, lambda _: None, lambda _: None)
    return traced if request.mode == "forward" else _without_unused(config, request, traced)


def _advanced(config: Config, request: Request, traced: _Traced, note: Callable[[str], None]) -> _Traced:
    """With the stages that follow those whose interfaces are known, as far as they are on this process."""
    for stage in range(len(traced.interfaces), request.schedule.stages):
        if not _ranks_here(config, request, stage):
            break
        note(f"stage {stage + 1} of {request.schedule.stages}")
        traced = _with_stage(config, request, traced, stage)
    return traced


def _ranks_here(config: Config, request: Request, stage: int) -> list[int]:
    return [rank for rank in request.schedule.placement.ranks_of(stage) if rank in config.group.here]


def _with_stage(
    config: Config, request: Request, traced: _Traced, stage: int, unused: frozenset[int] = frozenset()
) -> _Traced:
    """With the programs of a stage of this process; its outputs ``unused`` have no cotangent."""
    ranks, params = _ranks_here(config, request, stage), request.params[stage]
    if params is None:
        raise StageError(
            f"stage {stage} is on rank {ranks[0]}, which is in this process, but its parameters are missing; "
            "give params one entry per stage (pipe.place keeps those that are on this process)"
        )
    x = traced.interfaces[stage - 1].y.handed_on() if stage else traced.kind[0]
    trees = [params, x, traced.kind[2][stage], request.states[stage] or AbstractTree.of(None)]
    devices = dict.fromkeys(map(config.group.device, ranks))
    programs = {
        (stage, d): _programs(config, request, config.functions[stage], trees, d, stage, unused) for d in devices
    }
    paths = tuple(".".join(map(str, path)) for path in params.spec.paths())
    interface = Interface.of(programs[stage, config.group.device(ranks[0])], paths)
    return replace(traced.updated({stage: interface}), programs={**traced.programs, **programs})


def _without_unused(config: Config, request: Request, traced: list[_Traced]) -> list[_Traced]:
    """Trace again, from the last stage down, the stages of which an output has no cotangent.

    Zeros would not do: in a backward, zero times infinity is NaN. Every process knows all interfaces, so all agree on
    whether another round is needed.
    """
    while any(kind.value_graph().lacking() for kind in traced):

        def recut(known: list[_Traced] = traced) -> list[dict[int, Interface]]:
            nonlocal traced
            traced = [_recut(config, request, kind) for kind in known]
            pairs = [zip(old.interfaces, new.interfaces, strict=True) for old, new in zip(known, traced, strict=True)]
            return [{stage: new for stage, (old, new) in enumerate(each) if new is not old} for each in pairs]

        for report in together(config.group, recut, _as_data, _from_data):
            traced = [kind.updated(news) for kind, news in zip(traced, report, strict=True)]
    return traced


def _as_data(news: Sequence[Mapping[int, Interface]]) -> list[dict[int, Any]]:
    return [{stage: interfaces.as_data(new) for stage, new in each.items()} for each in news]


def _from_data(news: Any) -> list[dict[int, Interface]]:
    return [{stage: interfaces.from_data(new) for stage, new in each.items()} for each in news]


def _recut(config: Config, request: Request, traced: _Traced) -> _Traced:
    """The same as far as the stages that lack a cotangent are on this process."""
    while (lacking := traced.value_graph().lacking()) and _ranks_here(config, request, lacking[0]):
        traced = _with_stage(config, request, traced, *lacking)
    return traced


def _loss_programs(config: Config, request: Request, traced: _Traced) -> Programs:
    """The loss's programs. Every process traces them: what they return is then known everywhere."""
    assert config.loss is not None
    _, targets, sides = traced.kind
    trees = [traced.output().handed_on(), *targets]
    x = replace(
        trees[0], spec=tree.together([t.spec for t in trees]), leaves=tuple(leaf for t in trees for leaf in t.leaves)
    )
    stage = loss_stage(config.loss, request.has_aux, request.each)
    ranks = [r for r in request.schedule.placement.ranks_of(config.stages - 1) if r in config.group.here]
    device = config.group.device((ranks or config.group.here)[0])
    programs = _programs(
        config, request, stage, [AbstractTree.of({}), x, sides[-1], AbstractTree.of(None)], device, None
    )
    check_scalar(stage.label, next(iter(programs.outputs.y.tensors), None))
    return programs


def _programs(
    config: Config, request: Request, stage: Stage, trees: Sequence[AbstractTree], device: torch.device,
    index: int | None, unused: frozenset[int] = frozenset(),
) -> Programs:  # fmt: skip
    """The programs of stage ``index``, or of the loss (None), on a device."""
    group = config.group
    group.journal(group.here[0], f"{TRACING} {'the loss' if index is None else f'stage {index}'}")
    try:
        return programs_of(stage, Signature(*(t.on(device) for t in trees)), unused, request)
    except StageError as error:
        raise type(error)(_located(str(error), trees[0], index)) from error.__cause__


def _located(text: str, params: AbstractTree, index: int | None) -> str:
    """A message that names the stage, or the loss, and where its arguments come from."""
    text = text.replace("FakeTensor", "Tensor")
    if index is None:
        return text.replace("stage ", "the loss ", 1)
    hints = ["its parameters are None: give params one entry per stage"] if params.spec == _NOTHING else []
    hints += [f"its input is what stage {index - 1} returns"] if index else []
    return f"stage {index}: {text}" + (f" ({'; '.join(hints)})" if hints else "")


def _check_patterns(config: Config, interfaces: Sequence[Interface]) -> None:
    """A pattern that matches no leaf is a mistake: what it should freeze, for instance, would be trained."""
    names = [f"{stage}.{leaf}" for stage, interface in enumerate(interfaces) for leaf in interface.leaves]
    for option, patterns in (("frozen", config.frozen), ("own", config.copies.own if config.copies else ())):
        fault = tree.unmatched(patterns, names)
        if fault:
            raise StageError(f"{option}={fault}")


Leaves: TypeAlias = tuple[tuple[int, int], ...]  # as (stage, index of the leaf)


def _ties(
    config: Config, request: Request, interfaces: Sequence[Interface]
) -> tuple[tuple[Leaves, ...], dict[tuple[int, int], Spec]]:
    """Tied leaves, and the specs of the gradients that are sent: those of tied leaves and of replicated stages."""
    avals = {
        (stage, index): leaf
        for stage, params in enumerate(request.params) if params is not None
        for index, leaf in enumerate(params.leaves) if isinstance(leaf, Aval)
    }  # fmt: skip
    spec = lambda leaf: spec_of(sum_of(leaf, config.accumulate))
    ranks_of = request.schedule.placement.ranks_of
    specs = {key: spec(leaf) for key, leaf in avals.items() if leaf.grad and len(ranks_of(key[0])) > 1}
    paths = [interface.leaves for interface in interfaces]
    groups = tuple(tuple(tied_leaves(names, paths)) for names in config.tied)
    for group in groups:
        known = {key: avals[key] for key in group if key in avals}
        shapes: dict[str, str] = {}
        for (stage, _), leaf in known.items():
            shapes.setdefault(str(leaf), f"{leaf} in stage {stage}")
        if len(shapes) > 1:
            listed = ", ".join(shapes.values())
            raise StageError(f"tied parameters differ in shape or dtype: {listed}; tie copies of one")
        for leaf in known.values():
            specs |= dict.fromkeys(group, spec(leaf))
    return groups, specs

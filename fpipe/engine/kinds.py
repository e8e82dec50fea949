# SPDX-License-Identifier: Apache-2.0
"""One kind of microbatch, traced: the interfaces of all stages, and the programs of the stages of
this process.

Where stages carry something from slice to slice, each slice of a microbatch is a kind. A slice is
traced for the carry that the slice before it returns. A carry that the next slice does not use has
no cotangent. Knows configurations and requests; no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TypeAlias

import torch

from .. import tree
from ..actions.product import load_pass
from ..collectives.rendezvous import TRACING
from ..errors import StageError
from ..lowering.job import ProgramSet
from ..lowering.value_graph import Interface, ValueGraph
from ..programs.cache import Signature, programs_of
from ..programs.program import Programs
from ..programs.signature import check_scalar, loss_stage
from ..stage import Stage
from ..tree import AbstractTree
from .config import Config
from .handshake import on_all_ranks
from .request import MicrobatchKind, Request

#: Programs by stage, None for the loss, and device.
LocalPrograms: TypeAlias = Mapping[tuple[int | None, torch.device], Programs]
_NOTHING = tree.flatten(None)[1]


@dataclass(frozen=True)
class TracedKind:
    """One kind of microbatch of a request: the interfaces of the stages that were traced so far,
    and programs of those on this process.
    """

    config: Config
    request: Request
    kind: MicrobatchKind
    interfaces: tuple[Interface, ...] = ()
    programs: LocalPrograms = field(default_factory=dict)
    slice: int = 0  # where stages have carries: the number of this slice in its microbatch

    @property
    def outputs(self) -> list[AbstractTree]:
        """The outputs of the stages, as far as they are known."""
        return [interface.y for interface in self.interfaces]

    def input_of(self, stage: int) -> AbstractTree:
        """The input of a stage: the output of the stage before it, or the batch."""
        return self.interfaces[stage - 1].y.as_input() if stage else self.kind.x

    def news(self, before: TracedKind) -> dict[int, Interface]:
        """The interfaces that this kind did not have ``before``, by stage."""
        known = dict(enumerate(before.interfaces))
        return {s: new for s, new in enumerate(self.interfaces) if new is not known.get(s)}

    def updated(self, news: Mapping[int, Interface]) -> TracedKind:
        """This kind with new interfaces of some stages, or with those of the next ones."""
        interfaces = {**dict(enumerate(self.interfaces)), **news}
        return replace(self, interfaces=tuple(interfaces[stage] for stage in sorted(interfaces)))

    def ranks_here(self, stage: int) -> list[int]:
        """The ranks of this process that hold a stage."""
        ranks = self.request.schedule.placement.ranks_of(stage)
        return [rank for rank in ranks if rank in self.config.group.here]

    def sides_and_state(self, stage: int) -> list[AbstractTree]:
        """The side inputs and the state of a stage, which its signature has beside params and x."""
        return [self.kind.sides[stage], self.request.states[stage] or AbstractTree.of(None)]

    def on_rank(self, rank: int) -> ProgramSet:
        """The programs of one rank, for lowering."""
        device = self.config.group.device(rank)
        stages = self.request.schedule.placement.stages_of(rank)
        programs = {stage: self.programs[stage, device] for stage in stages}
        return ProgramSet(self.graph, programs, self.programs.get((None, device)))

    @property
    def loss(self) -> Programs | None:
        """The programs of the loss on any device."""
        return self.local(None)

    def local(self, stage: int | None) -> Programs | None:
        """The programs of a stage on any device; None if it is on another process."""
        return next((programs for (s, _), programs in self.programs.items() if s == stage), None)

    def carry(self, stage: int) -> AbstractTree:
        """The carry that a stage of this process passes to the next slice."""
        programs = self.local(stage)
        assert programs is not None
        return load_pass("slices").parted(programs.outputs.y)[1].as_input()

    @cached_property
    def graph(self) -> ValueGraph:
        """How values pass between stages, and to the loss or the caller. All stages are traced."""
        batch = self.kind.x.tensors
        if self.loss is not None:
            loss = Interface.of(self.loss)
            returned_inputs = {source for source in loss.ys if isinstance(source, int)}
            reads = tuple(
                self.request.each or read or leaf in returned_inputs
                for leaf, read in enumerate(loss.reads_x)
            )
            return ValueGraph(self.interfaces, loss.dxs, reads, batch)
        y = self.outputs[-1]
        dxs = tuple(
            (f"dx{leaf}", aval) if aval is not None and aval.grad else None
            for leaf, aval in enumerate(y.tensors)
        )
        return ValueGraph(self.interfaces, dxs, (True,) * len(y.leaves), batch, has_loss=False)


#: The kinds of microbatches, as far as they are traced.
Traced: TypeAlias = list[TracedKind]


def trace_here(note: Callable[[str], None], known: Traced) -> Traced:
    """Trace the stages of this process, and the loss, for each kind."""
    kinds: Traced = []
    for kind in known:
        previous = kinds[-1] if kind.slice else None
        stages = kind.config.stages
        for stage in range(stages):
            if kind.ranks_here(stage):
                note(f"stage {stage + 1} of {stages}")
                kind = trace_stage(kind, previous, stage)
        if kind.config.loss is not None:
            note("the loss")
            kind = with_loss(kind)
        kinds.append(kind)
    return kinds


def trace_stage(
    traced: TracedKind,
    previous: TracedKind | None,
    stage: int,
    unused: frozenset[int] = frozenset(),
) -> TracedKind:
    """Trace a stage of this process, and add its programs and its interface to the kind.

    Its outputs ``unused`` have no cotangent. ``previous`` is the previous slice of the microbatch.
    """
    ranks = traced.ranks_here(stage)
    params = traced.request.params[stage]
    if params is None:
        raise StageError(
            f"stage {stage} is on rank {ranks[0]}, which is in this process, but its parameters "
            "are missing; give params one entry per stage (pipe.place keeps those that are on this "
            "process)"
        )
    x = traced.input_of(stage)
    function = traced.config.functions[stage]
    carry_leaves = 0
    if function.carry and previous is not None:
        carry = previous.carry(stage)
        carry_leaves = len(carry.leaves)
        x = load_pass("slices").with_carry(x, carry)
    trees = [params, x, *traced.sides_and_state(stage)]
    on_devices = partial(_programs, traced, ranks, stage, trees, unused)
    y = None
    if function.carry:
        programs, y = load_pass("slices").traced_slice(
            function,
            traced.slice == 0,
            traced.slice == traced.request.chain - 1,
            carry_leaves,
            on_devices,
        )
    else:
        programs = on_devices(function)
    paths = tuple(".".join(map(str, path)) for path in params.structure.paths())
    interface = Interface.of(next(iter(programs.values())), paths, carry_leaves, y)
    return replace(traced.updated({stage: interface}), programs={**traced.programs, **programs})


def with_loss(traced: TracedKind) -> TracedKind:
    """With the loss, on the devices of all ranks here, so that each knows what the loss returns."""
    config = traced.config
    assert config.loss is not None
    trees = [traced.input_of(len(traced.interfaces)), *traced.kind.targets]
    x = replace(
        trees[0],
        structure=tree.tuple_structure([t.structure for t in trees]),
        leaves=tuple(leaf for t in trees for leaf in t.leaves),
    )
    function = loss_stage(config.loss, traced.request.has_aux, traced.request.each)
    trees = [AbstractTree.of({}), x, traced.kind.sides[-1], AbstractTree.of(None)]
    losses = _programs(traced, config.group.here, None, trees, frozenset(), function)
    for programs in losses.values():
        check_scalar(function.label, next(iter(programs.outputs.y.tensors), None))
    return replace(traced, programs={**traced.programs, **losses})


def _programs(
    traced: TracedKind,
    ranks: Sequence[int],
    stage: int | None,
    trees: Sequence[AbstractTree],
    unused: frozenset[int],
    function: Stage,
) -> LocalPrograms:
    """Trace a stage, or the loss (None), on the devices of ranks."""
    request = traced.request
    group = traced.config.group
    note = group.notes(group.here[0])
    note(f"{TRACING} the loss" if stage is None else f"{TRACING} stage {stage}")
    made = {}
    try:
        for device in dict.fromkeys(map(group.device, ranks)):
            programs = programs_of(
                function, Signature(*(t.on(device) for t in trees)), unused, request
            )
            if trees[0].wanted and not any((*programs.dps, *programs.dxs)):
                load_pass("explain").check_gradient(function, programs, trees[1], request)
            made[stage, device] = programs
        return made
    except StageError as error:
        text = load_pass("explain").located(str(error), trees, stage)
        raise type(error)(text) from error.__cause__


def exchange(
    config: Config, step: Callable[[Traced], Traced], kinds: Traced
) -> tuple[Traced, bool]:
    """Do a step of the preparation on every process. An error of one is raised on all.

    Returns:
        The kinds after the step, with the interfaces that other processes traced in it, and whether
        any process traced one.
    """
    after: Traced = []

    def work() -> list[dict[int, Interface]]:  # on_all_ranks reports its error to all
        after[:] = step(kinds)
        return [new.news(old) for new, old in zip(after, kinds, strict=True)]

    reports = [work()] if config.local else on_all_ranks(config.group, work)
    # Several processes may hold a stage. The first one's report is applied last, so it counts.
    for report in reversed(reports):
        after = [kind.updated(news) for kind, news in zip(after, report, strict=True)]
    return after, any(map(any, reports))

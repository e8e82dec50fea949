# SPDX-License-Identifier: Apache-2.0
"""One kind of microbatch, traced: the interfaces of its stages, and the programs of those of this
process.

Slices of a microbatch of which a stage carries something from each to the next are kinds in a row:
a slice is traced for the carry that the slice before it returns, and a carry that the next slice
does not use has no cotangent. Knows configurations and requests; no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from .. import tree
from ..actions.product import feature
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
from .mistakes import no_params
from .request import Kind, Request

#: The programs of stages by device.
Local: TypeAlias = Mapping[tuple[int, torch.device], Programs]
_NOTHING = tree.flatten(None)[1]


@dataclass(frozen=True)
class TracedKind:
    """One kind of microbatch: the interfaces of its first stages, and local programs by stage and
    device.
    """

    kind: Kind
    interfaces: tuple[Interface, ...] = ()
    programs: Local = field(default_factory=dict)
    loss: Programs | None = None
    each: bool = False  # whether the rank of the loss reads all outputs
    slice: int = 0  # of stages with carries: which slice of a microbatch it is, of how many
    slices: int = 1

    def output(self) -> AbstractTree:
        """The output of the last stage whose interface is known, or the batch."""
        return self.interfaces[-1].y if self.interfaces else self.kind[0]

    def updated(self, news: Mapping[int, Interface]) -> TracedKind:
        """With other interfaces of some stages, or with that of the next one."""
        known = {**dict(enumerate(self.interfaces)), **news}
        return replace(self, interfaces=tuple(known[stage] for stage in sorted(known)))

    def on_rank(self, config: Config, request: Request, rank: int) -> ProgramSet:
        """What lowering needs on one rank."""
        device = config.group.device(rank)
        stages = request.schedule.placement.stages_of(rank)
        return ProgramSet(
            self.value_graph(), {s: self.programs[s, device] for s in stages}, self.loss
        )

    def local(self, stage: int) -> Programs | None:
        """The programs of a stage, if it is on this process."""
        return next((programs for (s, _), programs in self.programs.items() if s == stage), None)

    def carry(self, stage: int) -> AbstractTree:
        """What a stage of this process carries to the next slice."""
        programs = self.local(stage)
        assert programs is not None
        return feature("slices").parted(programs.outputs.y)[1].as_input()

    def value_graph(self) -> ValueGraph:
        """How values pass between the stages, all of whose interfaces are known."""
        batch = self.kind[0].tensors
        y = self.output()
        if self.loss is not None:
            loss = Interface.of(self.loss)
            passed_on = {
                source for source in loss.ys if isinstance(source, int)
            }  # the loss returns its input
            takes = tuple(
                reads or leaf in passed_on or self.each for leaf, reads in enumerate(loss.takes_x)
            )
            return ValueGraph(self.interfaces, loss.dxs, takes, batch)
        dxs = tuple(
            (f"dx{j}", a) if a is not None and a.grad else None for j, a in enumerate(y.tensors)
        )
        return ValueGraph(self.interfaces, dxs, (True,) * len(y.leaves), batch, has_loss=False)


def in_turn(
    traced: Sequence[TracedKind], fn: Callable[[TracedKind, TracedKind | None], TracedKind]
) -> list[TracedKind]:
    """``fn`` of each kind and the slice before it, of which ``fn`` has been taken."""
    found: list[TracedKind] = []
    for kind in traced:
        found.append(fn(kind, found[-1] if kind.slice else None))
    return found


def advanced(
    config: Config,
    request: Request,
    traced: TracedKind,
    before: TracedKind | None,
    note: Callable[[str], None],
) -> TracedKind:
    """With the stages that follow those whose interfaces are known, as far as they are on this
    process.
    """
    for stage in range(len(traced.interfaces), request.schedule.stages):
        if not ranks_here(config, request, stage):
            break
        note(f"stage {stage + 1} of {request.schedule.stages}")
        traced = with_stage(config, request, traced, before, stage)
    return traced


def ranks_here(config: Config, request: Request, stage: int) -> list[int]:
    """The ranks of this process that have a stage."""
    return [
        rank for rank in request.schedule.placement.ranks_of(stage) if rank in config.group.here
    ]


def with_stage(
    config: Config,
    request: Request,
    traced: TracedKind,
    before: TracedKind | None,
    stage: int,
    unused: frozenset[int] = frozenset(),
) -> TracedKind:
    """With the programs of a stage of this process; its outputs ``unused`` have no cotangent.

    ``before`` is the slice before this one.
    """
    ranks = ranks_here(config, request, stage)
    params = request.params[stage]
    if params is None:
        raise no_params(stage, ranks[0])
    x = traced.interfaces[stage - 1].y.as_input() if stage else traced.kind[0]
    function = config.functions[stage]
    carry = before.carry(stage) if function.carry and before is not None else None
    x = x if carry is None else feature("slices").with_carry(x, carry)
    trees = [params, x, traced.kind[2][stage], request.states[stage] or AbstractTree.of(None)]
    devices = dict.fromkeys(map(config.group.device, ranks))

    def on_devices(called):
        return {
            (stage, d): _programs(config, request, called, trees, d, stage, unused) for d in devices
        }

    y = None
    inner = 0 if carry is None else len(carry.leaves)
    if function.carry:
        first = not traced.slice
        last = traced.slice == traced.slices - 1
        programs, y = feature("slices").traced_slice(function, first, last, inner, on_devices)
    else:
        programs = on_devices(function)
    paths = tuple(".".join(map(str, path)) for path in params.spec.paths())
    interface = Interface.of(programs[stage, config.group.device(ranks[0])], paths, inner, y)
    return replace(traced.updated({stage: interface}), programs={**traced.programs, **programs})


def loss_programs(config: Config, request: Request, traced: TracedKind) -> Programs:
    """The loss's programs. Every process traces them: what they return is then known everywhere."""
    assert config.loss is not None
    _, targets, sides = traced.kind
    trees = [traced.output().as_input(), *targets]
    x = replace(
        trees[0],
        spec=tree.tuple_structure([t.spec for t in trees]),
        leaves=tuple(leaf for t in trees for leaf in t.leaves),
    )
    stage = loss_stage(config.loss, request.has_aux, request.each)
    ranks = [
        r for r in request.schedule.placement.ranks_of(config.stages - 1) if r in config.group.here
    ]
    device = config.group.device((ranks or config.group.here)[0])
    programs = _programs(
        config,
        request,
        stage,
        [AbstractTree.of({}), x, sides[-1], AbstractTree.of(None)],
        device,
        None,
    )
    check_scalar(stage.label, next(iter(programs.outputs.y.tensors), None))
    return programs


def _programs(
    config: Config,
    request: Request,
    stage: Stage,
    trees: Sequence[AbstractTree],
    device: torch.device,
    index: int | None,
    unused: frozenset[int] = frozenset(),
) -> Programs:
    """The programs of stage ``index``, or of the loss (None), on a device."""
    group = config.group
    group.notes(group.here[0])(f"{TRACING} {'the loss' if index is None else f'stage {index}'}")
    try:
        return programs_of(stage, Signature(*(t.on(device) for t in trees)), unused, request)
    except StageError as error:
        located = feature("explain").located
        raise type(error)(located(str(error), trees[0], index)) from error.__cause__

# SPDX-License-Identifier: Apache-2.0
"""Steps that all copies of a pipeline carry out together: REDUCE, UNSHARD, RESHARD and the waits
for them.

Gradients of a stage are reduced as soon as the last of them is computed. Parameters that are
sharded are gathered one action ahead of their first use and freed after their last. Where the
number of whole stages is limited, the one whose next use in the row is furthest is freed first.
Knows steps and keys; no tensors and no backends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import TypeAlias

from ...actions.action import AnyAction, Row
from ...engine.copies import Copies
from ...lowering.builder import Builder
from ...lowering.instruction import Instruction
from ...lowering.job import LoweringInput
from ...lowering.keys import Key
from ...lowering.plan import Feature
from ...lowering.value_graph import grad, param, reduced_grad, whole_param
from .instructions import Landed, OfShare, Reduce, Reshard, Unshard
from .sharding import Layout, Share

#: What is done to the parameters of a stage.
_Step: TypeAlias = tuple[type[OfShare], int]


@dataclass(frozen=True)
class OfCopies(Feature):
    """Emits what copies carry out together; ``layouts`` are by stage, ``tied`` are tied leaves."""

    copies: Copies
    layouts: Mapping[int, Layout]
    tied: tuple[tuple[tuple[int, int], ...], ...] = ()

    def start(self, builder: Builder) -> Feature:
        return _OnRank(self, builder)

    def parameters(self, stage: int) -> Share:
        """The parameters of a stage that the copies share."""
        layout = self.layouts[stage]
        return Share(stage, layout, layout.leaves, self.copies)


class _OnRank(Feature):
    def __init__(self, of: OfCopies, builder: Builder):
        self.of = of
        self.out = builder.out
        self.steps = _steps(of, builder.job, builder.rank, builder.accumulated)

    def parameter(self, stage: int, leaf: int) -> Key | None:
        sharded = self.of.copies.cut and leaf in self.of.layouts[stage].shapes
        if sharded:
            return whole_param(stage, leaf)
        return None

    def before(self) -> None:
        out = self.out
        out += next(self.steps)

    def finish(self) -> None:
        out = self.out
        out += chain.from_iterable(self.steps)

    def results(self, keys: Iterable[Key]) -> list[Key]:
        shares = [ins.op.share for ins in self.out if isinstance(ins.op, Reduce)]
        leaves = [(share.stage, leaf) for share in shares for leaf in share.leaves]
        reduced = {grad(*leaf): reduced_grad(*leaf) for leaf in leaves}
        return [reduced.get(key, key) for key in keys]


def _steps(
    of: OfCopies, job: LoweringInput, rank: int, added: Set[Key]
) -> Iterator[list[Instruction]]:
    """The instructions before each position of the row, at the end of each phase, and after the
    row; ``added`` grows meanwhile.
    """
    row = job.schedule[rank]
    summed_first = _summed_first(of, job, rank)
    ends: dict[int, int] = {}  # by stage, the position after its last gradient
    for position, entry in enumerate(row, 1):
        for part in entry.parts:
            if part.op in "BW" and part.stage not in summed_first:
                ends[part.stage] = position
    reduced: list[OfShare] = []
    for position, unused, steps in _gathered(of, job, row):
        ready = [stage for stage, end in ends.items() if end == position]
        reduces = _reduces(of, job, ready, added)
        reduced += reduces
        ops = [Reshard(of.parameters(stage)) for stage in unused]
        ops += reduces
        ops += [kind(of.parameters(stage)) for kind, stage in steps]
        yield list(map(_instruction, ops))
    late = _reduces(of, job, summed_first, added)
    waits = [Landed(op.share) for op in reduced + late]
    yield list(map(_instruction, late + waits))


def _gathered(
    of: OfCopies, job: LoweringInput, row: Row
) -> Iterator[tuple[int, list[int], list[_Step]]]:
    """Each position of a row, and the end of each phase: the stages to free there, then how those
    that are read become whole.
    """
    reads = [_stages_read(of, job, entry) for entry in row]
    if of.copies.zero == 3:
        allowed = of.copies.unsharded
    else:
        allowed = job.stages
    limit = max([allowed, *map(len, reads)])
    phases = [(0, len(row))]
    if job.phased:
        forwards = list(takewhile(_is_forward, row))
        phases = [(0, len(forwards)), (len(forwards), len(row))]
    for begin, end in phases:
        for position, changes in enumerate(_of_phase(reads[begin:end], limit), begin):
            yield position, *changes


def _is_forward(entry: AnyAction) -> bool:
    return all(part.op == "F" for part in entry.parts)


def _of_phase(
    reads: Sequence[Sequence[int]], limit: int
) -> Iterator[tuple[list[int], list[_Step]]]:
    """Each position of a phase, and its end; at most ``limit`` stages are whole or on their way."""
    whole: set[int] = set()
    arriving: set[int] = set()

    def gather(stages: Sequence[int], kept: Sequence[int]) -> Iterator[_Step]:
        for stage in stages:
            if stage in whole or stage in arriving:
                continue
            if len(whole) + len(arriving) == limit:
                others = whole.difference(kept)
                if not others:
                    continue
                furthest = max(others, key=lambda other: _next_use(other, upcoming))
                whole.remove(furthest)
                yield Reshard, furthest
            arriving.add(stage)
            yield Unshard, stage

    before: Sequence[int] = ()
    for position in range(len(reads) + 1):
        upcoming = reads[position:]
        unused = [stage for stage in before if _next_use(stage, upcoming) == len(upcoming)]
        whole.difference_update(unused)
        now = upcoming[0] if upcoming else ()
        ahead = next(filter(None, upcoming[1:]), ())
        steps = list(gather(now, now))
        steps += [(Landed, stage) for stage in now if stage in arriving]
        arriving.difference_update(now)
        whole.update(now)
        steps += gather(ahead, [*now, *ahead])
        yield unused, steps
        before = now


def _next_use(stage: int, upcoming: Sequence[Sequence[int]]) -> int:
    """How far the next position is that reads a stage; the number of positions: none does."""
    return next((n for n, stages in enumerate(upcoming) if stage in stages), len(upcoming))


def _stages_read(of: OfCopies, job: LoweringInput, entry: AnyAction) -> list[int]:
    """The stages of which an entry of the row reads sharded parameters."""
    stages: dict[int, None] = {}
    for stage, op, mb in entry.parts if of.copies.cut else ():
        own = job.kind(mb).programs[stage]
        program = getattr(own, op.lower())
        inputs = [own.roles[name] for name in program.inputs if name in own.roles]
        params = {leaf for role, leaf in inputs if role == "param"}
        if params.intersection(of.layouts[stage].shapes):
            stages[stage] = None
    return list(stages)


def _summed_first(of: OfCopies, job: LoweringInput, rank: int) -> list[int]:
    """Stages here whose gradients are summed over ranks or stages before the copies reduce them."""
    tied = {stage for group in of.tied for stage, _ in group}
    stages = []
    for stage in range(job.stages):
        ranks = job.schedule.placement.ranks_of(stage)
        if rank in ranks and (stage in tied or len(ranks) > 1):
            stages.append(stage)
    return stages


def _reduces(
    of: OfCopies, job: LoweringInput, stages: Iterable[int], added: Set[Key]
) -> list[OfShare]:
    """REDUCE of the gradients of each stage that has any."""
    reduces: list[OfShare] = []
    for stage in stages:
        layout = of.layouts[stage]
        leaves = tuple(leaf for leaf in layout.leaves if grad(stage, leaf) in added)
        if leaves:
            reduces.append(Reduce(Share(stage, layout, leaves, of.copies, True, job.accumulate)))
    return reduces


def _instruction(op: OfShare) -> Instruction:
    share = op.share
    after = reduced_grad if share.gradients else whole_param
    keys = {Reduce: grad, Unshard: param, Reshard: whole_param, Landed: after}[type(op)]
    values = tuple(keys(share.stage, leaf) for leaf in share.leaves)
    if isinstance(op, Landed):
        return Instruction(op, writes=values)
    return Instruction(op, reads=values)

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
from itertools import count

import torch

from ...actions.action import Action
from ...engine.copies import Copies
from ...lowering.builder import Builder
from ...lowering.instruction import Instruction
from ...lowering.job import LoweringInput
from ...lowering.keys import Grad, Key
from ...lowering.plan import Feature
from ...lowering.value_graph import grad, param, reduced_grad, whole_param
from .instructions import Landed, Reduce, Reshard, Unshard
from .sharding import Layout, Share


@dataclass(frozen=True)
class OfCopies(Feature):
    """Emits what copies carry out together; ``layouts`` are by stage, ``tied`` are tied leaves."""

    copies: Copies
    layouts: Mapping[int, Layout]
    tied: tuple[tuple[tuple[int, int], ...], ...] = ()

    def start(self, builder: Builder) -> Feature:
        return _OnRank(self, builder)

    def share(
        self, stage: int, leaves: tuple[int, ...] | None = None, wide: torch.dtype | None = None
    ) -> Share:
        """The parameters of a stage or, with ``leaves``, gradients of some."""
        gradients = leaves is not None
        if leaves is None:
            leaves = self.leaves(stage)
        return Share(stage, self.layouts[stage], leaves, self.copies, gradients, wide)

    def leaves(self, stage: int) -> tuple[int, ...]:
        """The leaves of a stage that the copies share, by bucket."""
        return tuple(leaf for bucket in self.layouts[stage].buckets for leaf in bucket.leaves)


class _OnRank(Feature):
    def __init__(self, of: OfCopies, builder: Builder):
        self.of, self.builder = of, builder
        self.steps = _steps(of, builder.job, builder.rank, builder.added)

    def parameter(self, stage: int, leaf: int) -> Key | None:
        sharded = self.of.copies.cut and self.of.layouts[stage].shapes[leaf] is not None
        return whole_param(stage, leaf) if sharded else None

    def before(self) -> None:
        self._emit()

    def _emit(self) -> None:
        out = self.builder.out
        out += next(self.steps)

    def finish(self) -> None:
        self._emit()

    def results(self, keys: Iterable[Key]) -> list[Key]:
        reduces = (ins.op for ins in self.builder.out if isinstance(ins.op, Reduce))
        leaves = {(op.share.stage, leaf) for op in reduces for leaf in op.share.leaves}
        kept = {*keys} - {grad(*leaf) for leaf in leaves}
        return [*kept, *(reduced_grad(*leaf) for leaf in leaves)]


@dataclass(frozen=True)
class _Uses:
    """Which sharded stages each position of a row reads, and the first position after the forward
    phase, if any.
    """

    stages: Sequence[tuple[int, ...]]
    backward: int

    @classmethod
    def of(cls, feature: OfCopies, job: LoweringInput, rank: int) -> _Uses:
        """The uses in a rank's row."""
        row = job.schedule[rank]
        backward = next(
            (n for n, entry in enumerate(row) if any(a.op != "F" for a in entry.parts)), len(row)
        )
        stages = [
            tuple(dict.fromkeys(a.stage for a in entry.parts if _reads_shards(feature, job, a)))
            for entry in row
        ]
        return cls(stages, backward if job.phased else 0)

    def _end(self, position: int) -> int:
        """The end of the phase of a position."""
        return self.backward if position < self.backward else len(self.stages)

    def next(self, stage: int, start: int) -> int:
        """The next position in this phase that reads a stage; the length of the row: none."""
        return next(
            (n for n in range(start, self._end(start)) if stage in self.stages[n]), len(self.stages)
        )

    def furthest(self, stages: Iterable[int], start: int) -> list[int]:
        """The stages in the order in which to free them: those that are needed again latest
        first.
        """
        return sorted(stages, key=lambda stage: self.next(stage, start), reverse=True)

    def ahead(self, position: int) -> tuple[int, ...]:
        """The stages of the next position in this phase that reads any."""
        return next(filter(None, self.stages[position + 1 : self._end(position)]), ())


def _steps(
    feature: OfCopies, job: LoweringInput, rank: int, added: Set[Key]
) -> Iterator[list[Instruction]]:
    """The instructions before each position of the row, between phases, and after the row;
    ``added`` grows meanwhile.
    """
    copies = feature.copies
    uses, numbers, shared = _Uses.of(feature, job, rank), count(), _summed_first(feature, job)
    last = {
        a.stage: n
        for n, entry in enumerate(job.schedule[rank])
        for a in entry.parts
        if a.op in "BW"
    }
    limit = max([copies.unsharded if copies.zero == 3 else job.stages, *map(len, uses.stages)])
    whole: set[int] = set()
    arriving: dict[int, Instruction] = {}
    reductions: list[Instruction] = []
    steps: list[Instruction] = []
    for position in range(len(uses.stages) + 1):
        previous = uses.stages[position - 1] if position else ()
        unused = [
            stage
            for stage in previous
            if uses.next(stage, position) == len(uses.stages) and stage in whole
        ]
        whole.difference_update(unused)
        ready = [
            stage for stage, place in last.items() if place == position - 1 and stage not in shared
        ]
        reduces = list(_reductions(feature, job, ready, added, numbers)) if job.training else []
        reductions += reduces
        steps = [*_reshards(feature, unused), *reduces]
        if job.phased and position == uses.backward:
            yield [*steps, *_reshards(feature, sorted(whole))]
            steps, whole = [], set()
        if position == len(uses.stages):
            break
        now, ahead = uses.stages[position], uses.ahead(position) if copies.cut else ()
        for needed, kept in ((now, now), (ahead, now + ahead)):
            for stage in [s for s in needed if s not in whole and s not in arriving]:
                surplus = max(len(whole) + len(arriving) + 1 - limit, 0)
                evictable = uses.furthest([s for s in whole if s not in kept], position)
                whole.difference_update(evictable[:surplus])
                steps += _reshards(feature, evictable[:surplus])
                if len(evictable) >= surplus:
                    steps.append(_unshard(feature, stage, next(numbers)))
                    arriving[stage] = _wait(steps[-1])
            if needed is now:
                steps += [arriving.pop(stage) for stage in now if stage in arriving]
                whole.update(now)
        yield steps
    late = sorted(shared & {source.stage for source, _ in added if isinstance(source, Grad)})
    steps += _reshards(feature, sorted(whole))
    reduces = list(_reductions(feature, job, late, added, numbers))
    yield [*steps, *reduces, *map(_wait, reductions + reduces)]


def _reads_shards(feature: OfCopies, job: LoweringInput, action: Action) -> bool:
    """Whether an action reads parameters that are sharded."""
    if not feature.copies.cut:
        return False
    programs, leaves = (
        job.kind(action.microbatch).programs[action.stage],
        feature.leaves(action.stage),
    )
    program = {"F": programs.f, "B": programs.b, "I": programs.i, "W": programs.w}[action.op]
    named = programs.roles
    return any(
        name in named and named[name].role == "param" and named[name].leaf in leaves
        for name in program.inputs
    )


def _summed_first(feature: OfCopies, job: LoweringInput) -> set[int]:
    """Stages whose gradients are summed over ranks or stages before the copies reduce them."""
    tied = {stage for group in feature.tied for stage, _ in group}
    ranks_of = job.schedule.placement.ranks_of
    return tied | {stage for stage in range(job.stages) if len(ranks_of(stage)) > 1}


def _unshard(feature: OfCopies, stage: int, number: int) -> Instruction:
    share = feature.share(stage)
    reads = tuple(param(stage, leaf) for leaf in share.leaves)
    return Instruction(Unshard(share, number), reads=reads)


def _reductions(
    feature: OfCopies,
    job: LoweringInput,
    stages: Iterable[int],
    added: Set[Key],
    numbers: Iterator[int],
) -> Iterator[Instruction]:
    """REDUCE of the gradients of each stage that has any."""
    for stage in stages:
        leaves = tuple(leaf for leaf in feature.leaves(stage) if grad(stage, leaf) in added)
        if leaves:
            op = Reduce(feature.share(stage, leaves, job.wide), next(numbers))
            yield Instruction(op, reads=tuple(grad(stage, leaf) for leaf in leaves))


def _reshards(feature: OfCopies, stages: Iterable[int]) -> Iterator[Instruction]:
    for stage in stages:
        share = feature.share(stage)
        reads = tuple(whole_param(stage, leaf) for leaf in share.leaves)
        yield Instruction(Reshard(share), reads=reads)


def _wait(started: Instruction) -> Instruction:
    """The wait for the result of a REDUCE or an UNSHARD."""
    op = started.op
    assert isinstance(op, (Reduce, Unshard))
    key = reduced_grad if op.share.gradients else whole_param
    writes = tuple(key(op.share.stage, leaf) for leaf in op.share.leaves)
    return Instruction(Landed(op.share, op.number), writes=writes)

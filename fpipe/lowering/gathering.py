# SPDX-License-Identifier: Apache-2.0
"""Steps that all copies of a pipeline carry out together: REDUCE, UNSHARD, RESHARD and the waits
for them.

Gradients of a stage are reduced as soon as the last of them is computed. Parameters that are
sharded are gathered one action ahead of their first use and freed after their last. Where the
number of whole stages is limited, the one whose next use in the row is furthest is freed first.
Knows steps and keys; no tensors and no backends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import count

from ..actions.action import Action
from .keys import Grad, Key, grad, inputs, param, reduced_grad, whole_param
from .plan import LoweringInput
from .sharding import Copies, Share
from .step import Step


@dataclass(frozen=True)
class _Uses:
    """Which sharded stages each position of a row reads, and the first position after the forward
    phase, if any.
    """

    stages: Sequence[tuple[int, ...]]
    backward: int

    @classmethod
    def of(cls, job: LoweringInput, rank: int) -> _Uses:
        """The uses in a rank's row."""
        row = job.schedule[rank]
        backward = next(
            (n for n, entry in enumerate(row) if any(a.op != "F" for a in entry.parts)), len(row)
        )
        stages = [
            tuple(dict.fromkeys(a.stage for a in entry.parts if _reads_shards(job, a)))
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


def steps_of_copies(
    job: LoweringInput, copies: Copies, rank: int, added: Set[Key]
) -> Iterator[list[Step]]:
    """The steps before each position of the row, between phases, and after the row; ``added`` grows
    meanwhile.
    """
    uses, numbers, shared = _Uses.of(job, rank), count(), _summed_first(job)
    last = {
        a.stage: n
        for n, entry in enumerate(job.schedule[rank])
        for a in entry.parts
        if a.op in "BW"
    }
    limit = max([copies.unsharded if copies.zero == 3 else job.stages, *map(len, uses.stages)])
    whole: set[int] = set()
    arriving: dict[int, Step] = {}
    reductions: list[Step] = []
    steps: list[Step] = []
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
        reduces = list(_reductions(job, copies, ready, added, numbers)) if job.training else []
        reductions += reduces
        steps = [*_reshards(job, copies, unused), *reduces]
        if job.phased and position == uses.backward:
            yield [*steps, *_reshards(job, copies, sorted(whole))]
            steps, whole = [], set()
        if position == len(uses.stages):
            break
        now, ahead = uses.stages[position], uses.ahead(position) if copies.cut else ()
        for needed, kept in ((now, now), (ahead, now + ahead)):
            for stage in [s for s in needed if s not in whole and s not in arriving]:
                surplus = max(len(whole) + len(arriving) + 1 - limit, 0)
                evictable = uses.furthest([s for s in whole if s not in kept], position)
                whole.difference_update(evictable[:surplus])
                steps += _reshards(job, copies, evictable[:surplus])
                if len(evictable) >= surplus:
                    steps.append(_unshard(job, copies, stage, next(numbers)))
                    arriving[stage] = _wait(steps[-1])
            if needed is now:
                steps += [arriving.pop(stage) for stage in now if stage in arriving]
                whole.update(now)
        yield steps
    late = sorted(shared & {source.stage for source, _ in added if isinstance(source, Grad)})
    steps += _reshards(job, copies, sorted(whole))
    reduces = list(_reductions(job, copies, late, added, numbers))
    yield [*steps, *reduces, *map(_wait, reductions + reduces)]


def parameter_key(job: LoweringInput, stage: int, leaf: int) -> Key:
    """The key under which programs read a parameter."""
    sharded = (
        job.copies is not None and job.copies.cut and job.layouts[stage].shapes[leaf] is not None
    )
    return whole_param(stage, leaf) if sharded else param(stage, leaf)


def _leaves(job: LoweringInput, stage: int) -> tuple[int, ...]:
    """The leaves of a stage that the copies share, by bucket."""
    return tuple(leaf for bucket in job.layouts[stage].buckets for leaf in bucket.leaves)


def _reads_shards(job: LoweringInput, action: Action) -> bool:
    """Whether an action reads parameters that are sharded."""
    if job.copies is None or not job.copies.cut:
        return False
    programs, leaves = (
        job.kind(action.microbatch).programs[action.stage],
        _leaves(job, action.stage),
    )
    program = {"F": programs.f, "B": programs.b, "I": programs.i, "W": programs.w}[action.op]
    named = inputs(programs)
    return any(
        name in named and named[name].role == "param" and named[name].leaf in leaves
        for name in program.inputs
    )


def _summed_first(job: LoweringInput) -> set[int]:
    """Stages whose gradients are summed over ranks or stages before the copies reduce them."""
    tied = {stage for group in job.tied for stage, _ in group}
    return tied | {
        stage for stage in range(job.stages) if len(job.schedule.placement.ranks_of(stage)) > 1
    }


def _unshard(job: LoweringInput, copies: Copies, stage: int, number: int) -> Step:
    share = Share(stage, job.layouts[stage], _leaves(job, stage), copies)
    return Step(
        "UNSHARD",
        reads=tuple(param(stage, leaf) for leaf in share.leaves),
        number=number,
        share=share,
    )


def _reductions(
    job: LoweringInput,
    copies: Copies,
    stages: Iterable[int],
    added: Set[Key],
    numbers: Iterator[int],
) -> Iterator[Step]:
    """REDUCE of the gradients of each stage that has any."""
    for stage in stages:
        leaves = tuple(leaf for leaf in _leaves(job, stage) if grad(stage, leaf) in added)
        if leaves:
            share = Share(stage, job.layouts[stage], leaves, copies, gradients=True, wide=job.wide)
            reads = tuple(grad(stage, leaf) for leaf in leaves)
            yield Step("REDUCE", reads=reads, number=next(numbers), share=share)


def _reshards(job: LoweringInput, copies: Copies, stages: Iterable[int]) -> Iterator[Step]:
    for stage in stages:
        share = Share(stage, job.layouts[stage], _leaves(job, stage), copies)
        yield Step(
            "RESHARD", reads=tuple(whole_param(stage, leaf) for leaf in share.leaves), share=share
        )


def _wait(step: Step) -> Step:
    """The wait for the result of a REDUCE or an UNSHARD."""
    share = step.share
    assert share is not None
    key = reduced_grad if share.gradients else whole_param
    return Step(
        "WAIT",
        writes=tuple(key(share.stage, leaf) for leaf in share.leaves),
        number=step.number,
        share=share,
    )

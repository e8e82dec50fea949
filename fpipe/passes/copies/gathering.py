# SPDX-License-Identifier: Apache-2.0
"""Steps that all copies of a pipeline carry out together: REDUCE, UNSHARD, RESHARD and the waits
for them.

Gradients of a stage are reduced as soon as the last of them is computed. Parameters that are
sharded are gathered one action ahead of their first use and freed after their last. Where the
number of whole stages is limited, the one whose next use in the row is furthest is freed first.
A wait for other copies blocks and does not yield to other ranks of this process: all copies run one
plan, so they start their collectives in one order, which a rank that ran in between could break.
Knows no backends.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, takewhile
from typing import Any, TypeAlias

from torch import Tensor

from ...actions.action import AnyAction, Row
from ...collectives.group import Work
from ...engine.copies import Copies
from ...lowering.builder import Builder
from ...lowering.instruction import Instruction, Machine, Opcode, Registers, StepFn
from ...lowering.instructions import step_of
from ...lowering.keys import Key
from ...lowering.memory import MemoryAccount
from ...lowering.plan import Feature
from ...lowering.value_graph import grad, param, reduced_grad, whole_param
from .sharding import Bucket, Layout, Share


@dataclass(frozen=True, slots=True)
class OfShare(Opcode):
    """What concerns leaves of a stage, ``share``; subclasses have no further fields."""

    share: Share

    def __str__(self) -> str:
        return f"stage {self.share.stage}"

    @property
    def memory(self) -> Hashable:
        """The key of what is under way until the WAIT; a stage has one gathering at a time."""
        return ("of all copies", self.share.stage, self.share.gradients)


class _Started(OfShare):
    """A collective that is under way until its WAIT; subclasses start it for a bucket."""

    def hold(self, ins: Instruction, ends: Sequence[int], account: MemoryAccount) -> int:
        account.begin(self.memory, self.memory, self.share.bytes)
        return account.live

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        key = self.memory
        frees = ins.frees
        buckets = self.share.slots(ins.reads)

        def step(r: Registers) -> None:
            works = []
            for bucket, reads in buckets:
                leaves: list[Any] = [r.slots[i] if i >= 0 else None for i in reads]
                works.append(self.start(bucket, leaves))
            for i in frees:
                r.slots[i] = None
            r.collectives[key] = works

        return step

    def start(self, bucket: Bucket, leaves: list[Tensor]) -> Work:
        """Start it for the leaves of a bucket, of which some may be missing."""
        raise NotImplementedError


class Reduce(_Started):
    """Start to reduce the gradients of a stage over the copies."""

    kind = "REDUCE"

    def start(self, bucket: Bucket, leaves: list[Tensor]) -> Work:
        copies = self.share.copies
        memory = self.share.layout.pack(bucket, leaves, self.share.carried(bucket))
        op = "mean" if copies.mean else "sum"
        return copies.group.start_reduce(memory, op, scatter=copies.zero > 1)


class Unshard(_Started):
    """Start to gather a stage's parameters from the parts of all copies."""

    kind = "UNSHARD"

    def start(self, bucket: Bucket, leaves: list[Tensor]) -> Work:
        return self.share.copies.group.start_gather(self.share.layout.fill(bucket, leaves))


class Reshard(OfShare):
    """Free gathered parameters."""

    kind = "RESHARD"

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        return step_of("{free}", ins)


class Landed(OfShare):
    """WAIT for what was reduced or gathered. Parameters may be gathered again: earlier values
    have ended then.
    """

    kind = "WAIT"
    renews = True

    def __str__(self) -> str:
        what = "gradients" if self.share.gradients else "parameters"
        return f"{what} of stage {self.share.stage}"

    def hold(self, ins: Instruction, ends: Sequence[int], account: MemoryAccount) -> int:
        for key, nbytes in zip(ins.writes, self.share.landed(), strict=True):
            if nbytes is None:
                account.share(key, account.storages[self.memory])
            else:
                account.begin(key, key, nbytes)
        account.end(self.memory)
        return account.live

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        share = self.share
        key = self.memory
        buckets = share.slots(ins.writes)
        journal = machine.group.journal
        rank = machine.rank
        text = f"waiting for the {self} of other copies"

        def step(r: Registers) -> None:
            journal(rank, text)
            for (bucket, writes), work in zip(buckets, r.collectives.pop(key), strict=True):
                (memory,) = work.wait()
                for i, value in zip(writes, share.values(bucket, memory), strict=True):
                    if i >= 0:
                        r.slots[i] = value

        return step


#: What is done to the parameters of a stage.
_Step: TypeAlias = tuple[type[OfShare], int]


@dataclass(frozen=True)
class OfCopies(Feature):
    """Emits what copies carry out together; ``layouts`` are by stage, ``tied`` are tied leaves."""

    copies: Copies
    layouts: Mapping[int, Layout]
    tied: tuple[tuple[tuple[int, int], ...], ...] = ()

    def parameters(self, stage: int) -> Share:
        """The parameters of a stage that the copies share."""
        layout = self.layouts[stage]
        return Share(stage, layout, layout.leaves, self.copies)

    def parameter(self, stage: int, leaf: int) -> Key | None:
        if self.copies.cut and leaf in self.layouts[stage].shapes:
            return whole_param(stage, leaf)
        return None

    def before(self, action: AnyAction | None) -> None:
        out = self.builder.out
        out += next(self.steps)

    def finish(self) -> None:
        out = self.builder.out
        out += chain.from_iterable(self.steps)

    def results(self, keys: Iterable[Key]) -> list[Key]:
        shares = [ins.op.share for ins in self.builder.out if isinstance(ins.op, Reduce)]
        leaves = [(share.stage, leaf) for share in shares for leaf in share.leaves]
        reduced = {grad(*leaf): reduced_grad(*leaf) for leaf in leaves}
        return [reduced.get(key, key) for key in keys]

    @cached_property
    def steps(self) -> Iterator[list[Instruction]]:
        """The instructions before each position of the row, at the end of each phase, and after the
        row.
        """
        builder: Builder = self.builder
        row = builder.job.schedule[builder.rank]
        placement = builder.job.schedule.placement
        tied = {stage for group in self.tied for stage, _ in group}
        summed_first = [  # over ranks or stages, before the copies reduce them
            stage
            for stage in placement.stages_of(builder.rank)
            if stage in tied or len(placement.ranks_of(stage)) > 1
        ]
        ends = {  # by stage, the position after its last gradient
            part.stage: position
            for position, entry in enumerate(row, 1)
            for part in entry.parts
            if part.op in "BW" and part.stage not in summed_first
        }
        reduced: list[OfShare] = []
        for position, unused, steps in self._gathered(row):
            ready = [stage for stage, end in ends.items() if end == position]
            reduces = self._reduces(ready)
            reduced += reduces
            ops = [Reshard(self.parameters(stage)) for stage in unused]
            ops += reduces
            ops += [kind(self.parameters(stage)) for kind, stage in steps]
            yield list(map(_instruction, ops))
        late = self._reduces(summed_first)
        yield list(map(_instruction, late + [Landed(op.share) for op in reduced + late]))

    def _gathered(self, row: Row) -> Iterator[tuple[int, list[int], list[_Step]]]:
        """Each position of a row, and the end of each phase: the stages to free there, then how
        those that are read become whole.
        """
        reads = [self._stages_read(entry) for entry in row]
        allowed = self.copies.unsharded if self.copies.zero == 3 else self.builder.job.stages
        limit = max([allowed, *map(len, reads)])
        phases = [(0, len(row))]
        if self.builder.job.phased:
            forwards = list(
                takewhile(lambda entry: all(part.op == "F" for part in entry.parts), row)
            )
            phases = [(0, len(forwards)), (len(forwards), len(row))]
        for begin, end in phases:
            for position, changes in enumerate(_of_phase(reads[begin:end], limit), begin):
                yield position, *changes

    def _stages_read(self, entry: AnyAction) -> list[int]:
        """The stages of which an entry of the row reads sharded parameters."""
        stages: dict[int, None] = {}
        for stage, op, mb in entry.parts if self.copies.cut else ():
            own = self.builder.job.kind(mb).programs[stage]
            program = getattr(own, op.lower())
            inputs = [own.roles[name] for name in program.inputs if name in own.roles]
            params = {leaf for role, leaf in inputs if role == "param"}
            if params.intersection(self.layouts[stage].shapes):
                stages[stage] = None
        return list(stages)

    def _reduces(self, stages: Iterable[int]) -> list[OfShare]:
        """REDUCE of the gradients of each stage that has any."""
        reduces: list[OfShare] = []
        for stage in stages:
            layout = self.layouts[stage]
            leaves = tuple(
                leaf for leaf in layout.leaves if grad(stage, leaf) in self.builder.accumulated
            )
            if leaves:
                reduces.append(
                    Reduce(
                        Share(stage, layout, leaves, self.copies, True, self.builder.job.accumulate)
                    )
                )
        return reduces


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


def _instruction(op: OfShare) -> Instruction:
    share = op.share
    after = reduced_grad if share.gradients else whole_param
    keys = {Reduce: grad, Unshard: param, Reshard: whole_param, Landed: after}[type(op)]
    values = tuple(keys(share.stage, leaf) for leaf in share.leaves)
    if isinstance(op, Landed):
        return Instruction(op, writes=values)
    return Instruction(op, reads=values)

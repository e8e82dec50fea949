# SPDX-License-Identifier: Apache-2.0
"""``Microbatches(iterator, count=)``: microbatches that come late.

A plan has TAKE before the first action of a rank that reads a microbatch of the caller, and TAKEN
at its end. If an iterator fails, TAKE goes on with the first microbatch in place of the missing
one, so that every rank sends and receives all that its plan says. At TAKEN the ranks tell each
other, and all raise the same error. Then nothing is under way, and the next call can begin.

Knows calls, plans and groups; no schedule by name and no backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import repeat
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from .. import tree
from ..actions.action import Action, AnyAction
from ..actions.product import load_pass
from ..collectives.group import Group, Pending
from ..devices import wide
from ..engine import side_inputs
from ..engine.arguments import Call
from ..engine.calls import surrounded
from ..engine.microbatches import Absent, Microbatches, Weighted
from ..engine.parts import Parts, Weights
from ..engine.request import Request
from ..errors import BatchError
from ..lowering.builder import Builder, input_gradients_of
from ..lowering.instruction import Instruction, Machine, Opcode, Registers, StepFn
from ..lowering.keys import BatchLeaf, Grad, Key, ReducedGrad, Seed, Side, Target
from ..lowering.plan import Feature
from ..tree import AbstractTree, Tree

#: The state of a call, fed as the side input of no stage.
PROGRESS: Key = (Side(-1, 0), 0)
#: What TAKE fills: x, the targets, or the side inputs of a stage.
Source: TypeAlias = tuple[Literal["x", "targets", "side"], int]


class Late(Microbatches):
    """Microbatches that come late; see ``Microbatches``, which makes them."""

    __slots__ = ("count", "iterator", "taken", "weights")

    def __init__(
        self,
        parts: Iterable[Tree] | Absent,
        count: int | None = None,
        weights: Sequence[float] | None = None,
    ):
        if type(count) is not int or count < 1:
            raise BatchError(
                f"Microbatches(count={count!r:.80}); give the number of microbatches that the "
                "iterator has, 1 at least"
            )
        if isinstance(parts, Absent):
            parts = repeat(parts)
        if isinstance(parts, (str, Mapping)) or not isinstance(parts, Iterable):
            raise BatchError(
                f"Microbatches(count={count}) takes an iterator of microbatches, not {parts!r:.80}"
            )
        try:
            self.weights = None if weights is None else [float(weight) for weight in weights]
        except (TypeError, ValueError) as error:
            raise BatchError(
                f"Microbatches(weights={weights!r:.80}); give a number for each microbatch"
            ) from error
        self.count = count
        self.iterator = iter(parts)
        self.taken: list[Tree] = []

    @property
    def late(self) -> Late:
        """Itself."""
        return self

    @property
    def shapes(self) -> Sequence[Tree]:
        """The first microbatch, for all."""
        return (take(self, 0),) * self.count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tree:
        return take(self, range(self.count)[index])

    def __iter__(self) -> Iterator[Tree]:
        return map(partial(take, self), range(self.count))

    def __repr__(self) -> str:
        return f"Microbatches(..., count={self.count}), of which {len(self.taken)} were taken"


def take(late: Late, m: int) -> Tree:
    """Microbatch ``m``, taken from the iterator if it was not taken before."""
    taken = late.taken
    while len(taken) <= m:
        where = f"microbatch {len(taken)} of {late.count}"
        try:
            taken.append(next(late.iterator))
        except StopIteration:
            raise BatchError(
                f"the iterator ended before {where}; give an iterator that has as many as count="
            ) from None
        except Exception as error:
            raise BatchError(
                f"the iterator raised {type(error).__name__} in place of {where}: {error}; make "
                "another one for the next call"
            ) from error
    return taken[m]


# ---- one call ----
@dataclass(frozen=True, eq=False)
class LateCall(Call):
    """A call with microbatches that come late."""

    def __post_init__(self) -> None:
        config = self.config
        late = [part for part in self.batch_parts if part.late is not None]
        if self.mode == "vjp" or config.capture or surrounded():
            raise BatchError(
                "microbatches that come late cannot be in fpipe.vjp, in a captured step, or in a "
                "stage or a torch.func transform; give all at once, as "
                "fpipe.Microbatches(list(batch))"
            )
        if len({id(_late(part).iterator) for part in late}) < len({id(part.late) for part in late}):
            raise BatchError(
                "two arguments take their microbatches from one iterator, so each would get every "
                "second one; give one of itertools.tee(iterator) to each"
            )
        self._check_weights()
        option = Taking(tuple(part.name for part in late), self._weighed and self._known is None)
        if option.after and any(stage.aux_loss for stage in config.functions):
            raise BatchError(
                "a stage has an auxiliary loss, so each rank needs the weights of fpipe.weighted "
                "before its first backward; give Microbatches(..., count=, weights=)"
            )
        if option not in config.more:
            variant = copy(config)  # with what follows from the other options
            vars(variant)["more"] = (*config.more, option)
            vars(self)["config"] = variant

    # ---- the loss ----
    @cached_property
    def _weighed(self) -> bool:
        """Whether ``fpipe.weighted`` computes weights from arguments that come late."""
        return any(part.late for part in self._weighing)

    @cached_property
    def _weighing(self) -> list[Parts]:
        """The arguments from which ``fpipe.weighted`` computes weights."""
        reduction = self.config.reduction
        if self.config.loss is None or not isinstance(reduction, Weighted):
            return []
        return [*self.targets, *side_inputs.of_stage(reduction.sides, self.sides).values()]

    @cached_property
    def _known(self) -> Sequence[float] | None:
        """The weights that the caller gave."""
        given = [_late(part).weights for part in self.batch_parts if part.late is not None]
        return next((weights for weights in given if weights is not None), None)

    def _check_weights(self) -> None:
        if self._known is None:
            return
        if not isinstance(self.config.reduction, Weighted):
            raise BatchError(
                "weights= are those of fpipe.weighted, and the reduction of the pipeline is "
                f"{self.config.reduction!r}; leave them out, or say pipeline(reduction=)"
            )
        if len(self._known) != self.units:
            raise BatchError(
                f"weights= has {len(self._known)} numbers for {self.units} losses; give one for "
                "each microbatch, and with slices= one for each slice"
            )

    def weights(self) -> Weights | None:
        """The weights of losses; those that are not known yet are entered at TAKEN."""
        if self._known is not None and self.config.loss is not None:
            counts = [torch.tensor(one, dtype=torch.float64, device="cpu") for one in self._known]
            shares = load_pass("weighting").shares(counts, self.config.copies)
            return Weights(None, shares, self.loss_scale)
        if not self._weighed:
            return super().weights()
        progress = self.progress
        if not any(part.absent for part in self._weighing):
            progress.base.append(_base(self, _count(progress, 0)))
        return Weights(None, progress.weights, self.loss_scale)

    # ---- what plans are fed ----
    @cached_property
    def progress(self) -> Progress:
        """What TAKE and TAKEN change."""
        return Progress(self, torch.is_grad_enabled())

    @cached_property
    def side_leaves(self) -> dict[tuple[int, int], list[Tree]]:
        """Those of a call, and the progress."""
        return {**super().side_leaves, (-1, 0): [self.progress]}

    def signature(self) -> tuple[Tree, ...]:
        """That of a call, and which arguments come late."""
        return (*super().signature(), self.config.more[-1])


@dataclass(frozen=True, eq=False)
class Progress:
    """What one call has taken, on the ranks of this process.

    ``counts`` are the weights before they are divided by their sum, by unit.
    """

    call: LateCall
    grad_enabled: bool  # where the caller is
    errors: list[BatchError] = field(default_factory=list)
    counts: dict[int, float] = field(default_factory=dict)
    base: list[float] = field(default_factory=list)  # a guess of the sum of all weights
    weights: list[Tensor] = field(default_factory=list)


def _late(part: Parts) -> Late:
    assert isinstance(part.late, Late)
    return part.late


# ---- what is taken ----
def row(progress: Progress, part: Parts, unit: int) -> Sequence[Tree]:
    """The leaves of an argument for a unit; those of the first one after an error."""
    if part.late is None:
        return part.rows[unit]
    m, place = divmod(unit, part.slices)
    late = _late(part)
    try:
        with torch.set_grad_enabled(progress.grad_enabled):
            value = take(late, m)
        found = AbstractTree.of(value)
        first = AbstractTree.of(late.taken[0])
        if found != first:
            texts = _texts(found, first)
            raise BatchError(
                f"microbatch {m} of {late.count} is {texts[0]}, and the first is {texts[1]}; those "
                "that come late are alike in structure, shapes, dtypes and strides: pad them "
                "(fpipe.pad), or give all at once"
            )
    except Exception as error:
        progress.errors.append(BatchError(f"{part.name}: {error}"))
        progress.errors[-1].__cause__ = error.__cause__
        return part.rows[unit]
    leaves = tree.leaves(value)
    if part.slices == 1:
        return leaves
    return load_pass("slicing").sliced(leaves, part.slices)[place]


def _texts(*trees: AbstractTree) -> list[str]:
    """Trees as texts that differ."""
    texts = [str(one) for one in trees]
    if len(set(texts)) == len(texts):
        return texts
    return [f"{one.structure} with {[tuple(aval) for aval in one.avals.values()]}" for one in trees]


def _count(progress: Progress, unit: int) -> float:
    """The weight of a unit before it is divided by the sum of all."""
    call = progress.call
    reduction = call.config.reduction
    assert isinstance(reduction, Weighted)
    sides = side_inputs.of_stage(reduction.sides, call.sides)

    def whole(part: Parts) -> Tree:
        return tree.unflatten(part.structures[unit], row(progress, part, unit))

    targets = [whole(target) for target in call.targets]
    try:
        side = {name: whole(part) for name, part in sides.items()}
        return float(load_pass("weighting").count(reduction, unit, targets, side))
    except BatchError as error:
        progress.errors.append(error)
        return 1.0


# ---- in plans ----
@dataclass(frozen=True)
class Taking:
    """The option: the names of the arguments that come late, and whether their weights are known
    only after they were taken.
    """

    names: tuple[str, ...]
    after: bool

    def features(self, request: Request) -> Iterator[Feature]:
        """TAKE before actions, and TAKEN at the end."""
        yield _Taken(self, request)


@dataclass(frozen=True)
class _Taken(Feature):
    option: Taking
    request: Request

    def before(self, action: AnyAction | None) -> None:
        for part in () if action is None else action.parts:
            if part.op == "F":
                self._take(part)

    def _late(self, name: str) -> bool:
        return any(one.startswith(name) for one in self.option.names)

    def _take(self, part: Action) -> None:
        """Emit TAKE before a forward that reads microbatches which come late."""
        stage, _, mb = part
        builder: Builder = self.builder
        job = builder.job
        x, targets, sides = self.request.kinds[self.request.kind_of[mb]]
        sources: list[Source] = []
        keys: list[Key] = []
        if stage == 0 and "x" in self.option.names:
            sources.append(("x", 0))
            keys += [(BatchLeaf(leaf), mb) for leaf in x.avals]
        readers = [stage]
        dtype = None
        if stage == job.stages - 1:
            readers.append(job.stages)
            loss = job.kind(mb).loss
            if self._late("target"):
                sources.append(("targets", 0))
                flags = [aval for target in targets for aval in target.tensors]
                keys += [(Target(n), mb) for n, aval in enumerate(flags) if aval is not None]
            if self.option.after and loss is not None:
                aval = loss.outputs.y.tensors[0]
                assert aval is not None
                dtype = aval.dtype
        for reader in readers:
            if self._late("side") and sides[reader].avals:
                sources.append(("side", reader))
                keys += [(Side(reader, leaf), mb) for leaf in sides[reader].avals]
        if dtype is not None:
            keys.append((Seed(job.stages), mb))
        if keys:
            op = Take(tuple(sources), dtype)
            builder.out.append(Instruction(op, part, (PROGRESS,), tuple(keys)))

    def finish(self) -> None:
        """Gradients are divided by the sum of the weights, where these were not known."""
        builder: Builder = self.builder
        keys = []
        if self.option.after and builder.job.training:
            keys = [key for key in builder.results() if isinstance(key[0], (Grad, ReducedGrad))]
            for mb in range(builder.job.schedule.units) if builder.job.wants_dx else ():
                if builder.job.schedule.placement.path(mb)[0] == builder.rank:
                    keys += input_gradients_of(builder.job.kind(mb), mb)
        op = Taken(self.option.after)
        builder.out.append(Instruction(op, None, (PROGRESS, *keys), tuple(keys)))


@dataclass(frozen=True, slots=True)
class Take(Opcode):
    """TAKE: take microbatches from the iterators of the caller.

    ``dtype``: that of the cotangent of the loss, whose weight depends on what is taken.
    """

    sources: tuple[Source, ...]
    dtype: torch.dtype | None
    kind = "TAKE"

    def __str__(self) -> str:
        names = [name if name != "side" else f"sides of {stage}" for name, stage in self.sources]
        return ", ".join(names)

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        (slot_of_progress,) = ins.reads
        kept = [slot >= 0 for slot in ins.writes]
        writes = tuple(slot for slot in ins.writes if slot >= 0)
        assert ins.action is not None
        unit = ins.action.microbatch
        note = machine.group.notes(machine.rank)
        text = f"taking microbatch {unit} for {ins.action}"

        def step(r: Registers) -> tuple[Pending, tuple[int, ...]]:
            progress = r.slots[slot_of_progress]

            def finish() -> tuple[Tensor, ...]:
                note(text)
                values = self._values(progress, unit, machine.device)
                return tuple(value for value, keep in zip(values, kept, strict=True) if keep)

            # Ranks of this process that can go on do so first.
            return Pending(finish, lambda: True), writes

        return step

    def _values(self, progress: Progress, unit: int, device: torch.device) -> Iterator[Tensor]:
        call = progress.call
        for name, stage in self.sources:
            if name == "x":
                parts: Iterable[Parts] = (call.x,)
            elif name == "targets":
                parts = call.targets
            else:
                parts = side_inputs.of_stage(call.config.sides[stage], call.sides).values()
            for part in parts:
                for leaf in filter(tree.is_tensor, row(progress, part, unit)):
                    yield leaf.to(device, non_blocking=device.type != "cpu")
        if self.dtype is not None:
            progress.counts[unit] = count = _count(progress, unit)
            share = torch.tensor(count / progress.base[0], dtype=torch.float64, device="cpu")
            weights = Weights(None, [share], call.loss_scale)
            yield weights.cotangent(0, self.dtype, device)


@dataclass(frozen=True, slots=True)
class Taken(Opcode):
    """TAKEN: raise on all ranks if an iterator failed on one.

    With ``after``, gradients were computed with weights that are parts of a guess of their sum, and
    become those of the sum.
    """

    after: bool
    kind = "TAKEN"
    updates = True

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        slot_of_progress, *slots = ins.reads

        def step(r: Registers) -> None:
            progress = r.slots[slot_of_progress]
            counts = _compared(progress, machine, self.after)
            # Gradients of a stage are complete once all weights were counted, also in one process.
            factor = 1.0
            if counts:  # the weights of all losses
                total = load_pass("weighting").total_of(counts, progress.call.config.copies)
                weights = [count / total for count in counts]
                device = machine.device
                progress.weights[:] = [weight.to(device, wide(device)) for weight in weights]
                factor = _base(progress.call, float(counts[0])) / float(total)
            for slot in slots:
                r.slots[slot] = r.slots[slot] * factor

        return step


def _compared(progress: Progress, machine: Machine, after: bool) -> list[Tensor]:
    """The weights that all ranks counted, if wanted. An error of any rank is raised on all."""
    call = progress.call
    group = machine.group
    copies = call.config.copies
    device = machine.device
    counts = [progress.counts.get(unit, 0.0) for unit in range(call.units if after else 0)]
    mine = torch.tensor([bool(progress.errors), *counts], dtype=torch.float64, device="cpu")
    failed, *counts = group.all_reduce(mine.to(device, wide(device))).to("cpu", torch.float64)
    groups = [group]
    if copies is not None:
        groups.append(copies.group)
        failed = copies.total(failed)
    if failed:
        raise _failure(progress, groups)
    return counts


def _failure(progress: Progress, groups: Sequence[Group]) -> BatchError:
    """The error that all ranks raise once they have completed the call."""
    cause = None
    text: str | None = None
    if progress.errors:
        cause = progress.errors[0].__cause__
        ranks = [one.global_rank(one.here[0]) for one in groups if len(one.here) < one.size]
        text = f"{f'rank {ranks[0]}, ' if ranks else ''}{progress.errors[0]}"
    for one in groups:
        text = next(filter(None, one.gather_objects(text)), None)
    error = BatchError(f"{text}. All ranks raise this, and can go on with their next call")
    error.__cause__ = cause
    groups[0].flush()
    for one in groups:
        one.leave(error)
    return error


def _base(call: Call, first: float) -> float:
    """A guess of the sum of all weights: all are like that of the first unit of each copy."""
    base = torch.tensor(call.units * (first or 1.0), dtype=torch.float64, device="cpu")
    copies = call.config.copies
    if copies is not None and not copies.mean:
        base = copies.total(base)
    return float(base)

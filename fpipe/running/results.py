"""What comes out of the registers after a run: the loss on every rank, gradients by stage, outputs, state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch

from .. import tree
from ..errors import MismatchError
from ..plans.keys import Key, Value, grad, reduced_grad
from ..plans.plan import ProgramSet, Scalar, spec_of
from ..programs.stage_programs import Programs
from ..schedules.actions import plain
from ..tree import Aval, Spec
from .feed import Values
from .loop import Registers
from .prepare import Resolved
from .scalars import added, packed, unpacked

if TYPE_CHECKING:
    from .pipeline import Pipeline


def collect(pipe: Pipeline, resolved: Resolved, regs: Mapping[int, Registers], values: Values) -> Results:
    """Read the registers of the ranks that live here."""
    return Results(pipe, resolved, regs, values)


def output_tree(resolved: Resolved, mb: int, tensors: Sequence[Any]) -> Any:
    """What the last stage returned for a microbatch, from the tensors in it."""
    face, made = resolved.interfaces[resolved.request.kind_of[mb]][-1], iter(tensors)
    static = dict(face.y_static)
    leaves = [static.get(j) if aval is None else next(made) for j, aval in enumerate(face.y_avals)]
    return tree.unflatten(face.y_spec, leaves)


class Results:
    """The results of a run, gathered on demand. Every process must ask for the same ones."""

    def __init__(self, pipe: Pipeline, resolved: Resolved, regs: Mapping[int, Registers], values: Values):
        self.pipe, self.resolved, self.regs, self.values = pipe, resolved, regs, values
        self.request = resolved.request
        self.placement = resolved.request.schedule.placement
        self.group = pipe.group
        self.stages, self.number = resolved.request.schedule.stages, resolved.request.schedule.microbatches
        self.alone = len(self.group.here) == self.group.size
        self._sent: torch.Tensor | None = None

    def _sent_early(self) -> bool:
        """Whether the loss is sent during the plan of the rank that computes it; every process has the same answer."""
        return next(iter(self.resolved.job.values())).early_loss and len(self._sources()) == 1

    def leave_loss(self) -> None:
        """The caller does not want the loss: receive it where it is sent early, otherwise exchange nothing."""
        if self._sent_early():
            self._loss()

    def send_loss(self) -> None:
        """Send the loss to the other ranks; every part of it is computed."""
        self._sent = self._loss()

    def _get(self, rank: int, key: Key) -> Any:
        return self.regs[rank].slots[self.resolved.bound[rank].plan.results[key]]

    def _kind(self, mb: int) -> tuple[int, ProgramSet]:
        index = self.request.kind_of[mb]
        return index, next(iter(self.resolved.job.values())).kinds[index]

    # ---- the loss -----------------------------------------------------------------------------------------------
    def loss(self) -> torch.Tensor:
        """The total: every microbatch's loss and auxiliary losses, weighted, added in microbatch order.

        Where there are copies of the pipeline, that of them all.
        """
        own = self._loss()
        return own if self.pipe.copies is None else self.pipe.copies.average(own)

    def _loss(self) -> torch.Tensor:
        if self._sent is not None:
            return self._sent
        sources = self._sources()
        if len(sources) == 1:  # one rank has them all, and tells the sum
            ((rank, wanted),) = sources
            mine = rank in self.group.here
            total = self._total({w[:2]: self._get(rank, w.key) for w in wanted}) if mine else None
            if self.alone:
                assert total is not None
                return total
            promoted = lambda: reduce(torch.promote_types, (w.aval.dtype for w in wanted))
            dtype = self.resolved.memo("the loss's dtype", promoted)
            return self._shared(None if total is None else [total], [dtype], rank)[0]
        found: dict[tuple[int, int], torch.Tensor] = {}
        for rank, wanted in sources:
            values = [self._get(rank, w.key) for w in wanted] if rank in self.group.here else None
            if not self.alone:
                values = self._shared(values, [w.aval.dtype for w in wanted], rank)
            assert values is not None
            found |= {w[:2]: value for w, value in zip(wanted, values, strict=True)}
        return self._total(found)

    def _total(self, found: Mapping[tuple[int, int], torch.Tensor]) -> torch.Tensor:
        """The weighted sum of scalars by (stage, microbatch), the losses under one stage past the last."""
        weights = self.values.weights
        assert weights is not None
        with_aux = sorted({stage for stage, _ in found if stage != self.stages})
        if weights.number is not None and not with_aux:
            return added([found[self.stages, mb] for mb in range(self.number)], weights.number)
        total = None
        for mb in range(self.number):
            value = found[self.stages, mb]
            extra = None
            for stage in with_aux:
                more = found.get((stage, mb))
                if more is not None:
                    more = more.to(value.device)
                    extra = more if extra is None else extra + more
            value = value if extra is None else value + extra
            value = value * weights.scale(mb, value)
            total = value if total is None else total + value.to(total.device)
        assert total is not None
        return total

    def _sources(self) -> list[tuple[int, list[Scalar]]]:
        """The ranks that compute losses or auxiliary losses, with these; every process has the same ones."""

        def find() -> list[tuple[int, list[Scalar]]]:
            some = next(iter(self.resolved.job.values()))
            return [(rank, self.resolved.job.get(rank, some).scalars(rank)) for rank in some.scalar_ranks()]

        return self.resolved.memo("scalars", find)

    def _shared(self, values: list[Any] | None, dtypes: list[torch.dtype], rank: int) -> list[Any]:
        """A rank's scalars on every rank, as one row of bytes: the tag of the plan that made them, then theirs."""
        device = self.group.device(self.group.here[0])
        tag = self.resolved.memo("tag", lambda: torch.tensor(self.resolved.tag, device=device))
        kinds = [tag.dtype, *dtypes]
        spec = Spec((sum(dtype.itemsize for dtype in kinds),), (1,), torch.uint8)
        (row,) = self.group.share(None if values is None else (packed([tag, *values]),), (spec,), rank)
        if values is not None:
            return values
        told, *made = unpacked(row, kinds)
        self._same_plan(rank, int(told))
        return [value.to(device) for value in made]

    def _same_plan(self, rank: int, tag: int) -> None:
        """Shapes may agree by chance where plans do not: then a loss would arrive that belongs to another step."""
        if tag != self.resolved.tag:
            raise MismatchError(
                f"rank {rank} ran another step than rank {self.group.here[0]} (other shapes, schedule or number of "
                "microbatches); make the same calls in the same order on every rank"
            )

    def _loss_key(self, loss: Programs, mb: int, leaf: int) -> Key:
        """Where a leaf of what the loss returned stands; it may be an input that was passed on."""
        name = loss.ys[leaf]
        assert name is not None
        _, kinds = self._kind(mb)
        return (kinds.graph.source(loss, self.stages, name), mb)

    def _programs(self, rank: int, kind: int, stage: int) -> Programs:
        return self.resolved.job[rank].kinds[kind].programs[stage]

    def aux(self) -> list[Any]:
        """The loss's second values, in microbatch order, on every rank."""
        out = []
        for mb in range(self.number):
            kind = self.request.kind_of[mb]
            loss = self.resolved.loss[kind]
            assert loss is not None
            rank = self.placement.path(mb)[-1]
            indices = [j for j, name in enumerate(loss.ys) if name is not None]
            made = [self._get(rank, self._loss_key(loss, mb, j)) for j in indices] if rank in self.group.here else None
            if not self.alone:
                specs = tuple(spec_of(a) for j in indices if (a := loss.y_avals[j]) is not None)
                made = self.group.share(None if made is None else tuple(made), specs, rank)
            assert made is not None
            out.append(loss.outputs.y.fill(made)[1])
        return out

    # ---- outputs ------------------------------------------------------------------------------------------------
    def outputs(self) -> list[Any] | None:
        """The last stage's outputs by microbatch, as ``outputs=`` says."""
        held = all(self.placement.path(mb)[-1] in self.group.here for mb in range(self.number))
        if not held and self.pipe.outputs == "last":
            return None
        return [self._output(mb) for mb in range(self.number)]

    def _output(self, mb: int) -> Any:
        kind, kinds = self._kind(mb)
        face = self.resolved.interfaces[kind][-1]
        rank = self.placement.path(mb)[-1]
        tensors = [j for j, aval in enumerate(face.y_avals) if aval is not None]
        avals = [face.y_avals[j] for j in tensors]
        mine = rank in self.group.here
        made: Sequence[Any] | None = None
        if mine:
            made = [self._get(rank, (source, mb)) for source in kinds.graph.outputs()]
        if self.pipe.outputs == "everywhere" and not self.alone:
            specs = tuple(spec_of(aval) for aval in avals if aval is not None)
            made = self.group.share(None if made is None else tuple(made), specs, rank)
        if made is None:
            device = self.group.device(self.group.here[0])
            made = [torch.zeros(a.shape, dtype=a.dtype, device=device) for a in avals if a is not None]
        return output_tree(self.resolved, mb, made)

    # ---- gradients ----------------------------------------------------------------------------------------------
    def param_grads(self, params: Any) -> Any:
        """One pytree per stage that lives here: a tensor for every leaf that is differentiated, else None."""
        out: list[Any] = [None] * self.stages
        copies = self.pipe.copies
        for stage, rank, spec, places in self.resolved.memo("grads", self._grad_places):
            held, leaves = self.regs[rank].slots, []
            for index, (slot, apart) in enumerate(places):
                if slot is None:
                    leaves.append(None)
                elif slot < 0:
                    value = self.values.params[stage][index]
                    leaves.append(torch.zeros_like(value, dtype=self.pipe.accumulate or value.dtype))
                else:
                    leaves.append(copies.divided(held[slot]) if apart and copies is not None else held[slot])
            out[stage] = tree.unflatten(spec, leaves)
        return tuple(out) if isinstance(params, tuple) else out

    def _grad_places(self) -> list[tuple[int, int, tree.Structure, list[tuple[int | None, bool]]]]:
        """By stage and leaf: the gradient's slot, -1 where nothing was added to it, None where none is asked for; and
        whether each copy of the pipeline has its own, to be divided by their number."""
        out = []
        for stage in self.pipe.here:
            group = self.request.params[stage]
            assert group is not None
            rank = next(r for r in self.placement.ranks_of(stage) if r in self.group.here)
            results = self.resolved.bound[rank].plan.results
            places: list[tuple[int | None, bool]] = []
            for index, leaf in enumerate(group.leaves):
                own, reduced = grad(stage, index), reduced_grad(stage, index)
                wanted = isinstance(leaf, Aval) and leaf.grad
                slot = results.get(reduced, results.get(own, -1)) if wanted else None
                places.append((slot, reduced not in results))
            out.append((stage, rank, group.spec, places))
        return out

    def input_grads(self) -> list[Any] | None:
        """The gradient of x by microbatch, on the rank of the first stage; None elsewhere."""
        out, copies = [], self.pipe.copies
        for mb in range(self.number):
            rank = self.placement.path(mb)[0]
            if rank not in self.group.here:
                return None
            kind, kinds = self._kind(mb)
            x = self.request.kinds[kind][0]
            leaves = []
            for index, leaf in enumerate(x.leaves):
                if not isinstance(leaf, Aval) or not leaf.grad:
                    leaves.append(None)
                    continue
                source = kinds.graph.cotangent(-1, index)
                value = self.values.x.rows[mb][index]
                found = torch.zeros_like(value) if source is None else self._get(rank, (source, mb))
                leaves.append(found if copies is None else copies.divided(found))
            out.append(tree.unflatten(x.spec, leaves))
        return out

    def states(self) -> list[Any]:
        """The state of each stage after its last microbatch; None where there is none or it lives elsewhere.

        A stage with several homes carries a state in each; that of the first home is told to the others.
        """
        out: list[Any] = [None] * self.stages
        for stage, function in enumerate(self.pipe.functions):
            homes = self.placement.ranks_of(stage)
            told = len(homes) > 1 and not self.alone
            if function.state and (told or stage in self.pipe.here):
                made = self._state(stage, self.placement.rank_of(stage), told)
                out[stage] = made if stage in self.pipe.here else None
        return out

    def _state(self, stage: int, home: int, told: bool) -> Any:
        row = self.request.schedule[home]
        last = [a.microbatch for a in plain(row) if a.stage == stage and a.op == "F"][-1:]
        kind = self.request.kind_of[last[0]] if last else 0
        spec, avals = self.resolved.interfaces[kind][stage].state
        values: Sequence[Any] | None = None
        if home in self.group.here:
            own = self._programs(home, kind, stage)
            names = own.new_state if last else ()
            values = [self._get(home, (Value(stage, n), last[0])) for n in names] or list(self.values.states[stage])
        if told:
            values = self.group.share(None if values is None else tuple(values), tuple(map(spec_of, avals)), home)
        assert values is not None and spec is not None
        return tree.unflatten(spec, values)

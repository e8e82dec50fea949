# SPDX-License-Identifier: Apache-2.0
"""What is read from the registers after a run: the loss on every rank, gradients by stage, outputs, state.

``ResultLayout`` is computed once for each signature, ``Results`` reads one run by it. Knows plans and registers; no
schedule by name and no backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple

import torch

from .. import tree
from ..errors import MismatchError
from ..plans.keys import Key, Value, grad, reduced_grad
from ..plans.plan import LoweringInput, ProgramSet, Scalar, spec_of
from ..programs.stage_programs import Programs
from ..schedules.actions import plain
from ..tree import Aval, Spec, Structure, Tree
from .arguments import Call
from .config import Config
from .prepare import Prepared
from .reduction import Weights
from .registers import Registers
from .scalars import added, packed, unpacked


def output_tree(prepared: Prepared, mb: int, tensors: Sequence[torch.Tensor]) -> Tree:
    """What the last stage returned for a microbatch, from the tensors in it."""
    return prepared.interfaces[prepared.request.kind_of[mb]][-1].y.fill(tensors)


class GradPlace(NamedTuple):
    """Where the gradient of a leaf is.

    ``slot`` is -1 where nothing was added to it, and None where no gradient is wanted. ``local``: other copies of the
    pipeline have no part in it.
    """

    slot: int | None
    local: bool


@dataclass(frozen=True, eq=False)
class ResultLayout:
    """Where the results of prepared plans are, computed once for each signature."""

    config: Config
    prepared: Prepared

    @cached_property
    def scalars(self) -> list[tuple[int, list[Scalar]]]:
        """The ranks that compute losses or auxiliary losses, with these; known to every process."""
        inputs, some = self.prepared.inputs, self._some
        return [(rank, inputs.get(rank, some).scalars(rank)) for rank in some.scalar_ranks()]

    @cached_property
    def loss_dtype(self) -> torch.dtype:
        """The dtype of the total of all losses of one rank."""
        ((_, wanted),) = self.scalars
        return reduce(torch.promote_types, (scalar.aval.dtype for scalar in wanted))

    @cached_property
    def tag(self) -> torch.Tensor:
        """The tag of the plans as a tensor."""
        group = self.config.group
        return torch.tensor(self.prepared.tag, device=group.device(group.here[0]))

    @cached_property
    def gradients(self) -> list[tuple[int, int, Structure, list[GradPlace]]]:
        """By stage: the rank here that holds it, the structure of its parameters, and where their gradients are."""
        out = []
        for stage in self.config.here:
            params = self.prepared.request.params[stage]
            assert params is not None
            rank = self.config.rank_here(stage)
            results = self.prepared.executables[rank].plan.results
            places = []
            for index, leaf in enumerate(params.leaves):
                local, reduced = grad(stage, index), reduced_grad(stage, index)
                wanted = isinstance(leaf, Aval) and leaf.grad
                slot = results.get(reduced, results.get(local, -1)) if wanted else None
                places.append(GradPlace(slot, reduced not in results))
            out.append((stage, rank, params.spec, places))
        return out

    @cached_property
    def early_loss(self) -> bool:
        """Whether the loss is sent during the plan of the rank that computes it; known to every process."""
        return self._some.early_loss and len(self.scalars) == 1

    @property
    def _some(self) -> LoweringInput:
        """What was lowered for a rank of this process: much of it is known of all ranks."""
        return next(iter(self.prepared.inputs.values()))

    def rank_of_output(self, mb: int) -> int:
        """The rank that runs the last stage, and the loss after it, for a microbatch."""
        return self.prepared.request.schedule.placement.path(mb)[-1]

    def kind(self, mb: int) -> tuple[int, ProgramSet]:
        """The kind of a microbatch, by number and by its programs on a rank of this process."""
        index = self.prepared.request.kind_of[mb]
        return index, self._some.kinds[index]

    def programs(self, rank: int, kind: int, stage: int) -> Programs:
        """The programs of a stage on a rank of this process."""
        return self.prepared.inputs[rank].kinds[kind].programs[stage]

    def loss_key(self, loss: Programs, mb: int, leaf: int) -> Key:
        """The key of a leaf that the loss returned; it may be an input that the loss returned as it was."""
        name = loss.ys[leaf]
        assert name is not None
        return (self.kind(mb)[1].graph.source(loss, self.config.stages, name), mb)


class Results:
    """The results of a run, gathered on demand. Every process must ask for the same ones."""

    def __init__(
        self, layout: ResultLayout, regs: Mapping[int, Registers], call: Call, weights: Weights | None
    ):  # fmt: skip
        self.layout, self.regs, self.call, self.weights = layout, regs, call, weights
        self.config, self.prepared, self.request = layout.config, layout.prepared, layout.prepared.request
        self.group, self.placement = self.config.group, self.request.schedule.placement
        self.stages, self.number = self.config.stages, call.number
        self._sent_loss: torch.Tensor | None = None

    def leave_loss(self) -> None:
        """Receive the loss where it is sent in any case, although the caller does not want it."""
        if self.layout.early_loss:
            self._loss()

    def send_loss(self) -> None:
        """Send the loss to the other ranks, once all its parts are computed."""
        self._sent_loss = self._loss()

    def _get(self, rank: int, key: Key) -> torch.Tensor:
        return self.regs[rank].slots[self.prepared.executables[rank].plan.results[key]]

    def _share(
        self, values: Sequence[torch.Tensor] | None, avals: Iterable[Aval | None], rank: int
    ) -> Sequence[torch.Tensor]:
        """A rank's values on every rank: None is passed where that rank is on another process."""
        if not self.config.local:
            specs = tuple(spec_of(aval) for aval in avals if aval is not None)
            return self.group.share(None if values is None else tuple(values), specs, rank)
        assert values is not None
        return values

    # ---- the loss -----------------------------------------------------------------------------------------------
    def loss(self) -> torch.Tensor:
        """The total: every microbatch's loss and auxiliary losses, weighted, added in microbatch order.

        With copies of the pipeline, that of all copies.
        """
        loss, copies = self._loss(), self.config.copies
        return loss if copies is None else copies.average(loss)

    def _loss(self) -> torch.Tensor:
        if self._sent_loss is not None:
            return self._sent_loss
        by_rank = self.layout.scalars
        if len(by_rank) == 1:  # this rank adds them up and sends the total
            ((rank, wanted),) = by_rank
            here = rank in self.group.here
            total = self._total({(s.stage, s.mb): self._get(rank, s.key) for s in wanted}) if here else None
            if self.config.local:
                assert total is not None
                return total
            return self._share_scalars(None if total is None else [total], [self.layout.loss_dtype], rank)[0]
        scalars: dict[tuple[int, int], torch.Tensor] = {}
        for rank, wanted in by_rank:
            values = [self._get(rank, s.key) for s in wanted] if rank in self.group.here else None
            if not self.config.local:
                values = self._share_scalars(values, [s.aval.dtype for s in wanted], rank)
            assert values is not None
            scalars |= {(s.stage, s.mb): value for s, value in zip(wanted, values, strict=True)}
        return self._total(scalars)

    def _total(self, scalars: Mapping[tuple[int, int], torch.Tensor]) -> torch.Tensor:
        """The weighted sum of scalars by (stage, microbatch), the losses under one stage past the last."""
        weights = self.weights
        assert weights is not None
        with_aux = sorted({stage for stage, _ in scalars if stage != self.stages})
        if weights.number is not None and not with_aux:
            return added([scalars[self.stages, mb] for mb in range(self.number)], weights.number)
        losses = []
        for mb in range(self.number):
            value = scalars[self.stages, mb]
            extras = [scalars[s, mb].to(value.device) for s in with_aux if (s, mb) in scalars]
            losses.append(value + reduce(torch.add, extras) if extras else value)
        return weights.sum(losses)

    def _share_scalars(
        self, values: list[torch.Tensor] | None, dtypes: Sequence[torch.dtype], rank: int
    ) -> list[torch.Tensor]:
        """A rank's scalars on every rank, as one row of bytes that begins with the tag of the plan."""
        tag = self.layout.tag
        kinds = [tag.dtype, *dtypes]
        spec = Spec((sum(dtype.itemsize for dtype in kinds),), (1,), torch.uint8)
        (row,) = self.group.share(None if values is None else (packed([tag, *values]),), (spec,), rank)
        if values is not None:
            return values
        their_tag, *scalars = unpacked(row, kinds)
        if int(their_tag) != self.prepared.tag:  # shapes may agree by chance: then the loss is that of another step
            raise MismatchError(
                f"rank {rank} ran another step than rank {self.group.here[0]} (other shapes, schedule or number of "
                "microbatches); make the same calls in the same order on every rank"
            )
        return [value.to(tag.device) for value in scalars]

    def aux(self) -> list[Tree]:
        """The loss's second values, in microbatch order, on every rank."""
        return [self._aux(mb) for mb in range(self.number)]

    def _aux(self, mb: int) -> Tree:
        loss = self.prepared.loss[self.request.kind_of[mb]]
        assert loss is not None
        rank = self.layout.rank_of_output(mb)
        indices = [j for j, name in enumerate(loss.ys) if name is not None]
        here = rank in self.group.here
        values = [self._get(rank, self.layout.loss_key(loss, mb, j)) for j in indices] if here else None
        values = self._share(values, [loss.outputs.y.tensors[j] for j in indices], rank)
        return loss.outputs.y.fill(values)[1]

    # ---- outputs ------------------------------------------------------------------------------------------------
    def outputs(self) -> list[Tree] | None:
        """The last stage's outputs by microbatch, as ``outputs=`` says."""
        here = all(self.layout.rank_of_output(mb) in self.group.here for mb in range(self.number))
        if not here and self.config.outputs == "last":
            return None
        return [self._output(mb) for mb in range(self.number)]

    def _output(self, mb: int) -> Tree:
        kind, programs = self.layout.kind(mb)
        avals = self.prepared.interfaces[kind][-1].y.tensors
        rank = self.layout.rank_of_output(mb)
        values: Sequence[torch.Tensor] | None = None
        if rank in self.group.here:
            values = [self._get(rank, (source, mb)) for source in programs.graph.outputs()]
        if self.config.outputs == "everywhere":
            values = self._share(values, avals, rank)
        if values is None:
            device = self.group.device(self.group.here[0])
            values = [torch.zeros(a.shape, dtype=a.dtype, device=device) for a in avals if a is not None]
        return output_tree(self.prepared, mb, values)

    # ---- gradients ----------------------------------------------------------------------------------------------
    def param_grads(self) -> Sequence[Tree]:
        """One pytree per stage of this process: a tensor for every leaf that is differentiated, else None."""
        out: list[Tree] = [None] * self.stages
        copies = self.config.copies
        for stage, rank, spec, places in self.layout.gradients:
            slots, leaves = self.regs[rank].slots, []
            for index, (slot, local) in enumerate(places):
                if slot is None:
                    leaves.append(None)
                elif slot < 0:
                    value = self.call.leaves[stage][0][index]
                    leaves.append(torch.zeros_like(value, dtype=self.config.accumulate or value.dtype))
                else:
                    leaves.append(copies.divided(slots[slot]) if local and copies is not None else slots[slot])
            out[stage] = tree.unflatten(spec, leaves)
        return tuple(out) if isinstance(self.call.params, tuple) else out

    def input_grads(self) -> list[Tree] | None:
        """The gradient of x by microbatch, on the rank of the first stage; None elsewhere."""
        out, copies = [], self.config.copies
        for mb in range(self.number):
            rank = self.placement.path(mb)[0]
            if rank not in self.group.here:
                return None
            kind, programs = self.layout.kind(mb)
            x = self.request.kinds[kind][0]
            leaves: list[torch.Tensor | None] = []
            for index, leaf in enumerate(x.leaves):
                if not isinstance(leaf, Aval) or not leaf.grad:
                    leaves.append(None)
                    continue
                source = programs.graph.cotangent(-1, index)
                grad = (
                    torch.zeros_like(self.call.x.rows[mb][index]) if source is None else self._get(rank, (source, mb))
                )
                leaves.append(grad if copies is None else copies.divided(grad))
            out.append(tree.unflatten(x.spec, leaves))
        return out

    # ---- state --------------------------------------------------------------------------------------------------
    def states(self) -> list[Tree]:
        """The state of each stage after its last microbatch; None for stages without one or on other processes.

        Each replica of a stage carries a state; that of the first replica is sent to the others.
        """
        out: list[Tree] = [None] * self.stages
        for stage, function in enumerate(self.config.functions):
            replicated = len(self.placement.ranks_of(stage)) > 1 and not self.config.local
            here = stage in self.config.here
            if function.state and (replicated or here):
                state = self._state(stage, self.placement.rank_of(stage), replicated)
                out[stage] = state if here else None
        return out

    def _state(self, stage: int, rank: int, replicated: bool) -> Tree:
        row = self.request.schedule[rank]
        last = [a.microbatch for a in plain(row) if a.stage == stage and a.op == "F"][-1:]
        kind = self.request.kind_of[last[0]] if last else 0
        state = self.prepared.interfaces[kind][stage].state
        assert state is not None
        values: Sequence[torch.Tensor] | None = None
        if rank in self.group.here:
            names = self.layout.programs(rank, kind, stage).new_state if last else ()
            values = [self._get(rank, (Value(stage, n), last[0])) for n in names] or list(
                self.call.state_leaves[stage][0]
            )
        if replicated:
            values = self._share(values, state.tensors, rank)
        assert values is not None
        return state.fill(values)

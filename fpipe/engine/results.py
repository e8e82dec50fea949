# SPDX-License-Identifier: Apache-2.0
"""Reads the results of a run from the registers: the loss and the gradients. ``outputs`` reads the
others.

``ResultLayout`` says where the results are, once for each signature. ``Results`` reads those of one
run. Knows plans and registers; no schedule by name and no backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import NamedTuple

import torch

from .. import tree
from ..lowering.instruction import Registers
from ..lowering.job import LoweringInput
from ..lowering.keys import Key
from ..lowering.value_graph import ValueGraph, grad, reduced_grad
from ..tree import Structure, Tree
from .arguments import Call
from .config import Config
from .parts import Weights, added
from .prepare import Prepared, sends_loss_early
from .scalars import Scalars, Tensors, gather_total, shared, total_of


class GradPlace(NamedTuple):
    """Where the gradient of a leaf is.

    ``slot`` is None where the leaf is not differentiated, and -1 where its gradient is zero.
    ``local`` is set where the pipeline has copies, and this leaf is not reduced over them.
    """

    slot: int | None
    local: bool


class StageGradients(NamedTuple):
    """Where the gradients of a stage are: a rank of this process, and a place for each leaf of the
    parameters.
    """

    stage: int
    rank: int
    structure: Structure
    places: list[GradPlace]


@dataclass(frozen=True, eq=False)
class ResultLayout:
    """Where the results of prepared plans are, computed once for each signature."""

    config: Config
    prepared: Prepared

    @cached_property
    def scalars(self) -> list[Scalars]:
        """The losses and auxiliary losses of each rank that computes some.

        Every process knows them all, but only the slots of its own ranks.
        """
        inputs = self.prepared.inputs
        executables = self.prepared.executables
        by_rank = []
        for rank in self._any_input.scalar_ranks():
            scalars = inputs.get(rank, self._any_input).scalars(rank)
            slots = None
            if rank in executables:
                results = executables[rank].plan.results
                slots = [results[scalar.key] for scalar in scalars]
            places = [(scalar.stage, scalar.mb) for scalar in scalars]
            dtypes = [scalar.aval.dtype for scalar in scalars]
            by_rank.append(Scalars(rank, places, dtypes, slots))
        return by_rank

    @cached_property
    def losses(self) -> tuple[int, list[int]] | None:
        """The rank that computes all losses, and their slots by microbatch.

        None if several ranks compute them, if the rank is not here, or with auxiliary losses.
        """
        rank, places, _, slots = self.scalars[0]
        if len(self.scalars) > 1 or self.aux_stages or slots is None:
            return None
        slot_of = {mb: slot for (_, mb), slot in zip(places, slots, strict=True)}
        return rank, [slot_of[mb] for mb in range(len(slot_of))]

    @cached_property
    def aux_stages(self) -> list[int]:
        """The stages with auxiliary losses."""
        stages = {stage for scalars in self.scalars for stage, _ in scalars.places}
        return sorted(stages - {self.config.stages})

    @cached_property
    def loss_dtype(self) -> torch.dtype:
        """The dtype of the total loss, where one rank computes all losses."""
        (scalars,) = self.scalars
        return reduce(torch.promote_types, scalars.dtypes)

    @cached_property
    def tag(self) -> torch.Tensor:
        """The tag of the plans as a tensor."""
        return torch.tensor(self.prepared.tag, device=self.config.device)

    @cached_property
    def gradients(self) -> list[StageGradients]:
        """Where the gradients of each stage of this process are."""
        by_stage = []
        for stage in self.config.here:
            params = self.prepared.request.params[stage]
            rank = self.config.rank_here(stage)
            assert params is not None
            results = self.prepared.executables[rank].plan.results
            places = []
            for index in range(len(params.leaves)):
                reduced = reduced_grad(stage, index)
                slot = None
                if index in params.wanted:
                    slot = results.get(reduced, results.get(grad(stage, index), -1))
                local = self.config.copies is not None and reduced not in results
                places.append(GradPlace(slot, local))
            by_stage.append(StageGradients(stage, rank, params.spec, places))
        return by_stage

    @cached_property
    def early_loss(self) -> bool:
        """Whether the rank that computes the loss sends it during its plan."""
        if self.config.local or len(self.scalars) != 1:
            return False
        return sends_loss_early(self.config, self.prepared.request)

    @property
    def _any_input(self) -> LoweringInput:
        """What the plan of some rank of this process was lowered from."""
        return next(iter(self.prepared.inputs.values()))

    def graph(self, mb: int) -> ValueGraph:
        """How values of a microbatch pass between stages."""
        return self._any_input.kind(mb).graph


class Results:
    """The loss and the gradients of a run, read when they are asked for.

    A result may be sent to other processes then, so every process must ask for the same ones in the
    same order. ``Outputs`` has the other results.
    """

    def __init__(
        self,
        layout: ResultLayout,
        regs: Mapping[int, Registers],
        call: Call,
        weights: Weights | None,
        cotangents: Iterable[Sequence[torch.Tensor | None]] = (),
    ):
        self.layout = layout
        self.regs = regs
        self.call = call
        self.weights = weights
        self.cotangents = cotangents
        self.config = layout.config
        self.prepared = layout.prepared
        self.request = layout.prepared.request
        self.group = self.config.group
        self.path = self.request.schedule.placement.path
        self.stages = self.config.stages
        self.number = call.number
        # Results of several microbatches are joined to a batch, which copies them.
        self.joins = call.number > 1 and (call.x.uniform or call.x.slices > 1)

    def discard_loss(self) -> None:
        """Receive the loss where it is sent early, although the caller drops it."""
        if self.layout.early_loss:
            self.pipeline_loss()

    def _get(self, rank: int, keys: Iterable[Key]) -> list[torch.Tensor] | None:
        """Results of a rank; None on other processes."""
        if rank not in self.group.here:
            return None
        slots = self.regs[rank].slots
        results = self.prepared.executables[rank].plan.results
        return [slots[results[key]] for key in keys]

    # ---- the loss ----
    def loss(self) -> torch.Tensor:
        """The total of all losses and auxiliary losses: weighted, then added in the order of
        microbatches. It is that of all copies of the pipeline.
        """
        loss = self.pipeline_loss()
        copies = self.config.copies
        return loss if copies is None else copies.average(loss)

    def pipeline_loss(self) -> torch.Tensor:
        """The total loss of this copy of the pipeline.

        Ranks that do not compute it receive it, unless that happened early, during the plan.
        """
        early = [r.loss for r in self.regs.values() if r.loss is not None]
        if early:
            return early[0]
        layout = self.layout
        weights = self.weights
        if layout.losses is not None and weights is not None and weights.common is not None:
            rank, loss_slots = layout.losses
            slots = self.regs[rank].slots
            total = added([slots[slot] for slot in loss_slots], weights.common)
            return self.share([total], [layout.loss_dtype], rank)[0]
        add = partial(total_of, weights=weights, with_aux=layout.aux_stages, stages=self.stages)
        return gather_total(layout.scalars, self.regs, self.share, add)

    def share(self, values: Tensors | None, dtypes: Sequence[torch.dtype], rank: int) -> Tensors:
        """Send the scalars of a rank to all others; returns them on every rank."""
        if self.config.local:
            assert values is not None
            return values
        return shared(self.group, self.layout.tag, self.prepared.tag, values, dtypes, rank)

    # ---- gradients ----
    def param_grads(self) -> Sequence[Tree]:
        """The gradients of the parameters of each stage; None for stages on other processes.

        Leaves that are not differentiated have the gradient None.
        """
        by_stage: list[Tree] = [None] * self.stages
        for stage, rank, structure, places in self.layout.gradients:
            slots = self.regs[rank].slots
            grads = []
            for index, (slot, local) in enumerate(places):
                if slot is None:
                    grads.append(None)
                elif slot < 0:
                    value = self.call.leaves[stage][0][index]
                    dtype = tree.sum_dtype(value.dtype, self.config.accumulate)
                    grads.append(torch.zeros_like(value, dtype=dtype))
                else:
                    grads.append(self._of_all_copies(slots[slot]) if local else slots[slot])
            by_stage[stage] = tree.unflatten(structure, grads)
        return tuple(by_stage) if isinstance(self.call.params, tuple) else by_stage

    def _of_all_copies(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the loss of all copies of the pipeline.

        Only this copy computes ``grad``, which is that of its own loss.
        """
        return grad if self.config.copies is None else self.config.copies.divided(grad)

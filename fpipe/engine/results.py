# SPDX-License-Identifier: Apache-2.0
"""What is read from the registers after a run: the loss on every rank, gradients by stage, outputs,
state.

``ResultLayout`` is computed once for each signature, ``Results`` reads one run by it. Knows plans
and registers; no schedule by name and no backend.
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
from .scalars import Scalars, gathered, shared, total_of


class GradPlace(NamedTuple):
    """Where the gradient of a leaf is.

    ``slot`` is -1 where nothing was added to it, and None where no gradient is wanted. ``local``:
    the pipeline has copies, and the others have no part in it.
    """

    slot: int | None
    local: bool


@dataclass(frozen=True, eq=False)
class ResultLayout:
    """Where the results of prepared plans are, computed once for each signature."""

    config: Config
    prepared: Prepared

    @cached_property
    def scalars(self) -> list[Scalars]:
        """The scalars of each rank that computes some; all but slots are known to every process."""
        inputs = self.prepared.inputs
        executables = self.prepared.executables
        out = []
        for rank in self._some.scalar_ranks():
            found = inputs.get(rank, self._some).scalars(rank)
            slots = (
                [executables[rank].plan.results[s.key] for s in found]
                if rank in executables
                else None
            )
            out.append(
                Scalars(
                    rank, [(s.stage, s.mb) for s in found], [s.aval.dtype for s in found], slots
                )
            )
        return out

    @cached_property
    def losses(self) -> tuple[int, list[int]] | None:
        """The rank and slots of all losses by microbatch, where they are here and there are no
        auxiliary ones.
        """
        (rank, places, _, slots), *others = self.scalars
        if others or self.aux_stages or slots is None:
            return None
        at = {mb: slot for (_, mb), slot in zip(places, slots, strict=True)}
        return rank, [at[mb] for mb in range(len(at))]

    @cached_property
    def aux_stages(self) -> list[int]:
        """The stages with auxiliary losses."""
        return sorted(
            {stage for each in self.scalars for stage, _ in each.places} - {self.config.stages}
        )

    @cached_property
    def loss_dtype(self) -> torch.dtype:
        """The dtype of the total of all losses of one rank."""
        (scalars,) = self.scalars
        return reduce(torch.promote_types, scalars.dtypes)

    @cached_property
    def tag(self) -> torch.Tensor:
        """The tag of the plans as a tensor."""
        return torch.tensor(self.prepared.tag, device=self.config.device)

    @cached_property
    def gradients(self) -> list[tuple[int, int, Structure, list[GradPlace]]]:
        """By stage: the rank here that holds it, the structure of its parameters, and where their
        gradients are.
        """
        out = []
        for stage in self.config.here:
            params = self.prepared.request.params[stage]
            rank = self.config.rank_here(stage)
            assert params is not None
            results = self.prepared.executables[rank].plan.results
            places = []
            for index in range(len(params.leaves)):
                reduced = reduced_grad(stage, index)
                slot = (
                    results.get(reduced, results.get(grad(stage, index), -1))
                    if index in params.wanted
                    else None
                )
                places.append(
                    GradPlace(slot, self.config.copies is not None and reduced not in results)
                )
            out.append((stage, rank, params.spec, places))
        return out

    @cached_property
    def early_loss(self) -> bool:
        """Whether the loss is sent during the plan of the rank that computes it; known to every
        process.
        """
        return (
            not self.config.local
            and sends_loss_early(self.config, self.prepared.request)
            and len(self.scalars) == 1
        )

    @property
    def _some(self) -> LoweringInput:
        """What was lowered for a rank of this process: much of it is known of all ranks."""
        return next(iter(self.prepared.inputs.values()))

    def graph(self, mb: int) -> ValueGraph:
        """How values of a microbatch pass between stages."""
        return self._some.kind(mb).graph


class Results:
    """The loss and gradients of a run, gathered on demand. Every process must ask for the same
    ones.

    ``Outputs`` has the other results.
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
        self.joins = call.number > 1 and (
            call.x.uniform or call.x.slices > 1
        )  # results are joined to a batch, and so copied

    def leave_loss(self) -> None:
        """Receive the loss where it is sent in any case, although the caller does not want it."""
        if self.layout.early_loss:
            self.pipeline_loss()

    def _get(self, rank: int, keys: Iterable[Key]) -> list[torch.Tensor] | None:
        """Results of a rank, on its process."""
        if rank not in self.group.here:
            return None
        slots = self.regs[rank].slots
        results = self.prepared.executables[rank].plan.results
        return [slots[results[key]] for key in keys]

    # ---- the loss ----
    def loss(self) -> torch.Tensor:
        """The total: every microbatch's loss and auxiliary losses, weighted, added in microbatch
        order.

        With copies of the pipeline, that of all copies.
        """
        loss = self.pipeline_loss()
        copies = self.config.copies
        return loss if copies is None else copies.average(loss)

    def pipeline_loss(self) -> torch.Tensor:
        """The total of this copy of the pipeline, received where other ranks compute it."""
        sent = [r.loss for r in self.regs.values() if r.loss is not None]  # during the plan
        if sent:
            return sent[0]
        layout = self.layout
        weights = self.weights
        if layout.losses is not None and weights is not None and weights.number is not None:
            rank, places = layout.losses
            slots = self.regs[rank].slots
            total = added([slots[place] for place in places], weights.number)
            return self.share([total], [layout.loss_dtype], rank)[0]
        add = partial(total_of, weights=weights, with_aux=layout.aux_stages, stages=self.stages)
        return gathered(layout.scalars, self.regs, self.share, add)

    def share(
        self, values: Sequence[torch.Tensor] | None, dtypes: Sequence[torch.dtype], rank: int
    ) -> Sequence[torch.Tensor]:
        """A rank's scalars on every rank."""
        if self.config.local:
            assert values is not None
            return values
        return shared(self.group, self.layout.tag, self.prepared.tag, values, dtypes, rank)

    # ---- gradients ----
    def param_grads(self) -> Sequence[Tree]:
        """One pytree per stage of this process: a tensor for every leaf that is differentiated,
        else None.
        """
        out: list[Tree] = [None] * self.stages
        for stage, rank, spec, places in self.layout.gradients:
            slots = self.regs[rank].slots
            leaves = []
            for index, (slot, local) in enumerate(places):
                if slot is None:
                    leaves.append(None)
                elif slot < 0:
                    value = self.call.leaves[stage][0][index]
                    leaves.append(
                        torch.zeros_like(
                            value, dtype=tree.sum_dtype(value.dtype, self.config.accumulate)
                        )
                    )
                else:
                    leaves.append(self._of_all(slots[slot]) if local else slots[slot])
            out[stage] = tree.unflatten(spec, leaves)
        return tuple(out) if isinstance(self.call.params, tuple) else out

    def _of_all(self, grad: torch.Tensor) -> torch.Tensor:
        """A gradient in which other copies of the pipeline have no part, as one of the loss of all
        copies.
        """
        return grad if self.config.copies is None else self.config.copies.divided(grad)

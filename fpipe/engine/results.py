# SPDX-License-Identifier: Apache-2.0
"""Reads the results of a run from the registers: the loss and the gradients. ``outputs`` reads the
others.

``ResultLayout`` says where the results are, once for each signature. ``Results`` reads those of one
run. Knows plans and registers; no schedule by name and no backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..lowering.instruction import Registers
from ..lowering.job import Job
from ..lowering.keys import Key
from ..lowering.value_graph import ValueGraph, grad, reduced_grad, spec_of
from ..tree import Aval, Structure, Tree
from .arguments import Call
from .config import Config
from .parts import Weights, added
from .prepare import Prepared


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


class RankScalars(NamedTuple):
    """The losses and auxiliary losses that a rank computes.

    ``places`` are their (stage, microbatch); the stage past the last stands for the loss. ``slots``
    is None if the rank is on another process.
    """

    rank: int
    places: list[tuple[int, int]]
    avals: list[Aval]
    slots: list[int] | None


@dataclass(frozen=True, eq=False)
class ResultLayout:
    """Where the results of prepared plans are, computed once for each signature."""

    config: Config
    prepared: Prepared

    @cached_property
    def scalars(self) -> list[RankScalars]:
        """The losses and auxiliary losses of each rank that computes some.

        Every process knows them all, but only the slots of its own ranks.
        """
        jobs = self.prepared.jobs
        executables = self.prepared.executables
        by_rank = []
        for rank, scalars in sorted(self._any_job.scalars().items()):
            slots = None
            if rank in executables:
                scalars = jobs[rank].scalars()[rank]
                results = executables[rank].plan.results
                slots = [results[scalar.key] for scalar in scalars]
            places = [(scalar.stage, scalar.mb) for scalar in scalars]
            by_rank.append(RankScalars(rank, places, [scalar.aval for scalar in scalars], slots))
        return by_rank

    @cached_property
    def aux_stages(self) -> list[int]:
        """The stages with auxiliary losses."""
        stages = {stage for of_rank in self.scalars for stage, _ in of_rank.places}
        return sorted(stages - {self.config.stages})

    @cached_property
    def total(self) -> Aval:
        """The total loss in abstract form, where one rank computes all losses."""
        avals = self.scalars[0].avals
        dtype = reduce(torch.promote_types, (aval.dtype for aval in avals))
        return avals[0]._replace(dtype=dtype)

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
            by_stage.append(StageGradients(stage, rank, params.structure, places))
        return by_stage

    @property
    def _any_job(self) -> Job:
        """What the plan of some rank of this process was lowered from."""
        return next(iter(self.prepared.jobs.values()))

    def graph(self, mb: int) -> ValueGraph:
        """How values of a microbatch pass between stages."""
        return self._any_job.kind(mb).graph


class Results:
    """The loss and the gradients of a run, read when they are asked for.

    A result may be sent to other processes then, so every process must ask for the same ones in the
    same order. ``RunResults`` has the others, too.
    """

    def __init__(
        self,
        layout: ResultLayout,
        regs: dict[int, Registers],
        call: Call,
        weights: Weights | None,
        cotangents: Iterable[Sequence[Tensor | None]] = (),
    ):
        self.layout = layout
        self.regs = regs
        self.call = call
        self.weights = weights
        self.cotangents = cotangents
        self.returned: dict[int, Any] = {}  # by the function each=, by microbatch
        self.config = layout.config
        self.prepared = layout.prepared
        self.request = layout.prepared.request
        self.group = self.config.group
        self.path = self.request.schedule.placement.path
        self.stages = self.config.stages
        self.units = call.units
        # Whether the results of microbatches are joined to a batch, and so are copied.
        self.joins = call.units > 1 and (call.x.uniform or call.x.slices > 1)

    def _get(self, rank: int, keys: Iterable[Key]) -> list[Tensor] | None:
        """Results of a rank; None on other processes."""
        if rank not in self.group.here:
            return None
        slots = self.regs[rank].slots
        results = self.prepared.executables[rank].plan.results
        return [slots[results[key]] for key in keys]

    # ---- the loss ----
    def loss(self) -> Tensor:
        """The total of all losses and auxiliary losses: weighted, then added in the order of
        microbatches. It is that of all copies of the pipeline.
        """
        loss = self.pipeline_loss()
        copies = self.config.copies
        return loss if copies is None else copies.average(loss)

    def pipeline_loss(self) -> Tensor:
        """The total loss of this copy of the pipeline. Ranks that do not compute it receive it."""
        losses: dict[tuple[int, int], Tensor] = {}
        one_rank = len(self.layout.scalars) == 1
        for rank, places, avals, slots in self.layout.scalars:
            values = None
            if slots is not None:
                values = [self.regs[rank].slots[slot] for slot in slots]
            if one_rank:  # it shares the total alone
                if values is not None:
                    values = [self._total(dict(zip(places, values, strict=True)))]
                return self.share(values, [self.layout.total], rank)[0]
            losses |= zip(places, self.share(values, avals, rank), strict=True)
        return self._total(losses)

    def _total(self, losses: Mapping[tuple[int, int], Tensor]) -> Tensor:
        """The weighted sum of losses by (stage, microbatch); the stage past the last is the loss.

        Auxiliary losses are added to the loss of their microbatch.
        """
        weights = self.weights
        assert weights is not None
        totals = [losses[self.stages, mb] for mb in range(self.units)]
        if self.layout.aux_stages:
            for mb, loss in enumerate(totals):
                places = [(stage, mb) for stage in self.layout.aux_stages]
                extras = [losses[place].to(loss.device) for place in places if place in losses]
                totals[mb] = loss + reduce(torch.add, extras) if extras else loss
        if weights.common is None:
            return added(weights.terms(totals))
        return added(totals, weights.common)

    def share(
        self, values: Sequence[Tensor] | None, avals: Iterable[Aval], rank: int
    ) -> Sequence[Tensor]:
        """The values of ``rank``, on every process. Where it is on another one, pass None."""
        if not self.config.local:
            sent = None if values is None else tuple(values)
            return self.group.share(sent, tuple(map(spec_of, avals)), rank)
        assert values is not None
        return values

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

    def _of_all_copies(self, grad: Tensor) -> Tensor:
        """A gradient of this copy's loss as one of the loss of all copies of the pipeline.

        No other copy has a part in it, so nothing is added: a mean only divides it.
        """
        return grad if self.config.copies is None else self.config.copies.divided(grad)

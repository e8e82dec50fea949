# SPDX-License-Identifier: Apache-2.0
"""What goes into the registers before a run: parameters, microbatches, weights, cotangents. Knows no schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from ..plans.keys import BatchLeaf, Key, OutputCotangent, Param, Seed, Side, State, Target
from ..plans.plan import Plan
from .arguments import Call
from .prepare import Prepared
from .reduction import Weights
from .registers import Registers

#: Returns a row of leaves of a call.
Row: TypeAlias = Callable[[Call], Sequence[Any]]


class Feeder:
    """The source of each fed value of a plan, read from its keys once."""

    def __init__(self, plan: Plan, prepared: Prepared, device: torch.device):
        self.device = device
        self.move = device.type != "cpu"
        self.rows: dict[tuple[object, ...], tuple[Row, list[tuple[int, int]]]] = {}  # with (slot, index in the row)
        self.params: list[int] = []
        self.returned = prepared.request.wants_dx  # the gradient of x may be the cotangent of a loss itself
        self.seeds: dict[torch.dtype, list[tuple[int, int]]] = {}
        self.cotangents: list[tuple[int, int, int]] = []
        for key, slot in plan.feeds.items():
            match key:
                case (Seed(stage), int(mb)):
                    self.seeds.setdefault(_seed_dtype(prepared, stage, mb), []).append((slot, mb))
                case (OutputCotangent(leaf), int(mb)):
                    self.cotangents.append((slot, mb, leaf))
                case _:
                    place, row, leaf = _source(key, prepared)
                    self.rows.setdefault(place, (row, []))[1].append((slot, leaf))
                    if isinstance(key[0], Param):
                        self.params.append(slot)

    def fill(self, r: Registers, call: Call, weights: Weights | None) -> None:
        """Write the values of a call into the registers."""
        slots = r.slots
        for row_of, places in self.rows.values():
            row = row_of(call)
            for slot, index in places:
                slots[slot] = row[index]
        for slot in self.params:
            slots[slot] = slots[slot].detach()
        if self.move:
            for _, places in self.rows.values():
                for slot, _ in places:
                    if isinstance(slots[slot], torch.Tensor):
                        slots[slot] = slots[slot].to(self.device, non_blocking=True)
        if weights is None:
            return
        for dtype, seeds in self.seeds.items():  # one cotangent for all losses where one number weights them all
            common = None if weights.number is None else weights.cotangent(0, dtype, self.device)
            if common is not None and self.returned:
                common = common.clone()
            for slot, mb in seeds:
                slots[slot] = weights.cotangent(mb, dtype, self.device) if common is None else common

    def fill_cotangents(self, r: Registers, cotangents: Sequence[Sequence[Any]]) -> None:
        """Write the cotangents of the outputs into the registers."""
        for slot, mb, index in self.cotangents:
            r.slots[slot] = cotangents[mb][index].detach().to(self.device)


def _source(key: Key, prepared: Prepared) -> tuple[tuple[object, ...], Row, int]:
    """The row that holds a fed value, by what identifies it and as a function of the call, and the index in it."""
    match key:
        case (Param(stage, leaf), None):
            return (Param, stage), lambda call: call.leaves[stage][0], leaf
        case (State(stage, leaf), None):
            return (State, stage), lambda call: call.state_leaves[stage][0], leaf
        case (Side(stage, leaf), int(mb)):
            return (Side, stage, mb), lambda call: call.side_leaves[stage, mb], leaf
        case (BatchLeaf(leaf), int(mb)):
            return (BatchLeaf, mb), lambda call: call.x.rows[mb], leaf
        case (Target(leaf), int(mb)):
            for which, target in enumerate(prepared.request.kinds[prepared.request.kind_of[mb]][1]):
                if leaf < len(target.leaves):
                    return (Target, which, mb), lambda call, which=which: call.targets[which].rows[mb], leaf
                leaf -= len(target.leaves)
    raise AssertionError(f"no value is fed under {key}")


def _seed_dtype(prepared: Prepared, stage: int, mb: int) -> torch.dtype:
    """The dtype of the cotangent of a stage's auxiliary loss or, one past the last stage, of the loss."""
    kind = prepared.request.kind_of[mb]
    if stage == prepared.request.schedule.stages:
        loss = prepared.loss[kind]
        aval = None if loss is None else loss.outputs.y.tensors[0]
    else:
        aval = next(p[stage].daux for p in (job.kinds[kind].programs for job in prepared.inputs.values()) if stage in p)
    assert aval is not None
    return aval.dtype

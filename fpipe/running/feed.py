# SPDX-License-Identifier: Apache-2.0
"""What goes into the registers before a run: parameters, microbatches, weights, cotangents. Knows no schedule."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from ..plans.keys import BatchLeaf, OutputCotangent, Param, Seed, Side, State, Target
from ..plans.plan import Plan
from .arguments import Call
from .prepare import Prepared
from .reduction import Weights
from .registers import Registers


class Feeder:
    """The source of each fed value of a plan, read from its keys once."""

    def __init__(self, plan: Plan, prepared: Prepared, device: torch.device):
        self.device = device
        self.move = device.type != "cpu"
        self.params: list[tuple[int, int, int]] = []
        self.states: list[tuple[int, int, int]] = []
        self.x: list[tuple[int, int, int]] = []
        self.targets: dict[int, list[tuple[int, int, int]]] = {}
        self.sides: list[tuple[int, int, int, int]] = []
        self.seeds: dict[torch.dtype, list[tuple[int, int]]] = {}
        self.cotangents: list[tuple[int, int, int]] = []
        for key, slot in plan.feeds.items():
            match key:
                case (Param(stage, leaf), None):
                    self.params.append((slot, stage, leaf))
                case (State(stage, leaf), None):
                    self.states.append((slot, stage, leaf))
                case (Side(stage, leaf), int(mb)):
                    self.sides.append((slot, stage, mb, leaf))
                case (BatchLeaf(leaf), int(mb)):
                    self.x.append((slot, mb, leaf))
                case (Target(leaf), int(mb)):
                    which, place = _target(prepared, mb, leaf)
                    self.targets.setdefault(which, []).append((slot, mb, place))
                case (OutputCotangent(leaf), int(mb)):
                    self.cotangents.append((slot, mb, leaf))
                case (Seed(stage), int(mb)):
                    self.seeds.setdefault(_seed_dtype(prepared, stage, mb), []).append((slot, mb))
                case _:
                    raise AssertionError(f"no value is fed under {key}")

    def fill(self, r: Registers, call: Call, weights: Weights | None) -> None:
        """Write the values of a call into the registers."""
        slots = r.slots
        for slot, stage, index in self.params:
            slots[slot] = call.leaves[stage][0][index].detach()
        for slot, stage, index in self.states:
            slots[slot] = call.state_leaves[stage][0][index]
        if self.x:
            rows = call.x.rows
            for slot, mb, index in self.x:
                slots[slot] = rows[mb][index]
        for which, places in self.targets.items():
            rows = call.targets[which].rows
            for slot, mb, index in places:
                slots[slot] = rows[mb][index]
        for slot, stage, mb, index in self.sides:
            slots[slot] = call.side_leaves[stage, mb][index]
        if weights is not None:
            self._seed(slots, weights)
        if self.move:
            fed = (self.params, self.states, self.x, *self.targets.values(), self.sides)
            for slot, *_ in chain.from_iterable(fed):
                if isinstance(slots[slot], torch.Tensor):
                    slots[slot] = slots[slot].to(self.device, non_blocking=True)

    def _seed(self, slots: list[Any], weights: Weights) -> None:
        """The cotangents of the losses: one for all where one number weighs them all."""
        for dtype, places in self.seeds.items():
            common = None if weights.number is None else weights.cotangent(0, dtype, self.device)
            for slot, mb in places:
                slots[slot] = weights.cotangent(mb, dtype, self.device) if common is None else common

    def fill_cotangents(self, r: Registers, cotangents: Sequence[Sequence[Any]]) -> None:
        """Write the cotangents of the outputs into the registers."""
        for slot, mb, index in self.cotangents:
            r.slots[slot] = cotangents[mb][index].detach().to(self.device)


def _target(prepared: Prepared, mb: int, index: int) -> tuple[int, int]:
    """The target to which a leaf of all targets belongs, for a microbatch, and its index in that target."""
    kind = prepared.request.kind_of[mb]
    for which, target in enumerate(prepared.request.kinds[kind][1]):
        if index < len(target.leaves):
            return which, index
        index -= len(target.leaves)
    raise AssertionError("the loss reads a leaf of no target")


def _seed_dtype(prepared: Prepared, stage: int, mb: int) -> torch.dtype:
    kind = prepared.request.kind_of[mb]
    if stage == prepared.request.schedule.stages:
        loss = prepared.loss[kind]
        assert loss is not None and loss.outputs.y.tensors[0] is not None
        return loss.outputs.y.tensors[0].dtype
    rank = next(iter(r for r in prepared.inputs if stage in prepared.inputs[r].kinds[kind].programs))
    aux = prepared.inputs[rank].kinds[kind].programs[stage].daux
    assert aux is not None
    return aux.dtype

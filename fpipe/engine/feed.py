# SPDX-License-Identifier: Apache-2.0
"""What goes into the registers before a run: parameters, microbatches, weights, cotangents. Knows
no schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ..lowering.instruction import Registers
from ..lowering.keys import BatchLeaf, Key, OutputCotangent, Param, Seed, Side, State, Target
from ..lowering.plan import Plan
from .arguments import Call
from .parts import Weights
from .prepare import Prepared

#: Returns rows of leaves of a call.
Table: TypeAlias = Callable[[Call], Mapping[Any, Sequence[Any]] | Sequence[Any]]


class Feeder:
    """The source of each fed value of a plan, read from its keys once."""

    def __init__(self, plan: Plan, prepared: Prepared, device: torch.device):
        self.device = device
        self.move = device.type != "cpu"
        self.tables: dict[
            object, tuple[Table, list[tuple[int, Any, int]]]
        ] = {}  # with (slot, row, index in it)
        self.params: list[int] = []
        self.returned = (
            prepared.request.wants_dx
        )  # the gradient of x may be the cotangent of a loss itself
        self.seeds: dict[torch.dtype, list[tuple[int, int]]] = {}
        self.cotangents: list[tuple[int, int, int]] = []
        for key, slot in plan.feeds.items():
            match key:
                case (Seed(stage), int(mb)):
                    self.seeds.setdefault(_seed_dtype(prepared, stage, mb), []).append((slot, mb))
                case (OutputCotangent(leaf), int(mb)):
                    self.cotangents.append((slot, mb, leaf))
                case _:
                    name, table, row, leaf = _source(key, prepared)
                    self.tables.setdefault(name, (table, []))[1].append((slot, row, leaf))
                    if isinstance(key[0], Param):
                        self.params.append(slot)

    def fill(self, r: Registers, call: Call, weights: Weights | None) -> None:
        """Write the values of a call into the registers."""
        slots = r.slots
        for table_of, places in self.tables.values():
            table = table_of(call)
            for slot, row, index in places:
                slots[slot] = table[row][index]
        for slot in self.params:
            slots[slot] = slots[slot].detach()
        if self.move:
            for _, places in self.tables.values():
                for slot, *_ in places:
                    if isinstance(slots[slot], torch.Tensor):
                        slots[slot] = slots[slot].to(self.device, non_blocking=True)
        if weights is None:
            return
        for (
            dtype,
            seeds,
        ) in self.seeds.items():  # one cotangent for all losses where one number weights them all
            common = None if weights.number is None else weights.cotangent(0, dtype, self.device)
            if common is not None and self.returned:
                common = common.clone()
            for slot, mb in seeds:
                slots[slot] = (
                    weights.cotangent(mb, dtype, self.device) if common is None else common
                )


def _source(key: Key, prepared: Prepared) -> tuple[object, Table, Any, int]:
    """The table that holds a fed value, by what identifies it and as a function of the call; the
    row, the index.
    """
    match key:
        case (Param(stage, leaf), None):
            return (Param, stage), lambda call: call.leaves[stage], 0, leaf  # beside the structure
        case (State(stage, leaf), None):
            return (State, stage), lambda call: call.state_leaves[stage], 0, leaf
        case (Side(stage, leaf), int(mb)):
            return Side, lambda call: call.side_leaves, (stage, mb), leaf
        case (BatchLeaf(leaf), int(mb)):
            return BatchLeaf, lambda call: call.x.rows, mb, leaf
        case (Target(leaf), int(mb)):
            for which, target in enumerate(prepared.request.kinds[prepared.request.kind_of[mb]][1]):
                if leaf < len(target.leaves):
                    return (
                        (Target, which),
                        lambda call, which=which: call.targets[which].rows,
                        mb,
                        leaf,
                    )
                leaf -= len(target.leaves)
    raise AssertionError(f"no value is fed under {key}")


def _seed_dtype(prepared: Prepared, stage: int, mb: int) -> torch.dtype:
    """The dtype of the cotangent of a stage's auxiliary loss or, one past the last stage, of the
    loss.
    """
    kind = prepared.request.kind_of[mb]
    if stage == prepared.request.schedule.stages:
        loss = prepared.loss[kind]
        aval = None if loss is None else loss.outputs.y.tensors[0]
    else:
        aval = next(
            p[stage].daux
            for p in (job.kinds[kind].programs for job in prepared.inputs.values())
            if stage in p
        )
    assert aval is not None
    return aval.dtype

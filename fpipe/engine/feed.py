# SPDX-License-Identifier: Apache-2.0
"""Fills the registers before a run: with parameters, microbatches and cotangents of losses.

Knows no schedule.
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

#: Rows of leaves of a call, such as its microbatches.
Table: TypeAlias = Callable[[Call], Mapping[Any, Sequence[Any]] | Sequence[Any]]
#: A slot, and the row and the index in it of the leaf that the slot is filled with.
Entry: TypeAlias = tuple[int, Any, int]


class Feeder:
    """Fills the registers of one rank. Its tables are built once, from the keys of the plan.

    * ``tables``: each table with the slots that are filled from it
    * ``params``: the slots of parameters
    * ``seeds``: the slots of the cotangents of losses with their microbatches, by dtype
    * ``cotangents``: the slots of the cotangents of outputs, each with microbatch and leaf
    """

    def __init__(self, plan: Plan, prepared: Prepared, device: torch.device):
        self.device = device
        self.move = device.type != "cpu"
        self.tables: dict[object, tuple[Table, list[Entry]]] = {}
        self.params: list[int] = []
        # The gradient of x may be the cotangent of a loss itself. The caller may write into it.
        self.copy_seeds = prepared.request.wants_dx
        self.seeds: dict[torch.dtype, list[tuple[int, int]]] = {}
        self.cotangents: list[tuple[int, int, int]] = []
        for key, slot in plan.feeds.items():
            match key:
                case (Seed(stage), int(mb)):
                    dtype = _seed_dtype(prepared, stage, mb)
                    self.seeds.setdefault(dtype, []).append((slot, mb))
                case (OutputCotangent(leaf), int(mb)):
                    self.cotangents.append((slot, mb, leaf))
                case _:
                    name, table, row, leaf = _source(key, prepared)
                    _, entries = self.tables.setdefault(name, (table, []))
                    entries.append((slot, row, leaf))
                    if isinstance(key[0], Param):
                        self.params.append(slot)

    def fill(self, r: Registers, call: Call, weights: Weights | None) -> None:
        """Write the values of a call into the registers."""
        slots = r.slots
        for table_of, entries in self.tables.values():
            table = table_of(call)
            for slot, row, index in entries:
                slots[slot] = table[row][index]
        for slot in self.params:
            slots[slot] = slots[slot].detach()
        if self.move:
            for _, entries in self.tables.values():
                for slot, _, _ in entries:
                    if isinstance(slots[slot], torch.Tensor):
                        slots[slot] = slots[slot].to(self.device, non_blocking=True)
        if weights is None:
            return
        for dtype, seeds in self.seeds.items():
            if weights.common is None:
                for slot, mb in seeds:
                    slots[slot] = weights.cotangent(mb, dtype, self.device)
                continue
            cotangent = weights.cotangent(0, dtype, self.device)
            if self.copy_seeds:
                cotangent = cotangent.clone()
            for slot, _ in seeds:
                slots[slot] = cotangent


def _source(key: Key, prepared: Prepared) -> tuple[object, Table, Any, int]:
    """Where the value of a key comes from: the name of a table, the table, a row and an index."""
    match key:
        case (Param(stage, leaf), None):
            # Row 0 has the leaves; the structure follows it.
            return (Param, stage), lambda call: call.leaves[stage], 0, leaf
        case (State(stage, leaf), None):
            return (State, stage), lambda call: call.state_leaves[stage], 0, leaf
        case (Side(stage, leaf), int(mb)):
            return Side, lambda call: call.side_leaves, (stage, mb), leaf
        case (BatchLeaf(leaf), int(mb)):
            return BatchLeaf, lambda call: call.x.rows, mb, leaf
        case (Target(leaf), int(mb)):
            # Keys number the leaves of all targets together.
            targets = prepared.request.kinds[prepared.request.kind_of[mb]].targets
            number = 0
            while leaf >= len(targets[number].leaves):
                leaf -= len(targets[number].leaves)
                number += 1
            return (Target, number), lambda call: call.targets[number].rows, mb, leaf
    raise AssertionError(f"no value is fed under {key}")


def _seed_dtype(prepared: Prepared, stage: int, mb: int) -> torch.dtype:
    """The dtype of the cotangent of a stage's auxiliary loss.

    The stage past the last is the loss.
    """
    kind = prepared.request.kind_of[mb]
    if stage == prepared.request.schedule.stages:
        loss = prepared.loss[kind]
        assert loss is not None
        aval = loss.outputs.y.tensors[0]
    else:
        programs = [job.program_sets[kind].programs for job in prepared.jobs.values()]
        aval = next(of_rank[stage].daux for of_rank in programs if stage in of_rank)
    assert aval is not None
    return aval.dtype

"""The promise of API.md, bit for bit: every schedule against plain autograd that runs one
microbatch after another.

The oracle (``models.py``) shares no code with the engine. Where a stage has replicas, each
accumulates for itself and the two are added; state of a replicated stage is that of its first home.
"""

from __future__ import annotations

from functools import cache, reduce
from typing import Any

import optree
import pytest
import torch

import fpipe
from fpipe.actions.action import unfused
from models import MODELS, SEED, Model, one, state_after
from sample import covering
from schedule_table import TABLE, Case, cases

RANKS = (1, 2, 4)
MICROBATCHES = range(1, 13)


def rows(schedule: fpipe.Schedule, rank: int, stage: int, ops: str) -> list[int]:
    """The microbatches for which a rank runs some operation of a stage, in its order."""
    return [a.microbatch for a in unfused(schedule[rank]) if a.stage == stage and a.op in ops]


def expected(model: Model, schedule: fpipe.Schedule) -> tuple[Any, list[list[torch.Tensor]]]:
    """Loss and gradients as API.md promises them."""
    stages, m = schedule.stages, schedule.microbatches
    each = [one(model.name, stages, m, k) for k in range(m)]
    homes: dict[tuple[int, int], list[torch.Tensor]] = {}
    for stage in range(stages):
        for leaf in range(len(each[0].grads[stage])):
            parts = []
            for rank in schedule.placement.ranks_of(stage):
                order = rows(schedule, rank, stage, "BW")
                added = [each[k].grads[stage][leaf] for k in order]
                parts.append(
                    reduce(torch.add, added)
                    if added
                    else torch.zeros_like(each[0].grads[stage][leaf])
                )
            homes[stage, leaf] = parts
    for group in model.tied(stages):
        members = [(int(name.split(".")[0]), 0) for name in group]
        together = [part for member in members for part in homes[member]]
        for member in members:
            homes[member] = together
    grads = [
        [reduce(torch.add, homes[s, i]) for i in range(len(each[0].grads[s]))]
        for s in range(stages)
    ]
    return reduce(torch.add, [k.loss for k in each]), grads


@cache
def sampled() -> dict[tuple[str, str], list[Case]]:
    """The cases of a model under a schedule that ``make test`` runs: with each schedule each model,
    each number of ranks and each number of microbatches, and each model with each pair of numbers
    that occurs with it.
    """
    table = [(case, name) for case in cases(RANKS, MICROBATCHES) for name in MODELS]
    found: dict[tuple[str, str], list[Case]] = {
        (name, family.name): [] for name in MODELS for family in TABLE
    }
    for case, name in covering(
        table, lambda row: (row[1], row[0].name, row[0].ranks, row[0].microbatches), pairs=True
    ):
        found[name, case.name].append(case)
    return found


def differ(a: Any, b: Any) -> bool:
    return not (a.dtype == b.dtype and torch.equal(a, b))


def check(model: Model, case: Case) -> None:
    schedule = case.make()
    stages, params, state = model.make(case.stages)
    x, t = model.batch(case.microbatches)
    pipe = fpipe.pipeline(
        stages,
        schedule,
        loss=model.loss,
        group=fpipe.local(case.ranks),
        seed=SEED,
        tied=model.tied(case.stages),
    )
    side = {} if state is None else {"state": state}
    argnums = (0, 1) if x.is_floating_point() else (0,)
    value, got = fpipe.value_and_grad(pipe, argnums, has_aux=model.has_aux)(params, x, t, **side)
    loss, grads = expected(model, schedule)
    value = value if isinstance(value, tuple) else (value,)
    assert not differ(value[0], loss), f"{case}: loss {value[0]} is not {loss}"
    for stage, (mine, want) in enumerate(zip(got[0], grads, strict=True)):
        for leaf, (a, b) in enumerate(zip(optree.tree_leaves(mine), want, strict=True)):
            assert not differ(a, b), (
                f"{case}: gradient {leaf} of stage {stage} differs by {(a - b).abs().max()}"
            )
    each = [one(model.name, case.stages, case.microbatches, k) for k in range(case.microbatches)]
    if len(argnums) == 2:
        assert not differ(got[1], torch.cat([k.dx for k in each])), f"{case}: input gradient"
    if model.has_aux:
        assert optree.tree_all(
            optree.tree_map(lambda a, b: a == b, value[1], [k.aux for k in each])
        ), f"{case}: aux"
    if state is not None:
        first = [schedule.placement.ranks_of(s)[0] for s in range(case.stages)]
        order = [rows(schedule, rank, s, "F") for s, rank in enumerate(first)]
        after = state_after(model.name, case.stages, case.microbatches, order)
        pairs = zip(optree.tree_leaves(value[-1]), optree.tree_leaves(after), strict=True)
        assert not any(differ(a, b) for a, b in pairs), f"{case}: state"


@pytest.mark.covering
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("family", [family.name for family in TABLE])
def test_bit_for_bit(family: str, name: str, long: bool):
    for case in cases(RANKS, MICROBATCHES, name=family) if long else sampled()[name, family]:
        check(MODELS[name], case)


def test_the_table_holds_every_schedule():
    known = {family.name for family in TABLE}
    assert set(fpipe.schedule_names()) <= known

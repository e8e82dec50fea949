"""Stages on several ranks: gradients are added in the order of microbatches, bit for bit as in one
process that runs the unsplit model."""

from __future__ import annotations

from functools import reduce
from itertools import product
from typing import Any

import optree
import pytest
import torch

import fpipe
from fpipe import Schedule, make_schedule
from models import MODELS, SEED, Model, one
from sample import covering

NAMES = ("GPipe", "1F1B", "Eager1F1B", "ZBH1", "ZBH2", "ZB1P", "ZB2P")
COPIES = [c for n in (1, 2, 3, 4) for c in product((1, 2, 3, 4), repeat=n) if max(c) > 1]


def expected(model: Model, stages: int, microbatches: int) -> tuple[Any, list[list[torch.Tensor]]]:
    """Plain autograd on one microbatch after another, added in their order."""
    each = [one(model.name, stages, microbatches, k) for k in range(microbatches)]
    grads = [
        [reduce(torch.add, [k.grads[s][i] for k in each]) for i in range(len(each[0].grads[s]))]
        for s in range(stages)
    ]
    for group in model.tied(stages):
        members = [int(name.split(".")[0]) for name in group]
        total = reduce(torch.add, [grads[s][0] for s in members])
        for s in members:
            grads[s][0] = total
    return reduce(torch.add, [k.loss for k in each]), grads


def equal(got: Any, loss: Any, grads: list[list[torch.Tensor]], here: Any = None) -> None:
    value, found = got
    value = value[0] if isinstance(value, tuple) else value
    assert torch.equal(value, loss)
    for stage, want in enumerate(grads):
        if here is None or stage in here:
            for mine, other in zip(optree.tree_leaves(found[stage]), want, strict=True):
                assert mine.dtype == other.dtype
                assert torch.equal(mine, other), f"stage {stage}"


def run(model: Model, schedule: Schedule, group: Any, **options: Any) -> tuple[Any, Any]:
    stages, params, state = model.make(schedule.stages)
    x, t = model.batch(schedule.microbatches)
    pipe = fpipe.pipeline(
        stages,
        schedule,
        loss=model.loss,
        group=group,
        seed=SEED,
        tied=model.tied(schedule.stages),
        **options,
    )
    side = {} if state is None else {"state": state}
    step = fpipe.value_and_grad(pipe, has_aux=model.has_aux)
    return step(pipe.place(params), x, t, **side)


def check(name: str, copies: tuple[int, ...], microbatches: int, model: Model) -> None:
    schedule = make_schedule(name, sum(copies), microbatches, replicas=copies)
    got = run(model, schedule, fpipe.local(sum(copies)))
    equal(got, *expected(model, len(copies), microbatches))


@pytest.mark.parametrize("name", NAMES)
def test_bits_are_those_of_one_process(name: str, long: bool) -> None:
    """1 to 4 copies of each of 1 to 4 stages."""
    models = ("mlp", "transformer", "tied", "moe")
    table = [(c, m, model) for c in COPIES for m in (4, 5, 7) for model in models]
    if not long:
        table = covering(table, lambda row: (*row[0], row[1], row[2]))
    for copies, microbatches, model in table:
        check(name, copies, microbatches, MODELS[model])

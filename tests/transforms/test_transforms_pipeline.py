"""Transforms over real pipelines: local, and on four processes, beside plain torch on the unsplit
model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import fpipe
from common import same
from fake_processes import merge
from fpipe import transforms as T
from transform_table import STAGES, TABLE, TIED, follow, inputs

VOCABULARY, WIDTH, BATCH, STEPS = 11, 6, 16, 3


def embed(p: Any, tokens: Tensor) -> Tensor:
    return p["wte"][tokens]


def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w1"] + p["b"]) @ p["w2"]


def head(p: Any, x: Tensor) -> Tensor:
    return x @ p["wte"].T


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, y)


STAGE_FUNCTIONS = [embed, *[block] * (STAGES - 2), head]


def network() -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: 0.5 * torch.randn(shape, generator=generator)
    wte = draw(VOCABULARY, WIDTH)
    blocks = [{"b": draw(8), "w1": draw(WIDTH, 8), "w2": draw(8, WIDTH)} for _ in range(STAGES - 2)]
    return [{"wte": wte}, *blocks, {"wte": wte.clone()}]


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        tuple(torch.randint(VOCABULARY, (BATCH,), generator=generator) for _ in "xy")
        for _ in range(STEPS)
    ]  # type: ignore[misc]


def train(
    group: Any, schedule: str, seen: Callable[[Any], None] = lambda state: None
) -> tuple[list[Any], list[float]]:
    """Three steps; the first one's loss has a scale that overflows, and so is left out."""
    pipe = fpipe.pipeline(
        STAGE_FUNCTIONS, schedule, loss=cross_entropy, microbatches=8, group=group, tied=TIED
    )
    tx = fpipe.chain(
        fpipe.skip_nonfinite(over=pipe),
        fpipe.clip_by_global_norm(0.5, over=pipe, exact=True),
        fpipe.adamw(0.01),
    )
    params = pipe.place(network())
    state, norms = tx.init(params), []
    for number, (x, y) in enumerate(batches()):
        grads = fpipe.grad(pipe)(params, x, y)
        if number == 0 and grads[2] is not None:
            grads[2]["b"][0] = torch.nan
        updates, state = tx.update(grads, state, params)
        params = fpipe.apply_updates(params, updates, donate=number == 2)
        norms.append(state[1].norm.item())
    assert state[0].skipped.item() == 1
    return params, norms


def plain() -> tuple[list[Any], list[float]]:
    """The same by torch alone, with one embedding."""
    params = network()
    params[-1] = params[0]
    own = optree.tree_map(lambda leaf: leaf.requires_grad_(), params)
    optimizer = torch.optim.AdamW(optree.tree_leaves(own[:-1]), 0.01)
    norms = [0.0]
    for x, y in batches()[1:]:
        for stage, function in enumerate(STAGE_FUNCTIONS):
            x = function(own[stage], x)
        optimizer.zero_grad()
        cross_entropy(x, y).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(optree.tree_leaves(own[:-1]), 0.5).item())
        optimizer.step()
    return own, norms


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBV"])
def test_training_is_torchs(schedule: str):
    params, norms = train(fpipe.local(4), schedule)
    expected, wanted = plain()
    assert norms == pytest.approx(wanted, rel=1e-5)
    assert max(wanted) > 0.5  # so that something is clipped
    for got, want in zip(optree.tree_leaves(params), optree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-5)


def on_a_process() -> tuple[Any, dict[str, Any], Any, list[float]]:
    """One rank's part: training, every row of the table, a mean over all, and the largest elements
    where one rank has NaN.
    """
    group = fpipe.init()
    trained = train(group, "ZBV")
    pipe = fpipe.pipeline(
        [block] * STAGES,
        "Interleaved1F1B",
        loss=cross_entropy,
        microbatches=4,
        group=group,
        tied=TIED,
    )
    parts = {}
    for name, row in TABLE.items():
        params, grads = inputs(row)
        parts[name] = follow(
            row.make(pipe), placed(params, pipe), [placed(g, pipe) for g in grads]
        )[0]
    ones = {"w": torch.full((3,), float(group.here[0]))}
    largest = [
        T.global_norm([torch.tensor([value])], p=math.inf, shards=group).item()
        for bad in range(group.size)
        for value in [math.nan if group.here[0] == bad else float(group.here[0])]
    ]
    return trained, parts, T.mean_over(group).update([None, ones], ())[0], largest


def placed(params: list[Any], pipe: Any) -> list[Any]:
    return [part if stage in pipe.here else None for stage, part in enumerate(params)]


def test_four_processes():
    """Every row, the same bits as on the whole model; and a training run, those of the local
    group. The maximum of gloo lost a NaN of another rank than the first.
    """
    found = fpipe.launch(on_a_process, ranks=4, timeout=100)
    params, norms = train(fpipe.local(4), "ZBV")
    assert same(merge([trained for (trained, _), *_ in found]), params)
    assert all(others == norms for (_, others), *_ in found)
    whole = fpipe.pipeline(
        [block] * STAGES, "GPipe", loss=cross_entropy, group=fpipe.local(STAGES), tied=TIED
    )
    for name, row in TABLE.items():
        given, grads = inputs(row)
        after, _ = follow(row.make(whole), given, grads)
        assert same(merge([parts[name] for _, parts, *_ in found]), after), name
    assert all(torch.equal(mean[1]["w"], torch.full((3,), 1.5)) for _, _, mean, _ in found)
    assert all(math.isnan(norm) for *_, largest in found for norm in largest)

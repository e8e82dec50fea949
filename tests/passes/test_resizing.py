"""A plan for new sizes reuses the steps of an earlier one, and equals the plan that lowering
makes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fpipe
from fpipe.lowering.builder import lower
from fpipe.passes.sizes import resizing
from schedule_table import TABLE, Case

D = 4


def loss(y: Any, t: Any) -> Any:
    return (y - t).square().mean()


def layer(p: Any, x: Any) -> Any:
    return x + torch.tanh(x @ p["w"]) + p["b"]


def pair(p: Any, x: Any) -> Any:
    return {"y": layer(p, x), "skipped": x * 2}


def taking(p: Any, x: Any) -> Any:
    return layer(p, x["y"]) + x["skipped"]


def counting(p: Any, state: Any, x: Any) -> Any:
    return layer(p, x), state + 1


def params(stages: int) -> list[Any]:
    return [{"w": torch.eye(D) / 2, "b": torch.zeros(D)} for _ in range(stages)]


@pytest.fixture
def reused(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each plan that had a predecessor, whether it reuses it."""
    found: list[bool] = []
    resized = resizing.resized

    def noted(*args: Any) -> Any:
        plan = resized(*args)
        found.append(plan is not None)
        return plan

    monkeypatch.setattr(resizing, "resized", noted)
    return found


def compare(pipe: fpipe.Pipeline) -> None:
    """All plans of a pipeline with those that lowering makes."""
    for cached in pipe.cache.plans.values():
        for rank, plan in cached.prepared.plans.items():
            alone = lower(cached.prepared.inputs[rank], rank)
            assert plan == alone
            assert plan.keyed == alone.keyed
            assert plan.curve == alone.curve


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry.name)
def test_under_every_schedule(entry: Any, reused: list[bool]):
    case = Case(entry.name, 4, 8, 4 * entry.per_rank[0])
    pipe = fpipe.pipeline(
        [layer] * case.stages, case.make(), loss=loss, microbatches=8, group=fpipe.local(4)
    )
    for length in (4, 6, 7, 9):
        x = torch.randn(8, length, D)
        fpipe.value_and_grad(pipe)(params(case.stages), x, x)
    compare(pipe)
    # The first length is traced as it is and the second one with symbols; the others are of the
    # same trace. Woven actions are ordered anew, by the times of their parts.
    assert reused == [False] * 4 + [not entry.fused] * 8


@pytest.mark.parametrize(
    ("stages", "more", "argnums"),
    [
        ([layer] * 4, {"tied": [("0.w", "3.w")]}, (0, 1)),
        ([layer] * 4, {"frozen": ["1.*"]}, 0),
        ([pair, taking, pair, taking], {}, (0, 1)),
        ([fpipe.Stage(counting, state=True, initial_state=torch.zeros(()))] * 4, {}, 0),
        ([fpipe.remat(layer)] * 4, {"accumulate": torch.float64}, 0),
    ],
    ids=["tied", "frozen", "skip", "state", "remat"],
)
def test_with_options(stages: list[Any], more: dict[str, Any], argnums: Any, reused: list[bool]):
    pipe = fpipe.pipeline(stages, "ZBH1", loss=loss, microbatches=4, group=fpipe.local(4), **more)
    side = {"state": [torch.zeros(())] * 4} if pipe.config.stateful else {}
    for length in (4, 6, 7, 9):
        x = torch.randn(4, length, D)
        fpipe.value_and_grad(pipe, argnums)(params(4), x, x, **side)
    compare(pipe)
    assert reused[4:] == [True] * 8


def test_mixed_lengths_and_other_modes(reused: list[bool]):
    pipe = fpipe.pipeline([layer] * 2, "1F1B", loss=loss, microbatches=3, group=fpipe.local(2))
    for lengths in ((4, 6, 4), (7, 9, 7), (5, 12, 5), (8, 8, 8), (3, 5, 7)):
        x = fpipe.Microbatches([torch.randn(2, n, D) for n in lengths])
        fpipe.value_and_grad(pipe)(params(2), x, x)
        pipe(params(2), x, x)
    compare(pipe)
    assert reused[-8:] != []
    outputs = fpipe.pipeline([layer] * 2, "1F1B", microbatches=3, group=fpipe.local(2))
    for length in (4, 6, 7, 9):
        y, pullback = fpipe.vjp(outputs, params(2), torch.randn(3, length, D))
        pullback(y)
    compare(outputs)


def test_other_sizes_need_other_plans_where_the_structure_differs(reused: list[bool]):
    """Below six the stage passes its input on, so nothing is computed that its own plan for six
    computes.
    """

    def branch(p: Any, x: Any) -> Any:
        return x if x.shape[1] < 6 else layer(p, x)

    pipe = fpipe.pipeline([layer, branch], "1F1B", loss=loss, microbatches=2, group=fpipe.local(2))
    for length in (4, 8, 9, 3, 5, 10):
        x = torch.randn(2, length, D)
        fpipe.value_and_grad(pipe)(params(2), x, x)
    compare(pipe)
    assert True in reused
    assert False in reused

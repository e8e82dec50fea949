"""What trainers stand on: the curve of one process on two and four, and an engine for reinforcement
learning.

Four processes are started once for all of it: four ranks of a pipeline, then two pipelines of two.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from fpipe.products.demo import Sizes, cross_entropy, gpt, one_process, sonnets
from sample import also

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from rl_data import cut, padded  # pyright: ignore[reportMissingImports]
from rl_engine import Engine, log_probs, ppo, rollouts  # pyright: ignore[reportMissingImports]

PARTS, ROWS, LENGTH = 4, 2, 16


# ---- training on text ----
def _model() -> tuple[Any, Any]:
    return gpt(Sizes(len(sonnets().letters), LENGTH, width=16, heads=2, layers=4), 4)


def _curve(steps: int, grads_of: Any, params: Any, over: Any = None) -> list[float]:
    """The losses of the steps, for a function (params, x, y) -> (loss, grads)."""
    text = sonnets()
    rules = fpipe.chain(fpipe.clip_by_global_norm(1.0, over=over), fpipe.adamw(1e-2))
    state, losses = rules.init(params), []
    for step in range(steps):
        loss, grads = grads_of(params, *text.batch(step, ROWS * PARTS, LENGTH))
        updates, state = rules.update(grads, state, params)
        params = fpipe.apply_updates(params, updates)
        losses.append(loss.item())
    return losses


def _piped(steps: int, schedule: str, group: Any) -> list[float]:
    stages, params = _model()
    pipe = fpipe.pipeline(stages, schedule, loss=cross_entropy, microbatches=PARTS, group=group)
    return _curve(steps, fpipe.value_and_grad(pipe), pipe.place(params), pipe)


@pytest.mark.xdist_group("trainers")
def test_the_curve_on_two_and_four_processes_is_that_of_one(four: list[dict[str, Any]], steps: int):
    stages, params = _model()
    plan = fpipe.make_schedule("1F1B", 1, PARTS, stages=4)
    one = _curve(steps, partial(_alone, stages, plan), params)
    assert sum(one[-10:]) < 0.85 * sum(one[:10]), "nothing was learned"
    for rank, found in enumerate(four):
        assert found["PP=4"] == one, f"rank {rank} of four"
        assert found["PP=2"] == one, f"rank {rank} of two"


def _alone(stages: Any, plan: fpipe.Schedule, params: Any, x: Tensor, y: Tensor) -> Any:
    return one_process(stages, params, cross_entropy, x, y, schedule=plan)


# ---- an engine ----
@cache
def _policy() -> tuple[Any, Any, list[dict[str, Any]]]:
    """A model, and data whose log-probabilities are of another one."""
    sizes = Sizes(len(sonnets().letters), width=16, heads=2, layers=2)
    stages, params = gpt(sizes, 4)
    data = rollouts(5)
    other = gpt(sizes, 1, seed=1)
    for one in data:
        tokens = one["tokens"][None]
        one["old_log_probs"] = log_probs(other[0][0](other[1][0], tokens), tokens)[0]
    return stages, params, data


def _engine(
    budget: int, divisor: int = 16, schedule: str = "Interleaved1F1B", group: Any = None
) -> Engine:
    stages, params, _ = _policy()
    return Engine(
        stages,
        params,
        rate=1e-3,
        budget=budget,
        divisor=divisor,
        schedule=schedule,
        group=group or fpipe.local(2),
    )


@cache
def _uncut() -> tuple[Tensor, Any]:
    """Loss and gradients of the mean over all tokens, by plain autograd and one sequence after
    another.
    """
    stages, params, data = _policy()
    count = sum(one["mask"].sum() for one in data)

    def total(params: Any) -> Tensor:
        terms = []
        for one in data:
            batch = {name: value[None] for name, value in one.items() if isinstance(value, Tensor)}
            y = batch["tokens"]
            for fn, p in zip(stages, params, strict=True):
                y = fn(p, y)
            terms.append(ppo(log_probs(y, batch["tokens"]), batch)[0] * batch["mask"].sum() / count)
        return torch.stack(terms).sum()

    grads, loss = torch.func.grad_and_value(total)(params)
    return loss, grads


def _close(made: Any, true: Any) -> None:
    torch.testing.assert_close(made, true, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("budget", "divisor", "schedule"),
    [(64, 16, "ZBV"), *also((16, 16, "Interleaved1F1B"), (10_000, 4, "1F1B"))],
)
def test_the_gradient_does_not_depend_on_the_cut(budget: int, divisor: int, schedule: str):
    engine, (_, _, data) = _engine(budget, divisor, schedule), _policy()
    made = engine.forward_backward_batch(data, ppo)
    loss, grads = _uncut()
    _close(made["loss"], loss)
    _close(engine.grads, grads)
    assert sorted(row for part in made["rows"] for row in part) == list(range(len(data))) and len(
        made["rows"]
    ) == len(made["metrics"])
    for rows, metrics in zip(made["rows"], made["metrics"], strict=True):
        assert metrics["tokens"] == sum(data[row]["mask"].sum() for row in rows)
    again = engine.forward_backward_batch(data, ppo, forward_only=True)
    _close(again["loss"], loss)
    _close(again["metrics"], made["metrics"])


def test_log_probabilities_come_in_the_order_of_the_data():
    engine, (stages, params, data) = _engine(64), _policy()
    for one, line in zip(
        data, engine.forward_backward_batch(data, forward_only=True)["log_probs"], strict=True
    ):
        y = one["tokens"][None]
        for fn, p in zip(stages, params, strict=True):
            y = fn(p, y)
        _close(line, log_probs(y, one["tokens"][None])[0])


def test_the_engine_has_sixty_lines_and_learns():
    lines = [
        line
        for part in (Engine, cut, padded, log_probs)
        for line in inspect.getsource(part).splitlines()
    ]
    assert len([line for line in lines if line.strip()]) <= 60
    engine, (_, _, data) = _engine(64), _policy()
    losses = []
    for _ in range(4):
        losses.append(engine.forward_backward_batch(data, ppo)["loss"].item())
        engine.step()
    assert losses == sorted(losses, reverse=True), losses


def _rl(group: Any) -> dict[str, Any]:
    engine, (_, _, data) = _engine(64, group=group), _policy()
    made = engine.forward_backward_batch(data, ppo)
    returned = engine.forward_backward_batch(data, forward_only=True)["log_probs"]
    return {
        "loss": made["loss"],
        "metrics": made["metrics"],
        "grads": engine.grads,
        "log_probs": returned,
    }


@pytest.mark.xdist_group("trainers")
def test_the_engine_on_two_processes(four: list[dict[str, Any]]):
    here = _rl(fpipe.local(2))
    for rank, found in enumerate(four):
        made = found["rl"]
        assert all(
            torch.equal(a, b) for a, b in zip(made["log_probs"], here["log_probs"], strict=True)
        ), rank
        assert torch.equal(made["loss"], here["loss"]) and made["metrics"] == here["metrics"]
        mine = [
            (own, other)
            for own, other in zip(made["grads"], here["grads"], strict=True)
            if own is not None
        ]
        assert len(mine) == 2
        for own, other in mine:
            torch.testing.assert_close(own, other, rtol=0, atol=0)


# ---- four processes ----
def _everything(steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {"PP=4": _piped(steps, "1F1B", fpipe.init(pp=4))}
    group = fpipe.init(pp=2, dp=2)  # two independent pipelines
    found["PP=2"] = _piped(steps, "ZBV", group)
    return found | {"rl": _rl(group)}


@pytest.fixture(scope="module")
def steps(long: bool) -> int:
    return 200 if long else 30


@pytest.fixture(scope="module")
def four(steps: int) -> list[dict[str, Any]]:
    return fpipe.launch(_everything, steps, ranks=4, timeout=300)

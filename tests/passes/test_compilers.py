"""``compile=``: gradients are those of traced programs; products add into sums."""

from __future__ import annotations

import os
import shutil
from typing import Any

import optree
import pytest
import torch

import fpipe
from common import squared
from models import MODELS
from sample import also

inductor = pytest.param(
    "inductor",
    marks=[
        pytest.mark.skipif("FPIPE_SLOW" not in os.environ, reason="slow: set FPIPE_SLOW=1"),
        pytest.mark.skipif(
            not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler here"
        ),
    ],
)


def step(model: str, schedule: str, **how: Any) -> list[torch.Tensor]:
    """The loss and the gradients of a step of six microbatches."""
    made = MODELS[model]
    schedule = fpipe.make_schedule(schedule, 2, 6)
    stages, params, state = made.make(schedule.stages)
    torch.manual_seed(0)
    pipe = fpipe.pipeline(stages, schedule, loss=made.loss, group=fpipe.local(2), seed=3, **how)
    f = fpipe.value_and_grad(pipe, has_aux=made.has_aux)
    x, t = made.batch(6)
    more = {} if state is None else {"state": state}
    f(params, x, t, **more)
    return optree.tree_leaves(f(params, x, t, **more))


@pytest.mark.covering
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("schedule", ["1F1B", "ZBV"])
@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("backend", ["addmm", inductor, *also("aot_eager")])
def test_gradients_are_those_of_traced_programs(backend: str, model: str, schedule: str):
    if backend == "inductor" and model == "transformer":
        pytest.skip("inductor draws other numbers")
    for mine, plain in zip(
        step(model, schedule, compile=backend), step(model, schedule), strict=True
    ):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-6)


def layer(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.nn.functional.linear(x, p["w"], p["b"]) @ p["v"])


def drawn(dtype: torch.dtype = torch.float32) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    one = lambda: {
        "w": torch.randn(6, 4, dtype=dtype),
        "b": torch.randn(6, dtype=dtype),
        "v": torch.randn(6, 4, dtype=dtype),
    }
    return [one(), one()], torch.randn(8, 4, dtype=dtype)


def step_of_two(**how: Any) -> Any:
    """Return a function that gives the loss and the gradients of two layers."""
    group = fpipe.local(2)
    pipe = fpipe.pipeline([layer] * 2, "1F1B", loss=squared, microbatches=4, group=group, **how)
    return fpipe.value_and_grad(pipe)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["addmm", "aot_eager"])
def test_sums_of_another_dtype(backend: str):
    params, x = drawn(torch.bfloat16)
    plain = step_of_two(accumulate=torch.float32)
    mine = step_of_two(accumulate=torch.float32, compile=backend)
    torch.testing.assert_close(mine(params, x, x), plain(params, x, x), rtol=1e-2, atol=1e-3)


def test_each_product_adds_into_its_sum():
    params, x = drawn()
    made = fpipe.trace(fpipe.Stage(layer, compile="addmm"), params[0], x)
    code = made.adding("B").code
    assert code.count("add_product(") == 2 and code.count(".add_(") == 1, code
    assert made.adding("W").code.count("add_product(") == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["addmm", *also("aot_eager")])
def test_other_sizes(backend: str):
    params, x = drawn()
    plain, mine = step_of_two(), step_of_two(compile=backend)
    for rows in (8, 16, 24):
        batch = x.repeat(3, 1)[:rows]
        torch.testing.assert_close(mine(params, batch, batch), plain(params, batch, batch))

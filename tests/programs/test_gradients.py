"""Gradients are those of autograd on the whole model, where torch treats special values in a special way."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe

ENGINES = ["trace", "eager"]
X = torch.linspace(-1, 1, 12).view(4, 3)


def step(stages: list[Any], params: list[Any], loss: Any, engine: str, microbatches: int = 1, **options: Any) -> Any:
    pipe = fpipe.pipeline(
        stages, loss=loss, microbatches=microbatches, group=fpipe.local(len(stages)), engine=engine, **options
    )
    return fpipe.value_and_grad(pipe, (0, 1))(params, X, X)


@pytest.mark.parametrize("engine", ENGINES)
def test_autocast_with_a_weight_used_twice_has_the_gradients_of_autograd(engine: str):
    """Autocast casts a weight once for both uses, so its gradient is summed in bfloat16 before it is cast back."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(3, 3, generator=generator)

    def stage(p: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ((x @ p).tanh() @ p).float()

    loss = lambda y, t: (y - t).square().mean()
    _, (grads, dx) = step([stage], [w], loss, engine)
    p, x = w.clone().requires_grad_(), X.clone().requires_grad_()
    loss(stage(p, x), X).backward()
    assert torch.equal(grads[0], p.grad)
    assert torch.equal(dx, x.grad)


@pytest.mark.parametrize("engine", ENGINES)
def test_autocast_casts_a_value_of_another_stage_at_every_use(engine: str):
    """Autocast keeps its casts of leaves alone: x of the second stage is none, that of the first stage is one."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(3, 3, generator=generator) for _ in range(2)]

    def stage(p: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (torch.mm(x, p).tanh() + torch.mm(x, p.T).sigmoid()).float()

    loss = lambda y, t: (y - t).square().mean()
    _, (grads, dx) = step([stage] * 2, weights, loss, engine)
    p, x = [w.clone().requires_grad_() for w in weights], X.clone().requires_grad_()
    loss(stage(p[1], stage(p[0], x)), X).backward()
    assert all(map(torch.equal, grads, [w.grad for w in p]))
    assert torch.equal(dx, x.grad)


@pytest.mark.parametrize("engine", ENGINES)
def test_accumulate_leaves_complex_parameters_complex(engine: str):
    stage = lambda p, x: x * p["used"]
    params = [{"used": torch.ones(3), "unused": torch.ones(2, dtype=torch.complex64)}]
    _, (grads, _) = step([stage], params, lambda y, t: y.sum(), engine, accumulate=torch.float32)
    assert grads[0]["unused"].dtype.is_complex


@pytest.mark.parametrize("engine", ENGINES)
def test_conjugates_between_local_ranks_are_what_they_are_between_processes(engine: str):
    """A message over a backend carries resolved numbers; between local ranks the lazy conjugate bit was handed on."""
    seen: list[bool] = []

    def second(p: Tensor, x: Tensor) -> Tensor:
        return torch.view_as_real(x.resolve_conj()).sum(-1) * p

    def each(number: int, y: Tensor) -> None:
        seen.append(y.is_conj())

    first = lambda p, x: torch.complex(x * p, x).conj()
    pipe = fpipe.pipeline([first], microbatches=1, group=fpipe.local(1), engine=engine)
    pipe([torch.ones(3)], X, each=each)
    assert seen == [False]
    stages = [first, second]
    value, _ = step(stages, [torch.ones(3)] * 2, lambda y, t: y.sum(), engine)
    assert math.isclose(float(value), 0.0, abs_tol=1e-5)

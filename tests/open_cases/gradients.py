# ruff: noqa: RUF012
"""Gradients of outputs that nothing uses, of autocast, of expanded and complex values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe

ENGINES = ["trace", "eager"]
X = torch.linspace(-1, 1, 12).view(4, 3)


def step(stages: list[Any], params: list[Any], loss: Any, engine: str, microbatches: int = 1, **options: Any) -> Any:
    pipe = fpipe.pipeline(
        stages, loss=loss, microbatches=microbatches, group=fpipe.local(len(stages)), engine=engine, **options
    )
    return fpipe.value_and_grad(pipe, (0, 1))(params, X, X)


def rooted(p: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The second output has an infinite derivative where x is negative."""
    return x * p, torch.where(x > 0, (x * p).sqrt(), 0.0)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_output_that_the_loss_ignores_has_no_cotangent(engine: str):
    _, (grads, dx) = step([rooted], [torch.ones(3)], lambda y, t: (y[0] - t).square().mean(), engine)
    assert grads[0].isfinite().all()
    assert dx.isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_output_that_the_next_stage_drops_has_no_cotangent(engine: str):
    stages = [rooted, lambda p, x: x[0] * p]
    _, (grads, dx) = step(stages, [torch.ones(3)] * 2, lambda y, t: (y - t).square().mean(), engine)
    assert grads[0].isfinite().all()
    assert dx.isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_output_that_the_next_stage_detaches_has_no_cotangent(engine: str):
    stages = [rooted, lambda p, x: x[0] * p + x[1].detach()]
    _, (grads, dx) = step(stages, [torch.ones(3)] * 2, lambda y, t: (y - t).square().mean(), engine)
    assert grads[0].isfinite().all()
    assert dx.isfinite().all()


class Two(torch.autograd.Function):
    """Two outputs; the gradient of one that nothing uses is None."""

    seen: list[tuple[bool, bool]] = []

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return a * 2 if b is None and a is not None else None if a is None else a * 2 + b * 1000


@pytest.mark.parametrize("engine", ENGINES)
def test_a_custom_function_sees_none_for_an_unused_output(engine: str):
    stage = lambda p, x: Two.apply(x * p)
    _, (grads, _) = step([stage], [torch.ones(3)], lambda y, t: y[0].sum(), engine)
    assert torch.equal(grads[0], 2 * X.sum(0))


@pytest.mark.parametrize("engine", ENGINES)
def test_expanded_outputs(engine: str):
    stages = [lambda p, x: (x * p).mean(1, keepdim=True).expand(4, 3), lambda p, x: x * p]
    _, (grads, _) = step(stages, [torch.ones(3)] * 2, lambda y, t: (y - t).square().mean(), engine)
    assert grads[0].isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_non_reentrant_checkpoint_under_inference_mode(engine: str):
    from torch.utils.checkpoint import checkpoint

    stage = lambda p, x: checkpoint(lambda t: (t * p).tanh(), x, use_reentrant=False)
    pipe = fpipe.pipeline([stage], microbatches=1, group=fpipe.local(1), engine=engine)
    with torch.inference_mode():
        y = pipe([torch.ones(3)], X)
    assert torch.equal(y, X.tanh())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: type[nn.Module], engine: str):
    module = kind(3, 5, batch_first=True)
    params = dict(module.named_parameters())

    def stage(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(module, p, (x[:, None],))[0][:, 0]

    loss = lambda y, t: y.square().mean()
    plain = {name: leaf.detach().clone() for name, leaf in params.items()}
    _, (grads, _) = step([stage], [plain], loss, engine)
    module.zero_grad()
    loss(module(X[:, None])[0][:, 0], X).backward()
    for name, leaf in params.items():
        assert leaf.grad is not None
        torch.testing.assert_close(grads[0][name], leaf.grad)

"""Gradients of outputs that nothing uses, of autocast, of expanded and complex values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe

ENGINES = ["trace", "eager"]
X = torch.linspace(-1, 1, 12).view(4, 3)


def step(stages: list[Any], params: list[Any], loss: Any, engine: Any, microbatches: int = 1, **options: Any) -> Any:
    pipe = fpipe.pipeline(
        stages, loss=loss, microbatches=microbatches, group=fpipe.local(len(stages)), engine=engine, **options
    )
    return fpipe.value_and_grad(pipe, (0, 1))(params, X, X)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: type[nn.Module], engine: Any):
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

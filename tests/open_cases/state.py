# ruff: noqa: PT017
"""Values that are changed in place between the phases of a call, and results that alias the caller's tensors."""

from __future__ import annotations

import pytest
import torch

import fpipe

ENGINES = ["trace", "eager"]
X = torch.linspace(-1, 1, 12).view(4, 3)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("changed", ["output", "parameter", "input"])
def test_a_value_changed_before_the_pullback_is_reported(changed: str, engine: str):
    """PyTorch raises, by its version counters; wrong gradients came back."""
    stages = [lambda p, x: (x * p).exp()] * 2
    params = [torch.ones(3), torch.ones(3)]
    x = X.clone()
    pipe = fpipe.pipeline(stages, microbatches=2, group=fpipe.local(2), engine=engine)
    y, pullback = fpipe.vjp(pipe, params, x)
    expected, _ = pullback(torch.ones_like(y), retain=True)
    expected = [grad.clone() for grad in expected]
    {"output": y, "parameter": params[0], "input": x}[changed].mul_(3)
    try:
        grads, _ = pullback(torch.ones(4, 3))
    except fpipe.FpipeError as error:
        assert "in place" in str(error)
        return
    for grad, other in zip(grads, expected, strict=True):
        assert torch.equal(grad, other)

# ruff: noqa: PT017
"""Pullbacks: values that change between the phases of a call, and several backwards of one forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fpipe

ENGINES = ["trace", "eager"]
X = torch.linspace(-1, 1, 12).view(4, 3)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("changed", ["output", "parameter", "input"])
def test_a_value_changed_before_the_pullback_is_reported(changed: str, engine: Any):
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


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("changed", ["output", "parameter", "input", "optimizer"])
def test_a_value_that_the_backward_needs_changed(changed: str, remat: bool, engine: Any):
    """One microbatch, so that the output is the tensor that its stage saved."""
    fn = lambda p, x: (x * p).exp()
    pipe = fpipe.pipeline([fpipe.remat(fn) if remat else fn], microbatches=1, group=fpipe.local(1), engine=engine)
    p, x = torch.ones(3, requires_grad=True), X.clone()
    y, pullback = fpipe.vjp(pipe, [p], x)
    if changed == "optimizer":
        p.grad = torch.ones(3)
        torch.optim.SGD([p], lr=0.1).step()
    else:
        with torch.no_grad():
            {"output": y, "parameter": p, "input": x}[changed].mul_(3)
    if changed == "output" and remat:  # it is computed again
        grads, _ = pullback(torch.ones(4, 3))
        torch.testing.assert_close(grads[0], (X * X.exp()).sum(0))
        return
    with pytest.raises(fpipe.StageError, match="in place"):
        pullback(torch.ones(4, 3))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_value_that_no_backward_needs_may_change(engine: Any):
    pipe = fpipe.pipeline([lambda p, x: x + p], microbatches=1, group=fpipe.local(1), engine=engine)
    p, x = torch.ones(3), X.clone()
    y, pullback = fpipe.vjp(pipe, [p], x)
    for tensor in (y, p, x):
        tensor.zero_()
    grads, _ = pullback(torch.ones(4, 3))
    assert torch.equal(grads[0], torch.full((3,), 4.0))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_a_retained_pullback_gives_the_same_again(schedule: str, engine: Any):
    """On autograd the graph was freed by the first."""
    fn = lambda p, x: torch.tanh(x * p).exp()
    pipe = fpipe.pipeline([fn, fpipe.remat(fn)], schedule, microbatches=2, group=fpipe.local(2), engine=engine)
    y, pullback = fpipe.vjp(pipe, [torch.ones(3), torch.ones(3)], X)
    first = [pullback(torch.ones_like(y), retain=True) for _ in range(2)]
    first.append(pullback(torch.ones_like(y)))
    for grads, dx in first[1:]:
        assert torch.equal(dx, first[0][1])
        assert all(map(torch.equal, grads, first[0][0]))
    with pytest.raises(fpipe.StageError, match="called before"):
        pullback(torch.ones_like(y))

# ruff: noqa: PT017
"""Values that are changed in place between the phases of a call, and results that alias the caller's tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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


@pytest.mark.parametrize("engine", ENGINES)
def test_an_identity_stage_returns_no_tensor_of_the_caller(engine: str):
    x = X.clone()
    pipe = fpipe.pipeline([lambda p, x: x] * 2, microbatches=1, group=fpipe.local(2), engine=engine)
    y = pipe([None, None], x)
    assert y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_identity_stage_returns_no_microbatch_of_the_caller(engine: str):
    parts = [X[:2].clone(), X[2:].clone()]
    pipe = fpipe.pipeline([lambda p, x: x], group=fpipe.local(1), microbatches=2, engine=engine)
    y = pipe([None], fpipe.Microbatches(parts))
    assert not {part.data_ptr() for part in y} & {part.data_ptr() for part in parts}


# ---- cotangents -----------------------------------------------------------------------------------------------------
def pulled(outputs: int = 1) -> tuple[Tensor, object]:
    stage = (lambda p, x: x * p) if outputs == 1 else (lambda p, x: (x * p, x + p))
    pipe = fpipe.pipeline([stage], microbatches=2, group=fpipe.local(1))
    return fpipe.vjp(pipe, [torch.ones(3)], X)


@pytest.mark.parametrize(
    "dy",
    [
        1.0,
        None,
        torch.ones(4, 3, dtype=torch.int64),
        torch.ones(4, 3, dtype=torch.bfloat16),
        torch.ones(4, 3).double(),
        torch.ones(3),
        "x",
    ],
    ids=["number", "none", "int64", "bfloat16", "float64", "shape", "text"],
)
def test_a_cotangent_of_another_kind_is_refused_and_consumes_nothing(dy: object):
    y, pullback = pulled()
    with pytest.raises(fpipe.BatchError, match="dy"):
        pullback(dy)
    grads, _ = pullback(torch.ones_like(y))
    assert torch.equal(grads[0], X.sum(0))


def test_none_is_the_cotangent_of_a_leaf_that_is_not_used():
    _, pullback = pulled(2)
    grads, dx = pullback((torch.ones(4, 3), None))
    assert torch.equal(grads[0], X.sum(0))
    assert torch.equal(dx, torch.ones(4, 3))

"""Cotangents of a pullback: checked before anything is consumed, as ``torch.func.vjp`` checks
them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fpipe

X = torch.linspace(-1, 1, 12).view(4, 3)
TOTAL = X[:2].sum(0) + X[2:].sum(0)


def pulled(outputs: int = 1) -> tuple[Any, Any]:
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
def test_a_cotangent_of_another_kind_is_refused_and_consumes_nothing(dy: Any):
    y, pullback = pulled()
    with pytest.raises(fpipe.errors.BatchError, match="dy"):
        pullback(dy)
    grads, _ = pullback(torch.ones_like(y))
    assert torch.equal(grads[0], TOTAL)


def test_none_is_the_cotangent_of_a_leaf_that_is_not_used():
    _, pullback = pulled(2)
    grads, dx = pullback((torch.ones(4, 3), None))
    assert torch.equal(grads[0], TOTAL)
    assert torch.equal(dx, torch.ones(4, 3))


@pytest.mark.parametrize(
    "dy", [[torch.ones(4, 3)] * 2, (torch.ones(4, 3),), {"a": torch.ones(4, 3)}]
)
def test_a_cotangent_of_another_structure_is_refused(dy: Any):
    _, pullback = pulled(2)
    with pytest.raises(
        fpipe.errors.BatchError, match="dy does not have the structure of the outputs"
    ):
        pullback(dy)


def test_a_cotangent_for_each_scalar_output():
    """Outputs without axes are stacked, so the cotangent of a batch has one number for each
    microbatch.
    """
    pipe = fpipe.pipeline([lambda p, x: (x * p).sum()], microbatches=2, group=fpipe.local(1))
    y, pullback = fpipe.vjp(pipe, [torch.ones(3)], X)
    assert y.shape == (2,)
    grads, _ = pullback(torch.tensor([1.0, 2.0]))
    assert torch.equal(grads[0], X[:2].sum(0) + 2 * X[2:].sum(0))


def test_microbatches_of_a_cotangent_are_as_many_as_those_of_the_outputs():
    pipe = fpipe.pipeline([lambda p, x: x * p], group=fpipe.local(1))
    y, pullback = fpipe.vjp(pipe, [torch.ones(3)], fpipe.Microbatches([X[:1], X[1:]]))
    for dy in (fpipe.Microbatches([y[0]]), y[0], fpipe.Microbatches([y[1], y[0]])):
        with pytest.raises(fpipe.errors.BatchError, match="dy"):
            pullback(dy)
    grads, dx = pullback(fpipe.Microbatches([torch.ones_like(part) for part in y]))
    assert torch.equal(grads[0], X[:1].sum(0) + X[1:].sum(0))
    assert [part.shape for part in dx] == [(1, 3), (3, 3)]


def test_a_list_in_place_of_a_cotangent_is_named_without_its_contents():
    pipe = fpipe.pipeline([lambda p, x: x * p], microbatches=1, group=fpipe.local(1))
    y, pullback = fpipe.vjp(pipe, [torch.ones(())], torch.ones(64))
    with pytest.raises(fpipe.errors.BatchError, match="dy has the leaf a list per microbatch"):
        pullback([y])


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "of",
    [
        lambda dy: dy.to_sparse(),
        lambda dy: dy.to_mkldnn(),
        lambda dy: torch.nested.nested_tensor(list(dy)),
    ],
    ids=["sparse", "mkldnn", "nested"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_cotangents_without_strides_are_refused_and_nothing_is_consumed(of: Any, whole: bool):
    x = X if whole else fpipe.Microbatches([X[:2], X[2:]])
    pipe = fpipe.pipeline([lambda p, x: x * p], microbatches=2, group=fpipe.local(1))
    _, pullback = fpipe.vjp(pipe, [torch.ones(3)], x)
    dy = of(torch.ones(4, 3)) if whole else fpipe.Microbatches([of(torch.ones(2, 3))] * 2)
    with pytest.raises(fpipe.errors.BatchError, match="give a dense tensor"):
        pullback(dy)
    full = torch.ones(4, 3) if whole else fpipe.Microbatches([torch.ones(2, 3)] * 2)
    assert torch.equal(pullback(full)[0][0], TOTAL)

"""A write into a result changes no argument and no other result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe

ENGINES = ["trace", "eager"]
X = torch.linspace(-1, 1, 12).view(4, 3)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_identity_stage_returns_no_tensor_of_the_caller(engine: Any):
    x = X.clone()
    pipe = fpipe.pipeline([lambda p, x: x] * 2, microbatches=1, group=fpipe.local(2), engine=engine)
    y = pipe([None, None], x)
    assert y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_identity_stage_returns_no_microbatch_of_the_caller(engine: Any):
    parts = [X[:2].clone(), X[2:].clone()]
    pipe = fpipe.pipeline([lambda p, x: x], group=fpipe.local(1), microbatches=2, engine=engine)
    y = pipe([None], fpipe.Microbatches(parts))
    assert not {part.data_ptr() for part in y} & {part.data_ptr() for part in parts}


def apart(*tensors: Tensor) -> bool:
    """Whether none of the tensors shares memory with another."""
    return len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("count", [1, 2])
def test_no_output_is_another_one_or_a_parameter(engine: Any, count: int):
    p, captured, mask = torch.ones(2, 3), torch.ones(2, 3), torch.ones(4, 3)

    def stage(p: Tensor, x: Tensor, *, mask: Tensor) -> Any:
        y = x * 2
        return y, y, y.view(-1, 3)[:2], x, x[:1], p, captured, mask

    pipe = fpipe.pipeline([stage], microbatches=1, group=fpipe.local(1), engine=engine)
    batch = X.clone() if count == 1 else fpipe.Microbatches([X.clone(), X.clone() + 1])
    sides = mask if count == 1 else fpipe.Microbatches([mask] * count)
    y = pipe([p], batch, mask=sides)
    leaves = [*y] if count == 1 else [leaf for part in y for leaf in part]
    given = [batch] if isinstance(batch, Tensor) else list(batch)
    assert apart(*leaves, *given, p, captured, mask)


@pytest.mark.parametrize("engine", ENGINES)
def test_each_gets_no_tensor_of_the_caller(engine: Any):
    x, seen = X.clone(), []

    def each(number: int, y: Any) -> None:
        assert apart(*y, x)
        seen.append(number)
        y[0].zero_()

    pipe = fpipe.pipeline(
        [lambda p, x: (x, x)], microbatches=2, group=fpipe.local(1), engine=engine
    )
    pipe([None], x, each=each)
    assert seen == [0, 1] and torch.equal(x, X)


@pytest.mark.parametrize("engine", ENGINES)
def test_aux_and_state_are_no_tensors_of_the_caller(engine: Any):
    state, target = [torch.ones(3)], X.clone()
    pipe = fpipe.pipeline(
        [fpipe.Stage(lambda p, s, x: (x * p, s), state=True)],
        loss=lambda y, t: (y.sum(), (t, t, y)),
        microbatches=2,
        group=fpipe.local(1),
        engine=engine,
    )
    (_, aux, after), _ = fpipe.value_and_grad(pipe, has_aux=True)(
        [torch.ones(3)], X, target, state=state
    )
    assert apart(aux[0][0], aux[0][1], aux[0][2], aux[1][2], state[0], after[0], target)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_input_gradient_is_no_cotangent(engine: Any):
    """Of an identity it was the cotangent that the caller passed, and of a loss that is its input
    the cached seed.
    """
    pipe = fpipe.pipeline([lambda p, x: x], microbatches=1, group=fpipe.local(1), engine=engine)
    dy = torch.ones(4, 3)
    _, pullback = fpipe.vjp(pipe, [None], X)
    _, dx = pullback(dy)
    assert torch.equal(dx, dy) and apart(dx, dy)

    pipe = fpipe.pipeline(
        [lambda p, x: x], loss=lambda y: y, reduction="sum", group=fpipe.local(1), engine=engine
    )
    step = fpipe.value_and_grad(pipe, argnums=1)
    batch = fpipe.Microbatches([torch.tensor(1.0), torch.tensor(2.0)])
    for _ in range(2):
        _, dx = step([None], batch)
        assert [d.item() for d in dx] == [1.0, 1.0] and apart(*dx)
        for d in dx:
            d.mul_(5)

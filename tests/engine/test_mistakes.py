"""Mistakes of first users that were silent, or whose message was torch's: each is one short error
that names value, rule and remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe.errors import FpipeError

WIDTH = 4
X, T = torch.ones(8, WIDTH), torch.zeros(8, WIDTH)
EYE = torch.eye(WIDTH)


def layer(p: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ p)


def squared(y: Any, t: Tensor) -> Any:
    return (y - t).square().mean()


def step(
    stages: Any = (layer, layer),
    params: Any = (EYE, EYE),
    loss: Callable[..., Any] = squared,
    **more: Any,
) -> Any:
    pipe = fpipe.pipeline(
        list(stages), "1F1B", loss=loss, microbatches=2, group=fpipe.local(2), **more
    )
    return fpipe.value_and_grad(pipe)(list(params), X, T)


def detached(p: Tensor, x: Tensor) -> Tensor:
    return layer(p, x).detach()


@torch.no_grad()
def without_grad(p: Tensor, x: Tensor) -> Tensor:
    return layer(p, x)


def number(p: Tensor, x: Tensor) -> float:
    return 1.0


def forgotten(p: Tensor, x: Tensor) -> None:
    layer(p, x)


def writing(p: Tensor, x: Tensor) -> Tensor:
    p.mul_(2)
    return x @ p


def called(p: Any, x: Tensor) -> Tensor:
    return p(x)


class Schedule1F1B:
    """Called as one of torch.distributed.pipelining."""


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "a stage that detaches": (lambda: step((layer, detached)), "stage 1: .*leave out detach"),
    "a stage that detaches, on autograd": (
        lambda: step((layer, detached), engine="eager"),
        "stage 1: .*leave out detach",
    ),
    "a first stage under no_grad": (lambda: step((without_grad, layer)), "stage 0: .*no_grad"),
    "a last stage that returns a number": (
        lambda: step((layer, number), loss=lambda y, t: t.sum() * y),
        "stage 1: .*returns nothing that has a gradient",
    ),
    "a first stage that returns a number": (
        lambda: step((number, lambda p, x: x * p)),
        "stage 0: .*returns nothing that has a gradient",
    ),
    "a forgotten return in the last stage": (
        lambda: step((layer, forgotten)),
        "stage 1: stage forgotten returned None; .*is a return missing",
    ),
    "a forgotten return in the first stage": (
        lambda: step((forgotten, layer)),
        "stage 0: stage forgotten returned None; .*is a return missing",
    ),
    "a loss that returns a float": (
        lambda: step(loss=lambda y, t: 1.0),
        "the loss .* must return one scalar tensor .* no gradient",
    ),
    "a loss with aux, without has_aux=True": (
        lambda: step(loss=lambda y, t: (squared(y, t), y.sum())),
        r"the loss returned a tuple of 2.*\(scalar, aux\) and pass has_aux=True",
    ),
    "a loss with aux, without has_aux=True, on autograd": (
        lambda: step(loss=lambda y, t: {"loss": squared(y, t), "y": y}, engine="eager"),
        "the loss returned dict.*has_aux=True",
    ),
    "a loss that calls item": (
        lambda: step(loss=lambda y, t: squared(y, t).item()),
        r"A loss returns a tensor: leave out item\(\)",
    ),
    "a stage that writes into its parameters": (
        lambda: step((writing, layer)),
        "must not write into its parameters",
    ),
    "parameters of integers": (
        lambda: step(params=(EYE.long(), EYE.long())),
        r"int64.*p\.to\(x\.dtype\)",
    ),
    "parameters of numpy": (
        lambda: step(params=(np.eye(4, dtype="float32"),) * 2),
        r"params\[0\] is a ndarray.*torch\.from_numpy",
    ),
    "modules as parameters": (
        lambda: step((called, called), (nn.Linear(4, 4), nn.Linear(4, 4))),
        "parameters hold the module Linear.*functional_call",
    ),
    "a name of a leaf of a bare tensor in tied=": (
        lambda: step(tied=[("0.w", "1.w")]),
        r"names '0\.w', but stage 0 has no such leaf; it has '0'",
    ),
    "a name of a leaf of a bare tensor in frozen=": (
        lambda: step(frozen=["0.w"]),
        r"'0\.w' matches no leaf; near names: 0, 1$",
    ),
    "three stages on four ranks": (
        lambda: fpipe.pipeline([layer] * 3, "1F1B", group=fpipe.local(4)),
        "1F1B takes a multiple of 4 stages on 4 ranks, not 3; .*or other ranks",
    ),
    "a class of torch as a schedule": (
        lambda: fpipe.pipeline([layer] * 2, Schedule1F1B, group=fpipe.local(2)),  # type: ignore[call-overload]
        "schedule=Schedule1F1B is a class; .*'1F1B'",
    ),
    "the name of a class of torch": (
        lambda: fpipe.pipeline([layer] * 2, "Schedule1F1B", group=fpipe.local(2)),
        r"no schedule is called 'Schedule1F1B'; did you mean 1F1B\?",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_is_one_short_error_of_fpipe(name: str):
    made, message = MISTAKES[name]
    with pytest.raises(FpipeError, match=message) as caught:
        made()
    assert len(str(caught.value)) < 1000


def test_a_stage_that_is_not_trained_may_detach():
    _, grads = step((detached, layer), frozen=["0"])
    expected = torch.func.grad(lambda p: squared(layer(p, layer(EYE, X)), T))(EYE)
    assert grads[0] is None
    torch.testing.assert_close(grads[1], expected)


def test_a_stage_that_stops_the_gradient_of_its_input_is_trained_alone():
    _, grads = step((layer, lambda p, x: layer(p, x.detach())))
    expected = torch.func.grad(lambda p: squared(layer(p, layer(EYE, X)), T))(EYE)
    torch.testing.assert_close(grads, [torch.zeros_like(EYE), expected])


def test_parameters_that_a_first_stage_does_not_use_get_zeros():
    _, grads = step((lambda p, x: 2 * x, layer))
    assert torch.equal(grads[0], torch.zeros_like(EYE)) and grads[1].any()


def test_an_input_that_is_changed_in_place_changes_nothing_else():
    def adding(p: Tensor, x: Tensor) -> Tensor:
        x.add_(1)
        return layer(p, x)

    before = X.clone()
    for engine in ("trace", "eager"):
        loss, grads = step((adding, adding), engine=engine)
        whole = lambda p, q: squared(layer(q, layer(p, X + 1) + 1), T)
        expected = torch.func.grad_and_value(whole, (0, 1))(EYE, EYE)
        torch.testing.assert_close((grads, loss), (list(expected[0]), expected[1]))
        assert torch.equal(X, before)


def test_forwards_alone_may_return_what_has_no_gradient():
    pipe = fpipe.pipeline([layer, detached], "1F1B", microbatches=2, group=fpipe.local(2))
    torch.testing.assert_close(pipe([EYE, EYE], X), layer(EYE, layer(EYE, X)))

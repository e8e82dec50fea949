"""Hessians and meta-gradients of pipelines, beside plain torch.func on the unsplit model."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import fpipe
from common import layer, squared


def close(got: Any, want: Any) -> None:
    for one, other in zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def layers() -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    made = [torch.randn(3, 3, generator=draw) for _ in range(4)]
    return made[:2], made[2:], *(torch.randn(4, 3, generator=draw) for _ in "xt")  # type: ignore[return-value]


def test_hessian_times_a_vector():
    """torch.func.jvp over fpipe's gradient."""
    params, v, x, t = layers()
    pipe = fpipe.pipeline([layer, layer], loss=squared, microbatches=2, group=fpipe.local(2))
    model = lambda p: squared(layer(p[1], layer(p[0], x)), t)
    want = torch.func.jvp(torch.func.grad(model), (params,), (v,))[1]
    found = torch.func.jvp(lambda p: fpipe.grad(pipe)(p, x, t), (params,), (v,))[1]
    close(found, want)


def test_the_tangent_of_a_loss_has_its_dtype():
    """torch.func.jvp gave a float64 tangent, as torch does for a scalar times a number."""
    params, v, x, t = layers()
    pipe = fpipe.pipeline([layer, layer], loss=squared, microbatches=2, group=fpipe.local(2))
    value, along = torch.func.jvp(lambda p: pipe(p, x, t), (params,), (v,))
    assert value.dtype == along.dtype == torch.float32


def test_meta_gradient():
    """The learning rate of one inner step, by torch.func over a function that calls the
    pipeline.
    """
    params, _, x, t = layers()
    pipe = fpipe.pipeline(
        [layer, layer], "1F1B", loss=squared, microbatches=2, group=fpipe.local(2)
    )
    whole = lambda p: squared(layer(p[1], layer(p[0], x)), t)

    def after(rate: Tensor, loss: Any) -> Tensor:
        grads = torch.func.grad(loss)(params)
        return loss([p - rate * g for p, g in zip(params, grads, strict=True)])

    rate = torch.tensor(0.3)
    found = torch.func.grad(after)(rate, lambda p: pipe(p, x, t))
    close(found, torch.func.grad(after)(rate, whole))
    assert found.abs() > 1e-3


@pytest.mark.parametrize("schedule", ["1F1B", "ZB1P"])
def test_meta_gradients_by_parameters_and_input(schedule: str):
    """fpipe's gradient inside torch.func's: the start value, and the rows."""
    params, v, x, t = layers()
    pipe = fpipe.pipeline(
        [layer, layer], schedule, loss=squared, microbatches=2, group=fpipe.local(2)
    )
    whole = lambda p, x: squared(layer(p[1], layer(p[0], x)), t)

    def after(params: Any, x: Tensor, both: Any, loss: Any) -> Tensor:
        value, (grads, dx) = both(params, x)
        steps = fpipe.sgd(0.3, 0.9)
        updates, _ = steps.update(grads, steps.init(params), params)
        return loss(fpipe.apply_updates(params, updates), x - dx) + value

    ours = lambda p, x: fpipe.value_and_grad(pipe, (0, 1))(p, x, t)
    plain = lambda p, x: torch.func.grad_and_value(whole, (0, 1))(p, x)[::-1]
    arguments = ours, lambda p, x: pipe(p, x, t)
    want = torch.func.grad(after, (0, 1))(params, x, plain, whole)
    close(torch.func.grad(after, (0, 1))(params, x, *arguments), want)
    along = torch.func.jvp(lambda p: after(p, x, *arguments), (params,), (v,))[1]
    wanted = sum((g * d).sum() for g, d in zip(want[0], v, strict=True))
    torch.testing.assert_close(
        along.float(), wanted, rtol=1e-4, atol=1e-5
    )  # torch's tangents of scalars are doubles
    many = torch.vmap(lambda x: after(params, x, *arguments))(torch.stack([x, 2 * x]))
    close(many, torch.stack([after(params, rows, plain, whole) for rows in (x, 2 * x)]))


def test_gradients_inside_a_transform_have_their_form():
    """Frozen leaves, further values, scales and Microbatches: as without a transform, if nothing is
    differentiated.
    """
    params, _, x, t = layers()
    own = [{"w": p, "n": 2} for p in params]
    stage = lambda p, x: layer(p["w"], x) * p["n"]
    loss = lambda y, t: (squared(y, t), {"most": y.max()})
    pipe = fpipe.pipeline(
        [stage, stage], loss=loss, microbatches=2, group=fpipe.local(2), frozen=["0"]
    )
    parts = fpipe.Microbatches(x.split([1, 3])), fpipe.Microbatches(t.split([1, 3]))
    both = fpipe.value_and_grad(pipe, (0, 1), has_aux=True)
    outside = both(own, *parts, loss_scale=4.0)
    seen: list[Any] = []

    def watched(rate: Tensor) -> Tensor:
        moved = [{"w": p["w"] + rate, "n": p["n"]} for p in own]
        out, (grads, dx) = both(moved, *parts, loss_scale=4.0)
        assert isinstance(dx, fpipe.Microbatches)
        seen.append(optree.tree_map(torch.func.debug_unwrap, (*out, grads, list(dx))))
        return out[0]

    torch.func.grad(watched)(torch.tensor(0.0))
    value, aux, grads, dx = seen[0]
    assert optree.tree_structure(grads) == optree.tree_structure(outside[1][0]) and grads[0] == {
        "n": None,
        "w": None,
    }
    close((value, aux, grads, dx), (*outside[0], outside[1][0], list(outside[1][1])))


@pytest.mark.parametrize("place", ["stage", "loss", "each"])
def test_an_error_of_a_stage_inside_a_transform_names_the_stage(place: str):
    """It arrived as it was, without the stage and the line; a run of a plan names both."""

    def wrong(*args: Any) -> Any:
        return len(args[-1].missing)

    params, _, x, t = layers()
    stages = [layer, wrong if place == "stage" else layer]
    loss = {"stage": squared, "loss": wrong, "each": None}[place]
    pipe = fpipe.pipeline(stages, loss=loss, microbatches=2, group=fpipe.local(2))

    def value(rate: Tensor) -> Tensor:
        moved = [p + rate for p in params]
        return pipe(moved, x, each=wrong)[0] if place == "each" else pipe(moved, x, t)

    what = {
        "stage": r"stage \S*wrong on microbatch 0",
        "loss": r"the loss \S*wrong on microbatch 0",
    }
    text = what.get(place, "each= after microbatch 0")
    with pytest.raises(
        fpipe.errors.ActionError, match=rf"{text} raised AttributeError at .*\.py:\d+ \(return len"
    ) as caught:
        torch.func.grad(value)(torch.tensor(0.0))
    assert isinstance(caught.value.__cause__, AttributeError)

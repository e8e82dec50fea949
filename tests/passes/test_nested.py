# ruff: noqa: PT017
"""Pipelines inside other functions: a transform of torch.func, a stage, a loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import fpipe
from fpipe.engine import parts


def layer(p: Tensor, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p)


def squared(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def parameters(count: int = 2, width: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(width, width, generator=generator) / 2 for _ in range(count)]


X, Y = torch.linspace(-1, 1, 16).view(4, 4), torch.linspace(1, -1, 16).view(4, 4)


def test_a_pipeline_inside_a_stage_is_differentiated_or_refused():
    """The inner pipeline's parameters reach the stage as its own; their gradients were dropped."""
    inner = fpipe.pipeline([layer, layer], microbatches=1, group=fpipe.local(2))
    params = parameters()

    def outer(p: list[Tensor], x: Tensor) -> Tensor:
        return inner(p, x) * 1.5

    pipe = fpipe.pipeline([outer], loss=squared, microbatches=1, group=fpipe.local(1))
    try:
        _, grads = fpipe.value_and_grad(pipe)([params], X, Y)
    except fpipe.FpipeError as error:
        assert "inside" in str(error)
        return
    live = [p.clone().requires_grad_() for p in params]
    squared(layer(live[1], layer(live[0], X)) * 1.5, Y).backward()
    for grad, p in zip(grads[0], live, strict=True):
        torch.testing.assert_close(grad, p.grad)


def test_a_pipeline_inside_a_loss_is_differentiated_or_refused():
    judge = fpipe.pipeline([layer], microbatches=1, group=fpipe.local(1))
    params = parameters(2)

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return squared(judge([params[1]], y), target)

    pipe = fpipe.pipeline([layer], loss=loss, microbatches=1, group=fpipe.local(1))
    try:
        _, grads = fpipe.value_and_grad(pipe)(params[:1], X, Y)
    except fpipe.FpipeError as error:
        assert "inside" in str(error)
        return
    live = params[0].clone().requires_grad_()
    squared(layer(params[1], layer(live, X)), Y).backward()
    torch.testing.assert_close(grads[0], live.grad)


def counts_inside(option: str, pipe: fpipe.Pipeline, params: list[Tensor]) -> None:
    """The gradient by torch.func is that of the pipeline alone, or the error names the option."""
    _, plain = fpipe.value_and_grad(pipe)(params, X, Y)
    try:
        inside = torch.func.grad(lambda p: pipe(p, X, Y))(params)
    except fpipe.FpipeError as error:
        assert option in str(error)
        return
    for a, b in zip(inside, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_ties_count_inside_torch_func():
    params = parameters()
    params[1] = params[0].clone()
    pipe = fpipe.pipeline(
        [layer, layer], loss=squared, microbatches=2, group=fpipe.local(2), tied=[("0", "1")]
    )
    counts_inside("tied", pipe, params)


def test_seeds_count_inside_torch_func():
    def noisy(p: Tensor, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(layer(p, x), 0.5)

    pipe = fpipe.pipeline(
        [noisy, noisy], loss=squared, microbatches=2, group=fpipe.local(2), seed=3
    )
    counts_inside("seed", pipe, parameters())


def test_accumulate_counts_inside_torch_func():
    params = [p.bfloat16() for p in parameters()]
    pipe = fpipe.pipeline(
        [layer, layer], loss=squared, microbatches=4, group=fpipe.local(2), accumulate=torch.float32
    )
    x, y = X.bfloat16(), Y.bfloat16()
    _, plain = fpipe.value_and_grad(pipe)(params, x, y)

    def outer(p: list[Tensor]) -> Tensor:
        _, grads = fpipe.value_and_grad(pipe)(p, x, y)
        return sum(g.float().sum() for g in grads)

    try:
        torch.func.grad(outer)(params)
        _, grads = torch.func.vmap(
            lambda _: fpipe.value_and_grad(pipe)(params, x, y), randomness="same"
        )(torch.zeros(1))
    except fpipe.FpipeError as error:
        assert "accumulate" in str(error)
        return
    assert [g.dtype for g in grads] == [g.dtype for g in plain]


@pytest.mark.parametrize("engine", ["trace", "eager"])
def test_a_stage_over_a_tensor_of_torch_func_says_what_to_do(engine: Any):
    params = parameters()

    def outer(scale: Tensor) -> Tensor:
        pipe = fpipe.pipeline(
            [layer, lambda p, x: layer(p, x) * scale],
            loss=squared,
            microbatches=1,
            group=fpipe.local(2),
            engine=engine,
        )
        value, _ = fpipe.value_and_grad(pipe)(params, X, Y)
        return value

    try:
        found = torch.func.grad(outer)(torch.tensor(2.0))
    except fpipe.FpipeError as error:
        assert "parameter or side input" in str(error)
        return
    scale = torch.tensor(2.0, requires_grad=True)
    squared(layer(params[1], layer(params[0], X)) * scale, Y).backward()
    torch.testing.assert_close(found, scale.grad)


@pytest.mark.parametrize("engine", ["trace", "eager"])
def test_an_inner_step_inside_a_stage(engine: Any):
    """The gradient of an inner pipeline is differentiated again, with a dtype of accumulation."""
    inner = fpipe.pipeline(
        [layer, layer],
        loss=squared,
        microbatches=2,
        group=fpipe.local(2),
        accumulate=torch.float64,
    )
    params = parameters()[:1]

    def adapted(p: Tensor, x: Tensor) -> Tensor:
        grads = fpipe.grad(inner)([p, p.clone()], x, Y)
        assert grads[0].dtype == torch.float64
        return layer(p - 0.1 * (grads[0] + grads[1]).float(), x)

    pipe = fpipe.pipeline(
        [adapted], loss=squared, microbatches=1, group=fpipe.local(1), engine=engine
    )
    value, grads = fpipe.value_and_grad(pipe)(params, X, Y)

    def plain(p: Tensor) -> Tensor:
        def loss(p: Tensor) -> Tensor:
            parts = zip(X.split(2), Y.split(2), strict=True)
            return sum(squared(layer(p, layer(p, x)), y) / 2 for x, y in parts)  # type: ignore[return-value]

        return squared(layer(p - 0.1 * torch.func.grad(loss)(p), X), Y)

    grad, expected = torch.func.grad_and_value(plain)(params[0])
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(grads[0], grad)


def test_a_seed_inside_a_stage_is_refused():
    inner = fpipe.pipeline([layer], microbatches=1, group=fpipe.local(1), seed=1)
    pipe = fpipe.pipeline([lambda p, x: inner([p], x)], microbatches=1, group=fpipe.local(1))
    with pytest.raises(
        fpipe.errors.StageError, match=r"seed= is not defined for a pipeline inside stage .*lambda"
    ):
        pipe(parameters(1), X)


def test_a_vjp_inside_a_transform_or_a_stage_is_refused():
    inner = fpipe.pipeline([layer], microbatches=1, group=fpipe.local(1))

    def outer(p: Tensor, x: Tensor) -> Tensor:
        return fpipe.vjp(inner, [p], x)[0]

    with pytest.raises(fpipe.errors.StageError, match=r"cannot run inside a torch\.func transform"):
        torch.func.grad(lambda p: outer(p, X).sum())(parameters(1)[0])
    pipe = fpipe.pipeline([outer], microbatches=1, group=fpipe.local(1))
    with pytest.raises(fpipe.errors.StageError, match=r"cannot run inside stage .*outer"):
        pipe(parameters(1), X)
    _, pullback = fpipe.vjp(inner, parameters(1), X)
    with pytest.raises(fpipe.errors.StageError, match=r"cannot run inside a torch\.func transform"):
        torch.func.grad(lambda dy: pullback(dy)[1].sum())(X)


def test_the_first_call_inside_a_transform():
    """A stage that no call has traced before could not be traced there."""
    pipe = fpipe.pipeline(
        [lambda p, x: torch.tanh(x @ p)], loss=squared, microbatches=1, group=fpipe.local(1)
    )
    params = parameters(1)
    inside = torch.vmap(lambda scale: scale * fpipe.value_and_grad(pipe)(params, X, Y)[0])(
        torch.ones(2)
    )
    torch.testing.assert_close(inside, pipe(params, X, Y).expand(2))


@pytest.mark.parametrize("around", ["stage", "transform"])
def test_stages_of_an_inner_pipeline_write_into_copies(around: str):
    """A write into the input changed the batch of the caller, so the stage around it computed other
    numbers.
    """

    def doubling(p: Tensor, x: Tensor) -> Tensor:
        return x.mul_(2) @ p

    params, x = parameters(2), X.clone()
    inner = fpipe.pipeline([doubling, doubling], microbatches=2, group=fpipe.local(2))
    if around == "stage":
        pipe = fpipe.pipeline([lambda p, x: x + inner(p, x)], microbatches=1, group=fpipe.local(1))
        found = pipe([params], x)
    else:
        found = torch.vmap(lambda shift: x + inner(params, x) + shift)(torch.zeros(1))[0]
    torch.testing.assert_close(found, X + 2 * (2 * X @ params[0]) @ params[1])
    assert torch.equal(x, X)


def test_an_inner_pipeline_does_not_write_into_parameters():
    params = parameters(1)
    inner = fpipe.pipeline([lambda p, x: x @ p.mul_(2)], microbatches=1, group=fpipe.local(1))
    with pytest.raises(
        fpipe.errors.TraceError, match="writes into its parameters or side inputs in place"
    ):
        torch.vmap(lambda x: inner(params, x))(X[None])


def test_results_of_functions_are_checked_inside_a_transform():
    """A loss with axes was returned as it was, or failed in torch."""

    params = parameters(1)

    def value(loss: Any, **options: Any) -> Any:
        pipe = fpipe.pipeline([layer], loss=loss, microbatches=2, group=fpipe.local(1))
        return torch.func.vmap(lambda x: pipe(params, x, Y, **options))(X[None])

    with pytest.raises(fpipe.errors.StageError, match=r"returned a tuple of 2.*has_aux=True"):
        value(lambda y, target: (squared(y, target), 1))
    with pytest.raises(
        fpipe.errors.StageError, match=r"must return one scalar tensor.*it returned float32"
    ):
        value(lambda y, target: (y - target).square().mean(0))
    with pytest.raises(fpipe.errors.StageError, match="must be floating"):
        value(lambda y, target: (y > target).sum())
    with pytest.raises(fpipe.errors.StageError, match=r"must return \(scalar, aux\)"):
        value(squared, has_aux=True)
    stage = fpipe.Stage(lambda p, x: (layer(p, x), x.sum(0)), aux_loss=True)
    pipe = fpipe.pipeline([stage], loss=squared, microbatches=2, group=fpipe.local(1))
    with pytest.raises(fpipe.errors.StageError, match="aux_loss=True"):
        torch.func.vmap(lambda x: pipe(params, x, Y))(X[None])


def test_aux_of_a_gradient_inside_a_transform_may_hold_numbers():
    pipe = fpipe.pipeline(
        [layer],
        loss=lambda y, t: (squared(y, t), {"y": y, "n": 1}),
        microbatches=2,
        group=fpipe.local(1),
    )
    both, params = fpipe.value_and_grad(pipe, has_aux=True), parameters(1)
    (_, aux), _ = both(params, X, Y)

    def inside(x: Tensor) -> Tensor:
        (_, aux), _ = both(params, x, Y)
        assert [part["n"] for part in aux] == [1, 1]
        return aux[1]["y"]

    torch.testing.assert_close(torch.func.vmap(inside)(X[None])[0], aux[1]["y"])


def test_complex_gradients_inside_a_transform_have_the_dtype_of_accumulation():
    params = [torch.ones(4, dtype=torch.complex64)]
    pipe = fpipe.pipeline(
        [lambda p, x: (x * p).abs()],
        loss=squared,
        microbatches=2,
        group=fpipe.local(1),
        accumulate=torch.float64,
    )
    (plain,) = fpipe.grad(pipe)(params, X, Y)
    (found,) = torch.func.vmap(lambda x: fpipe.grad(pipe)(params, x, Y))(X[None])
    assert found.dtype == plain.dtype == torch.complex128
    torch.testing.assert_close(found[0], plain)


def test_tangents_of_forward_mode_pass_through_a_pipeline():
    """Outside torch.func transforms a plan ran, and the result had no tangent."""
    pipe = fpipe.pipeline([layer, layer], loss=squared, microbatches=2, group=fpipe.local(2))
    params = parameters()
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(p, torch.ones_like(p)) for p in params]
        found = forward_ad.unpack_dual(pipe(duals, X, Y)).tangent
    gradients = fpipe.grad(pipe)(params, X, Y)
    torch.testing.assert_close(found, sum(gradient.sum() for gradient in gradients))


def test_a_transform_comes_before_any_other_call():
    """What one call keeps for the next ones is no value of the transform."""
    parts._constant.cache_clear()
    pipe = fpipe.pipeline([layer] * 2, loss=squared, microbatches=2, group=fpipe.local(2))
    params = parameters()

    def after_a_step(rate: Tensor) -> Tensor:
        _, grads = fpipe.value_and_grad(pipe)(params, X, Y)
        return pipe([p - rate * g for p, g in zip(params, grads, strict=True)], X, Y)

    rate = torch.tensor(0.1)
    first, second = (torch.func.grad(after_a_step)(rate) for _ in range(2))
    assert torch.equal(first, second)
    assert fpipe.value_and_grad(pipe)(params, X, Y)[0].isfinite()

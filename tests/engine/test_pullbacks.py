# ruff: noqa: PT017
"""Pullbacks: values that change between the phases of a call, and several backwards of one
forward.
"""

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
    pipe = fpipe.pipeline(
        [fpipe.remat(fn) if remat else fn], microbatches=1, group=fpipe.local(1), engine=engine
    )
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
    with pytest.raises(fpipe.errors.StageError, match="in place"):
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
    pipe = fpipe.pipeline(
        [fn, fpipe.remat(fn)], schedule, microbatches=2, group=fpipe.local(2), engine=engine
    )
    y, pullback = fpipe.vjp(pipe, [torch.ones(3), torch.ones(3)], X)
    first = [pullback(torch.ones_like(y), retain=True) for _ in range(2)]
    first.append(pullback(torch.ones_like(y)))
    for grads, dx in first[1:]:
        assert torch.equal(dx, first[0][1])
        assert all(map(torch.equal, grads, first[0][0]))
    with pytest.raises(fpipe.errors.StageError, match="called before"):
        pullback(torch.ones_like(y))


# ---- stages with replicas ----
#: Two Vs in opposite directions: each rank has both the first and the last stage.
TWO_VS = fpipe.Schedule.parse(
    "[0F0, 1F2, 2F2, 3F0, 3B0, 2B2, 1B2, 0B0, 0F1, 1F3, 2F3, 3F1, 3B1, 2B3, 1B3, 0B1]\n"
    "[0F2, 1F0, 2F0, 3F2, 3B2, 2B0, 1B0, 0B2, 0F3, 1F1, 2F1, 3F3, 3B3, 2B1, 1B1, 0B3]"
)


@pytest.mark.covering
@pytest.mark.parametrize("order", ["lockstep", "buffered"])
@pytest.mark.parametrize(("schedule", "ranks"), [("DualPipe", 4), (TWO_VS, 2)])
def test_each_rank_with_a_replica_has_all_outputs_and_the_whole_gradient_of_the_input(
    schedule: Any, ranks: int, order: Any
):
    """Each had those of its microbatches alone, None with outputs="last", and the gradient of the
    input was lost.
    """
    stages = 4
    params = [torch.linspace(0.5, 1, 3) + stage for stage in range(stages)]
    x = torch.linspace(-1, 1, 24).view(8, 3)
    layer = lambda p, x: torch.tanh(x * p)
    weight = torch.arange(24.0).view(8, 3)  # of a loss over the whole batch
    loss = lambda y: (y * weight).square().mean()

    def unsplit() -> tuple[torch.Tensor, list[torch.Tensor]]:
        leaves = [leaf.clone().requires_grad_() for leaf in (x, *params)]
        y = leaves[0]
        for p in leaves[1:]:
            y = layer(p, y)
        return y.detach(), list(torch.autograd.grad(loss(y), leaves))

    def rank(group: Any, outputs: Any) -> Any:
        pipe = fpipe.pipeline(
            [layer] * stages, schedule, microbatches=4, group=group, outputs=outputs
        )
        y, pullback = fpipe.vjp(pipe, pipe.place(params), x)
        assert all(map(torch.equal, [y] if y is not None else [], [pipe(pipe.place(params), x)]))
        by_value = fpipe.pipeline(
            [layer] * stages,
            schedule,
            microbatches=4,
            group=group,
            loss=lambda y: y.sum(),
            reduction="sum",
        )
        two = (
            fpipe.grad(by_value, argnums=1)(pipe.place(params), x),
            pullback(torch.ones_like(x), retain=True)[1],
        )
        assert two == (None, None) if 0 not in pipe.here else torch.equal(*two)
        dy = torch.func.grad(loss)(y) if group.rank == pipe.output_rank else None
        return stages - 1 in pipe.here, 0 in pipe.here, y, *pullback(dy)

    true, (true_dx, *true_grads) = unsplit()
    for outputs in ("zeros", "everywhere", "last"):
        for last, first, y, grads, dx in fpipe.testing.run(
            lambda g, o=outputs: rank(g, o), ranks, order=order
        ):
            if last or outputs == "everywhere":
                torch.testing.assert_close(y, true)
            else:
                assert y is None if outputs == "last" else not y.any()
            assert (dx is None) == (not first)
            for grad, other in zip([dx, *grads], [true_dx, *true_grads], strict=True):
                if grad is not None:
                    torch.testing.assert_close(grad, other)


@pytest.mark.parametrize("name", ["1F1B", "ZBH1", "ZBV", "DualPipeV", "DualPipe"])
@pytest.mark.parametrize("outputs", ["zeros", "last"])
def test_a_cotangent_that_stages_pass_on_is_that_of_the_last_rank(name: str, outputs: Any):
    """The gradient of ``x + p`` is ``dy`` itself. Ranks before the last stage read their ``dy``,
    which is that of the zeros that stand for the outputs there.
    """
    schedule = fpipe.make_schedule(name, 2, 4)
    params = [torch.full((3,), float(stage)) for stage in range(schedule.stages)]
    x = torch.arange(24.0).view(8, 3)

    def rank(group: Any) -> list[Any]:
        pipe = fpipe.pipeline([torch.add] * len(params), schedule, group=group, outputs=outputs)
        y, pullback = fpipe.vjp(pipe, pipe.place(params), x)
        grads, dx = pullback(None if y is None else y * 2)
        assert dx is None or torch.equal(dx, 2 * (x + sum(params)))
        return grads

    wanted = (2 * (x + sum(params))).view(4, 2, 3).sum((0, 1))
    for grads in fpipe.testing.run(rank, ranks=2):
        found = [grad for grad in grads if grad is not None]
        assert found and all(torch.equal(grad, wanted) for grad in found)

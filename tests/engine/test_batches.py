"""What trainers need from a call: a function for each output instead of all outputs, metrics
without a backward, the scale of half precision, weights from masks; under every schedule where that
could matter.
"""

from __future__ import annotations

import weakref
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
import fpipe.engine.plan_cache
from common import layer, squared

PARTS, WIDTH = 4, 6


def given(stages: int = 4) -> tuple[list[Tensor], Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    params = [torch.randn(WIDTH, WIDTH, generator=draw) for _ in range(stages)]
    return (
        params,
        torch.randn(2 * PARTS, WIDTH, generator=draw),
        torch.randn(2 * PARTS, WIDTH, generator=draw),
    )


def piped(schedule: str = "ZBV", stages: int = 4, **more: Any) -> fpipe.Pipeline:
    return fpipe.pipeline(
        [layer] * stages, schedule, **({"microbatches": PARTS, "group": fpipe.local(2)} | more)
    )


@pytest.mark.parametrize("schedule", fpipe.schedule_names())
def test_each_output_is_handed_over_and_let_go(schedule: str):
    stages = fpipe.make_schedule(schedule, 2, PARTS).stages
    params, x, _ = given(stages)
    pipe = piped(schedule, stages)
    order: list[int] = []
    before: list[weakref.ref[Tensor]] = []

    def each(index: int, y: Tensor) -> Tensor:
        assert all(seen() is None for seen in before), "an output is kept"
        assert y.is_inference() and not torch.is_grad_enabled()
        before.append(weakref.ref(y))
        order.append(index)
        return y.sum(1)

    with torch.inference_mode():
        results = pipe(params, x, each=each)
    assert sorted(order) == list(range(PARTS))
    for one, part in zip(results, x.chunk(PARTS), strict=True):
        assert torch.equal(one, reduce(lambda v, p: layer(p, v), params, part).sum(1))


def test_the_plan_holds_one_output_where_each_is_given():
    big = lambda p, x: x @ p.repeat(1, 100)
    fns, (params, x, _) = [layer, big], given(2)
    pipe = fpipe.pipeline(fns, "1F1B", microbatches=PARTS, group=fpipe.local(2))
    pipe(params, x)
    pipe(params, x, each=lambda i, y: None)
    all_of_them, one = (
        {r: p.peak for r, p in made.prepared.plans.items()}[1] for made in pipe.cache.plans.values()
    )
    output = 4 * 2 * 100 * WIDTH
    assert all_of_them >= PARTS * output and output <= one < 2 * output + 4 * WIDTH * 100 * WIDTH


def test_each_gets_pytrees_and_its_errors_say_where():
    last = lambda p, x: {"y": x @ p, "n": 3}
    params, x, _ = given()
    pipe = fpipe.pipeline(
        [layer, layer, layer, last], "ZBV", microbatches=PARTS, group=fpipe.local(2)
    )
    shapes = [(y["y"].shape, y["n"], i) for i, y in enumerate(pipe(params, x, each=lambda i, y: y))]
    assert shapes == [((2, WIDTH), 3, i) for i in range(PARTS)]
    with pytest.raises(fpipe.FpipeError, match=r"each= after 3F0 on rank 0 raised KeyError.*'no'"):
        pipe(params, x, each=lambda i, y: y["no"])
    assert pipe(params, x)["y"].shape == x.shape, "a call after a fault"


def test_state_comes_with_each():
    counting = fpipe.Stage(lambda p, s, x: (x @ p, s + 1), state=True)
    params, x, _ = given()
    pipe = fpipe.pipeline(
        [layer, layer, layer, counting], "ZBV", microbatches=PARTS, group=fpipe.local(2)
    )
    results, state = pipe(params, x, each=lambda i, y: i, state=[None, None, None, torch.tensor(0)])
    assert results == list(range(PARTS)) and state[3] == PARTS


def test_metrics_without_a_backward():
    def loss(y: Tensor, t: Tensor) -> Any:
        return squared(y, t), {"mean": y.mean(), "rows": len(y)}

    params, x, t = given()
    pipe = piped(loss=loss)
    value, metrics = pipe(params, x, t, has_aux=True)
    (true, same), _ = fpipe.value_and_grad(pipe, has_aux=True)(params, x, t)
    assert torch.equal(value, true) and [m["rows"] for m in metrics] == [2] * PARTS
    assert all(torch.equal(a["mean"], b["mean"]) for a, b in zip(metrics, same, strict=True))


def test_metrics_and_each_under_torch_func():
    params, x, t = given()
    pipe = piped(loss=lambda y, t: (squared(y, t), y.sum()))
    grads, metrics = torch.func.grad(lambda p: pipe(p, x, t, has_aux=True), has_aux=True)(params)
    (_, aux), true = fpipe.value_and_grad(pipe, has_aux=True)(params, x, t)
    torch.testing.assert_close((grads, metrics), (true, aux))
    total = lambda p: torch.stack(piped()(p, x, each=lambda i, y: (i + 1) * y.sum())).sum()
    assert torch.func.grad(total)(params)[0].abs().sum() > 0


@pytest.mark.parametrize("reduction", ["mean", "sum", fpipe.weighted(lambda t: (t > 0).sum())])
def test_a_loss_scale_scales_gradients_and_not_the_loss(reduction: Any):
    params, x, t = given()
    both = fpipe.value_and_grad(piped(loss=squared, reduction=reduction), argnums=(0, 1))
    loss, (grads, dx) = both(params, x, t)
    for scale in (1024.0, torch.tensor(1024.0)):
        value, (scaled, dscaled) = both(params, x, t, loss_scale=scale)
        assert torch.equal(loss, value) and torch.equal(dscaled, 1024 * dx)
        assert all(torch.equal(s, 1024 * g) for s, g in zip(scaled, grads, strict=True))


def test_a_loss_scale_keeps_what_half_precision_would_lose():
    params, x, t = given()
    params, x = [p.half() * 1e-3 for p in params], x.half()
    step = fpipe.value_and_grad(piped(loss=lambda y, t: (y * t).float().mean()))
    tx = fpipe.chain(fpipe.cast(torch.float32), fpipe.dynamic_loss_scale(2.0**15))
    state = tx.init(params)
    lost = step(params, x, t.half())[1]
    kept, _ = tx.update(step(params, x, t.half(), loss_scale=state[1].scale)[1], state, params)
    assert (lost[0] == 0).all() and (kept[0] != 0).any()


def test_weights_may_come_from_a_side_input():
    def loss(y: Tensor, t: Tensor, *, mask: Tensor) -> Tensor:
        return ((y - t).square().mean(1) * mask).sum() / mask.sum()

    params, x, t = given()
    mask = torch.tensor([1.0, 1, 1, 0, 1, 0, 1, 1])
    whole = fpipe.weighted(lambda t, *, mask: mask.sum())
    cut = fpipe.value_and_grad(piped(loss=loss, reduction=whole))(params, x, t, mask=mask)
    uncut = fpipe.value_and_grad(piped("GPipe", loss=loss, microbatches=1, group=fpipe.local(1)))
    torch.testing.assert_close(cut, uncut(params, x, t, mask=mask))


def test_the_plans_of_many_signatures_are_let_go(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fpipe.engine.plan_cache, "MAX_PLANS", 6)
    params, x, _ = given(1)
    pipe = piped("GPipe", 1, group=fpipe.local(1), microbatches=1)
    for rows in (1, 2, 3, 4, 1, 5, 6, 7):
        pipe(params, x[:1].expand(rows, WIDTH))
    kept = [
        made.prepared.request.kinds[0].x.leaves[0].shape[0] for made in pipe.cache.plans.values()
    ]
    assert sorted(kept) == [1, 3, 4, 5, 6, 7], "what was used last stays"


def test_many_shapes_that_took_long_are_hinted_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fpipe.engine.plan_cache, "WARN_PLANS", 3)
    monkeypatch.setattr(fpipe.engine.plan_cache, "WARN_SECONDS", 0.0)
    params, x, _ = given(1)
    pipe = piped("GPipe", 1, group=fpipe.local(1), microbatches=1)
    for rows in (1, 2):
        pipe(params, x[:1].expand(rows, WIDTH))
    with pytest.warns(
        UserWarning,
        match=r"plans for 3 kinds of arguments .* tracing [0-9.]+ s \([0-9]+ "
        r"traces?\).*fpipe.pad.*dynamic",
    ):
        pipe(params, x[:1].expand(3, WIDTH))
    pipe(params, x[:1].expand(4, WIDTH))


def test_what_makes_no_sense_is_reported():
    params, x, t = given()
    outputs, training = piped(), piped(loss=squared)
    with pytest.raises(fpipe.errors.BatchError, match="has no loss"):
        outputs(params, x, has_aux=True)
    with pytest.raises(fpipe.errors.BatchError, match="function of"):
        outputs(params, x, each=3)  # type: ignore[arg-type]
    for scale in (0.0, -1, float("nan"), True, torch.ones(1)):
        with pytest.raises(fpipe.errors.BatchError, match="loss_scale"):
            fpipe.value_and_grad(training)(params, x, t, loss_scale=scale)
    with pytest.raises(fpipe.errors.StageError, match="'each' cannot be a side input"):
        fpipe.pipeline([lambda p, x, *, each: x], "GPipe", microbatches=1, group=fpipe.local(1))


# ---- over processes ----
@pytest.mark.parametrize("outputs", ["zeros", "everywhere"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBV", "DualPipe"])
def test_what_each_returns_stays_where_it_was_called_or_goes_everywhere(
    schedule: str, outputs: Any
):
    stages = fpipe.make_schedule(schedule, 2, PARTS).stages
    params, x, _ = given(stages)
    true = piped(schedule, stages)(params, x, each=lambda i, y: (i, y.sum()))

    def rank(group: Any) -> tuple[int, bool, Any]:
        pipe = piped(schedule, stages, group=group, outputs=outputs)
        return (
            group.rank,
            pipe.output_rank == group.rank,
            pipe(pipe.place(params), x, each=lambda i, y: (i, y.sum())),
        )

    found = fpipe.testing.run(rank, 2)
    assert sum(last for _, last, _ in found) == 1
    for _, last, results in found:
        if (
            schedule == "DualPipe" and outputs == "zeros"
        ):  # each half of the microbatches ends on another rank
            assert [one for one in results if one is not None] in (true[:2], true[2:])
        else:
            assert results == (true if last or outputs == "everywhere" else None)


def test_all_ranks_say_each_or_none():
    params, x, _ = given()

    def rank(group: Any) -> None:
        pipe = piped(group=group)
        pipe(pipe.place(params), x, each=(lambda i, y: y) if group.rank else None)

    with pytest.raises(fpipe.errors.MismatchError, match="each="):
        fpipe.testing.run(rank, 2)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("the reduction", ({"reduction": "mean"}, {"reduction": "sum"})),
        ("the reduction", ({"reduction": "sum"}, {"reduction": fpipe.weighted(torch.numel)})),
        ("the seed", ({"seed": 1}, {"seed": 2})),
    ],
)
def test_ranks_that_weigh_or_draw_otherwise_are_reported(
    name: str, values: tuple[dict[str, Any], dict[str, Any]]
):
    def step(group: Any) -> Any:
        pipe = piped(group=group, loss=squared, **values[group.rank])
        params, x, t = given()
        return fpipe.value_and_grad(pipe)(pipe.place(params), x, t)

    with pytest.raises(fpipe.errors.MismatchError, match=f"disagree about {name}"):
        fpipe.testing.run(step, ranks=2)


def test_weights_from_a_side_input_count_over_all_copies():
    def loss(y: Tensor, t: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        return ((y - t).square().mean(1) * mask).sum() / mask.sum().clamp(min=1), mask.sum()

    params, x, t = given()
    mask = torch.tensor([1.0, 1, 1, 0, 1, 0, 0, 0])
    more: dict[str, Any] = {
        "loss": loss,
        "reduction": fpipe.weighted(lambda t, *, mask: mask.sum()),
    }
    alone = piped("GPipe", 4, microbatches=1, group=fpipe.local(1), **more)
    whole = fpipe.value_and_grad(alone, has_aux=True)(params, x, t, mask=mask, loss_scale=2.0)

    def copy(group: Any) -> Any:
        mine = slice(4 * group.rank, 4 * group.rank + 4)
        pipe = piped(microbatches=2, dp=group, **more)
        step = fpipe.value_and_grad(pipe, has_aux=True)
        return step(params, x[mine], t[mine], mask=mask[mine], loss_scale=2.0)

    for (value, counts), grads in fpipe.testing.run(copy, 2):
        torch.testing.assert_close((value, grads), (whole[0][0], whole[1]))
        assert len(counts) == 2


@pytest.mark.parametrize("engine", ["trace", "eager"])
def test_inference_before_and_between_steps(engine: Any):
    params, x, t = given()
    outputs, step = piped(engine=engine), fpipe.value_and_grad(piped(loss=squared, engine=engine))
    true = reduce(lambda v, p: layer(p, v), params, x)

    def infer() -> None:
        with torch.inference_mode():
            y = outputs(params, x)
            sums = outputs(params, x, each=lambda i, y: y.sum(0))
        assert torch.equal(y, true) and y.is_inference() and len(sums) == PARTS

    infer()
    first = step(params, x, t)
    infer()
    again = step(params, x, t)
    assert torch.equal(first[0], again[0]) and all(map(torch.equal, first[1], again[1]))


def test_a_weight_that_one_rank_cannot_compute_ends_the_call_everywhere(
    monkeypatch: pytest.MonkeyPatch,
):
    """The call was announced, but its failure was not reported: other processes waited for its
    messages.
    """
    group, reported = fpipe.local(1), []
    monkeypatch.setattr(type(group), "failed", lambda self, error: reported.append(error))
    pipe = fpipe.pipeline(
        [layer],
        loss=squared,
        microbatches=2,
        group=group,
        reduction=fpipe.weighted(lambda t: 1 // int(t.sum())),
    )
    with pytest.raises(fpipe.errors.BatchError, match="ZeroDivisionError"):
        fpipe.grad(pipe)([torch.eye(3)], torch.ones(4, 3), torch.zeros(4, 3))
    assert ["ZeroDivisionError" in str(error) for error in reported] == [True]

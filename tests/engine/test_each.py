"""``each=`` with a loss: results of any kind by microbatch, on the rank of the last stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from common import layer, same, squared
from fpipe.programs import cache

PARAMS = [torch.eye(4) * (s + 1) / 4 for s in range(4)]
X, T = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))


def piped(
    schedule: str = "1F1B", loss: Any = squared, ranks: int = 2, **more: Any
) -> fpipe.Pipeline:
    microbatches = more.pop("microbatches", 4)
    return fpipe.pipeline(
        [layer] * 4,
        schedule,
        loss=loss,
        microbatches=microbatches,
        group=fpipe.local(ranks),
        **more,
    )


def plain(number: int) -> tuple[Tensor, Tensor]:
    """The output and the loss of a microbatch, without a pipeline."""
    y = X.chunk(4)[number]
    for p in PARAMS:
        y = layer(p, y)
    return y, squared(y, T.chunk(4)[number])


@pytest.mark.parametrize("schedule", ["1F1B", "ZBV", "DualPipeV", "Interleaved1F1B", "LoopedBFS"])
@pytest.mark.parametrize("engine", ["trace", "eager"])
def test_each_gets_output_and_loss(schedule: str, engine: str):
    ranks = 4 if schedule == "1F1B" else 2
    without = fpipe.value_and_grad(piped(schedule, ranks=ranks, engine=engine))(PARAMS, X, T)
    step = fpipe.value_and_grad(
        piped(schedule, ranks=ranks, engine=engine),
        each=lambda number, y, loss: {"n": number, "y": y, "loss": loss},
    )
    (loss, results), grads = step(PARAMS, X, T)
    assert same((loss, grads), without)
    for number, row in enumerate(results):
        assert row["n"] == number
        assert same((row["y"], row["loss"]), plain(number))


def test_each_gets_all_that_the_loss_returned():
    loss = lambda y, t: (squared(y, t), {"mean": y.mean(), "name": "constant"})
    step = fpipe.value_and_grad(piped(loss=loss), has_aux=True, each=lambda number, y, out: out)
    (_, results), _ = step(PARAMS, X, T)
    assert [float(scalar) for scalar, _ in results] == [float(plain(n)[1]) for n in range(4)]
    assert [float(aux["mean"]) for _, aux in results] == [
        float(plain(n)[0].mean()) for n in range(4)
    ]
    assert {aux["name"] for _, aux in results} == {"constant"}


class Metric:
    """Something that is neither a tensor nor a number."""

    def __init__(self, value: float):
        self.value = value


@pytest.mark.parametrize("schedule", ["1F1B", "ZBV"])
def test_a_loss_on_autograd_returns_metrics_of_any_kind(schedule: str):
    """Python numbers that differ in every microbatch and call, objects, tensors: no trace, no plan
    for each value.
    """
    calls = []

    def loss(y: Tensor, t: Tensor) -> tuple[Tensor, Any]:
        calls.append(0)
        value = squared(y, t)
        return value, {
            "loss": value.item(),
            "object": Metric(y.max().item()),
            "kept": y.mean(),
            "text": f"{len(calls)}",
        }

    pipe = piped(schedule, fpipe.Stage(loss, engine="eager"))
    step = fpipe.value_and_grad(pipe, has_aux=True, each=lambda number, y, out: (number, out[1]))
    want = fpipe.value_and_grad(piped(schedule))(PARAMS, X, T)
    for _ in range(2):
        (value, results), grads = step(PARAMS, X, T)
        assert same((value, grads), want)
        for number, metrics in results:
            y, alone = plain(number)
            assert metrics["loss"] == alone.item()
            assert metrics["object"].value == y.max().item()
            assert not metrics["kept"].requires_grad
    assert len({metrics["text"] for _, metrics in results}) == 4
    assert len(pipe.cache.plans) == 1


def test_forward_only_with_a_loss():
    loss, results = piped()(PARAMS, X, T, each=lambda number, y, loss: (number, float(loss)))
    assert [number for number, _ in results] == [0, 1, 2, 3]
    assert float(loss) == pytest.approx(sum(value for _, value in results) / 4)


def test_outputs_that_the_loss_does_not_read_reach_each():
    """A leaf that stages pass on, and that only ``each`` reads, is sent to the rank of the last
    stage.
    """
    stages = [lambda p, x: (x[0] @ p, x[1])] * 2
    pipe = fpipe.pipeline(
        stages, loss=lambda y, t: squared(y[0], t), microbatches=2, group=fpipe.local(2)
    )
    step = fpipe.value_and_grad(pipe, each=lambda number, y, loss: y[1])
    (_, results), _ = step(PARAMS[:2], (X, torch.arange(8)), T)
    assert [row.tolist() for row in results] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_state_and_weights():
    def counted(p: Tensor, n: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return layer(p, x), n + 1

    stages = [fpipe.Stage(counted, state=True, initial_state=torch.tensor(0)), layer]
    pipe = fpipe.pipeline(
        stages,
        loss=squared,
        microbatches=2,
        group=fpipe.local(2),
        reduction=fpipe.weighted(lambda t: len(t)),
    )
    (_, results, state), _ = fpipe.value_and_grad(pipe, each=lambda n, y, loss: n)(PARAMS[:2], X, T)
    assert results == [0, 1]
    assert int(state[0]) == 2


def test_other_ranks_get_none():
    def rank(group: Any) -> Any:
        stages = [layer] * 2
        pipe = fpipe.pipeline(stages, loss=squared, microbatches=2, group=group)
        everywhere = fpipe.pipeline(
            stages, loss=squared, microbatches=2, group=group, outputs="everywhere"
        )
        each = lambda number, y, loss: float(loss)
        found = [
            fpipe.value_and_grad(p, each=each)(p.place(PARAMS[:2]), X, T)[0][1]
            for p in (pipe, everywhere)
        ]
        try:
            fpipe.value_and_grad(pipe, each=each if group.here == (0,) else None)(
                pipe.place(PARAMS[:2]), X, T
            )
        except fpipe.errors.MismatchError as error:
            return *found, str(error)
        raise AssertionError("ranks that disagree about each= must be refused")

    (first, all_first, text), (last, all_last, _) = fpipe.testing.run(
        rank, ranks=2, order="buffered", seed=0
    )
    assert first is None
    assert last == all_first == all_last
    assert len(last) == 2
    assert "each=" in text


def test_a_write_into_what_the_backward_needs_is_refused():
    step = fpipe.value_and_grad(piped(), each=lambda number, y, loss: y.zero_())
    with pytest.raises(fpipe.errors.ActionError, match=r"each= after 3F0.*wrote into the output"):
        step(PARAMS, X, T)


def test_an_error_of_each_names_it():
    step = fpipe.value_and_grad(piped(), each=lambda number, y, loss: loss["no"])
    with pytest.raises(fpipe.errors.ActionError, match="each= after 3F0 on rank"):
        step(PARAMS, X, T)
    with pytest.raises(fpipe.errors.BatchError, match="its output, what the loss returned"):
        fpipe.value_and_grad(piped(), each=3)(PARAMS, X, T)  # type: ignore[arg-type]


def test_inside_a_transform():
    pipe = piped(microbatches=2)

    def value(p: Tensor) -> Tensor:
        (loss, results), _ = fpipe.value_and_grad(pipe, each=lambda n, y, loss: loss)(
            [p, *PARAMS[1:]], X, T
        )
        return loss + 0 * results[0]

    assert torch.allclose(torch.func.vmap(value)(torch.stack([PARAMS[0]] * 2)), pipe(PARAMS, X, T))


def test_no_trace_for_a_value_of_each():
    pipe, before = piped(), len(cache._BY_FUNCTION)
    for number in range(3):
        fpipe.value_and_grad(pipe, each=lambda n, y, loss, number=number: number)(PARAMS, X, T)
    assert len(pipe.cache.plans) == 1
    assert len(cache._BY_FUNCTION) <= before + 2

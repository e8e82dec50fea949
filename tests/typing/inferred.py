"""What a type checker infers for calls of the public names; ``test_typing.py`` runs pyright on this
file.
"""

from __future__ import annotations

from typing import Any, assert_type

from torch import Tensor

import fpipe
from fpipe import Pipeline

Leaves = dict[str, Tensor]


def layer(p: Leaves, x: Tensor) -> Tensor:
    """A stage."""
    return x @ p["w"]


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    """A loss."""
    return (y - target).square().mean()


def loss_with_aux(y: Tensor, target: Tensor) -> tuple[Tensor, dict[str, int]]:
    """A loss that returns something else too."""
    return loss_of(y, target), {"rows": len(y)}


def of_pipelines(params: list[Leaves], x: Tensor) -> None:
    """Outputs and losses of a forward."""
    outputs = fpipe.pipeline([layer] * 4, "ZBV", group=fpipe.local(2), microbatches=4)
    assert_type(outputs, Pipeline[Tensor, None])
    assert_type(outputs(params, x), Tensor)
    assert_type(
        outputs(params, x, each=lambda number, y: y.sum().item()), list[int | float | bool] | None
    )
    last = fpipe.pipeline([layer] * 4, outputs="last")
    assert_type(last(params, x), Tensor | None)
    pipe = fpipe.pipeline([layer] * 4, "1F1B", loss=loss_of, reduction="sum")
    assert_type(pipe, Pipeline[Tensor, Tensor])
    assert_type(pipe(params, x, x, seed=1), Tensor)
    assert_type(pipe.eval().under(pipe.schedule(4)), Pipeline[Tensor, Tensor])
    assert_type(pipe.place(params), list[Leaves])
    assert_type(pipe.unshard(pipe.shard(params)), list[Leaves])
    with_aux = fpipe.pipeline([layer] * 4, "1F1B", loss=loss_with_aux)
    assert_type(with_aux(params, x, x, has_aux=True), tuple[Tensor, list[dict[str, int]]])
    assert_type(fpipe.pipeline([fpipe.Stage(layer)], loss=fpipe.Stage(loss_of)), Pipeline[Any, Any])


def of_gradients(pipe: Pipeline[Tensor, Tensor], params: list[Leaves], x: Tensor) -> None:
    """Values and gradients, by what is differentiated."""
    loss, grads = fpipe.value_and_grad(pipe)(params, x, x, seed=3, loss_scale=2.0)
    assert_type(loss, Tensor)
    assert_type(grads, list[Leaves])
    loss, dx = fpipe.value_and_grad(pipe, 1)(params, x, x)
    assert_type(dx, Tensor | None)
    loss, (grads, dx) = fpipe.value_and_grad(pipe, argnums=(0, 1))(params, x, x)
    assert_type(loss, Tensor)
    assert_type(grads, list[Leaves])
    assert_type(dx, Tensor | None)
    assert_type(fpipe.grad(pipe)(params, x, x), list[Leaves])
    (loss, _), grads = fpipe.value_and_grad(pipe)(params, x, x, state=[x, x])
    assert_type(grads, list[Leaves])
    norms = fpipe.per_example(pipe, 1.0)(params, x, x)
    assert_type(norms, tuple[Tensor, list[Leaves], Tensor])


def of_aux_and_each(
    pipe: Pipeline[Tensor, tuple[Tensor, str]], params: list[Leaves], x: Tensor
) -> None:
    """What a loss and ``each`` return."""
    (loss, aux), grads = fpipe.value_and_grad(pipe, has_aux=True)(params, x, x)
    assert_type(loss, Tensor)
    assert_type(aux, list[str])
    assert_type(grads, list[Leaves])
    grads, aux = fpipe.grad(pipe, has_aux=True)(params, x, x)
    assert_type(aux, list[str])
    step = fpipe.value_and_grad(
        pipe, has_aux=True, each=lambda number, y, result: (number, result[1])
    )
    (loss, results), grads = step(params, x, x)
    assert_type(results, list[tuple[int, str]] | None)


def of_vjp(params: list[Leaves], x: Tensor) -> None:
    """Outputs and pullbacks."""
    y, pullback = fpipe.vjp(fpipe.pipeline([layer]), params, x)
    assert_type(y, Tensor)
    dparams, dx = pullback(y)
    assert_type(dparams, list[Leaves])
    assert_type(dx, Tensor | None)


def of_transforms(params: list[Leaves], grads: list[Leaves]) -> None:
    """Updates have the type of gradients."""
    tx = fpipe.chain(
        fpipe.clip_by_global_norm(1.0),
        fpipe.adamw(fpipe.transforms.warmup_cosine(1e-3, warmup=10, steps=100)),
    )
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)
    assert_type(updates, list[Leaves])
    assert_type(fpipe.apply_updates(params, updates), list[Leaves])


def of_processes(params: list[Leaves]) -> None:
    """Results by rank, and functions that stand for others."""
    assert_type(fpipe.launch(len, [1, 2], ranks=2), list[int])
    assert_type(fpipe.testing.run(lambda group: str(group.rank), ranks=2), list[str])
    assert_type(fpipe.pipeline([fpipe.remat(layer), fpipe.block(layer)]), Pipeline[Tensor, None])


def of_schedules() -> None:
    """Schedules and what follows from them."""
    schedule = fpipe.make_schedule("ZBV", 4, 8)
    assert_type(schedule, fpipe.Schedule)
    assert_type(schedule.check().simulate(fpipe.Costs(F=1, I=1, W=1)), fpipe.Timeline)
    assert_type(schedule.simulate().total, float)

    @fpipe.register_schedule("Mine")
    def mine(ranks: int, microbatches: int) -> fpipe.Schedule:
        return fpipe.make_schedule("1F1B", ranks, microbatches)

    assert_type(mine(2, 4), fpipe.Schedule)

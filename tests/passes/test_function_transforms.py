"""Forward mode, Hessians and meta-gradients of pipelines, beside plain torch.func on the unsplit
model.
"""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe
from common import layer, squared
from fpipe.errors import StageError
from language_model import WIDTH, WORDS, data, language
from models import cross_entropy, embed


def attend(p: Any, x: Tensor, *, gain: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (x @ p["qkv"]).unsqueeze(1).chunk(3, -1)
    x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1) * gain[:, None, None]
    return torch.tanh(x), 0.1 * x.square().mean()


def head(p: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,)) @ p["wte"].T


def parameters(seed: int) -> list[Any]:
    draw = torch.Generator().manual_seed(seed)
    wte = torch.randn(WORDS, WIDTH, generator=draw)
    return [
        {"wte": wte},
        *({"qkv": torch.randn(WIDTH, 3 * WIDTH, generator=draw) / 2} for _ in "ab"),
        {"wte": wte.clone()},
    ]


def unsplit(params: list[Any], tied: bool = False) -> Tensor:
    """The same model in one piece."""
    x, t, gain = data()
    total = torch.zeros(())
    for tokens, target, part in zip(x.split(2), t.split(2), gain.split(2), strict=True):
        y, aux = embed(params[0], tokens), torch.zeros(())
        for p in params[1:3]:
            y, more = attend(p, y, gain=part)
            aux = aux + more
        total = total + (cross_entropy(head(params[0 if tied else 3], y), target) + aux) / 4
    return total


def compute(group: Any, schedule: str) -> tuple[Any, Any]:
    """Everything on a group; gradients of the stages of this rank."""
    x, t, gain = data()
    pipe = language(attend, head, group, schedule, tied=[("0.wte", "3.wte")])
    params, v = pipe.place(parameters(0)), pipe.place(parameters(1))
    forward = fpipe.jvp(pipe, (params,), (v,), x, t, gain=gain)
    return forward, fpipe.hvp(pipe, params, v, x, t, gain=gain)


def on_a_process() -> tuple[Any, Any]:
    return compute(fpipe.init(timeout=60), "ZBV")


def close(got: Any, want: Any) -> None:
    for one, other in zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def check(forward: Any, hessian: list[Any]) -> None:
    """Results of four stages, compared with torch.func."""
    params, v = parameters(0), parameters(1)
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with math:
        close(forward, torch.func.jvp(unsplit, (params,), (v,)))
        single = lambda p: unsplit(p, tied=True)
        want = torch.func.jvp(torch.func.grad(single), (params,), (v,))[1]
    assert want[1]["qkv"].abs().max() > 0.01
    want[3] = want[0]  # copies of one parameter
    close(hessian, want)


def test_on_a_local_group():
    check(*compute(fpipe.local(4), "ZB1P"))


def test_on_two_ranks():
    found = fpipe.launch(on_a_process, ranks=2, timeout=100)
    assert torch.equal(found[0][0][1], found[1][0][1])
    check(
        found[0][0],
        [part if part is not None else found[1][1][s] for s, part in enumerate(found[0][1])],
    )


def layers() -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    made = [torch.randn(3, 3, generator=draw) for _ in range(4)]
    return made[:2], made[2:], *(torch.randn(4, 3, generator=draw) for _ in "xt")  # type: ignore[return-value]


@pytest.mark.parametrize("engine", ["trace", "eager"])
def test_along_the_input(engine: Any):
    """Without a loss outputs come back, and x may change too."""
    params, v, x, dx = layers()
    pipe = fpipe.pipeline(
        [layer, layer], "GPipe", microbatches=2, group=fpipe.local(2), engine=engine
    )
    want = torch.func.jvp(lambda p, x: layer(p[1], layer(p[0], x)), (params, x), (v, dx))
    close(fpipe.jvp(pipe, (params, x), (v, dx)), want)
    parts = [fpipe.Microbatches(batch.split(2)) for batch in (x, dx)]
    ys, dys = fpipe.jvp(pipe, (params, parts[0]), (v, parts[1]))
    close([torch.cat(list(ys)), torch.cat(list(dys))], want)
    still = fpipe.jvp(pipe, (params,), (None,), x)[1]
    assert still.shape == x.shape and not still.any()


def test_frozen_leaves():
    params, v, x, t = layers()
    pipe = fpipe.pipeline(
        [layer, layer], loss=squared, microbatches=2, group=fpipe.local(2), frozen=["0"]
    )
    found = fpipe.hvp(pipe, params, v, x, t)
    model = lambda p: squared(layer(p[1], layer(p[0], x)), t)
    want = torch.func.jvp(torch.func.grad(model), (params,), (v,))[1]
    assert found[0] is None
    close(found[1], want[1])


def test_bad_tangents():
    params, v, x, t = layers()
    pipe = fpipe.pipeline([layer, layer], loss=squared, microbatches=2, group=fpipe.local(2))
    with pytest.raises(StageError, match="make them alike"):
        fpipe.jvp(pipe, (params,), ([v[0], v[1][:2]],), x, t)
    with pytest.raises(StageError, match="takes tuples"):
        fpipe.jvp(pipe, params, v, x, t)  # type: ignore[arg-type]
    with pytest.raises(StageError, match="not have its form"):
        fpipe.jvp(pipe, ([{"w": p} for p in params],), (v,), x, t)
    with pytest.raises(StageError, match="needs a loss"):
        fpipe.hvp(
            fpipe.pipeline([layer], microbatches=1, group=fpipe.local(1)), params[:1], v[:1], x
        )
    stateful = fpipe.pipeline(
        [fpipe.Stage(lambda p, s, x: (x, s), state=True)], microbatches=1, group=fpipe.local(1)
    )
    with pytest.raises(StageError, match="with state"):
        fpipe.jvp(stateful, (params[:1],), (v[:1],), x)


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


@pytest.mark.parametrize("norm", ["layer", "batch", "instance"])
def test_hessians_through_norms(norm: str):
    """The second derivative counts what a normalization's statistics do, as forward over reverse
    does.
    """

    def normed(p: Tensor, x: Tensor) -> Tensor:
        h = (x @ p)[:, None].expand(-1, 2, -1) * torch.tensor([1.0, 2.0])[:, None]
        if norm == "layer":
            return F.layer_norm(h, (3,), p[0], p[1])
        return (
            F.batch_norm(h, None, None, p[0, :2], training=True)
            if norm == "batch"
            else F.instance_norm(h)
        )

    params, v, x, _ = layers()
    cubes = lambda y: y.pow(3).mean()
    pipe = fpipe.pipeline([layer, normed], loss=cubes, microbatches=1, group=fpipe.local(2))
    model = lambda p: cubes(normed(p[1], layer(p[0], x)))
    want = torch.func.jvp(torch.func.grad(model), (params,), (v,))[1]
    close(fpipe.hvp(pipe, params, v, x), want)
    close(fpipe.jvp(pipe, (params,), (v,), x), torch.func.jvp(model, (params,), (v,)))


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

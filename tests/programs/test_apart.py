"""Whatever a pipeline can do in one process, it does on ranks apart, to the bit: fake ranks against
the local group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import fpipe
from common import layer, squared

WIDTH, PARTS, RANKS = 3, 4, 2


@optree.dataclasses.dataclass(namespace="fpipe")
class Pair:
    """A registered class, known to every rank."""

    h: Tensor
    scale: float


def with_aux(y, t):
    return squared(y, t), {"y": y, "n": 3}


def balanced(p, x):
    return layer(p, x), x.square().mean()


def counting(p, state, x):
    return layer(p, x) + state["n"], {"n": state["n"] + x.mean()}


def scaled(p, x, *, scale):
    return layer(p, x) * scale


def noisy(p, x):
    return torch.nn.functional.dropout(layer(p, x), 0.5)


def data(stages: int) -> tuple[list[Tensor], Tensor, Tensor]:
    torch.manual_seed(stages)
    return (
        [torch.randn(WIDTH, WIDTH) for _ in range(stages)],
        torch.randn(8, WIDTH),
        torch.randn(8, WIDTH),
    )


def stages_of(schedule: str) -> int:
    return fpipe.make_schedule(schedule, RANKS, PARTS).stages


def pipeline(
    fns: Any, schedule: str, group: Any, **more: Any
) -> tuple[fpipe.Pipeline, list[Any], Tensor, Tensor]:
    count = stages_of(schedule)
    fns = fns if isinstance(fns, list) else [fns] * count
    more = {"loss": squared, "microbatches": PARTS} | more
    params, x, t = data(count)
    for one, other in more.get("tied", ()):
        params[int(other[0])] = params[int(one[0])].clone()
    pipe = fpipe.pipeline(fns, schedule, group=group, **more)
    return pipe, pipe.place(params), x, t


def gradients(fns: Any = layer, **more: Any) -> Callable[[str, Any], Any]:
    """A test: value and gradients."""
    options = {name: more.pop(name) for name in ("argnums", "has_aux") if name in more}
    side = more.pop("side", {})

    def play(schedule: str, group: Any) -> Any:
        pipe, params, x, t = pipeline(fns, schedule, group, **more)
        value, grads = fpipe.value_and_grad(pipe, **options)(params, x, t, **side)
        if "argnums" in options:
            return {"value": value, "grads": grads[0], "dx": grads[1]}
        return {"value": value, "grads": grads}

    return play


def of_state(schedule: str, group: Any) -> Any:
    start = {"n": torch.zeros(())}
    pipe, params, x, t = pipeline(
        fpipe.Stage(counting, state=True, initial_state=start), schedule, group
    )
    (loss, state), _ = fpipe.value_and_grad(pipe)(params, x, t)
    (loss, state), grads = fpipe.value_and_grad(pipe)(params, x, t, state=state)
    return {"value": loss, "state": state, "grads": grads}


def uneven(schedule: str, group: Any) -> Any:
    pipe, params, x, t = pipeline(layer, schedule, group)
    made = []
    for sizes in ((1, 4, 2, 1), (3, 1, 2, 2), (8,) if schedule != "DualPipe" else (1, 4, 2, 1)):
        xs, ts = fpipe.Microbatches(x.split(sizes)), fpipe.Microbatches(t.split(sizes))
        made.append(fpipe.value_and_grad(pipe)(params, xs, ts))
    columns = zip(*(grads for _, grads in made), strict=True)
    return {
        "value": [loss for loss, _ in made],
        "grads": [None if c[0] is None else sum(c) for c in columns],
    }


def pulled(schedule: str, group: Any) -> Any:
    pipe, params, x, _ = pipeline(layer, schedule, group, loss=None, outputs="everywhere")
    y, pullback = fpipe.vjp(pipe, params, x)
    dparams, dx = pullback(y * 2)
    return {"value": y, "grads": dparams, "dx": dx}


def forward(schedule: str, group: Any) -> Any:
    pipe, params, x, t = pipeline(layer, schedule, group)
    return {"value": pipe(params, x, t)}


def trees(schedule: str, group: Any) -> Any:
    count = stages_of(schedule)
    first, last = (
        lambda p, x: (Pair(layer(p, x), 2.0), x),
        lambda p, v: layer(p, v[0].h) * v[0].scale + v[1],
    )
    middle = lambda p, v: (Pair(layer(p, v[0].h), v[0].scale + 1), v[1])
    return gradients([first, *[middle] * (count - 2), last])(schedule, group)


def passed_on(schedule: str, group: Any) -> Any:
    """The loss is what the last stage returns, and the last stage passes on the output of the one
    before it.
    """
    count = stages_of(schedule)
    made = lambda p, x: layer(p, x).sum()
    fns = [layer] * (count - 2) + [made, lambda p, x: x]
    return gradients(fns, loss=lambda y, t: y)(schedule, group)


PLAYS = {
    "gradients": gradients(),
    "input gradient": gradients(argnums=(0, 1)),
    "aux": gradients(loss=with_aux, has_aux=True),
    "auxiliary losses": gradients(fpipe.Stage(balanced, aux_loss=True)),
    "tied": gradients(tied=[("0.", "1.")]),
    "frozen": gradients(frozen=["1.*"]),
    "sum": gradients(reduction="sum"),
    "weighted": gradients(reduction=fpipe.weighted(lambda t: (t > 0).sum())),
    "wide": gradients(accumulate=torch.float64),
    "draws": gradients(noisy, seed=4),
    "side inputs": gradients(scaled, side={"scale": torch.linspace(0.5, 1, 24).view(8, 3)}),
    "state": of_state,
    "uneven": uneven,
    "vjp": pulled,
    "forward": forward,
    "trees": trees,
    "passed on": passed_on,
}


def agree(mine: Any, whole: Any) -> None:
    """A rank has the results of the local group: every value, and the entries of its stages."""
    flat, spec = optree.tree_flatten(mine, namespace="fpipe")
    true, other = optree.tree_flatten(whole, namespace="fpipe")
    assert spec == other
    for a, b in zip(flat, true, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.covering
@pytest.mark.parametrize("schedule", ["1F1B", "ZBV", "DualPipe"])
@pytest.mark.parametrize("name", PLAYS)
def test_ranks_apart_give_what_they_give_together(name: str, schedule: str):
    play = PLAYS[name]
    together = play(schedule, fpipe.local(RANKS))
    placement = fpipe.make_schedule(schedule, RANKS, PARTS).placement
    for rank, made in enumerate(
        fpipe.testing.run(lambda group: play(schedule, group), RANKS, seed=len(name))
    ):
        agree(made["value"], together["value"])
        if "dx" in made:
            first = rank in {path[0] for path in placement.paths}
            assert torch.equal(made["dx"], together["dx"]) if first else made["dx"] is None
        for part in ("grads", "state"):
            for stage, entry in enumerate(made.get(part, [])):
                if stage in placement.stages_of(rank):
                    agree(entry, together[part][stage])
                else:
                    assert entry is None


@pytest.mark.parametrize("mode", ["zeros", "everywhere", "last"])
def test_outputs_are_where_they_were_asked_for(mode: Any):
    def play(group: Any) -> Any:
        pipe, params, x, _ = pipeline(layer, "1F1B", group, loss=None, outputs=mode)
        return pipe(params, x)

    whole = play(fpipe.local(RANKS))
    first, last = fpipe.testing.run(play, RANKS)
    assert torch.equal(last, whole)
    if mode == "everywhere":
        assert torch.equal(first, whole)
    elif mode == "zeros":
        assert first.shape == whole.shape and first.dtype == whole.dtype and not first.any()
    else:
        assert first is None

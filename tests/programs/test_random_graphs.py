"""Unusual pipelines: stages that pass on, drop, change and add leaves, under random schedules.

Each is held to plain autograd through the whole model, to the bit. A leaf that one stage gives
twice is left out: the next stage sees two leaves, and adds up their gradients in another order than
autograd would for the one tensor.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe
from fpipe.actions.action import unfused
from sample import also

WIDTH = 3
Leaves = list[Tensor]


def floating(v: Tensor) -> Tensor:
    return v if v.is_floating_point() else v.float()


def written(a: Tensor, p: dict[str, Tensor]) -> Tensor:
    h = a * 1
    h[0] = 0
    return h.mul_(p["b"])


#: what a leaf may be computed from: two leaves of the input, and the parameters
MAKERS: dict[str, Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor]] = {
    "product": lambda a, b, p: torch.tanh(a @ p["w"]),
    "sum": lambda a, b, p: a + b,
    "gate": lambda a, b, p: a * b.sigmoid(),
    "scaled": lambda a, b, p: a * p["b"],
    "parameters": lambda a, b, p: torch.arange(6.0).view(2, 3) * p["b"],
    "stopped": lambda a, b, p: a.detach() * 2,
    "transposed": lambda a, b, p: (a @ p["w"]).t().contiguous().t(),
    "gaps": lambda a, b, p: torch.cat([a, b], 1)[:, ::2],
    "integers": lambda a, b, p: (a > 0).long(),
    "masked": lambda a, b, p: a.masked_fill(a > 0, 0.0),
    "sorted": lambda a, b, p: a.sort(0)[0],
    "written": lambda a, b, p: written(a, p),
    "dropped": lambda a, b, p: F.threshold(a, 0.1, 0.0),
}


def stage(
    draw: random.Random, leaves: int
) -> tuple[Callable[[dict[str, Tensor], Leaves], Leaves], int]:
    """A stage for so many leaves, and how many it gives."""
    passed = draw.sample(range(leaves), draw.randint(0, min(2, leaves)))
    made = [
        (draw.choice(list(MAKERS)), draw.randrange(leaves), draw.randrange(leaves))
        for _ in range(draw.randint(1, 3))
    ]
    made.append(("product", draw.randrange(leaves), 0))

    def fn(p: dict[str, Tensor], x: Leaves) -> Leaves:
        return [x[i] for i in passed] + [
            MAKERS[name](floating(x[i]), floating(x[j]), p) for name, i, j in made
        ]

    return (fpipe.remat(fn) if draw.random() < 0.2 else fn), len(passed) + len(made)


def loss(y: Leaves, t: Tensor) -> Any:
    return sum((floating(v) * t).mean() + floating(v).square().mean() for v in y)


def whole(
    fns: Any, params: Any, x: Leaves, t: Tensor, share: float
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """One microbatch by plain autograd: its share of the loss, gradients of parameters by stage and
    name, and of x.
    """
    leaves = [{name: v.clone().requires_grad_() for name, v in p.items()} for p in params]
    starts = [v.clone().requires_grad_() for v in x]
    y = starts
    for fn, p in zip(fns, leaves, strict=True):
        y = fn(p, y)
    value = loss(y, t) * share
    wrt = [p[name] for p in leaves for name in ("b", "w")]
    grads = torch.autograd.grad(value, wrt + starts, allow_unused=True)
    full = [
        torch.zeros_like(v) if g is None else g for g, v in zip(grads, wrt + starts, strict=True)
    ]
    return value.detach(), full[: len(wrt)], full[len(wrt) :]


@pytest.mark.parametrize("seed", [*range(3), *also(*range(3, 12))])
def test_a_random_pipeline(seed: int):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    ranks, parts = draw.choice([1, 2, 2, 4]), draw.randint(1, 4)
    name = draw.choice(
        [n for n in fpipe.schedule_names() if ranks < 4 or fpipe.make_schedule(n, 4, 4).stages < 8]
    )
    schedule = fpipe.make_schedule(name, ranks, parts)
    fns, leaves = [], 2
    for _ in range(schedule.stages):
        fn, leaves = stage(draw, leaves)
        fns.append(fn)
    params = [{"w": torch.randn(WIDTH, WIDTH), "b": torch.randn(WIDTH)} for _ in fns]
    x, t = [torch.randn(2 * parts, WIDTH) for _ in range(2)], torch.randn(2 * parts, WIDTH)
    pipe = fpipe.pipeline(fns, schedule, loss=loss, group=fpipe.local(ranks))
    with fpipe.debug():
        value, (grads, dx) = fpipe.value_and_grad(pipe, argnums=(0, 1))(params, x, t)
    cut = [[v[2 * m : 2 * m + 2] for v in (*x, t)] for m in range(parts)]
    each = [whole(fns, params, part[:2], part[2], 1 / parts) for part in cut]
    assert torch.equal(value, reduce(torch.add, [one[0] for one in each]))
    for s in range(len(fns)):
        for k, leaf in enumerate(("b", "w")):
            homes = []
            for rank in schedule.placement.ranks_of(s):
                order = [
                    a.microbatch for a in unfused(schedule[rank]) if a.stage == s and a.op in "BW"
                ]
                homes += (
                    [reduce(torch.add, [each[m][1][2 * s + k] for m in order])] if order else []
                )
            assert torch.equal(grads[s][leaf], reduce(torch.add, homes)), (name, s, leaf)
    for k in range(2):
        assert torch.equal(dx[k], torch.cat([one[2][k] for one in each])), (name, k)

"""The table of all transforms, each with a plain reference, and the small model that tests update
with them.

``TABLE`` maps a name to a ``Row``: a function that builds the transform, and the same update
written for a flat list of leaves with torch's own optimizers or a few lines of arithmetic. A new
transform is one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fpipe import transforms as T

STAGES, STEPS = 8, 4
TIED = (("0.wte", "7.wte"),)


def model(seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[Any]:
    """Eight stages; the last one's embedding is the first one's."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=dtype)

    wte = draw(7, 4)
    middle = [
        {"b": draw(5), "deep": [{"w": draw(4, 5)}], "w": draw(5, 4)} for _ in range(STAGES - 2)
    ]
    return [{"wte": wte}, *middle, {"norm": draw(4), "wte": wte.clone()}]


def gradients(steps: int = STEPS, scale: float = 0.3) -> list[list[Any]]:
    return [model(seed, scale=scale) for seed in range(100, 100 + steps)]


def follow(tx: T.Transform, params: Any, grads: list[Any]) -> tuple[Any, Any]:
    """Parameters and state after some steps."""
    state = tx.init(params)
    for gradient in grads:
        updates, state = tx.update(gradient, state, params)
        params = T.apply_updates(params, updates)
    return params, state


# ---- what each should do, on a flat list of leaves ----
Plain = Callable[[list[Tensor], list[list[Tensor]]], list[Tensor]]


def by_torch(
    optimizer: Callable[[Any], Any], before: Callable[[Any], Any] = lambda leaves: None
) -> Plain:
    def steps(params: list[Tensor], grads: list[list[Tensor]]) -> list[Tensor]:
        own = [torch.nn.Parameter(p.clone()) for p in params]
        made = optimizer(own)
        for gradient in grads:
            for p, g in zip(own, gradient, strict=True):
                p.grad = g.clone()
            before(own)
            made.step()
        return [p.detach() for p in own]

    return steps


def by_hand(
    rule: Callable[..., tuple[Tensor, Any]], start: Callable[[Tensor], Any] = lambda p: None
) -> Plain:
    """Each leaf alone, with ``rule(gradient, memory, t, param) -> (update, memory)``, t from 1."""

    def steps(params: list[Tensor], grads: list[list[Tensor]]) -> list[Tensor]:
        after = []
        for index, p in enumerate(params):
            memory = start(p)
            for t, gradient in enumerate(grads, 1):
                update, memory = rule(gradient[index], memory, t, p)
                p = p + update
            after.append(p)
        return after

    return steps


def clip(max_norm: float, p: float) -> Callable[[Any], Any]:
    return lambda own: torch.nn.utils.clip_grad_norm_(own, max_norm, p)


def sgd1(own: Any) -> Any:
    return torch.optim.SGD(own, lr=1.0)


def untied(rule: Plain) -> Plain:
    """The rule on a model in which the tied embedding is one parameter: the last stage's copy is
    left out.
    """

    def steps(params: list[Tensor], grads: list[list[Tensor]]) -> list[Tensor]:
        after = rule(params[:-1], [gradient[:-1] for gradient in grads])
        return [*after, after[0]]

    return steps


class Row(NamedTuple):
    make: Callable[[Any], T.Transform]
    expected: Plain | None
    close: float = 1e-6
    tied: bool = False  # gradients of tied copies are the same, as a pipeline gives them


def descend(*transforms: T.Transform) -> T.Transform:
    return T.chain(*transforms, T.scale(-1.0))


def muon() -> T.Transform:
    return T.from_torch(torch.optim.Muon, lr=0.02)


def warm(step: int) -> float:
    return 0.1 / (1 + step)


def clipping(p: float, exact: bool = False) -> Row:
    make = lambda over: descend(T.clip_by_global_norm(0.7, over=over, p=p, exact=exact))
    return Row(make, untied(by_torch(sgd1, clip(0.7, p))), tied=True)


TABLE = {
    "identity": Row(lambda over: descend(T.identity()), by_hand(lambda g, m, t, p: (-g, m))),
    "master": Row(
        lambda over: T.master(T.sgd(0.1)), by_torch(lambda own: torch.optim.SGD(own, 0.1))
    ),
    "scale": Row(lambda over: T.scale(-0.5), by_hand(lambda g, m, t, p: (-0.5 * g, m))),
    "scale_by_schedule": Row(
        lambda over: descend(T.scale_by_schedule(warm)),
        by_hand(lambda g, m, t, p: (-warm(t - 1) * g, m)),
    ),
    "cast": Row(
        lambda over: descend(T.cast(torch.bfloat16)),
        by_hand(lambda g, m, t, p: (-g.bfloat16().float(), m)),
        1e-6,
    ),
    "clip 2": clipping(2.0),
    "clip 2 exact": clipping(2.0, exact=True),
    "clip 1": clipping(1.0),
    "clip 3 exact": clipping(3.0, exact=True),
    "clip inf": clipping(math.inf),
    "clip inf exact": clipping(math.inf, exact=True),
    "add_noise": Row(lambda over: descend(T.add_noise(0.01, seed=5)), None),
    "skip_nonfinite": Row(
        lambda over: T.chain(T.skip_nonfinite(over=over), T.sgd(0.1)),
        by_torch(lambda own: torch.optim.SGD(own, 0.1)),
    ),
    "dynamic_loss_scale": Row(
        lambda over: T.chain(T.dynamic_loss_scale(4.0, over=over), T.sgd(1.0)),
        by_hand(lambda g, m, t, p: (-g / 4, m)),
    ),
    "sgd": Row(lambda over: T.sgd(0.1), by_torch(lambda own: torch.optim.SGD(own, 0.1))),
    "sgd momentum": Row(
        lambda over: T.sgd(0.1, 0.9, dampening=0.3, weight_decay=0.05),
        by_torch(lambda own: torch.optim.SGD(own, 0.1, 0.9, 0.3, 0.05)),
    ),
    "sgd nesterov": Row(
        lambda over: T.sgd(0.1, 0.9, nesterov=True),
        by_torch(lambda own: torch.optim.SGD(own, 0.1, 0.9, nesterov=True)),
    ),
    "adamw": Row(
        lambda over: T.adamw(0.01), by_torch(lambda own: torch.optim.AdamW(own, 0.01, foreach=True))
    ),
    "adamw options": Row(
        lambda over: T.adamw(0.02, (0.8, 0.9), 1e-3, 0.2, fused=False),
        by_torch(lambda own: torch.optim.AdamW(own, 0.02, (0.8, 0.9), 1e-3, 0.2, foreach=True)),
    ),
    "from_torch muon": Row(
        lambda over: T.masked(muon(), matrices),
        lambda params, grads: [
            after[0] if p.ndim == 2 else p + sum(gradient[i] for gradient in grads)
            for i, p in enumerate(params)
            for after in [
                by_torch(lambda own: torch.optim.Muon(own, 0.02))([p], [[g[i]] for g in grads])
                if p.ndim == 2
                else [p]
            ]
        ],
    ),
    "masked": Row(lambda over: T.chain(T.masked(T.scale(3.0), ["1", "*.b"]), T.scale(-1.0)), None),
    "partition": Row(
        lambda over: T.partition(
            {
                "matrix": T.chain(
                    T.clip_by_global_norm(0.5, over=over, exact=True), T.sgd(0.02, 0.9)
                ),
                "other": T.chain(T.clip_by_global_norm(0.5, over=over, exact=True), T.adamw(0.01)),
            },
            lambda params: optree.tree_map(lambda p: "matrix" if p.ndim == 2 else "other", params),
        ),
        None,
    ),
    "from_torch": Row(
        lambda over: T.from_torch(torch.optim.RMSprop, lr=0.01, momentum=0.9),
        by_torch(lambda own: torch.optim.RMSprop(own, lr=0.01, momentum=0.9)),
    ),
    "from_torch adamw": Row(
        lambda over: T.from_torch(torch.optim.AdamW, lr=0.01),
        by_torch(lambda own: torch.optim.AdamW(own, 0.01)),
    ),
    "all together": Row(
        lambda over: T.chain(
            T.skip_nonfinite(over=over),
            T.clip_by_global_norm(0.7, over=over, exact=True),
            T.adamw(warm, mask=["*.w"]),
            T.scale(0.5),
        ),
        None,
        tied=True,
    ),
}


def matrices(params: Any) -> Any:
    return optree.tree_map(lambda p: p.ndim == 2, params)


def inputs(row: Row) -> tuple[list[Any], list[list[Any]]]:
    grads = gradients()
    if row.tied:
        for gradient in grads:
            gradient[-1]["wte"] = gradient[0]["wte"].clone()
    return model(), grads

"""Stages with carries, and what they are compared with: plain autograd on the unsplit model, slice
after slice.

``plain`` runs the slices of each microbatch in order through the whole model. Its backward goes
from the last slice to the first, one ``torch.autograd.grad`` for each, of the slice's weighted loss
and of its carries, with the gradients that the slice behind computed for them. Gradients are added
in the order in which the schedule runs them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

import fpipe
from fpipe.actions.action import unfused as plain_row

D, B, S, K, M = 4, 2, 8, 4, 2  # width, rows and tokens of a microbatch, slices, microbatches


def attention(p: Any, carry: Any, x: Tensor) -> tuple[Tensor, Any]:
    """Causal attention with keys and values of earlier slices, to which those of this one are
    appended.
    """
    q, k, v = (x @ p[name] for name in "qkv")
    if carry is not None:
        k, v = torch.cat([carry["k"], k], 1), torch.cat([carry["v"], v], 1)
    past = k.shape[1] - x.shape[1]
    mask = torch.ones(x.shape[1], k.shape[1], dtype=torch.bool, device=x.device).tril(past)
    weights = (q @ k.transpose(1, 2)).masked_fill(~mask, float("-inf")).softmax(-1)
    return x + weights @ v @ p["o"], {"k": k, "v": v}


def recurrent(p: Any, carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """A recurrence along the sequence; the carry keeps its shape."""
    ys = []
    for token in x.unbind(1):
        carry = torch.tanh(token @ p["q"] + carry @ p["k"])
        ys.append(carry)
    return torch.stack(ys, 1) * p["v"].sum() + x @ p["o"], carry


def shifted(p: Any, carry: Any, x: Tensor) -> tuple[Tensor, Any]:
    """Carries that are input, output, or unchanged: what enters of a slice is what left the one
    before.
    """
    number, before, constant = carry
    y = before @ p["q"] + x + constant * number
    return y @ p["k"] * p["v"].sum() + p["o"].sum(), (number + x.shape[1], x, constant)


def delayed(p: Any, carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output is the carry itself, and the carry the output of this slice."""
    return carry, torch.tanh(x @ p["q"] @ p["k"] + p["o"].sum(0) * p["v"].sum())


def summed(p: Any, carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """One tensor is output and carry, and its gradients are those of both."""
    total = carry + torch.tanh(x @ p["q"]) @ p["k"] * p["v"].sum() + p["o"].sum()
    return total, total


class Carrying(NamedTuple):
    """A stage function and the carry of its first slice."""

    fn: Callable[..., Any]
    initial: Any


zeros = lambda x: torch.zeros(x.shape[0], D)
MODELS = {
    "attention": Carrying(attention, None),
    "recurrent": Carrying(recurrent, zeros),
    "shifted": Carrying(shifted, lambda x: (0, torch.zeros_like(x), torch.ones(x.shape[0], 1, D))),
    "delayed": Carrying(delayed, lambda x: torch.zeros_like(x)),
    "summed": Carrying(summed, torch.zeros(1, 1, D)),
}


def stage(model: str, **options: Any) -> fpipe.Stage:
    return fpipe.Stage(MODELS[model].fn, carry=True, initial_carry=MODELS[model].initial, **options)


def parameters(stages: int, seed: int = 0) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [{name: torch.randn(D, D, generator=draw) / 2 for name in "qkvo"} for _ in range(stages)]


def batch(microbatches: int = M, tokens: int = S, seed: int = 1) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, t = (torch.randn(B * microbatches, tokens, D, generator=draw) for _ in range(2))
    return x, t


def squared(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean()


# ---- the oracle ----
class Unit(NamedTuple):
    """What autograd computed of one slice: gradients of each stage's parameters, and of x."""

    params: list[dict[str, Tensor | None]]
    x: Tensor


def plain(
    models: Sequence[Carrying],
    params: Sequence[Any],
    x: Tensor,
    t: Tensor,
    microbatches: int,
    slices: int,
    schedule: fpipe.Schedule,
) -> tuple[Tensor, list[Any], Tensor]:
    """Loss, gradients and the gradient of x of ``squared``."""
    weight = 1 / (microbatches * slices)
    total, units = None, {}
    for m, (xs, ts) in enumerate(zip(x.chunk(microbatches), t.chunk(microbatches), strict=True)):
        losses, found = _microbatch(
            models, params, xs.chunk(slices, 1), ts.chunk(slices, 1), weight
        )
        for s, (loss, unit) in enumerate(zip(losses, found, strict=True)):
            total = loss * weight if total is None else total + loss * weight
            units[f"{m}.{s}" if slices > 1 else str(m)] = unit
    dx = [
        torch.cat([u.x for n, u in units.items() if n.split(".")[0] == str(m)], 1)
        for m in range(microbatches)
    ]
    return total, [_added(units, s, schedule) for s in range(len(params))], torch.cat(dx)  # type: ignore[return-value]


def _microbatch(
    models: Sequence[Carrying],
    params: Sequence[Any],
    xs: Sequence[Tensor],
    ts: Sequence[Tensor],
    weight: float,
) -> tuple[list[Tensor], list[Unit]]:
    """The losses and gradients of the slices of one microbatch."""
    live = lambda tree: optree.tree_map(
        lambda a: a.detach().requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a,
        tree,
        none_is_leaf=False,
    )
    runs, carries = [], [None] * len(models)
    for s, (x, t) in enumerate(zip(xs, ts, strict=True)):
        ps, x = live(list(params)), x.detach().requires_grad_()
        given, returned, y = [], [], x
        for i, model in enumerate(models):
            if s:
                given.append(live(carries[i]))
            else:
                given.append(
                    model.initial(y.detach()) if callable(model.initial) else model.initial
                )
            y, after = model.fn(ps[i], given[i], y)
            returned.append(after)
        carries = returned
        runs.append((ps, x, given, returned, squared(y, t)))
    units: list[Unit] = []
    behind: list[tuple[Tensor, Tensor]] = []  # the carries of a slice, and their gradients
    for s in reversed(range(len(xs))):
        ps, x, given, _, loss = runs[s]
        ends = [
            (end, g) for end, g in ((loss * weight, torch.ones(())), *behind) if end.requires_grad
        ]
        tensors = lambda tree: [a for a in optree.tree_leaves(tree) if isinstance(a, Tensor)]
        leaves = [
            *(a for p in ps for a in p.values()),
            x,
            *(a for a in tensors(given) if s and a.requires_grad),
        ]
        found = (
            torch.autograd.grad(
                [e for e, _ in ends], leaves, [g for _, g in ends], allow_unused=True
            )
            if ends
            else [None] * len(leaves)
        )
        by_param = iter(found)
        grads = [{name: next(by_param) for name in p} for p in ps]
        dx = next(by_param)
        units.insert(0, Unit(grads, torch.zeros_like(x) if dx is None else dx))
        behind = []
        for mine, theirs in zip(tensors(runs[s - 1][3]), tensors(given), strict=True) if s else ():
            grad = next(by_param) if theirs.requires_grad else None
            if grad is not None:
                behind.append((mine, grad))
    return [run[-1].detach() for run in runs], units


def _added(units: dict[str, Unit], stage: int, schedule: fpipe.Schedule) -> dict[str, Tensor]:
    """The gradients of a stage, in the order of the schedule; those of replicas are added to the
    first's.
    """
    sums = []
    for rank in schedule.placement.ranks_of(stage):
        into: dict[str, Tensor] = {}
        for action in plain_row(schedule[rank]):
            if action.stage == stage and action.op in "BW":
                for name, grad in units[str(action.microbatch)].params[stage].items():
                    if grad is not None:
                        into[name] = into[name] + grad if name in into else grad
        sums.append(into)
    total = sums[0]
    for more in sums[1:]:
        total = {name: value + more[name] for name, value in total.items()}
    return total


# ---- random stages ----
def random_stage(draw: random.Random) -> Carrying:
    """A stage whose output and carries are random mixtures of its input, its carries and its
    parameters, or are any of these themselves.
    """
    count = draw.randint(0, 3)
    pick = lambda: draw.choice(
        ["x", "y", "tanh", "last", "mean", "detached", "gain", *(f"c{i}" for i in range(count))]
    )
    output, returned = pick(), [pick() for _ in range(count)]
    terms = [
        draw.choice(["x", "tanh", *(f"c{i}" for i in range(count))])
        for _ in range(draw.randint(1, 3))
    ]
    names = [draw.choice("qkvo") for _ in terms]
    whole = draw.random() < 0.5  # whether carries have the size of a slice

    def fn(p: Any, carry: Any, x: Tensor) -> tuple[Tensor, Any]:
        known: dict[str, Tensor] = {f"c{i}": c for i, c in enumerate(carry)}
        known |= {"x": x, "tanh": torch.tanh(x @ p["q"]), "gain": x * p["o"].sum()}
        y = sum(known[term] @ p[name] for term, name in zip(terms, names, strict=True))
        known |= {
            "y": y,
            "last": x[:, -1:],
            "mean": y.mean(1, keepdim=True),
            "detached": y.detach() * 0.5,
        }
        fit = lambda value: (
            value if value.shape[1] == x.shape[1] or not whole else value.expand_as(x)
        )
        made = [fit(known[name]) for name in returned]
        return known[output].expand_as(x), [c if whole else c[:, -1:] for c in made]

    return Carrying(fn, lambda x: [torch.ones_like(x if whole else x[:, :1]) for _ in range(count)])

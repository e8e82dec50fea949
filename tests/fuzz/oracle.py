"""The expected results of a case: plain autograd, one microbatch after another through the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

import fpipe

from .cases import Call, Case, loss_function, weight
from .models import tensors_of

leaves_of = lambda t: optree.tree_leaves(t, namespace="fpipe")


@dataclass(frozen=True)
class Expected:
    """What a call must return."""

    value: Any
    grads: list[Any] | None = None
    input_grads: list[Tensor | None] | None = None
    aux: list[Any] | None = None


def expected(
    case: Case, call: Call, stages: Sequence[fpipe.Stage], params: list[Any], schedule: fpipe.Schedule,
    batch: tuple[list[Tensor], list[Tensor], list[Tensor]], cotangents: list[list[Tensor]] | None,
) -> Expected:  # fmt: skip
    """Run the microbatches one after another."""
    xs, targets, scales = batch
    weights = _weights(case, targets)
    per_microbatch: list[list[list[Tensor | None]]] = []
    losses, outputs, input_grads, auxes = [], [], [], []
    for m in range(call.microbatches):
        live = [optree.tree_map(lambda t: t.clone().requires_grad_(), p, namespace="fpipe") for p in params]
        x = xs[m].clone().requires_grad_()
        y, extra = x, None
        for stage, p in zip(stages, live, strict=True):
            out = stage.fn(p, y, **({"scale": scales[m]} if "scale" in stage.sides else {}))
            if stage.aux_loss:
                out, more = out
                extra = more if extra is None else extra + more
            y = out
        flat = [leaf for p in live for leaf in leaves_of(p)]
        if case.loss:
            value = loss_function(case)(y, targets[m])
            if case.loss == "aux":
                value, aux = value
                auxes.append(aux)
            value = value if extra is None else value + extra
            roots, seeds = [value], [torch.ones_like(value) * weights[m]]
            losses.append(value.detach())
        else:
            outputs.append(optree.tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, y, namespace="fpipe"))
            pairs = zip(tensors_of(y), [] if cotangents is None else cotangents[m], strict=False)
            chosen = [(t, c) for t, c in pairs if t.requires_grad]
            roots, seeds = [t for t, _ in chosen], [c for _, c in chosen]
        if call.kind == "forward":
            continue
        wanted = [*flat, x]
        found = (
            torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
            if roots and any(r.requires_grad for r in roots)
            else [None] * len(wanted)
        )
        input_grads.append(found[-1])
        rows, at = [], 0
        for p in live:
            count = len(leaves_of(p))
            rows.append(list(found[at : at + count]))
            at += count
        per_microbatch.append(rows)
    value = _total(losses, weights) if case.loss else outputs
    if call.kind == "forward":
        return Expected(value, aux=auxes)
    grads = _accumulated(case, per_microbatch, params, schedule)
    grads_x = [torch.zeros_like(x) if g is None else g for x, g in zip(xs, input_grads, strict=True)]
    return Expected(value, _summed_ties(case, grads, params), grads_x, auxes)


def _weights(case: Case, targets: Sequence[Tensor]) -> list[Any]:
    count = len(targets)
    if case.reduction == "weighted":
        counts = [weight(t).to(torch.float64) for t in targets]
        total = torch.stack(counts).sum()
        total = torch.where(total == 0, torch.ones_like(total), total)
        return [(c / total).to(case.dtype) for c in counts]
    return [1.0 / count if case.reduction == "mean" else 1.0] * count


def _total(losses: Sequence[Tensor], weights: Sequence[Any]) -> Tensor:
    total = None
    for value, scale in zip(losses, weights, strict=True):
        part = value * scale
        total = part if total is None else total + part
    assert total is not None
    return total


def _order(schedule: fpipe.Schedule, stage: int) -> list[list[int]]:
    """By replica of a stage: the microbatches in the order in which the schedule runs their weight gradients."""
    rows: list[list[int]] = []
    for rank in range(schedule.ranks):
        order = [
            part.microbatch
            for action in schedule[rank]
            for part in action.parts
            if part.stage == stage and part.op in "BW"
        ]
        rows += [order] if order else []
    return rows


def _accumulated(
    case: Case, found: list[list[list[Tensor | None]]], params: list[Any], schedule: fpipe.Schedule
) -> list[list[Tensor | None]]:
    out: list[list[Tensor | None]] = []
    for stage, p in enumerate(params):
        row: list[Tensor | None] = []
        for index, leaf in enumerate(leaves_of(p)):
            if str(stage) in case.frozen:
                row.append(None)
                continue
            total: Tensor | None = None
            for order in _order(schedule, stage):
                part: Tensor | None = None
                for m in order:
                    grad = found[m][stage][index]
                    if grad is None:
                        continue
                    grad = grad.double() if case.wide else grad
                    part = grad.clone() if part is None else part + grad
                total = part if total is None else total if part is None else total + part
            row.append(
                torch.zeros_like(leaf, dtype=torch.float64 if case.wide else leaf.dtype) if total is None else total
            )
        out.append(row)
    return out


def _summed_ties(case: Case, grads: list[list[Tensor | None]], params: list[Any]) -> list[list[Tensor | None]]:
    for names in case.tied:
        places = [tuple(map(int, name.split("."))) for name in names]
        parts = [grads[s][i] for s, i in places]
        if any(part is None for part in parts):
            continue
        total = parts[0] + parts[1]  # type: ignore[operator]
        for s, i in places:
            grads[s][i] = total
    return grads


def same(a: Any, b: Any, exact: bool) -> str:
    """ "" where two trees are equal, else the first difference."""
    one, other = leaves_of(a), leaves_of(b)
    if len(one) != len(other):
        return f"{len(one)} leaves where {len(other)} are expected"
    for n, (x, y) in enumerate(zip(one, other, strict=True)):
        if not isinstance(y, Tensor):
            if x != y:
                return f"leaf {n} is {x!r}, expected {y!r}"
            continue
        if not isinstance(x, Tensor) or x.shape != y.shape or x.dtype != y.dtype:
            got = f"{x.dtype}{list(x.shape)}" if isinstance(x, Tensor) else repr(x)
            return f"leaf {n} is {got}, expected {y.dtype}{list(y.shape)}"
        if torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num()):
            continue
        close = torch.allclose(x.double(), y.double(), rtol=1e-4, atol=1e-5, equal_nan=True)
        if exact or not close:
            worst = float((x.double() - y.double()).abs().nan_to_num(float("inf")).max())
            return f"leaf {n} {'differs in its last bits' if close else 'is wrong'}: {worst:.3g} at most"
    return ""


def as_rows(params: Sequence[Any], grads: Sequence[Any]) -> list[list[Any]]:
    """Gradients as flat rows, with None where a leaf has none."""
    rows = []
    for p, g in zip(params, grads, strict=True):
        none_is_leaf = optree.tree_leaves(g, none_is_leaf=True, namespace="fpipe")
        skeleton = optree.tree_leaves(p, none_is_leaf=True, namespace="fpipe")
        rows.append([found for found, like in zip(none_is_leaf, skeleton, strict=True) if like is not None])
    return rows

"""Run one case and compare it with the oracle."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch
from torch import Tensor

import fpipe

from .cases import (
    LOSSES,
    PER_MODEL,
    Call,
    Case,
    batch_of,
    parameters_of,
    random_case,
    stages_of,
    states_of,
    weight,
)
from .compare import difference, nearly, same_bits, within_error
from .models import tensors_of
from .oracle import Expected, Given, expected, leaves_of


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    ``kind`` is "equal", "refused" (an fpipe error before a result), "different", "error", or
    "limit": the last bits differ for the documented reason ``text``, and the error is that of plain
    autograd.
    """

    kind: str
    text: str = ""


def run_case(seed: int) -> Outcome:
    """Generate, run and compare the case of a seed."""
    case = random_case(seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _run(case)
    except fpipe.FpipeError as error:
        return Outcome("refused", f"{type(error).__name__}: {error}")
    except Exception as error:
        return Outcome("error", f"{type(error).__name__}: {error}")


def _run(case: Case) -> Outcome:
    torch.manual_seed(0)
    params = parameters_of(case)
    pipe = _pipeline(case, case.schedule, case.ranks)
    worst = Outcome("equal")
    for number, call in enumerate(case.calls):
        found = _call(case, call, number, pipe, params)
        if found.kind == "different":
            return replace(found, text=f"call {number} ({call.kind}): {found.text}")
        worst = worst if found.kind == "equal" else found
    return worst


def _pipeline(case: Case, schedule: str, ranks: int) -> fpipe.Pipeline:
    options: dict[str, Any] = {"accumulate": torch.float64} if case.wide else {}
    if case.model.loss:
        reduction = fpipe.weighted(weight) if case.reduction == "weighted" else case.reduction
        options |= {"loss": LOSSES[case.model.loss], "reduction": reduction}
    return fpipe.pipeline(
        stages_of(case.model),
        schedule,
        group=fpipe.local(ranks),
        frozen=case.frozen,
        tied=case.tied,
        microbatches=case.count,
        seed=7 if case.model.dropout else None,
        **options,
    )


def _call(case: Case, call: Call, number: int, pipe: fpipe.Pipeline, params: list[Any]) -> Outcome:
    given = Given(params, batch_of(case, call, number), None, states_of(case))
    kept = [t.clone() for t in leaves_of(params)]
    result, cotangents = _results(case, call, pipe, given)
    if any(not torch.equal(a, b) for a, b in zip(kept, leaves_of(params), strict=True)):
        return Outcome("different", "the call changed the parameters")
    schedule = fpipe.make_schedule(
        case.schedule, case.ranks, call.microbatches, stages=len(case.model.bodies)
    )
    if case.model.draws:
        wanted, _ = _results(case, call, _other(case), given)
    else:
        given = replace(given, cotangents=cotangents)
        wanted = expected(case, call, given, schedule)
    found = difference(result, wanted, same_bits)
    if found and case.model.draws and (_replicated(schedule) or _transposes(case)):
        found = difference(result, wanted, nearly)
        return (
            Outcome("different", found)
            if found
            else Outcome("limit", "sums of two ranks, or strides of cotangents")
        )
    if not found or not wanted.limits:
        return Outcome("different", found) if found else Outcome("equal")
    run = lambda dtype: expected(case, call, given.to(dtype), schedule)
    low = run(torch.float32) if case.model.dtype is torch.float64 else wanted
    found = difference(result, wanted, within_error(case, wanted, low, run(torch.float64)))
    return (
        Outcome("different", found) if found else Outcome("limit", ", ".join(sorted(wanted.limits)))
    )


def _transposes(case: Case) -> bool:
    """Whether a stage returns a tensor with other strides than its gradient has: messages carry the
    planned ones.
    """
    return any(
        step.name in ("transposed_view", "expand")
        for body in case.model.bodies
        for step in body.steps
    )


def _replicated(schedule: fpipe.Schedule) -> bool:
    """Whether a stage is on two ranks, whose gradients are added last: no other schedule has that
    order of sums.
    """
    return any(len(schedule.placement.ranks_of(stage)) > 1 for stage in range(schedule.stages))


def _other(case: Case) -> fpipe.Pipeline:
    """Another pipeline with the same draws and, where no stage is on two ranks, the same order of
    sums.
    """
    stages = len(case.model.bodies)
    if case.schedule == "LoopedBFS":
        return _pipeline(case, "LoopedBFS", 1 if case.ranks > 1 else stages)
    return _pipeline(case, "GPipe", stages)


# ---- calling ----
def _results(
    case: Case, call: Call, pipe: fpipe.Pipeline, given: Given
) -> tuple[Expected, list[list[Tensor]] | None]:
    batch = given.batch
    x, target, scale = (
        fpipe.Microbatches(p) if call.split else torch.cat(p)
        for p in (batch.xs, batch.targets, batch.scales)
    )
    keywords: dict[str, Any] = (
        {"scale": scale} if any("scale" in s.sides for s in stages_of(case.model)) else {}
    )
    keywords |= {"state": given.state} if case.model.stateful else {}
    if case.model.loss:
        return _with_loss(case, call, pipe, given.params, (x, target), keywords), None
    if call.kind == "forward":
        y = pipe(given.params, x, **keywords)
        y, state = y if case.model.stateful else (y, None)
        return Expected(_parts(y, call), state=state), None
    y, pullback = fpipe.vjp(pipe, given.params, x, **keywords)
    y, state = y if case.model.stateful else (y, None)
    parts = _parts(y, call)
    generator = torch.Generator().manual_seed(case.seed)
    draw = lambda t: (
        torch.randn(t.shape, generator=generator, dtype=t.dtype)
        if isinstance(t, Tensor) and t.is_floating_point()
        else t
    )
    dys = [optree.tree_map(draw, part, namespace="fpipe") for part in parts]
    grads, dx = pullback(fpipe.Microbatches(dys) if call.split else _joined(dys))
    found = Expected(parts, as_rows(given.params, grads), _rows_of(dx, call), state=state)
    return found, [tensors_of(dy) for dy in dys]


def _with_loss(
    case: Case,
    call: Call,
    pipe: fpipe.Pipeline,
    params: list[Any],
    batch: tuple[Any, Any],
    keywords: dict[str, Any],
) -> Expected:
    has_aux = case.model.loss == "aux"
    if call.kind == "forward":
        value, grads, dx = pipe(params, *batch, has_aux=has_aux, **keywords), None, None
    else:
        argnums = (0, 1) if call.input_grad else 0
        step = fpipe.value_and_grad(pipe, argnums, has_aux=has_aux)
        value, grads = step(params, *batch, loss_scale=call.scale, **keywords)
        grads, dx = grads if call.input_grad else (grads, None)
    rest = iter(value[1:] if has_aux or case.model.stateful else ())
    aux, state = next(rest) if has_aux else None, next(rest) if case.model.stateful else None
    loss = value[0] if has_aux or case.model.stateful else value
    return Expected(
        loss, None if grads is None else as_rows(params, grads), _rows_of(dx, call), aux, state
    )


def as_rows(params: list[Any], grads: Any) -> list[list[Any]]:
    """Gradients as flat rows, with None where a leaf has none."""
    rows = []
    for p, g in zip(params, grads, strict=True):
        none_is_leaf = optree.tree_leaves(g, none_is_leaf=True, namespace="fpipe")
        skeleton = optree.tree_leaves(p, none_is_leaf=True, namespace="fpipe")
        rows.append(
            [found for found, like in zip(none_is_leaf, skeleton, strict=True) if like is not None]
        )
    return rows


def _rows_of(dx: Any, call: Call) -> list[Tensor | None] | None:
    if dx is None:
        return None
    return list(dx) if call.split else list(torch.split(dx, list(call.rows)))


def _parts(y: Any, call: Call) -> list[Any]:
    """Outputs by microbatch."""
    if call.split:
        return list(y)
    leaves, spec = optree.tree_flatten(y, namespace="fpipe")
    rows = [
        torch.split(leaf, list(call.rows))
        if isinstance(leaf, Tensor)
        else [leaf] * call.microbatches
        for leaf in leaves
    ]
    return [optree.tree_unflatten(spec, [row[m] for row in rows]) for m in range(call.microbatches)]


def _joined(parts: list[Any]) -> Any:
    join = lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0]
    return optree.tree_map(join, *parts, namespace="fpipe")


# ---- processes of a pool, which import this module but not that of ``python -m tests.fuzz`` ----
def start() -> None:
    """Compute with one thread."""
    torch.set_num_threads(1)


def cases_of_a_model(first: int) -> list[tuple[int, Outcome]]:
    """The outcomes of cases that share a model, each with its seed."""
    return [(seed, run_case(seed)) for seed in range(first, first + PER_MODEL)]

"""Run one case and compare it with the oracle."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

import fpipe

from .cases import Call, Case, batch_of, loss_function, parameters_of, random_case, stages_of, weight
from .models import tensors_of
from .oracle import Expected, as_rows, expected, leaves_of, same


@dataclass(frozen=True)
class Outcome:
    """What became of a case: "equal", "refused" (an fpipe error before a result), "different" or "error"."""

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
    stages, params = stages_of(case), parameters_of(case)
    pipe = _pipeline(case, stages, case.schedule, case.ranks)
    for number, call in enumerate(case.calls):
        difference = _call(case, call, number, pipe, stages, params)
        if difference:
            return Outcome("different", f"call {number} ({call.kind}): {difference}")
    return Outcome("equal")


def _pipeline(case: Case, stages: list[fpipe.Stage], schedule: str, ranks: int) -> fpipe.Pipeline:
    options: dict[str, Any] = {"accumulate": torch.float64} if case.wide else {}
    if case.loss:
        reduction = fpipe.weighted(weight) if case.reduction == "weighted" else case.reduction
        options |= {"loss": loss_function(case), "reduction": reduction}
    return fpipe.pipeline(
        stages, schedule, group=fpipe.local(ranks), frozen=case.frozen, tied=case.tied, microbatches=case.count,
        seed=7 if case.dropout else None, **options,
    )  # fmt: skip


def _call(case: Case, call: Call, number: int, pipe: Any, stages: list[fpipe.Stage], params: list[Any]) -> str:
    batch = batch_of(case, call, number)
    xs, targets, scales = batch
    given = [fpipe.Microbatches(p) if call.split else torch.cat(p) for p in (xs, targets, scales)]
    side = {"scale": given[2]} if any("scale" in stage.sides for stage in stages) else {}
    kept = [t.clone() for t in leaves_of(params)]
    result, cotangents = _results(case, call, pipe, params, given, side)
    if any(not torch.equal(a, b) for a, b in zip(kept, leaves_of(params), strict=True)):
        return "the call changed the parameters"
    if any(body.random for body in case.bodies):
        plain = _pipeline(case, stages, "GPipe", len(stages))
        wanted, _ = _results(case, call, plain, params, given, side)
    else:
        schedule = fpipe.make_schedule(case.schedule, case.ranks, call.microbatches, stages=len(stages))
        wanted = expected(case, call, stages, params, schedule, batch, cotangents)
    return _compare(case, call, result, wanted)


def _compare(case: Case, call: Call, result: Expected, wanted: Expected) -> str:
    # Cases that draw are compared with another schedule, and LoopedBFS adds gradients in the opposite order.
    ordered = case.schedule != "LoopedBFS" or not any(body.random for body in case.bodies)
    for name in ("value", "aux", "grads", "input_grads"):
        one, other = getattr(result, name), getattr(wanted, name)
        if one is None or (name == "aux" and case.loss != "aux"):
            continue
        difference = same(one, other, case.exact and ordered)
        if difference:
            return f"{name}: {difference}"
    if result.grads is not None and wanted.grads is not None:
        for s, (row, other) in enumerate(zip(result.grads, wanted.grads, strict=True)):
            if [g is None for g in row] != [g is None for g in other]:
                return f"grads: stage {s} has None at other leaves than expected"
    return ""


def _results(
    case: Case, call: Call, pipe: Any, params: list[Any], given: list[Any], side: dict[str, Any]
) -> tuple[Expected, list[list[Tensor]] | None]:
    x, target, _ = given
    aux = case.loss == "aux"
    if case.loss:
        if call.kind == "forward":
            value = pipe(params, x, target, has_aux=aux, **side)
            return (Expected(value[0], aux=value[1]) if aux else Expected(value)), None
        argnums = (0, 1) if call.input_grad else 0
        value, grads = fpipe.value_and_grad(pipe, argnums, has_aux=aux)(params, x, target, **side)
        value, found = value if aux else (value, None)
        grads, dx = grads if call.input_grad else (grads, None)
        return Expected(value, as_rows(params, grads), _rows_of(dx, call), found), None
    if call.kind == "forward":
        return Expected(_parts(pipe(params, x, **side), call)), None
    y, pullback = fpipe.vjp(pipe, params, x, **side)
    parts = _parts(y, call)
    generator = torch.Generator().manual_seed(case.seed)
    draw = lambda t: (
        torch.randn(t.shape, generator=generator, dtype=t.dtype)
        if isinstance(t, Tensor) and t.is_floating_point()
        else t
    )
    dys = [optree.tree_map(draw, part, namespace="fpipe") for part in parts]
    whole = fpipe.Microbatches(dys) if call.split else _joined(dys)
    grads, dx = pullback(whole)
    return Expected(parts, as_rows(params, grads), _rows_of(dx, call)), [tensors_of(dy) for dy in dys]


def _rows_of(dx: Any, call: Call) -> list[Tensor] | None:
    if dx is None:
        return None
    return list(dx) if call.split else list(torch.split(dx, list(call.rows)))


def _parts(y: Any, call: Call) -> list[Any]:
    """Outputs by microbatch."""
    if call.split:
        return list(y)
    leaves, spec = optree.tree_flatten(y, namespace="fpipe")
    rows = [
        torch.split(leaf, list(call.rows)) if isinstance(leaf, Tensor) else [leaf] * call.microbatches
        for leaf in leaves
    ]
    return [optree.tree_unflatten(spec, [row[m] for row in rows]) for m in range(call.microbatches)]


def _joined(parts: list[Any]) -> Any:
    join = lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0]
    return optree.tree_map(join, *parts, namespace="fpipe")


# ---- processes of a pool, which import this module but not that of ``python -m tests.fuzz`` -------------------------
def start() -> None:
    """Compute with one thread."""
    torch.set_num_threads(1)


def numbered(seed: int) -> tuple[int, Outcome]:
    """The outcome of a case with its number."""
    return seed, run_case(seed)

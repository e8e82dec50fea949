"""Run one case and compare it with the oracle."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import fpipe

from .cases import (
    PER_MODEL,
    Call,
    Case,
    batch_of,
    made,
    parameters_of,
    random_case,
    states_of,
)
from .compare import difference, nearly, same_bits, within_error
from .features import SETTINGS
from .oracle import Expected, Given, expected, one_stage_a_rank
from .session import DifferenceError, Ran, sessions


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    ``kind`` is "equal", "refused" (an fpipe error before a result), "plain" (plain autograd raises
    an error), "different", "error", or "limit": the last bits differ for the documented reason
    ``text``, and the error is that of plain autograd.
    """

    kind: str
    text: str = ""


def run_case(seed: int) -> Outcome:
    """Generate, run and compare the case of a seed."""
    case = random_case(seed)
    with warnings.catch_warnings(), TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        try:
            return _run(case, Path(folder))
        except DifferenceError as error:
            return Outcome("different", str(error))
        except Exception as error:
            kind = "refused" if isinstance(error, fpipe.FpipeError) else "error"
            if _fails_plainly(case):
                kind = "plain"
            return Outcome(kind, f"{type(error).__name__}: {error}")


def _fails_plainly(case: Case) -> bool:
    """Whether plain autograd, too, raises an error in a call with the first parameters."""
    count = len(case.model.bodies)
    params, states = parameters_of(case), states_of(case)
    for number, call in enumerate(case.calls):
        schedule = made("GPipe", 1, call.microbatches, stages=count, slices=case.slices)
        batches = [batch_of(case, call, number, copy) for copy in range(case.copies)]
        given = [Given(params, batch, None, states) for batch in batches]
        try:
            with SETTINGS[call.features.get("setting", "")].plain():
                expected(case, call, given, schedule)
        except Exception:
            return True
    return False


def _run(case: Case, folder: Path) -> Outcome:
    torch.manual_seed(0)
    found = sessions(case, folder, (case.schedule, case.ranks))
    others: list[list[Ran]] = []
    if case.model.draws:
        others = sessions(case, folder / "other", _other(case))
    worst = Outcome("equal")
    for number, call in enumerate(case.calls):
        copies = [ran[number] for ran in found]
        outcome = _compared(case, call, copies, [ran[number] for ran in others])
        if outcome.kind in ("different", "plain"):
            return replace(outcome, text=f"call {number} ({call.kind}): {outcome.text}")
        worst = worst if outcome.kind == "equal" else outcome
    return worst


def _compared(case: Case, call: Call, copies: Sequence[Ran], others: Sequence[Ran]) -> Outcome:
    """What became of a call."""
    first = copies[0]
    schedule = made(
        first.schedule,
        first.ranks,
        call.microbatches,
        stages=len(case.model.bodies),
        slices=case.slices,
    )
    results = [copy.result for copy in copies]
    if others:
        wanted = [other.result for other in others]
        found = _first(results, wanted, same_bits)
        if found and (_replicated(schedule) or _transposes(case)):
            found = _first(results, wanted, nearly)
            text = "sums of two ranks, or strides of cotangents"
            return Outcome("different", found) if found else Outcome("limit", text)
        return Outcome("different", found) if found else Outcome("equal")
    given = [copy.given for copy in copies]

    def plain(dtype: torch.dtype | None = None) -> list[Expected]:
        numbers = given if dtype is None else [copy.to(dtype) for copy in given]
        with SETTINGS[call.features.get("setting", "")].plain():
            return expected(case, call, numbers, schedule)

    try:
        wanted = plain()
    except Exception as error:
        return Outcome("plain", f"{type(error).__name__}: {error}")
    found = _first(results, wanted, same_bits)
    if not found or not wanted[0].limits:
        return Outcome("different", found) if found else Outcome("equal")
    low = plain(torch.float32) if case.model.dtype is torch.float64 else wanted
    reference = plain(torch.float64)
    for result, *runs in zip(results, wanted, low, reference, strict=True):
        found = difference(result, runs[0], within_error(case, call, *runs))
        if found:
            return Outcome("different", found)
    return Outcome("limit", ", ".join(sorted(wanted[0].limits)))


def _first(
    results: Sequence[Expected], wanted: Sequence[Expected], leaf: Callable[[Any, Any], str]
) -> str:
    """The first difference of the results of copies."""
    pairs = zip(results, wanted, strict=True)
    return next((found for a, b in pairs if (found := difference(a, b, leaf))), "")


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
    order of sums. With ``replicas=`` they are added in the order of microbatches.
    """
    several = any(len(schedule.placement.ranks_of(stage)) > 1 for stage in range(schedule.stages))
    return several and not one_stage_a_rank(schedule)


def _other(case: Case) -> tuple[str, int]:
    """Another pipeline with the same draws and, where no stage is on two ranks, the same order of
    sums.
    """
    stages = len(case.model.bodies)
    if case.schedule == "LoopedBFS":
        return "LoopedBFS", 1 if case.ranks > 1 else stages
    return "GPipe", stages


# ---- processes of a pool, which import this module but not that of ``python -m tests.fuzz`` ----
def start() -> None:
    """Compute with one thread."""
    torch.set_num_threads(1)


def cases_of_a_model(first: int) -> list[tuple[int, Outcome]]:
    """The outcomes of cases that share a model, each with its seed."""
    return [(seed, run_case(seed)) for seed in range(first, first + PER_MODEL)]

# SPDX-License-Identifier: Apache-2.0
"""The search over layouts: all of them, the shortest possible first, until no other one can be
among the best.

What is found is the best of what is enumerated: a layout is skipped where its work alone takes
longer than the layouts that were found, or where its state alone has no room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import Any

from ...errors import PlanError, ScheduleError
from .hardware import GIB, USABLE
from .layout import RECOMPUTE, Job, Layout, Recompute, divides
from .prediction import Prediction, least, predict, usable

#: The schedules that are tried, and the numbers of stages that a rank may have.
SCHEDULES: dict[str, tuple[int, ...]] = {
    "1F1B": (1,),
    "Interleaved1F1B": (2, 3, 4, 6, 8),
    "InterleavedZeroBubble": (2, 3, 4),
    "ZBH1": (1,),
    "ZBH2": (1,),
    "ZBVZeroBubble": (2,),
    "VHalf": (2,),
    "VMin": (2,),
    "DualPipeV": (2,),
    "LoopedBFS": (2, 4, 8),
    "GPipe": (1,),
}
MOST_MICROBATCH = 16  #: sequences of a microbatch, at most
NEAREST = 16  #: layouts that are predicted to say which comes nearest, where none fits
MORE = 6  #: how often the number of GPUs is doubled, to say how many would do


@dataclass(frozen=True)
class Choices:
    """What the search may choose from: lists of values; empty: all of them."""

    schedules: Sequence[str] = ()
    tp: Sequence[int] = ()
    pp: Sequence[int] = ()
    zero: Sequence[int] = ()
    microbatch: Sequence[int] = ()
    recompute: Sequence[Recompute] = ()
    sequence_parallel: bool = True


@dataclass(frozen=True)
class Found:
    """The best layouts, the best of each combination of tensor ranks, pipeline ranks and schedule,
    and how many there were: all, those whose state has room, and those that were predicted.
    """

    best: tuple[Prediction, ...]
    layouts: int
    possible: int
    predicted: int


def search(
    job: Job,
    choices: Choices | None = None,
    top: int = 5,
    track: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> Found:
    """The layouts in which a step is shortest, of those that fit.

    Args:
        job: what is trained, and on what.
        choices: what to choose from; by default everything.
        top: how many layouts to return.
        track: yields the items of a list, for a display of progress.

    Returns:
        The predictions, best first, and counts.

    Raises:
        PlanError: if no layout exists or fits; it says which comes nearest, and what would make it
        fit.

    >>> from .hardware import find_gpu
    >>> from .model import Model
    >>> job = Job(Model("m", "llama", 4096, 32, 32, 32000, 11008), 8, find_gpu("a100"), batch=64,
    ...     sequence=4096)
    >>> search(job).best[0].fits
    True
    """
    choices = choices or Choices()
    layouts = list(candidates(job, choices))
    if not layouts:
        raise _none(job, choices)
    bounds = [(*least(job, layout), layout) for layout in track(layouts)]
    room = usable(job)
    possible = sorted((bound for bound in bounds if bound[1] <= room), key=_order)
    best: dict[tuple[int, int, str], Prediction] = {}
    predicted, worst = 0, inf
    for seconds, _, layout in possible:
        if seconds > worst:
            break
        found = _tried(job, layout)
        predicted += found is not None
        if found is None or not found.fits:
            continue
        key = layout.tp, layout.pp, layout.schedule
        if key not in best or found.step < best[key].step:
            best[key] = found
            steps = sorted(each.step for each in best.values())
            worst = steps[top - 1] if len(steps) >= top else inf
    if not best:
        raise _too_large(
            job, choices, [bound[2] for bound in sorted(bounds, key=lambda bound: bound[1])]
        )
    chosen = sorted(best.values(), key=lambda each: each.step)[:top]
    return Found(tuple(chosen), len(layouts), len(possible), predicted)


def candidates(job: Job, choices: Choices) -> Iterator[Layout]:
    """All layouts of a job."""
    model, gpus = job.model, job.gpus
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    for tp, pp in product(choices.tp or divisors, choices.pp or divisors):
        dp, rest = divmod(gpus, tp * pp)
        if rest or job.batch % dp or pp > model.layers:
            continue
        if tp <= job.gpu.node and divides(model, tp):
            layout = Layout(tp, pp, dp, sequence_parallel=choices.sequence_parallel)
            for scheduled in _scheduled(job, choices, layout):
                yield from _detailed(job, choices, scheduled)


def _scheduled(job: Job, choices: Choices, layout: Layout) -> Iterator[Layout]:
    """A layout with each schedule."""
    if layout.pp == 1:
        yield layout
        return
    for name in choices.schedules or SCHEDULES:
        for per_rank in SCHEDULES[name]:
            if layout.pp * per_rank <= job.model.layers:
                yield replace(layout, schedule=name, per_rank=per_rank)


def _detailed(job: Job, choices: Choices, layout: Layout) -> Iterator[Layout]:
    """A layout with each microbatch, ZeRO degree and choice of recompute."""
    sizes = choices.microbatch or [1 << n for n in range(MOST_MICROBATCH.bit_length())]
    degrees: Sequence[int] = [0]
    if layout.dp > 1:
        degrees = choices.zero or [0, 1, *([3] if layout.per_rank > 2 else [])]
    for microbatch, zero, recompute in product(sizes, degrees, choices.recompute or RECOMPUTE):
        if job.batch // layout.dp % microbatch == 0:
            yield replace(layout, microbatch=microbatch, zero=zero, recompute=recompute)


def _order(bound: tuple[float, float, Layout]) -> tuple[float, int, int]:
    """By time; of equal ones those that share and compute again less come first."""
    seconds, _, layout = bound
    return seconds, layout.zero, RECOMPUTE.index(layout.recompute)


def _tried(job: Job, layout: Layout) -> Prediction | None:
    """The prediction of a layout; None where its schedule has no form for the counts."""
    try:
        return predict(job, layout)
    except ScheduleError:
        return None


def _none(job: Job, choices: Choices) -> PlanError:
    """The error where no layout exists."""
    what = f"no layout of {job.gpus} GPUs divides {job.model.name} and {job.batch} sequences"
    if choices != Choices(sequence_parallel=choices.sequence_parallel):
        return PlanError(f"{what} with the given choices; leave out some of them")
    power = 1 << (job.gpus.bit_length() - 1)
    return PlanError(
        f"{what}; give a number of GPUs and of sequences with common divisors, such as {power} GPUs"
    )


def _too_large(job: Job, choices: Choices, layouts: Sequence[Layout]) -> PlanError:
    """The error where no layout fits: which comes nearest, and what would make it fit."""
    roomy = replace(job, gpu=replace(job.gpu, memory=inf))
    found = [each for layout in layouts[:NEAREST] if (each := _tried(roomy, layout)) is not None]
    if not found:
        return PlanError(
            f"no schedule has a form for {job.batch} sequences on {job.gpus} GPUs; give more "
            "sequences"
        )
    near = min(found, key=lambda each: each.fullest.total)
    need = near.fullest.total / USABLE
    text = (
        f"no layout fits {job.gpu.memory / GIB:.3g} GiB; nearest is {near.layout} with "
        f"{need / GIB:.3g} GiB"
    )
    return PlanError(
        f"{text}. It fits with --memory {1.01 * need / GIB:.3g}GiB{_with_more(job, choices)}"
    )


def _with_more(job: Job, choices: Choices) -> str:
    """With how many GPUs a layout would fit."""
    for doubled in range(1, MORE + 1):
        larger = replace(job, gpus=job.gpus << doubled)
        bounds = [(least(larger, layout)[1], layout) for layout in candidates(larger, choices)]
        fitting = sorted(
            (bound for bound in bounds if bound[0] <= usable(job)), key=lambda bound: bound[0]
        )
        for _, layout in fitting[:NEAREST]:
            if (found := _tried(larger, layout)) is not None and found.fits:
                return f", or with --gpus {larger.gpus}"
    return ", or with fewer tokens of a sequence"

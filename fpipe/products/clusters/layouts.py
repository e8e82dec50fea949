# SPDX-License-Identifier: Apache-2.0
"""The search over layouts: all of them, the shortest possible first, until no other one can be
among the best.

The result is the best of what is enumerated: a layout is skipped where its work alone takes longer
than the layouts that are among the best, or where its state alone has no room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import product
from typing import NamedTuple

from ...actions import Track
from ...errors import PlanError, ScheduleError
from .hardware import GIB, USABLE
from .layout import RECOMPUTE, Job, Layout, divides
from .prediction import Prediction, least, predict, usable

#: The schedules that are tried, and the numbers of stages that a rank may have.
SCHEDULES = {
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


class Bound(NamedTuple):
    """Seconds and bytes that a layout has at least."""

    seconds: float
    nbytes: float
    layout: Layout


@dataclass(frozen=True)
class Layouts:
    """The best layouts, the best of each combination of tensor ranks, pipeline ranks and schedule,
    and how many there were: all, those whose state has room, and those that were predicted.
    """

    best: tuple[Prediction, ...]
    layouts: int
    possible: int
    predicted: int


def search(
    job: Job,
    accepts: Callable[[Layout], bool] | None = None,
    top: int = 5,
    track: Track = iter,
) -> Layouts:
    """The layouts in which a step is shortest, of those that fit.

    Args:
        job: what is trained, and on what.
        accepts: whether a layout is tried; by default all are.
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
    layouts = list(filter(accepts, candidates(job)))
    if not layouts:
        raise _none(job, accepts is not None)
    bounds = [Bound(*least(job, layout), layout) for layout in track(layouts)]
    possible = sorted((bound for bound in bounds if bound.nbytes <= usable(job)), key=_order)
    best: dict[tuple[int, int, str], Prediction] = {}
    shortest: list[Prediction] = []
    predicted = 0
    for seconds, _, layout in possible:
        if len(shortest) == top and seconds > shortest[-1].step:
            break
        prediction = _tried(job, layout)
        if prediction is None:
            continue
        predicted += 1
        key = layout.tp, layout.pp, layout.schedule
        if prediction.fits and (key not in best or prediction.step < best[key].step):
            best[key] = prediction
            shortest = nsmallest(top, best.values(), key=lambda prediction: prediction.step)
    if not shortest:
        smallest = nsmallest(NEAREST, bounds, key=lambda bound: bound.nbytes)
        raise _too_large(job, [bound.layout for bound in smallest])
    return Layouts(tuple(shortest), len(layouts), len(possible), predicted)


def candidates(job: Job) -> Iterator[Layout]:
    """All layouts of a job."""
    model = job.model
    gpus = job.gpus
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    sizes = [1 << n for n in range(MOST_MICROBATCH.bit_length())]
    for tp, pp in product(divisors, divisors):
        dp, rest = divmod(gpus, tp * pp)
        if rest or job.batch % dp or pp > model.layers:
            continue
        if tp > job.gpu.node or not divides(model, tp):
            continue
        for name, per_rank in _schedules(model.layers, pp):
            layout = Layout(tp, pp, dp, schedule=name, per_rank=per_rank)
            degrees = [0]
            if dp > 1:
                degrees += [1, 3] if per_rank > 2 else [1]
            for microbatch, zero, recompute in product(sizes, degrees, RECOMPUTE):
                if job.batch // dp % microbatch == 0:
                    yield replace(layout, microbatch=microbatch, zero=zero, recompute=recompute)


def _schedules(layers: int, pp: int) -> Iterator[tuple[str, int]]:
    """Names of schedules, each with the numbers of stages that a rank may have."""
    if pp == 1:
        yield "1F1B", 1
        return
    for name, counts in SCHEDULES.items():
        for per_rank in counts:
            if pp * per_rank <= layers:
                yield name, per_rank


def _order(bound: Bound) -> tuple[float, int, int]:
    """By time; of equal ones those that share and compute again less come first."""
    return bound.seconds, bound.layout.zero, RECOMPUTE.index(bound.layout.recompute)


def _tried(job: Job, layout: Layout) -> Prediction | None:
    """The prediction of a layout; None where its schedule has no form for the counts."""
    try:
        return predict(job, layout)
    except ScheduleError:
        return None


def _none(job: Job, chosen: bool) -> PlanError:
    """The error where no layout exists."""
    what = f"no layout of {job.gpus} GPUs divides {job.model.name!s:.60} and {job.batch} sequences"
    if chosen:
        return PlanError(f"{what} with the given choices; leave out some of them")
    power = 1 << (job.gpus.bit_length() - 1)
    return PlanError(
        f"{what}; give a number of GPUs and of sequences with common divisors, such as {power} GPUs"
    )


def _too_large(job: Job, layouts: Sequence[Layout]) -> PlanError:
    """The error where no layout fits: which of these comes nearest, and what would make it fit."""
    predictions = [prediction for layout in layouts if (prediction := _tried(job, layout))]
    if not predictions:
        return PlanError(
            f"no schedule has a form for {job.batch} sequences on {job.gpus} GPUs; give more "
            "sequences"
        )
    near = min(predictions, key=lambda prediction: prediction.fullest.total)
    need = near.fullest.total / USABLE / GIB
    return PlanError(
        f"no layout fits {job.gpu.memory / GIB:.3g} GiB; nearest is {near.layout}, which fits with "
        f"--memory {1.01 * need:.3g}GiB; more GPUs, or shorter sequences, need less"
    )

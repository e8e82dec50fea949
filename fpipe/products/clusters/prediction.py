# SPDX-License-Identifier: Apache-2.0
"""Memory and time of a job in a layout: costs of stages in seconds and bytes, and the schedule in
the simulator.

The rows of a schedule determine what a rank holds, and their simulation how long they take.
Data-parallel collectives and the optimizer are added. Knows no search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from ...actions import Costs, Timeline, unfused
from ...schedule import Schedule
from .hardware import GRADIENT, LATENCY, MEMORY, OPTIMIZER, PARAMETER, USABLE
from .layout import Job, Layout
from .sizes import (
    Work,
    embedding_bytes,
    head_work,
    layer_work,
    logits_bytes,
    operations,
    state_bytes,
    total,
)

#: Schedules of more microbatches than this many times the ranks are simulated for fewer, and
#: extended.
PERIODS = 8
#: Schedules in which the second stages of ranks are in the reverse order of the first; those that
#: run all forwards before the first backward; those that split backwards.
TURNED = ("ZBVZeroBubble", "VHalf", "VMin", "DualPipeV")
FORWARDS_FIRST = ("GPipe", "LoopedBFS")
SPLIT = (*TURNED, "ZBH1", "ZBH2", "InterleavedZeroBubble")


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank: state of its layers and of its part of the vocabulary, activations, and
    what is computed for a moment. ``late`` are the gradients among its state that it does not have
    yet while it holds the most.
    """

    rank: int
    layers: float
    vocabulary: float
    activations: float
    moment: float
    late: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.layers + self.vocabulary + self.activations + self.moment - self.late


@dataclass(frozen=True)
class Prediction:
    """What is expected of a layout.

    Args:
        job: what is trained.
        layout: how it is distributed.
        memory: by rank of the pipeline.
        step: seconds of a step.
        parts: seconds of a step by what they are spent on, on an average rank.
        bubble: the share of a pipeline's time in which an average rank does nothing.
    """

    job: Job
    layout: Layout
    memory: tuple[Memory, ...]
    step: float
    parts: dict[str, float]
    bubble: float

    @property
    def fullest(self) -> Memory:
        """The memory of the fullest rank."""
        return max(self.memory, key=lambda memory: memory.total)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank has enough memory."""
        return self.fullest.total <= usable(self.job)

    @property
    def flops(self) -> float:
        """Operations of the model a second on each GPU; what is computed again does not count."""
        job = self.job
        return operations(job) * job.tokens / job.gpus / self.step

    @property
    def mfu(self) -> float:
        """``flops`` as a share of the data sheet's."""
        return self.flops / self.job.gpu.flops


def usable(job: Job) -> float:
    """The bytes of a GPU that tensors can have."""
    return job.gpu.memory * USABLE


def predict(job: Job, layout: Layout) -> Prediction:
    """Memory and time of a job in a layout.

    Args:
        job: what is trained.
        layout: how it is distributed.

    Returns:
        The prediction.

    Raises:
        PlanError: if the layout does not fit the job.
        ScheduleError: if its schedule has no form for these counts.

    >>> from .hardware import find_gpu
    >>> from .model import Model
    >>> job = Job(Model("m", "llama", 4096, 32, 32, 32000, 11008), 8, find_gpu("a100"), batch=64,
    ...     sequence=4096)
    >>> prediction = predict(job, Layout(tp=2, pp=2, dp=2, recompute="selective"))
    >>> prediction.fits, 0.4 < prediction.mfu < 0.6
    (True, True)
    """
    layout.check(job)
    case = _Case(job, layout)
    # without ZeRO the simulation is the same
    seconds, busy, *by_rank = _simulated(_Case(job, replace(layout, zero=0)))
    held = zip(by_rank[: layout.pp], by_rank[layout.pp :], strict=True)
    memory = tuple(_memory(case, rank, *nbytes) for rank, nbytes in enumerate(held))
    parts = _parts(case, seconds)
    step = seconds + parts["copies"] + parts["optimizer"]
    return Prediction(job, layout, memory, step, parts, bubble=1 - busy / seconds)


def least(job: Job, layout: Layout) -> tuple[float, float]:
    """Seconds that no step in a layout is shorter than, and bytes that its fullest rank has at
    least.

    A rank begins after the forwards of the stages before its first one and, where backwards are not
    split, ends before their backwards. It holds its state, and the activations of a microbatch of
    its last stage: before it has gradients, where the most may be held only then.
    """
    case = _Case(job, layout)
    before = case.works[: layout.pp - 1]
    waits = [work.F if layout.schedule in SPLIT else work.seconds for work in before]
    is_early = layout.schedule in FORWARDS_FIRST or case.microbatches < 4 * layout.pp
    ends: list[float] = []
    nbytes: list[float] = []
    for start, stages in zip(accumulate(waits, initial=0.0), case.ranks, strict=True):
        busy = sum(case.works[stage].seconds for stage in stages)
        ends.append(start + case.microbatches * busy)
        elements = sum(case.elements[stage] for stage in stages)
        held = state_bytes(layout, elements)
        if layout.stages - 1 in stages:
            late = elements * GRADIENT / layout.tp if is_early else 0.0
            held += max(case.works[-1].saved - late, 0.0)
        nbytes.append(held)
    return max(ends) + _copies(case) + _optimizer(case), max(nbytes)


# ---- stages ----
@dataclass(frozen=True)
class _Case:
    """A job in a layout, and what each of its stages takes and has."""

    job: Job
    layout: Layout

    @cached_property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return self.layout.microbatches(self.job)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return self.layout.counts(self.job.model)

    @cached_property
    def ranks(self) -> list[list[int]]:
        """The stages of each rank."""
        p = self.layout.pp
        if self.layout.schedule in TURNED:
            return [[rank, 2 * p - 1 - rank] for rank in range(p)]
        return [list(range(rank, self.layout.stages, p)) for rank in range(p)]

    @cached_property
    def vocabulary(self) -> list[int]:
        """Parameters of each stage beside its layers."""
        model = self.job.model
        elements = [0] * self.layout.stages
        elements[0] += model.embedding_parameters
        if self.layout.stages > 1 or not model.tied:
            elements[-1] += model.head_parameters
        return elements

    @cached_property
    def elements(self) -> list[int]:
        """Parameters of each stage, before tensor-parallel ranks split them."""
        layer = self.job.model.layer_parameters
        stages = zip(self.counts, self.vocabulary, strict=True)
        return [count * layer + vocabulary for count, vocabulary in stages]

    @cached_property
    def boundary(self) -> float:
        """Bytes of a message between stages."""
        job = self.job
        layout = self.layout
        return job.sequence * layout.microbatch * job.model.hidden * PARAMETER / layout.tp

    @cached_property
    def works(self) -> list[Work]:
        """Seconds and bytes of each stage for a microbatch.

        What a stage sends is held until a later message shows that it has arrived.
        """
        job = self.job
        layout = self.layout
        layer = layer_work(job, layout)
        layers = {count: layer.times(count) for count in set(self.counts)}
        sent = Work(saved=self.boundary, kept=self.boundary)
        beside = [sent] * (layout.stages - 1) + [head_work(job, layout)]
        works = [
            total(layers[count], more) for count, more in zip(self.counts, beside, strict=True)
        ]
        works[0] = total(works[0], Work(saved=embedding_bytes(job, layout)))
        return works


# ---- the schedule ----
@lru_cache(maxsize=1024)
def _simulated(case: _Case) -> list[float]:
    """What ``_run`` returns; with many microbatches, that of two schedules of fewer, whose
    difference is repeated.
    """
    count = case.microbatches
    p = case.layout.pp
    if count <= PERIODS * p:
        return _run(case, count)
    fewer = (PERIODS - 4) * p + count % p
    times = (count - fewer) / (2 * p)
    short = _run(case, fewer)
    long = _run(case, fewer + 2 * p)
    return [a + (b - a) * times for a, b in zip(short, long, strict=True)]


def _run(case: _Case, microbatches: int) -> list[float]:
    """The schedule for a number of microbatches in the simulator: its seconds, those in which an
    average rank is busy, the most bytes of activations of each rank, and of each rank the bytes of
    gradients that come later.
    """
    works = case.works
    costs = Costs(
        F=[work.F for work in works],
        I=[work.I for work in works],
        W=[work.W for work in works],
        comm=LATENCY,
        boundary=case.boundary,
        bandwidth=case.job.gpu.width(case.job.gpus),
        saved=[work.saved for work in works],
        kept=[work.kept for work in works],
    )
    schedule = case.layout.schedule_for(microbatches)
    timeline = schedule.simulate(costs)
    gradients = [elements * GRADIENT / case.layout.tp for elements in case.elements]
    late = _late(timeline, schedule, costs, gradients)
    return [timeline.total, sum(timeline.busy) / timeline.ranks, *timeline.peak_bytes, *late]


def _late(
    timeline: Timeline,
    schedule: Schedule,
    costs: Costs,
    gradients: Sequence[float],
) -> list[float]:
    """The bytes of gradients that each rank does not have yet while it holds the most.

    The gradients of a stage come with its first backward: with few microbatches, a rank holds the
    most activations before it has gradients.

    >>> costs = Costs(saved=1)
    >>> for row in ("[0F0, 0F1, 0B0, 0B1]", "[0F0, 0B0, 0F1, 0B1]"):
    ...     schedule = Schedule.parse(row)
    ...     _late(schedule.simulate(costs), schedule, costs, [3.0])
    [1.0]
    [0.0]
    """
    memory = costs.memory(schedule.stages)
    late = []
    for rank, row in enumerate(schedule):
        to_come = {stage: gradients[stage] for stage in schedule.placement.stages_of(rank)}
        end = timeline.peak_bytes[rank] + sum(to_come.values())
        changes = [
            memory[op][stage] + (to_come.pop(stage, 0.0) if op in ("B", "W") else 0.0)
            for stage, op, _ in unfused(row)
        ]
        late.append(max(end - max(accumulate(changes)), 0.0))
    return late


def _parts(case: _Case, seconds: float) -> dict[str, float]:
    """Seconds of an average rank by what they are spent on."""
    times = case.microbatches / case.layout.pp
    works = total(*case.works)
    bound = works.products + works.collectives + works.again
    return {
        "matrix products": works.products * times,
        "memory-bound operations": (works.seconds - bound) * times,
        "computing again": works.again * times,
        "tensor-parallel collectives": works.collectives * times,
        "bubble and messages": seconds - works.seconds * times,
        "copies": _copies(case),
        "optimizer": _optimizer(case),
    }


def _copies(case: _Case) -> float:
    """The seconds of data-parallel collectives that nothing hides.

    Gradients are reduced as soon as those of a stage are complete, and parameters gathered while
    the stage before runs: those of one stage of a rank are not hidden. With ``zero=3``, parameters
    are gathered for forward and backward of as many microbatches as there are ranks, which hide
    them where they take longer.
    """
    layout = case.layout
    dp = layout.dp
    if dp == 1:
        return 0.0
    width = case.job.gpu.width(layout.tp * dp)
    elements = max(case.elements) / layout.tp * (dp - 1) / dp
    gathered = elements * PARAMETER / width + LATENCY
    reduced = elements * GRADIENT / width + LATENCY
    if layout.zero < 3:
        return gathered + reduced
    times = case.microbatches / layout.pp
    rounds = 2 * layout.per_rank * max(times, 1)
    work = sum(stage.seconds for stage in case.works) * times
    return gathered + reduced + max(rounds * gathered - work, 0.0)


def _optimizer(case: _Case) -> float:
    """The seconds in which the optimizer reads and writes its state."""
    layout = case.layout
    elements = max(case.elements) * layout.per_rank / layout.tp
    if layout.zero:
        elements /= layout.dp
    moved = elements * (2 * OPTIMIZER + GRADIENT + PARAMETER)
    return moved / (case.job.gpu.bandwidth * MEMORY)


# ---- memory ----
def _memory(case: _Case, rank: int, activations: float, late: float) -> Memory:
    stages = case.ranks[rank]
    layers = sum(case.counts[stage] for stage in stages) * case.job.model.layer_parameters
    return Memory(
        rank,
        layers=state_bytes(case.layout, layers),
        vocabulary=state_bytes(case.layout, sum(case.vocabulary[stage] for stage in stages)),
        activations=activations,
        moment=max(_moment(case, stage) for stage in stages),
        late=late,
    )


def _moment(case: _Case, stage: int) -> float:
    """What a backward of a stage has at most, beside what is held before it.

    It has what a layer keeps for W and, in the last stage, gradients of logits. A backward that is
    not split computes the gradients of all weights of its stage before it adds them.
    """
    layout = case.layout
    count = case.counts[stage]
    layer = layer_work(case.job, layout)
    nbytes = layer.kept if count else 0.0
    if layout.schedule not in SPLIT:
        gradients = case.elements[stage] * PARAMETER / layout.tp
        nbytes += min(count * max(layer.kept - layer.saved, 0.0), gradients)
    if stage == layout.stages - 1:
        nbytes += logits_bytes(case.job, layout)
    return nbytes

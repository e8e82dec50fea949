# SPDX-License-Identifier: Apache-2.0
"""Memory and time of a job in a layout: costs of stages in seconds and bytes, and the schedule in
the simulator.

The rows of a schedule determine what a rank holds, and their simulation how long they take.
Data-parallel collectives and the optimizer are added. Knows no search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from ...actions import Costs, Row, Timeline, plain
from ...generators import make_schedule
from ...schedule import Schedule
from .hardware import LATENCY, LINK, MEMORY, NETWORK, USABLE
from .layout import Job, Layout
from .sizes import (
    Bytes,
    Times,
    again_seconds,
    embedding_bytes,
    head_costs,
    layer_bytes,
    layer_times,
    operations,
    state_bytes,
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
    late: float = 0.0

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
        return operations(self.job) * self.job.tokens / self.job.gpus / self.step

    @property
    def mfu(self) -> float:
        """``flops`` as a share of the data sheet's."""
        return self.flops / self.job.gpu.flops

    @property
    def limit(self) -> str:
        """What takes most of the time beside the products of the model."""
        return max((name for name in self.parts if name != "products"), key=self.parts.__getitem__)


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
    >>> found = predict(job, Layout(tp=2, pp=2, dp=2, recompute="selective"))
    >>> found.fits, 0.4 < found.mfu < 0.6
    (True, True)
    """
    layout.check(job)
    stages = _stages(job, layout)
    total, peaks, bubble = _simulated(job, layout, stages)
    parts = _parts(job, layout, stages, total)
    memory = _memory(job, layout, peaks)
    step = total + parts["copies"] + parts["optimizer"]
    return Prediction(job, layout, memory, step, parts, bubble)


def least(job: Job, layout: Layout) -> tuple[float, float]:
    """Seconds that no step in a layout is shorter than, and bytes that its fullest rank has at
    least.

    A rank begins after the forwards of the stages before its first one and, where backwards are not
    split, ends before their backwards. It holds its state, and the activations of a microbatch of
    its last stage, perhaps before it has gradients.
    """
    stages, elements, p = _stages(job, layout), _elements(job, layout), layout.pp
    turned = layout.schedule in TURNED
    work, held = [0.0] * p, [0.0] * p
    for stage, (_, times) in enumerate(stages):
        rank = 2 * p - 1 - stage if turned and stage >= p else stage % p
        work[rank] += times.all
        held[rank] += elements[stage]
    count, before, longest = layout.microbatches(job), 0.0, 0.0
    for rank, busy in enumerate(work):
        longest = max(longest, before + count * busy)
        times = stages[rank][1]
        before += times.F if layout.schedule in SPLIT else times.all
    last = (p - 1 if not turned else 0), stages[-1][0].saved
    without = last[1] - (
        held[last[0]] * job.precision.gradients / layout.tp if _early(layout, count) else 0.0
    )
    least_held = max(
        state_bytes(job, layout, each, layout.per_rank)
        + (max(without, 0.0) if rank == last[0] else 0.0)
        for rank, each in enumerate(held)
    )
    return longest + _copies(job, layout, stages) + _optimizer(job, layout), least_held


def crowded(job: Job, layout: Layout) -> bool:
    """Whether what a rank holds at least has no room, by the number of activations that the
    schedule lets it hold.
    """
    stages, elements = _stages(job, layout), _elements(job, layout)
    counts, held = _held(
        layout.schedule, layout.pp, min(layout.microbatches(job), 4 * layout.pp), layout.stages
    )
    split, gradients = layout.schedule in SPLIT, _gradients(job, layout)
    late = _early(layout, layout.microbatches(job))
    for count, here in zip(counts, held, strict=True):
        fewest = min(
            min(b.saved, b.kept) if split else b.saved for b, _ in (stages[s] for s in here)
        )
        state = state_bytes(job, layout, sum(elements[s] for s in here), layout.per_rank)
        without = sum(gradients[s] for s in here) if late else 0.0
        if max(state, state - without + count * fewest) > usable(job):
            return True
    return False


@lru_cache(maxsize=4096)
def _held(
    name: str, ranks: int, microbatches: int, stages: int
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The most activations that each rank holds at once, and the stages of each rank."""
    schedule = make_schedule(name, ranks, microbatches, stages)
    return schedule.simulate().peak, tuple(
        tuple(schedule.placement.stages_of(rank)) for rank in range(ranks)
    )


# ---- stages ----
def _stages(job: Job, layout: Layout) -> list[tuple[Bytes, Times]]:
    """Bytes and seconds of each stage for a microbatch; what is computed again is part of I.

    What a stage sends is held until a later message shows that it has arrived.
    """
    one, times, again = (
        layer_bytes(job, layout),
        layer_times(job, layout),
        again_seconds(job, layout),
    )
    sent = (
        job.sequence
        * layout.microbatch
        * job.model.hidden
        * job.precision.parameters
        / layout.split
    )
    counts = layout.counts(job.model)
    found = [
        (
            Bytes(count * one.saved + sent, count * one.kept + sent),
            Times(
                count * times.F,
                count * (times.I + again),
                count * times.W,
                count * times.products,
                count * times.collectives,
            ),
        )
        for count in counts
    ]
    (first, spent), (head, head_times, _) = found[0], head_costs(job, layout)
    found[0] = Bytes(first.saved + embedding_bytes(job, layout), first.kept), spent
    last, spent = found[-1]
    found[-1] = (
        Bytes(last.saved - sent + head.saved, last.kept - sent + head.kept),
        Times(*(a + b for a, b in zip(spent, head_times, strict=True))),
    )
    return found


def _elements(job: Job, layout: Layout) -> list[int]:
    """Parameters of each stage, before tensor-parallel ranks split them."""
    each = job.model.layer_parameters
    found = [count * each for count in layout.counts(job.model)]
    return [n + vocabulary for n, vocabulary in zip(found, _vocabulary(job, layout), strict=True)]


def _vocabulary(job: Job, layout: Layout) -> list[int]:
    """Parameters of each stage beside its layers."""
    found = [0] * layout.stages
    found[0] += job.model.embedding_parameters
    if layout.stages > 1 or not job.model.tied:
        found[-1] += job.model.head_parameters
    return found


# ---- the schedule ----
def _simulated(
    job: Job, layout: Layout, stages: list[tuple[Bytes, Times]]
) -> tuple[float, list[float], float]:
    """Seconds of the schedule, the most activations of each rank in bytes, then its late gradients,
    and the bubble.
    """
    h, size = job.model.hidden, job.precision.parameters
    boundary = job.sequence * layout.microbatch * h * size / layout.tp
    width = job.gpu.network * NETWORK if job.gpus > job.gpu.node else job.gpu.link * LINK
    costs = Costs(
        F=[t.F for _, t in stages],
        I=[t.I for _, t in stages],
        W=[t.W for _, t in stages],
        comm=LATENCY,
        boundary=boundary,
        bandwidth=width,
        saved=[b.saved for b, _ in stages],
        kept=[b.kept for b, _ in stages],
    )

    gradients = _gradients(job, layout)

    def run(microbatches: int) -> tuple[float, list[float], float]:
        schedule = layout.schedule_for(microbatches)
        timeline = schedule.simulate(costs)
        bytes_of_ranks = [*timeline.peak_bytes, *_late(timeline, schedule, costs, gradients)]
        return timeline.total, bytes_of_ranks, sum(timeline.busy) / timeline.ranks

    count, p = layout.microbatches(job), layout.pp
    if count <= PERIODS * p:
        total, peaks, busy = run(count)
        return total, peaks, 1 - busy / total
    fewer = (PERIODS - 4) * p + count % p
    (near, peaks, busy), (far, more, busier) = run(fewer), run(fewer + 2 * p)
    times = (count - fewer) / (2 * p)
    total = near + (far - near) * times
    peaks = [a + (b - a) * times for a, b in zip(peaks, more, strict=True)]
    return total, peaks, 1 - (busy + (busier - busy) * times) / total


def _early(layout: Layout, microbatches: int) -> bool:
    """Whether ranks may hold the most activations only before they have all gradients."""
    return layout.schedule in FORWARDS_FIRST or microbatches < 4 * layout.pp


def _gradients(job: Job, layout: Layout) -> list[float]:
    """Bytes of the sums of gradients of each stage."""
    return [elements * job.precision.gradients / layout.tp for elements in _elements(job, layout)]


def _late(
    timeline: Timeline, schedule: Schedule, costs: Costs, gradients: Sequence[float]
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

    def changes(row: Row) -> Iterator[float]:
        begun = set[int]()
        for stage, op, _ in plain(row):
            first = op in ("B", "W") and stage not in begun
            begun |= {stage} if first else set()
            yield memory[op][stage] + (gradients[stage] if first else 0.0)

    both = [max(accumulate(changes(row), initial=0.0)) for row in schedule]
    ends = [
        sum(gradients[stage] for stage in schedule.placement.stages_of(rank))
        for rank in range(schedule.ranks)
    ]
    parts = zip(timeline.peak_bytes, ends, both, strict=True)
    return [max(activations + end - most, 0.0) for activations, end, most in parts]


def _parts(
    job: Job, layout: Layout, stages: list[tuple[Bytes, Times]], total: float
) -> dict[str, float]:
    """Seconds of an average rank by what they are spent on."""
    times = layout.microbatches(job) / layout.pp
    again = again_seconds(job, layout) * job.model.layers * times
    products = sum(t.products for _, t in stages) * times
    collectives = sum(t.collectives for _, t in stages) * times
    work = sum(t.all for _, t in stages) * times
    return {
        "products": products,
        "memory-bound operations": work - products - collectives - again,
        "computing again": again,
        "tensor-parallel collectives": collectives,
        "bubble and messages": total - work,
        "copies": _copies(job, layout, stages),
        "optimizer": _optimizer(job, layout),
    }


def _copies(job: Job, layout: Layout, stages: list[tuple[Bytes, Times]]) -> float:
    """The seconds of data-parallel collectives that nothing hides.

    Gradients are reduced as soon as those of a stage are complete, and parameters gathered while
    the stage before runs: those of one stage of a rank are not hidden. With ``zero=3``, parameters
    are gathered for forward and backward of as many microbatches as there are ranks, which hide
    them where they take longer.
    """
    if layout.dp == 1:
        return 0.0
    within = layout.tp * layout.dp <= job.gpu.node
    width = job.gpu.link * LINK if within else job.gpu.network * NETWORK
    elements = max(_elements(job, layout)) / layout.tp * (layout.dp - 1) / layout.dp
    gathered = elements * job.precision.parameters / width + LATENCY
    reduced = elements * job.precision.gradients / width + LATENCY
    if layout.zero < 3:
        return gathered + reduced
    count = layout.microbatches(job)
    rounds = 2 * layout.per_rank * max(count / layout.pp, 1)
    work = sum(times.all for _, times in stages) * count / layout.pp
    return gathered + reduced + max(rounds * gathered - work, 0.0)


def _optimizer(job: Job, layout: Layout) -> float:
    """The seconds in which the optimizer reads and writes its state."""
    elements = (
        max(_elements(job, layout))
        * layout.per_rank
        / layout.tp
        / (layout.dp if layout.zero else 1)
    )
    each = job.precision
    return (
        elements
        * (2 * each.optimizer + each.gradients + each.parameters)
        / (job.gpu.bandwidth * MEMORY)
    )


# ---- memory ----
def _memory(job: Job, layout: Layout, peaks: list[float]) -> tuple[Memory, ...]:
    placement = layout.schedule_for(min(layout.microbatches(job), 2 * layout.pp)).placement
    counts, vocabulary = layout.counts(job.model), _vocabulary(job, layout)
    elements, each = _elements(job, layout), job.model.layer_parameters
    found = []
    for rank, (peak, late) in enumerate(zip(peaks[: layout.pp], peaks[layout.pp :], strict=True)):
        held = placement.stages_of(rank)

        def state(elements):
            return state_bytes(job, layout, elements, layout.per_rank)

        moment = max(_moment(job, layout, stage, elements[stage]) for stage in held)
        layers = sum(counts[s] for s in held) * each
        found.append(
            Memory(rank, state(layers), state(sum(vocabulary[s] for s in held)), peak, moment, late)
        )
    return tuple(found)


def _moment(job: Job, layout: Layout, stage: int, elements: int) -> float:
    """What a backward of a stage has at most, beside what is held before it.

    It has what a layer keeps for W and, in the last stage, gradients of logits. A backward that is
    not split computes the gradients of all weights of its stage before it adds them.
    """
    one, count = layer_bytes(job, layout), layout.counts(job.model)[stage]
    found = one.kept if count else 0.0
    if layout.schedule not in SPLIT:
        gradients = elements * job.precision.parameters / layout.tp
        found += min(count * max(one.kept - one.saved, 0.0), gradients)
    return found + (head_costs(job, layout)[2] if stage == layout.stages - 1 else 0.0)

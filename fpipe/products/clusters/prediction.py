# SPDX-License-Identifier: Apache-2.0
"""Memory and time of a job in a layout: costs of stages in seconds and bytes, and the schedule in
the simulator.

The rows of a schedule determine what a rank holds, and their simulation how long they take.
Data-parallel collectives and the optimizer are added. Knows no search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...actions import Costs, Row, Timeline, plain
from ...schedule import Schedule
from .hardware import LATENCY, LINK, MEMORY, NETWORK, USABLE
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
    works = _works(job, layout)
    seconds, busy, *nbytes = _simulated(job, layout, works)
    activations, late = nbytes[: layout.pp], nbytes[layout.pp :]
    memory = tuple(
        _memory(job, layout, rank, *held)
        for rank, held in enumerate(zip(activations, late, strict=True))
    )
    parts = _parts(job, layout, works, seconds)
    step = seconds + parts["copies"] + parts["optimizer"]
    return Prediction(job, layout, memory, step, parts, bubble=1 - busy / seconds)


def least(job: Job, layout: Layout) -> tuple[float, float]:
    """Seconds that no step in a layout is shorter than, and bytes that its fullest rank has at
    least.

    A rank begins after the forwards of the stages before its first one and, where backwards are not
    split, ends before their backwards. It holds its state, and the activations of a microbatch of
    its last stage, perhaps before it has gradients.
    """
    works, elements, p = _works(job, layout), _elements(job, layout), layout.pp
    turned, count = layout.schedule in TURNED, layout.microbatches(job)
    busy, held = [0.0] * p, [0.0] * p
    for stage, work in enumerate(works):
        rank = 2 * p - 1 - stage if turned and stage >= p else stage % p
        busy[rank] += work.seconds
        held[rank] += elements[stage]
    ways = [work.F if layout.schedule in SPLIT else work.seconds for work in works[:p]]
    before = accumulate(ways, initial=0.0)
    seconds = max(start + count * each for start, each in zip(before, busy, strict=False))
    nbytes = [state_bytes(job, layout, each, layout.per_rank) for each in held]
    last = 0 if turned else p - 1
    late = held[last] * job.precision.gradients / layout.tp if _early(layout, count) else 0.0
    nbytes[last] += max(works[-1].saved - late, 0.0)
    return seconds + _copies(job, layout, works) + _optimizer(job, layout), max(nbytes)


# ---- stages ----
def _works(job: Job, layout: Layout) -> list[Work]:
    """Seconds and bytes of each stage for a microbatch.

    What a stage sends is held until a later message shows that it has arrived.
    """
    layer, head = layer_work(job, layout), head_work(job, layout)
    sent = (
        job.sequence * layout.microbatch * job.model.hidden * job.precision.parameters
    ) / layout.split
    message = Work(saved=sent, kept=sent)
    works = [
        total(
            Work(*(count * each for each in layer)), head if stage == layout.stages - 1 else message
        )
        for stage, count in enumerate(layout.counts(job.model))
    ]
    works[0] = total(works[0], Work(saved=embedding_bytes(job, layout)))
    return works


def _elements(job: Job, layout: Layout) -> list[int]:
    """Parameters of each stage, before tensor-parallel ranks split them."""
    layers = (count * job.model.layer_parameters for count in layout.counts(job.model))
    return [a + b for a, b in zip(layers, _vocabulary(job, layout), strict=True)]


def _vocabulary(job: Job, layout: Layout) -> list[int]:
    """Parameters of each stage beside its layers."""
    elements = [0] * layout.stages
    elements[0] += job.model.embedding_parameters
    if layout.stages > 1 or not job.model.tied:
        elements[-1] += job.model.head_parameters
    return elements


# ---- the schedule ----
def _simulated(job: Job, layout: Layout, works: Sequence[Work]) -> list[float]:
    """Seconds of the schedule, those in which an average rank is busy, then by rank the most bytes
    of activations, then by rank the gradients that come later.

    With many microbatches, two schedules of fewer are simulated, and their difference repeated.
    """
    forward, inputs, weights, saved, kept, *_ = zip(*works, strict=True)
    model, within = job.model, job.gpus <= job.gpu.node
    size = job.precision.parameters
    costs = Costs(
        F=forward,
        I=inputs,
        W=weights,
        comm=LATENCY,
        boundary=job.sequence * layout.microbatch * model.hidden * size / layout.tp,
        bandwidth=job.gpu.link * LINK if within else job.gpu.network * NETWORK,
        saved=saved,
        kept=kept,
    )
    each = job.precision.gradients / layout.tp
    gradients = [elements * each for elements in _elements(job, layout)]

    def run(microbatches: int) -> list[float]:
        schedule = layout.schedule_for(microbatches)
        timeline = schedule.simulate(costs)
        late = _late(timeline, schedule, costs, gradients)
        busy = sum(timeline.busy) / timeline.ranks
        return [timeline.total, busy, *timeline.peak_bytes, *late]

    count, p = layout.microbatches(job), layout.pp
    if count <= PERIODS * p:
        return run(count)
    fewer = (PERIODS - 4) * p + count % p
    times = (count - fewer) / (2 * p)
    return [a + (b - a) * times for a, b in zip(run(fewer), run(fewer + 2 * p), strict=True)]


def _early(layout: Layout, microbatches: int) -> bool:
    """Whether ranks may hold the most activations only before they have all gradients."""
    return layout.schedule in FORWARDS_FIRST or microbatches < 4 * layout.pp


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

    late = []
    for rank, (row, activations) in enumerate(zip(schedule, timeline.peak_bytes, strict=True)):
        end = sum(gradients[stage] for stage in schedule.placement.stages_of(rank))
        most = max(accumulate(changes(row), initial=0.0))
        late.append(max(activations + end - most, 0.0))
    return late


def _parts(job: Job, layout: Layout, works: Sequence[Work], seconds: float) -> dict[str, float]:
    """Seconds of an average rank by what they are spent on."""
    times, all_stages = layout.microbatches(job) / layout.pp, total(*works)
    bound = all_stages.products + all_stages.collectives + all_stages.again
    return {
        "products": all_stages.products * times,
        "memory-bound operations": (all_stages.seconds - bound) * times,
        "computing again": all_stages.again * times,
        "tensor-parallel collectives": all_stages.collectives * times,
        "bubble and messages": seconds - all_stages.seconds * times,
        "copies": _copies(job, layout, works),
        "optimizer": _optimizer(job, layout),
    }


def _copies(job: Job, layout: Layout, works: Sequence[Work]) -> float:
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
    times = layout.microbatches(job) / layout.pp
    rounds = 2 * layout.per_rank * max(times, 1)
    work = sum(each.seconds for each in works) * times
    return gathered + reduced + max(rounds * gathered - work, 0.0)


def _optimizer(job: Job, layout: Layout) -> float:
    """The seconds in which the optimizer reads and writes its state."""
    elements = max(_elements(job, layout)) * layout.per_rank / layout.tp
    parts, each = layout.dp if layout.zero else 1, job.precision
    moved = elements / parts * (2 * each.optimizer + each.gradients + each.parameters)
    return moved / (job.gpu.bandwidth * MEMORY)


# ---- memory ----
def _memory(job: Job, layout: Layout, rank: int, activations: float, late: float) -> Memory:
    few = min(layout.microbatches(job), 2 * layout.pp)
    held = layout.schedule_for(few).placement.stages_of(rank)
    counts, vocabulary = layout.counts(job.model), _vocabulary(job, layout)
    layers = sum(counts[stage] for stage in held) * job.model.layer_parameters
    return Memory(
        rank,
        layers=state_bytes(job, layout, layers, layout.per_rank),
        vocabulary=state_bytes(job, layout, sum(vocabulary[s] for s in held), layout.per_rank),
        activations=activations,
        moment=max(_moment(job, layout, stage) for stage in held),
        late=late,
    )


def _moment(job: Job, layout: Layout, stage: int) -> float:
    """What a backward of a stage has at most, beside what is held before it.

    It has what a layer keeps for W and, in the last stage, gradients of logits. A backward that is
    not split computes the gradients of all weights of its stage before it adds them.
    """
    layer, count = layer_work(job, layout), layout.counts(job.model)[stage]
    nbytes = layer.kept if count else 0.0
    if layout.schedule not in SPLIT:
        gradients = _elements(job, layout)[stage] * job.precision.parameters / layout.tp
        nbytes += min(count * max(layer.kept - layer.saved, 0.0), gradients)
    return nbytes + (logits_bytes(job, layout) if stage == layout.stages - 1 else 0.0)

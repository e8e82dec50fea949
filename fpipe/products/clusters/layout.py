# SPDX-License-Identifier: Apache-2.0
"""``Job`` and ``Layout``: what is trained on which GPUs, and how it is distributed. Values; they
predict nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Literal, TypeAlias

from ...errors import PlanError
from ...generators import make_schedule
from ...schedule import Schedule
from ..search.balancing import spread
from .hardware import Gpu
from .model import Model

Recompute: TypeAlias = Literal["none", "selective", "full"]
MOST = 1 << 24  #: GPUs, sequences of a batch, tokens of a sequence
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


def _check_whole(name: str, value: object, low: int, high: int) -> None:
    """Raise PlanError unless a value is a whole number within limits."""
    if type(value) is not int or not low <= value <= high:
        raise PlanError(f"{name} is {value!r:.40}, and must be from {low} to {high}; correct it")


@dataclass(frozen=True)
class Job:
    """What is trained, and on what.

    Args:
        model: its sizes.
        gpus: how many there are.
        gpu: their kind.
        batch: sequences of a global batch.
        sequence: tokens of a sequence.
    """

    model: Model
    gpus: int
    gpu: Gpu
    batch: int
    sequence: int

    def __post_init__(self) -> None:
        for name in ("gpus", "batch", "sequence"):
            _check_whole(name, getattr(self, name), 1, MOST)

    @property
    def tokens(self) -> int:
        """Tokens of a global batch."""
        return self.batch * self.sequence


@dataclass(frozen=True)
class Layout:
    """How a job is distributed.

    Args:
        tp: tensor-parallel ranks, within a machine, which split the sequence between their matrix
            products.
        pp: ranks of a pipeline.
        dp: copies of the pipeline.
        zero: what copies share, as ``fpipe.pipeline(zero=)``.
        schedule: a name of the catalogue.
        per_rank: stages of a rank.
        microbatch: sequences of a microbatch.
        recompute: what a backward computes again: nothing, what is cheap, or whole layers.
        layers: of each stage; by default even by cost, with the head counted.

    >>> Layout(tp=8, pp=16, dp=8, schedule="VHalf", per_rank=2).stages
    32
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 1
    schedule: str = "1F1B"
    per_rank: int = 1
    microbatch: int = 1
    recompute: Recompute = "none"
    layers: tuple[int, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return (
            f"tp {self.tp}, pp {self.pp}, dp {self.dp}, zero {self.zero}, {self.schedule}, "
            f"stages a rank {self.per_rank}, microbatch {self.microbatch}, "
            f"recompute {self.recompute}"
        )

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.pp * self.per_rank

    def microbatches(self, job: Job) -> int:
        """Microbatches of a copy of the pipeline in a step."""
        return job.batch // (self.dp * self.microbatch)

    def check(self, job: Job) -> Layout:
        """This layout; raises PlanError where it does not fit the job."""
        model = job.model
        layers = self.layers
        for name in ("tp", "pp", "dp", "per_rank", "microbatch"):
            _check_whole(name, getattr(self, name), 1, MOST)
        _check_whole("zero", self.zero, 0, 3)
        for count in layers:
            _check_whole("layers", count, 0, model.layers)
        if self.recompute not in RECOMPUTE:
            raise PlanError(
                f"recompute is {self.recompute!r}, and must be one of {', '.join(RECOMPUTE)}; "
                "correct it"
            )
        rules = {
            f"tp x pp x dp must be the {job.gpus} GPUs": self.tp * self.pp * self.dp == job.gpus,
            f"dp x microbatch must divide {job.batch} sequences": (
                job.batch % (self.dp * self.microbatch) == 0
            ),
            "tp must divide heads, key-value heads and the feed-forward": divides(model, self.tp),
            f"tp must be within a machine of {job.gpu.node} GPUs": self.tp <= job.gpu.node,
            f"{model.layers} layers, embedding and head must fill all stages": (
                self.stages <= model.layers + 2
            ),
            f"layers must be {self.stages} numbers with the sum {model.layers}": (
                not layers or (len(layers), sum(layers)) == (self.stages, model.layers)
            ),
        }
        for rule, holds in rules.items():
            if not holds:
                raise PlanError(f"{self}: {rule}; choose other sizes")
        return self

    def counts(self, model: Model) -> tuple[int, ...]:
        """Layers of each stage."""
        return self.layers or even_layers(model, self.stages)

    def schedule_for(self, microbatches: int) -> Schedule:
        """The schedule for a number of microbatches; ScheduleError where it has no such form."""
        return _schedule(self.schedule, self.pp, microbatches, self.stages)


def divides(model: Model, tp: int) -> bool:
    """Whether tensor-parallel ranks can split the layers of a model."""
    return not any(
        size % tp for size in (model.heads, model.kv_heads, model.feed_forward, model.hidden)
    )


@lru_cache(maxsize=4096)
def even_layers(model: Model, stages: int) -> tuple[int, ...]:
    """The layers of each stage, even by cost: the head counts as its matrix, the embedding as
    nothing.

    >>> even_layers(Model("m", "llama", 8, 6, 2, 64, 16), 4)
    (1, 2, 2, 1)
    """
    head = model.vocabulary * model.hidden / model.active_matrices
    starts = spread([0.0, *[1.0] * model.layers, head], stages)
    # item 0 is the embedding, and the last one is the head
    firsts = [min(max(start - 1, 0), model.layers) for start in starts]
    return tuple(end - first for first, end in pairwise((*firsts, model.layers)))


_schedule = lru_cache(maxsize=256)(make_schedule)

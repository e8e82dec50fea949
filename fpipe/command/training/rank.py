"""What each process of ``fpipe train`` does: the same few lines that a user would write, and reports on a wire.

Rank 0 reports; every rank returns what its stages ended with. Knows nothing of screens or files.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from ... import tree
from ...collectives.setup import init
from ...running.pipeline import Pipeline, pipeline, value_and_grad
from ...running.profile.profiling import profile
from ...schedule import Schedule
from ...schedules.timeline import Timeline
from ...transforms import adamw, apply_updates, chain, clip_by_global_norm
from .gpt import Sizes, cross_entropy, gpt
from .text import Text, sonnets


@dataclass(frozen=True)
class Settings:
    """What is trained, and how."""

    schedule: Schedule
    steps: int = 200
    rows: int = 2  #: of a microbatch
    length: int = 64
    width: int = 64
    layers: int = 8
    rate: float = 4e-3
    seed: int = 0
    pictures: int = 12  #: how many steps are measured action by action, on the way

    def model(self) -> tuple[Text, Any, Any]:
        """The text, and the model's functions and parameters, the same in every process."""
        text = sonnets()
        sizes = Sizes(len(text.letters), self.length, self.width, layers=self.layers)
        return text, *gpt(sizes, self.schedule.stages, self.seed)

    def batch(self, text: Text, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch of a step."""
        return text.batch(step, self.rows * self.schedule.microbatches, self.length, self.seed)

    def rate_at(self, step: int) -> float:
        """The learning rate: a short way up, and slowly down to a tenth."""
        way = step / max(self.steps, 1)
        return self.rate * min((step + 1) / 10, 1.0) * (1 - 0.9 * way)

    def measured(self, step: int) -> bool:
        """Whether this step is measured. The first ones are not: programs are made and memory is found."""
        every = max(self.steps // self.pictures, 1)
        return step == self.steps - 1 or (step >= 2 and (step - 2) % every == 0)


class Ready(NamedTuple):
    """The model is placed and the ranks have met."""

    parameters: int


class Step(NamedTuple):
    """A step is done."""

    number: int
    loss: float
    tokens: int
    seconds: float


class Measured(NamedTuple):
    """A step was measured; the last one is simulated too, by what all the measured ones cost."""

    number: int
    timeline: Timeline
    simulated: Timeline | None


class Kept(NamedTuple):
    """Of the last step: what it started from, its loss and gradients, and what it ended with; by stage."""

    loss: float
    before: list[Any]
    grads: list[Any]
    after: list[Any]


def work(settings: Settings, wire: Connection | None) -> Kept:
    """Train on this rank; called by ``launch`` in each process."""
    torch.set_num_threads(1)
    group = init(pp=settings.schedule.ranks)
    text, functions, params = settings.model()
    pipe = pipeline(functions, settings.schedule, loss=cross_entropy, group=group)
    tell = wire.send if wire is not None and 0 in group.here else _silent
    tell(Ready(sum(leaf.numel() for leaf in tree.leaves(params))))
    return _train(settings, pipe, text, pipe.place(params), tell)


def _train(settings: Settings, pipe: Pipeline, text: Text, params: list[Any], tell: Any) -> Kept:
    plainly = value_and_grad(pipe)
    clocked = profile(plainly)
    rules = chain(clip_by_global_norm(1.0, over=pipe), adamw(settings.rate_at, weight_decay=0.01))
    state = rules.init(params)
    kept = None
    for number in range(settings.steps):
        x, following = settings.batch(text, number)
        before, start = params, time.perf_counter()
        measured = settings.measured(number)
        loss, grads = (clocked if measured else plainly)(params, x, following)
        updates, state = rules.update(grads, state, params)
        params = apply_updates(params, updates)
        tell(Step(number, float(loss), x.numel(), time.perf_counter() - start))
        last = number == settings.steps - 1
        if measured:
            tell(Measured(number, clocked.timeline, clocked.simulated if last else None))
        if last:
            kept = Kept(float(loss), before, grads, params)
    assert kept is not None, "a run has one step at least"
    return kept


def _silent(event: object) -> None:
    """A rank that does not report."""

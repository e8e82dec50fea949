# SPDX-License-Identifier: Apache-2.0
"""One process of ``fpipe train``: a training loop as a user would write it, with reports over a
connection.

Rank 0 reports; every rank returns the parameters and gradients of its stages. Knows no screen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ... import Costs, init, pipeline, profile, value_and_grad
from ...actions import Timeline, counted
from ...devices import cores, pick
from ...schedule import Schedule
from ...transforms import adamw, apply_updates, chain, clip_by_global_norm
from ..pictures import save
from .gpt import Params, Sizes, StageFunction, cross_entropy, gpt
from .text import Text, sonnets


@dataclass(frozen=True)
class Settings:
    """Model, schedule and training."""

    schedule: Schedule
    page: Path  #: where the timelines of the last step are drawn
    steps: int = 200
    rows: int = 2  #: per microbatch
    length: int = 64
    width: int = 64
    layers: int = 8
    rate: float = 4e-3
    seed: int = 0
    pictures: int = 12  #: steps that are measured action by action

    def model(self) -> tuple[Text, list[StageFunction], list[Params]]:
        """The text, and the model's functions and parameters, the same in every process."""
        text = sonnets()
        sizes = Sizes(len(text.letters), self.length, self.width, layers=self.layers)
        return text, *gpt(sizes, self.schedule.stages, self.seed)

    def batch(self, text: Text, step: int) -> tuple[Tensor, Tensor]:
        """The batch of a step."""
        return text.batch(step, self.rows * self.schedule.microbatches, self.length, self.seed)

    def rate_at(self, step: int) -> float:
        """The learning rate: a short warm-up, then a linear decay to a tenth."""
        warm_up = min((step + 1) / 10, 1.0)
        progress = step / max(self.steps, 1)
        return self.rate * warm_up * (1 - 0.9 * progress)

    def measured(self, step: int) -> bool:
        """Whether this step is measured. The first two are not: they trace programs and allocate
        memory.
        """
        every = max(self.steps // self.pictures, 1)
        return step == self.steps - 1 or (step >= 2 and (step - 2) % every == 0)


class Step(NamedTuple):
    """A step is finished."""

    number: int
    loss: float
    speed: float  #: tokens a second
    timeline: Timeline | None  #: if it was measured


class LastStep(NamedTuple):
    """The last step: its loss and, by stage, the parameters before it and the gradients."""

    loss: float
    before: Sequence[Params | None]
    grads: Sequence[Params | None]


def work(settings: Settings, wire: Connection) -> LastStep:
    """Train on this rank; called by ``launch`` in each process."""
    torch.set_num_threads(1)
    os.environ["TERM"] = "dumb"  # no line of its own: rank 0 reports to the panel
    devices = max(torch.accelerator.device_count(), 1)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = pick(local_rank=local % devices)  # ranks may share one
    group = init(pp=settings.schedule.ranks, device=device)
    text, functions, params = settings.model()
    pipe = pipeline(functions, settings.schedule, loss=cross_entropy, group=group)
    params = pipe.place(params)
    step = value_and_grad(pipe)
    profiled = profile(step)
    rules = chain(clip_by_global_norm(1.0, over=pipe), adamw(settings.rate_at, weight_decay=0.01))
    state = rules.init(params)
    last = LastStep(0.0, params, params)
    reports = 0 in group.here
    for number in range(settings.steps):
        x, following = settings.batch(text, number)
        start = time.perf_counter()
        measured = settings.measured(number)
        run = profiled if measured else step
        loss, grads = run(params, x, following)
        updates, state = rules.update(grads, state, params)
        last = LastStep(float(loss), params, grads)
        params = apply_updates(params, updates)
        if reports:
            speed = x.numel() / (time.perf_counter() - start)
            wire.send(Step(number, last.loss, speed, profiled.timeline if measured else None))
    if reports:
        theory = planned(settings.schedule, sum(profiled.simulated.busy))
        real = profiled.timeline
        ratio = f"{real.total / theory.total:.1f} times as long{sharing(settings.schedule.ranks)}"
        note = f"{theory.note} The measured step takes {ratio}."
        save([replace(theory, note=note), real], settings.page)
    return last


def planned(schedule: Schedule, busy: float) -> Timeline:
    """The schedule where the work of all ranks, ``busy`` seconds, is spread evenly over ranks and
    over F, I and W.
    """
    unit = busy / sum(schedule.simulate(per="rank").busy)
    return replace(
        schedule.simulate(Costs(F=unit, I=unit, W=unit, unit="s"), per="rank"),
        name=f"{schedule.name} in theory",
        note="The work of the measured step, spread evenly over ranks, F, I and W.",
    )


def sharing(ranks: int) -> str:
    """That processes share cores, if they do."""
    count = counted(cores(), "core")
    return f": {ranks} processes and their messages wait for {count}" * (cores() < ranks)

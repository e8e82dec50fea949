"""Runs the ranks of ``fpipe train``, passes their reports to a screen, and holds what they made against one process.

Knows no options and prints nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ... import tree
from ...schedules import pictures
from ...schedules.timeline import Timeline
from ..launch import launch
from .gpt import cross_entropy
from .rank import Kept, Measured, Ready, Settings, Step, work
from .single import one_process


class Listener(Protocol):
    """What takes the reports: a screen."""

    def ready(self, parameters: int) -> None:
        """The ranks have met."""
        ...

    def step(self, done: Step) -> None:
        """A step is done."""
        ...

    def measured(self, number: int, timeline: Timeline) -> None:
        """A step was measured."""
        ...


class Outcome(NamedTuple):
    """All stages of the last step, put together from the ranks, and that step measured and simulated."""

    before: list[Any]
    grads: list[Any]
    after: list[Any]
    losses: list[float]  #: by rank; they are one number
    measured: Measured


def conduct(settings: Settings, listener: Listener) -> Outcome:
    """Train on processes of this machine."""
    measured: list[Measured] = []
    with _listening(listener, measured) as wire:
        kept = launch(work, settings, wire, ranks=settings.schedule.ranks)
    return together(kept, measured[-1])


def together(kept: Sequence[Kept], measured: Measured) -> Outcome:
    """Every stage from a rank that holds it."""
    whole = [
        [next(part for part in parts if part is not None) for parts in zip(*lists, strict=True)]
        for lists in zip(*((k.before, k.grads, k.after) for k in kept), strict=True)
    ]
    return Outcome(whole[0], whole[1], whole[2], [k.loss for k in kept], measured)


@contextmanager
def _listening(listener: Listener, measured: list[Measured]) -> Iterator[Connection]:
    """A wire for rank 0; what comes in is passed on by a thread, so that the ranks can be waited for."""
    ours, theirs = Pipe(duplex=False)

    def listen() -> None:
        while True:
            try:
                report = ours.recv()
            except (EOFError, OSError):
                return
            if isinstance(report, Ready):
                listener.ready(report.parameters)
            elif isinstance(report, Step):
                listener.step(report)
            elif isinstance(report, Measured):
                measured.append(report)
                listener.measured(report.number, report.timeline)

    thread = threading.Thread(target=listen, name="fpipe-train-reports", daemon=True)
    thread.start()
    try:
        yield theirs
    finally:
        theirs.close()  # the ranks have ended, so this was the last end of the wire
        thread.join(10)
        ours.close()


class Verdict(NamedTuple):
    """How far a pipeline's gradients are from one process's: 0 is the promise."""

    largest: float
    tensors: int
    numbers: int
    loss: float  #: how far the losses are


def verdict(settings: Settings, outcome: Outcome) -> Verdict:
    """The last step once more, in this process, by plain autograd."""
    text, functions, _ = settings.model()
    x, following = settings.batch(text, settings.steps - 1)
    loss, grads = one_process(functions, outcome.before, cross_entropy, x, following, schedule=settings.schedule)
    ours, theirs = tree.leaves(outcome.grads), tree.leaves(grads)
    apart = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    numbers = sum(leaf.numel() for leaf in ours)
    return Verdict(apart, len(ours), numbers, max(abs(mine - float(loss)) for mine in outcome.losses))


def write(report: Measured, out: Path, title: str) -> Path:
    """The simulated and the measured timeline as one page, and each as a file for ``fpipe view``; the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    both = []
    for kind, timeline in (("simulated", report.simulated), ("measured", report.timeline)):
        if timeline is not None:
            both.append(replace(timeline, name=f"{title} {kind}".strip()))
            both[-1].save(out / f"{kind}.json")
    page = out / "timeline.html"
    pictures.save(both, page)
    return page


def sample(settings: Settings, params: Sequence[Any], start: str, count: int) -> str:
    """What the model writes, character by character."""
    text, functions, _ = settings.model()
    tokens, dice = text.encode(start), torch.Generator().manual_seed(settings.seed)
    with torch.no_grad():
        for _ in range(count):
            y: Tensor = tokens[-settings.length :][None]
            for fn, own in zip(functions, params, strict=True):
                y = fn(own, y)
            chances = torch.softmax(y[0, -1] / 0.7, dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=dice)])
    return text.decode(tokens)

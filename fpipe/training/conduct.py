"""Runs the ranks of ``fpipe train``, passes their reports to a screen, and holds what they made against one process.

Knows no options and prints nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import pictures, tree
from .._launch import launch
from ..simulate import Costs
from ..timeline import Timeline
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
    """All stages of the last step, put together from the ranks; ``timelines`` are the measured ones, in order."""

    before: list[Any]
    grads: list[Any]
    after: list[Any]
    losses: list[float]  #: by rank; they are one number
    timelines: list[Timeline]


def conduct(settings: Settings, listener: Listener) -> Outcome:
    """Train on processes of this machine."""
    timelines: list[Timeline] = []
    with _listening(listener, timelines) as wire:
        kept = launch(work, settings, wire, ranks=settings.schedule.ranks)
    return together(kept, timelines)


def together(kept: Sequence[Kept], timelines: list[Timeline]) -> Outcome:
    """Every stage from a rank that holds it."""
    whole = [
        [next(part for part in parts if part is not None) for parts in zip(*lists, strict=True)]
        for lists in zip(*((k.before, k.grads, k.after) for k in kept), strict=True)
    ]
    return Outcome(whole[0], whole[1], whole[2], [k.loss for k in kept], timelines)


@contextmanager
def _listening(listener: Listener, timelines: list[Timeline]) -> Iterator[Connection]:
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
                timelines.append(report.timeline)
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


def write(settings: Settings, measured: Timeline, out: Path) -> Path:
    """The simulated and the measured timeline as one page, and each as a file for ``fpipe view``; the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    simulated = settings.schedule.simulate(costs_of(measured))
    for name, timeline in (("simulated", simulated), ("measured", measured)):
        timeline.save(out / f"{name}.json")
    page = out / "timeline.html"
    pictures.save([simulated, measured], page)
    return page


def costs_of(measured: Timeline) -> Costs:
    """What actions took, the middle one of each stage and kind; messages are taken to be free.

    >>> from fpipe.actions import Action
    >>> spans = [(0, Action(0, "F", 0), 0.0, 2.0), (0, Action(0, "B", 0), 2.0, 5.0)]
    >>> costs_of(Timeline.measured(spans))
    Costs(F=(2.0,), I=(0.0,), W=(0.0,), B=(3.0,), unit='s')
    """
    times: dict[tuple[str, int], list[float]] = {}
    for span in measured:
        first = span.action.parts[0]
        kind = first.op if len(span.action.parts) == 1 else "overlap"
        times.setdefault((kind, first.stage), []).append(span.end - span.start)
    stages = range(measured.placement.stages)
    found = {
        kind: [median(times.get((kind, stage), [0.0])) for stage in stages]
        for kind in ("F", "I", "W", "B", "overlap")
        if any((kind, stage) in times for stage in stages) or kind in "FIW"
    }
    return Costs(**found, unit=measured.unit)


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

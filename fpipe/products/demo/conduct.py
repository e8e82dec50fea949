# SPDX-License-Identifier: Apache-2.0
"""The run of ``fpipe train``: starts the ranks, shows their reports, compares gradients with one
process, and prints.

Knows no options.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from ... import launch, tree
from ...devices import cores
from .. import pictures
from .gpt import cross_entropy
from .rank import LastStep, Measured, Ready, Settings, Step, work
from .screen import Screen
from .single import one_process


def run(settings: Settings, source: str, out: Path) -> int:
    """Train and print the results; returns the exit status, 1 if the gradients differ from those of
    one process.
    """
    torch.set_num_threads(1)  # like the ranks: the order of a sum determines its bits
    console, s = Console(highlight=False), settings.schedule
    title = (
        f"{s.name or source}: {s.ranks} processes, {s.stages} stages, {s.microbatches} microbatches"
    )
    if not console.is_terminal:
        console.print(title)
    screen = Screen(console, title, settings.steps)
    with screen.live if console.is_terminal else nullcontext():
        last = conduct(settings, screen.show)
    lines = sample(settings, last.after, "Shall I", 120).splitlines()
    text = " / ".join(filter(None, map(str.strip, lines)))
    console.print(f"\n[dim]A sample of the model:[/dim] {escape(text)}", soft_wrap=True)
    result = verdict(settings, last)
    good = result.largest == 0 and result.loss == 0
    largest = f"[bold {'green' if good else 'red'}]{result.largest:g}[/]"
    of = f"({result.tensors} tensors, {result.numbers:,} numbers; loss {result.loss:g})"
    console.print(
        f"Largest difference of its gradients from a single process: {largest}  {of}",
        soft_wrap=True,
    )
    page = write(last, out, s.name)
    console.print(f"Simulated and measured timeline: [bold]{page}[/bold]", soft_wrap=True)
    if cores() < s.ranks:
        shared = f"{s.ranks} processes share {cores()} of this machine's cores"
        console.print(
            f"[dim]({shared}: measured actions take turns, and are longer for it)[/dim]",
            soft_wrap=True,
        )
    console.print("\nThree things to try next:")
    for line, purpose in _next(settings, out):
        console.print(f"  [bold cyan]{line}[/]\n      {purpose}", soft_wrap=True)
    return 0 if good else 1


def conduct(settings: Settings, show: Callable[[Ready | Step | Measured], None]) -> LastStep:
    """Train on processes of this machine, pass each report of rank 0 to ``show``, and collect the
    last step.
    """
    ours, theirs = Pipe(duplex=False)
    listener = threading.Thread(
        target=_listen, args=(ours, show), name="fpipe-train-reports", daemon=True
    )
    listener.start()
    try:
        return of_all_ranks(launch(work, settings, theirs, ranks=settings.schedule.ranks))
    finally:
        theirs.close()  # the ranks have ended, so this was the last open end
        listener.join(10)
        ours.close()


def _listen(reports: Connection, show: Callable[[Ready | Step | Measured], None]) -> None:
    with suppress(EOFError, OSError):
        while True:
            show(reports.recv())


def of_all_ranks(parts: Sequence[LastStep]) -> LastStep:
    """The last step of all ranks, each stage from a rank that holds it."""
    before, grads, after = (
        [next(part for part in stage if part is not None) for stage in zip(*lists, strict=True)]
        for lists in zip(*((part.before, part.grads, part.after) for part in parts), strict=True)
    )
    losses = [loss for part in parts for loss in part.losses]
    return parts[0]._replace(losses=losses, before=before, grads=grads, after=after)


class Verdict(NamedTuple):
    """Differences of a pipeline's gradients from those of one process: 0 is required."""

    largest: float
    tensors: int
    numbers: int
    loss: float  #: difference of the losses


def verdict(settings: Settings, last: LastStep) -> Verdict:
    """Compare with the last step in this process, by plain autograd."""
    text, functions, _ = settings.model()
    x, following = settings.batch(text, settings.steps - 1)
    loss, grads = one_process(
        functions, last.before, cross_entropy, x, following, schedule=settings.schedule
    )
    ours, theirs = tree.leaves(last.grads), tree.leaves(grads)
    largest = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    numbers = sum(leaf.numel() for leaf in ours)
    return Verdict(
        largest, len(ours), numbers, max(abs(other - float(loss)) for other in last.losses)
    )


def write(last: LastStep, out: Path, title: str) -> Path:
    """Write both timelines as one page, and each as a file for ``fpipe view``; return the path of
    the page.
    """
    out.mkdir(parents=True, exist_ok=True)
    timelines = {"simulated": last.simulated, "measured": last.measured}
    named = [
        replace(timeline, name=f"{title} {kind}".strip()) for kind, timeline in timelines.items()
    ]
    for kind, timeline in zip(timelines, named, strict=True):
        timeline.save(out / f"{kind}.json")
    pictures.save(named, out / "timeline.html")
    return out / "timeline.html"


def sample(settings: Settings, params: Sequence[Any], start: str, count: int) -> str:
    """Text generated by the model, character by character."""
    text, functions, _ = settings.model()
    tokens, generator = text.encode(start), torch.Generator().manual_seed(settings.seed)
    with torch.no_grad():
        for _ in range(count):
            y: Tensor = tokens[-settings.length :][None]
            for fn, p in zip(functions, params, strict=True):
                y = fn(p, y)
            probabilities = torch.softmax(y[0, -1] / 0.7, dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)])
    return text.decode(tokens)


def _next(settings: Settings, out: Path) -> list[tuple[str, str]]:
    other = "DualPipeV" if settings.schedule.name != "DualPipeV" else "1F1B"
    p, m = settings.schedule.ranks, settings.schedule.microbatches
    fpipe = "fpipe" if which("fpipe") else "python -m fpipe"
    return [
        (
            f"{fpipe} view {out}",
            "open that page: zoom, hover over an action to see what it waited for, search 3F2",
        ),
        (
            f"{fpipe} train --schedule {other} --ranks {p} --out {out}-{other.lower()}",
            "the same losses, another order",
        ),
        (f"{fpipe} compare --ranks {p} --microbatches {m}", "all schedules, bubbles and memory"),
    ]

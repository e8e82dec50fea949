# SPDX-License-Identifier: Apache-2.0
"""The run of ``fpipe train``: starts the ranks, shows their reports, compares gradients with one
process, and prints.

Knows no options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from statistics import median
from threading import Thread

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ... import launch, tree
from ...actions import Timeline
from ..pictures import strip
from .gpt import Params, cross_entropy
from .rank import LastStep, Settings, Step, sharing, work
from .single import one_process


def run(settings: Settings, source: str) -> int:
    """Train and print the results; returns the exit status, 1 if the gradients differ from those of
    one process.
    """
    torch.set_num_threads(1)  # like the ranks: the order of a sum determines its bits
    console = Console(highlight=False, soft_wrap=True)
    s = settings.schedule
    title = (
        f"{s.name or source}: {s.ranks} processes, {s.stages} stages, {s.microbatches} microbatches"
    )
    settings.page.parent.mkdir(parents=True, exist_ok=True)
    planned = s.simulate(per="rank")
    steps: list[Step] = []
    with screen(console, title, settings.steps, planned) as show:

        def keep(step: Step) -> None:
            steps.append(step)
            show(step)

        largest = largest_difference(settings, conduct(settings, keep))
        differ = f"[bold red]differ by at most {largest:g} from"
        found = differ if largest else "[bold green]identical to"
        bubble = [step.timeline.bubble for step in steps if step.timeline][-1]
        show(
            f"loss       from {steps[0].loss:.4f} to {steps[-1].loss:.4f}\n"
            f"speed      {median(step.speed for step in steps):,.0f} tokens/s (median)\n"
            f"bubble     {planned.bubble:.0%} in theory, {bubble:.0%} here{sharing(s.ranks)}\n"
            f"check      last step: loss and gradients {found}[/] those of one process\n"
            f"timeline   open [bold]{settings.page}[/] in a browser"
        )
    return 1 if largest else 0


def conduct(settings: Settings, show: Callable[[Step], None]) -> list[LastStep]:
    """Train on processes of this machine, pass each report of rank 0 to ``show``, and return the
    last step of each rank.
    """
    ours, theirs = Pipe(duplex=False)

    def listen() -> None:
        with suppress(EOFError, OSError):
            while True:
                show(ours.recv())

    listener = Thread(target=listen, name="fpipe-train-reports", daemon=True)
    listener.start()
    try:
        return launch(work, settings, theirs, ranks=settings.schedule.ranks)
    finally:
        theirs.close()  # the ranks have ended, so this was the last open end
        listener.join(10)
        ours.close()


def largest_difference(settings: Settings, parts: Sequence[LastStep]) -> float:
    """Of the loss and the gradients of the last step from those of this process, by plain autograd:
    0 is required.
    """
    text, functions, _ = settings.model()
    batch = settings.batch(text, settings.steps - 1)
    before = of_all_ranks([part.before for part in parts])
    device = tree.leaves(before)[0].device
    batch = [tensor.to(device) for tensor in batch]
    loss, grads = one_process(functions, before, cross_entropy, *batch, schedule=settings.schedule)
    pipelined = of_all_ranks([part.grads for part in parts])
    pairs = zip(tree.leaves(pipelined), tree.leaves(grads), strict=True)
    differences = [(a - b).abs().max() for a, b in pairs]
    differences += [abs(part.loss - loss) for part in parts]
    return float(max(differences))


def of_all_ranks(parts: Sequence[Sequence[Params | None]]) -> list[Params]:
    """Each stage from a rank that holds it."""
    stages = zip(*parts, strict=True)
    return [next(filter(None, of_ranks)) for of_ranks in stages]


@contextmanager
def screen(
    console: Console, title: str, steps: int, planned: Timeline
) -> Iterator[Callable[[Step | str], None]]:
    """Shows steps and text while the block runs: a panel of progress, loss, the plan and the text;
    or without a terminal the text, and a line for every tenth of the steps.
    """
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(None),
        MofNCompleteColumn(),
        TextColumn("steps, left"),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )
    task = bar.add_task("starting the ranks", total=steps)

    drawn = Text.from_ansi(f"\n{strip(planned, console, console.width - 4)}")
    panel = Panel(Group(bar, drawn), title=f"[bold]fpipe train[/bold]  {title}")

    def show(news: Step | str) -> None:
        if isinstance(news, str):
            panel.renderable = Group(bar, drawn, Text.from_markup(news))
        else:
            bar.update(task, completed=news.number + 1, description=f"loss {news.loss:.4f}")

    def print_line(news: Step | str) -> None:
        if isinstance(news, str):
            console.print(f"\n{news}")
        elif (done := news.number + 1) in (1, steps) or done % max(steps // 10, 1) == 0:
            console.print(f"step {done:4d}   loss {news.loss:.4f}")

    if console.is_terminal:
        with Live(panel, console=console, refresh_per_second=6):
            yield show
    else:
        console.print(title)
        yield print_line

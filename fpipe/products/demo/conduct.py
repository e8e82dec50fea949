# SPDX-License-Identifier: Apache-2.0
"""The run of ``fpipe train``: starts the ranks, shows their reports, compares gradients with one
process, and prints.

Knows no options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
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
    ideal = f"bubble {planned.bubble:.0%} at equal times of F, I, W"
    bubble = f"{ideal}; {{:.0%}} measured{sharing(s.ranks)}"
    with screen(console, title, settings.steps, bubble, planned) as show:
        largest = largest_difference(settings, conduct(settings, show))
        differ = f"[bold red]differ by at most {largest:g}[/]"
        show(
            "Last step compared with one process: loss and gradients "
            f"{differ if largest else 'are [bold green]identical[/]'}"
        )
        show(f"Timeline, simulated and measured: [bold]{settings.page}[/bold]")
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
    console: Console, title: str, steps: int, bubble: str, planned: Timeline
) -> Iterator[Callable[[Step | str], None]]:
    """Shows steps and lines while the block runs: a panel of progress, loss, speed, the plan and
    the lines; or without a terminal the lines, and one for every tenth of the steps. ``bubble``
    is the format of a line for that of a measured step.
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

    above = Text()
    drawn = Text.from_ansi(f"\n{strip(planned, console, console.width - 4)}")
    lines: list[Text] = []
    panel = Panel(Group(bar, drawn), title=f"[bold]fpipe train[/bold]  {title}")

    def show(news: Step | str) -> None:
        nonlocal above
        if isinstance(news, str):
            lines.append(Text.from_markup(news))
            lines[-1].no_wrap = False
        else:
            bar.update(task, completed=news.number + 1, description=described(news))
            if news.number == 0:
                lines.append(Text(f"Loss in the first step: {news.loss:.4f}"))
            if news.timeline:
                above = Text(f"\n{bubbles(news)}")
        panel.renderable = Group(bar, above, drawn, *lines)

    def bubbles(step: Step) -> str:
        return bubble.format(step.timeline.bubble) if step.timeline else ""

    def print_line(news: Step | str) -> None:
        if isinstance(news, str):
            console.print(news)
        elif news.number + 1 == steps or news.number % max(steps // 10, 1) == 0:
            console.print(
                f"step {news.number + 1:4d}   {described(news)}\n{bubbles(news)}".rstrip()
            )

    if console.is_terminal:
        with Live(panel, console=console, refresh_per_second=6):
            yield show
    else:
        console.print(title)
        yield print_line


def described(step: Step) -> str:
    """``loss 2.1000   5,000 tokens/s``."""
    return f"loss {step.loss:.4f}   {step.speed:7,.0f} tokens/s"

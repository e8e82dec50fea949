# SPDX-License-Identifier: Apache-2.0
"""The display of ``fpipe train``: live on a terminal, and ten lines of text elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from .rank import Step


@contextmanager
def screen(console: Console, title: str, steps: int) -> Iterator[Callable[[Step], None]]:
    """Shows steps while the block runs: progress, loss, speed and the last measured timeline, or
    without a terminal a line for every tenth of the steps.
    """
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )
    task = bar.add_task("starting the ranks", total=steps)

    def panel(*below: Text) -> Panel:
        return Panel(Group(bar, *below), title=f"[bold]fpipe train[/bold]  {title}")

    def show(step: Step) -> None:
        bar.update(task, completed=step.number + 1, description=described(step))
        if step.timeline:
            heading = Text(f"\nstep {step.number + 1} as it ran", style="dim")
            color = console.color_system is not None
            drawn = step.timeline.draw(width=max(console.width - 4, 20), color=color)
            live.update(panel(heading, Text.from_ansi(drawn, no_wrap=True)))

    def print_line(step: Step) -> None:
        if step.number + 1 == steps or step.number % max(steps // 10, 1) == 0:
            console.print(f"step {step.number + 1:4d}   {described(step)}")

    if console.is_terminal:
        with Live(panel(), console=console, refresh_per_second=6) as live:
            yield show
    else:
        console.print(title)
        yield print_line


def described(step: Step) -> str:
    """``loss 2.1000   5,000 tokens/s``."""
    return f"loss {step.loss:.4f}   {step.speed:7,.0f} tokens/s"

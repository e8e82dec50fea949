# SPDX-License-Identifier: Apache-2.0
"""The display of ``fpipe train``: live on a terminal, and ten lines of text elsewhere.

Knows the reports of ``rank``, and nothing of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median_high

from rich.console import Console, Group, RenderableType
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
from rich.table import Table
from rich.text import Text

from .rank import Measured, Ready, Step

_BARS = "▁▂▃▄▅▆▇█"


class Screen:
    """Shows progress, loss, speed and the timeline of the last measured step."""

    def __init__(self, console: Console, title: str, steps: int):
        self.console, self.title, self.steps = console, title, steps
        self.done: list[Step] = []
        self.timeline: list[Text] = []
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self.task = self.bar.add_task("starting the ranks", total=steps)
        self.live = Live(
            console=console, refresh_per_second=6, transient=False, get_renderable=self.picture
        )

    def show(self, report: Ready | Step | Measured) -> None:
        """Include a report in the display; without a terminal, print a line for every tenth of the
        steps.
        """
        if isinstance(report, Ready):
            self.title = f"{self.title}, {report.parameters:,} parameters"
            self.bar.update(self.task, description="tracing the stages")
        elif isinstance(report, Measured):
            color = self.console.color_system is not None
            drawn = report.timeline.draw(width=self._width, color=color)
            title = f"step {report.number + 1} as it ran"
            self.timeline = [Text(), Text(title, style="dim"), Text.from_ansi(drawn, no_wrap=True)]
        else:
            self.done.append(report)
            number = report.number + 1
            self.bar.update(self.task, completed=number, description="training")
            tenth = number == self.steps or report.number % max(self.steps // 10, 1) == 0
            if tenth and not self.console.is_terminal:
                self.console.print(
                    f"step {number:4d}   loss {report.loss:.4f}   {self._speed():7,.0f} tokens/s"
                )

    def picture(self) -> RenderableType:
        """The whole display."""
        parts = [self.bar, self._figures(), *self.timeline]
        title = f"[bold]fpipe train[/bold]  {self.title}"
        return Panel(Group(*parts), title=title, title_align="left")

    @property
    def _width(self) -> int:
        return max(self.console.width - 4, 20)

    def _figures(self) -> RenderableType:
        if not self.done:
            return Text("loss  -", style="dim")
        losses = [step.loss for step in self.done]
        row = Table.grid(padding=(0, 3))
        row.add_row(
            Text(f"loss {losses[-1]:.4f}", style="bold"),
            Text(sparkline(losses, max(min(self._width - 40, 60), 8)), style="cyan"),
            Text(f"{self._speed():,.0f} tokens/s", style="bold"),
        )
        return row

    def _speed(self) -> float:
        """The median of the last steps, because the first step traces the programs."""
        return median_high(step.tokens / step.seconds for step in self.done[-15:])


def sparkline(values: Sequence[float], width: int) -> str:
    """Numbers as small bars, at most ``width`` of them, each the mean of its share.

    >>> sparkline([4, 3, 2, 1], 4), sparkline([1, 1], 8), sparkline([8, 0, 4, 4], 2)
    ('█▆▃▁', '▁▁', '▁▁')
    """
    count = min(width, len(values))
    edges = [k * len(values) // count for k in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(_BARS[round((m - low) / (high - low) * 7) if high > low else 0] for m in means)

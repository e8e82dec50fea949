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

from ...actions import KINDS, OPS, Timeline
from ..pictures.colours import fill
from .rank import Measured, Ready, Step

_BARS = "▁▂▃▄▅▆▇█"


class Screen:
    """Shows progress, loss, speed and the timeline of the last measured step."""

    def __init__(self, console: Console, title: str, steps: int):
        self.console, self.title, self.steps = console, title, steps
        self.done: list[Step] = []
        self.measured: Measured | None = None
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
            self.measured = report
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
        inside = max(self.console.width - 4, 20)
        parts: list[RenderableType] = [self.bar, self._figures(inside)]
        if self.measured is not None:
            number, timeline = self.measured
            title = (
                f"step {number + 1} as it ran: {1e3 * timeline.total:.0f} ms, bubble "
                f"{timeline.bubble:.0%}"
            )
            parts += [Text(), Text(title, style="dim"), lanes(timeline, inside)]
        return Panel(
            Group(*parts), title=f"[bold]fpipe train[/bold]  {self.title}", title_align="left"
        )

    def _figures(self, width: int) -> RenderableType:
        if not self.done:
            return Text("loss  -", style="dim")
        losses = [step.loss for step in self.done]
        row = Table.grid(padding=(0, 3))
        row.add_row(
            Text(f"loss {losses[-1]:.4f}", style="bold"),
            Text(sparkline(losses, max(min(width - 40, 60), 8)), style="cyan"),
            Text(f"{self._speed():,.0f} tokens/s", style="bold"),
        )
        return row

    def _speed(self) -> float:
        """The median of the last steps, because the first step traces the programs."""
        return median_high(step.tokens / step.seconds for step in self.done[-15:])


def lanes(timeline: Timeline, width: int) -> Text:
    """A timeline in one line per rank, with a legend; later stages of a rank are paler.

    >>> from fpipe.schedule import Schedule
    >>> print(lanes(Schedule.parse("[0F0, 0B0]").simulate(), 20).plain)
    rank 0  FFFFBBBBBBBB
    F forward   B backward
    """
    columns, picture, seen = max(width - 8, 8), Text(no_wrap=True), set[str]()
    for rank in range(timeline.ranks):
        picture.append(f"rank {rank:<2} ", style="dim")
        held = timeline.placement.stages_of(rank)
        row = [(" ", "")] * columns
        for span in timeline.of_rank(rank):
            first, last = (
                (t - timeline.start) / timeline.total * columns for t in (span.start, span.end)
            )
            parts = span.action.parts
            for column in range(int(first), min(max(round(last), int(first) + 1), columns)):
                part = parts[column % len(parts)]  # a fused action shows both
                ground = fill(part.op, held.index(part.stage), len(held))
                row[column] = (
                    part.op,
                    f"{ground} on {ground}",
                )  # shows the letter where colours are not available
                seen.add(part.op)
        for letter, style in row:
            picture.append(letter, style=style)
        picture.append("\n")
    for op in sorted(seen, key=OPS.index):
        picture.append(op, style=f"on {fill(op, 0, 1)}")
        picture.append(f" {KINDS[op].name}   ")
    picture.rstrip()
    return picture


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

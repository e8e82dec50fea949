# SPDX-License-Identifier: Apache-2.0
"""The progress of work that takes longer than a second, as one line on standard error.

A thread draws the line, if standard error is a terminal, and erases it at the end. This module must
not know schedules.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

T = TypeVar("T")
AFTER = 1.0  #: seconds until the line appears
_END = 1.0  #: seconds for the thread to erase it
_EVERY = 0.1  #: seconds between two updates


class Track(Protocol):
    """Passes items on, and counts them."""

    def __call__(self, items: Sequence[T], /) -> Iterator[T]: ...


@contextmanager
def progress(what: str | Callable[[], str]) -> Iterator[Track]:
    """Show a line while the body runs. ``track(items)`` yields items and counts them in the line.

    ``what`` is the text of the line, or a function that returns it.

    >>> with progress("reading") as track:
    ...     list(track([1, 2]))
    [1, 2]
    """
    counts = [0, 0]  # items that were processed, and all items
    done = threading.Event()

    def track(items: Sequence[T]) -> Iterator[T]:
        counts[1] = len(items)
        for item in items:
            yield item
            counts[0] += 1

    thread = threading.Thread(
        target=_show, args=(what, counts, done), name="fpipe-progress", daemon=True
    )
    if sys.stderr.isatty():
        thread.start()
    try:
        yield track
    finally:
        done.set()
        if thread.ident is not None:
            thread.join(_END)


@contextmanager
def noted(what: str) -> Iterator[Callable[[str], None]]:
    """Show a line while the body runs. ``note(text)`` names the next part of the work in it.

    >>> with noted("tracing") as note:
    ...     note("stage 1 of 2")
    """
    now = [what]

    def note(text: str) -> None:
        now[0] = f"{what} {text}"

    with progress(lambda: now[0]):
        yield note


def _show(what: str | Callable[[], str], counts: Sequence[int], done: threading.Event) -> None:
    if done.wait(AFTER):
        return
    from rich.console import Console  # slow, and seldom needed
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as line:
        text = what if callable(what) else lambda: what
        task = line.add_task(text(), total=None)
        while not done.wait(_EVERY):
            line.update(
                task,
                description=text(),
                completed=counts[0],
                total=counts[1] if counts[1] > 1 else None,
            )

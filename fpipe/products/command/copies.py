# SPDX-License-Identifier: Apache-2.0
"""``fpipe copies``: a script as several copies of a pipeline, of which any may be lost."""

from __future__ import annotations

import os
import runpy
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import click

from ..training.elastic import COPIES, COPY, LIGHTHOUSE, import_torchft
from ..training.launch import launch
from .options import Count, option

T = TypeVar("T")
#: Milliseconds after which a copy without a sign of life is lost, and for which those that meet
#: wait for one that still computes.
_SILENCE = 2_000
_PATIENCE = 60_000


@click.command(context_settings={"ignore_unknown_options": True})
@option("--copies N", "Copies of the pipeline.", 2)
@option("-p --ranks N", "Processes of a copy.", 1)
@option("--restarts N", "Of each copy that fails.", 3, type=Count(0))
@click.argument("script", metavar="FILE", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", metavar="[ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
def copies(copies: int, ranks: int, restarts: int, script: str, arguments: tuple[str, ...]) -> None:
    """Run a script as several copies of a pipeline; the loss of a copy does not stop the others.

    The script passes fpipe.elastic() to fpipe.Loop. On several machines, run torchft_lighthouse
    where it stays, and start each copy with torchrun; the page "Checkpoint, resume and export" has
    the environment variables.
    """
    run_copies(_script, script, arguments, ranks=ranks, copies=copies, restarts=restarts)


def run_copies(
    fn: Callable[..., T], *args: object, ranks: int, copies: int, restarts: int = 3
) -> list[list[T] | None]:
    """Run ``fn(*args)`` on the processes of several copies, and start a copy that fails again as
    long as no other one has ended.

    Returns:
        The results by copy and rank; ``None`` for a copy that was lost for good.

    Raises:
        Exception: the first one, if all copies were lost.
    """
    coordination = import_torchft("torchft.coordination")
    lighthouse = coordination.LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        heartbeat_timeout_ms=_SILENCE,
        join_timeout_ms=_PATIENCE,
    )
    _, _, port = lighthouse.address().rpartition(":")
    address = f"http://127.0.0.1:{port}"
    results: list[list[T] | None] = [None] * copies
    errors: list[Exception] = []
    ended = threading.Event()

    def run(copy: int) -> None:
        env = {LIGHTHOUSE: address, COPY: str(copy), COPIES: str(copies)}
        for _ in range(restarts + 1):
            try:
                results[copy] = launch(fn, *args, ranks=ranks, env=env)
            except Exception as error:  # of the user's function, or of the processes
                errors.append(error)
                if ended.is_set():
                    return
            else:
                ended.set()
                return

    threads = [threading.Thread(target=run, args=(copy,), daemon=True) for copy in range(copies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lighthouse.shutdown()
    if not ended.is_set():
        raise errors[0]
    return results


def _script(path: str, arguments: tuple[str, ...]) -> None:
    """Run a script in this process as python would."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    runpy.run_path(path, run_name="__main__")

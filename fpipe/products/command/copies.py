# SPDX-License-Identifier: Apache-2.0
"""``fpipe copies``: a script as several copies of a pipeline, of which any may be lost."""

from __future__ import annotations

import os
import runpy
import sys
import time

import click

from ..training import outcome
from ..training.launch import launch
from ..training.quorum import ADDRESS, COPIES, COPY
from .options import Count


@click.command("copies", context_settings={"ignore_unknown_options": True})
@click.option(
    "--copies",
    type=Count(),
    default=2,
    help="Copies of the pipeline.",
)
@click.option(
    "-p",
    "--ranks",
    type=Count(),
    default=1,
    help="Processes of a copy.",
)
@click.option(
    "--restarts",
    type=Count(0),
    default=3,
    help="Of each copy that fails.",
)
@click.option(
    "--serve", metavar="HOST:PORT", help="Serve copies on other machines, and start none."
)
@click.argument(
    "script", metavar="[FILE]", required=False, type=click.Path(exists=True, dir_okay=False)
)
@click.argument("arguments", metavar="[ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
def copies(
    copies: int,
    ranks: int,
    restarts: int,
    serve: str | None,
    script: str | None,
    arguments: tuple[str, ...],
) -> None:
    """Run a script as several copies of a pipeline; the loss of a copy does not stop the others.

    The script passes fpipe.quorum() to fpipe.Loop. With --serve, copies are started on other
    machines, each by torchrun with the environment variables that are printed; one that is lost is
    noticed by the others.
    """
    if serve is not None:
        _serve(serve, copies)
        return
    if script is None:
        raise click.UsageError("give the file of a script, or --serve HOST:PORT")
    launch(_script, script, arguments, ranks=ranks, copies=copies, restarts=restarts)


def _serve(address: str, copies: int) -> None:
    """Hold the store of copies on other machines until the process is interrupted."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise click.BadParameter(f"{address!r} is not HOST:PORT", param_hint="--serve")
    store = outcome.store(host, int(port))
    click.echo(f"export {ADDRESS}={host}:{store.port} {COPIES}={copies}")
    click.echo(
        f"export {COPY}=0  # 0 to {copies - 1}; then torchrun --nproc-per-node ... script.py"
    )
    while True:
        time.sleep(3600)


def _script(path: str, arguments: tuple[str, ...]) -> None:
    """Run a script in this process as python would."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    runpy.run_path(path, run_name="__main__")

# SPDX-License-Identifier: Apache-2.0
"""``fpipe copies``: a script as several copies of a pipeline, of which any may be lost.

Each copy is a job of torchrun, as on several machines. Beside them, this module serves their
lighthouse.
"""

from __future__ import annotations

import os
import subprocess
import sys

import click

from ..training.elastic import COPIES, COPY, LIGHTHOUSE, import_torchft
from .options import Count, option

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
def copies(
    copies: int,
    ranks: int,
    restarts: int,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Run a script as several copies of a pipeline; the loss of a copy does not stop the others.

    The script passes fpipe.elastic() to fpipe.Loop. Each copy is started with torchrun. The exit
    status is 0 if one copy has finished. On several machines, run torchft_lighthouse where it
    stays, and start each copy with torchrun; the page "Checkpoint, resume and export" has the
    environment variables.
    """
    lighthouse = import_torchft("torchft.coordination").LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        heartbeat_timeout_ms=_SILENCE,
        join_timeout_ms=_PATIENCE,
    )
    _, _, port = lighthouse.address().rpartition(":")
    shared = {**os.environ, LIGHTHOUSE: f"http://127.0.0.1:{port}", COPIES: str(copies)}
    options = f"--standalone --nproc-per-node={ranks} --max-restarts={restarts}"
    command = [sys.executable, "-m", "torch.distributed.run", *options.split(), script, *arguments]
    jobs = [subprocess.Popen(command, env={**shared, COPY: str(copy)}) for copy in range(copies)]
    try:
        statuses = [job.wait() for job in jobs]
    finally:
        for job in jobs:
            job.terminate()
        lighthouse.shutdown()
    return min(map(abs, statuses))

"""One rank of a job of three under env://, of which rank 0 hosts the store and is stopped at a
moment.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

import fpipe
from fpipe.collectives.setup import MeshGroup

TIMEOUT = 3.0


def layer(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p)


def main(moment: str, env: dict[str, str], errors: Path) -> None:
    """The last line of the file ``errors`` is the error of this rank."""
    os.environ.update(env)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    rank = int(env["RANK"])
    stop = lambda now: os.kill(os.getpid(), signal.SIGSTOP) if rank == 0 and now == moment else None
    stop("start")
    start = time.monotonic()
    try:
        # To start may take long where there are few cores.
        group = fpipe.init(device="cpu", timeout=TIMEOUT if moment == "start" else 60)
        assert isinstance(group, MeshGroup)
        group.barrier()
        group._monitor.timeout = group._rendezvous.store.seconds = TIMEOUT
        print("met", file=sys.stderr, flush=True)
        while rank == 0 and any("met" not in errors.with_name(other).read_text() for other in "12"):
            time.sleep(
                0.01
            )  # not stopped while another rank is in the barrier, with the long time-out
        stop("handshake")
        pipe = fpipe.pipeline(
            [layer] * 3, "1F1B", loss=lambda y: y.sum(), microbatches=2, group=group
        )
        params = pipe.place([torch.eye(4)] * 3)
        step = fpipe.value_and_grad(pipe)
        start = time.monotonic()
        step(params, torch.ones(4, 4))
        stop("step")
        start = time.monotonic()
        step(params, torch.ones(4, 4))
        stop("barrier")
        start = time.monotonic()
        group.barrier()
    except fpipe.FpipeError as error:
        print(
            f"{time.monotonic() - start:.1f} {type(error).__name__}: {error}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

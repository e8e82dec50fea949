"""``fpipe.launch`` from a process that has imported what takes each of its ranks seconds to
import.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import collector
import fpipe
from fpipe.products.training.launch import _context

PROCESSES = _context("forkserver", None)


def launch(
    prepare: Callable[[], Any], fn: Callable[..., Any], *args: Any, ranks: int, timeout: float
) -> list[Any]:
    """What ``fpipe.launch`` returns, of processes that are forked from one that has called
    ``prepare``.
    """
    ours, theirs = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_launched, args=(theirs, prepare, fn, args, ranks, timeout))
    process.start()
    theirs.close()
    try:
        found = pickle.loads(ours.recv_bytes())
    finally:
        process.kill()
        process.join()
    if isinstance(found, Exception):
        raise found
    return found


def _launched(
    report: Connection, prepare: Any, fn: Any, args: Any, ranks: int, timeout: float
) -> None:
    import torch

    # threads do not survive a fork; in builds for CUDA, a process that was forked after this call
    # aborts in its first backward
    if torch.version.cuda is None:
        torch.set_num_threads(1)
    prepare()
    collector.settle()
    try:
        found: Any = fpipe.launch(fn, *args, ranks=ranks, timeout=timeout, start="fork")
    except Exception as error:
        found = error
    report.send_bytes(pickle.dumps(found))

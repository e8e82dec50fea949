# SPDX-License-Identifier: Apache-2.0
"""What a launched rank gets and reports, and which of several failures is raised.

This module must not know processes and pipes.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ...errors import LaunchError, PeerError, StalledError


@dataclass(frozen=True)
class Report:
    """Of one rank: its result, or its exception and what failed as text; the time; whether the
    process ended without a report.
    """

    value: object = None
    failure: str = ""
    when: float = field(default_factory=time.monotonic)
    ended: bool = False


def environment(rank: int, ranks: int, tcp_store: TCPStore) -> dict[str, str]:
    """The environment variables of torchrun for a rank of one machine whose launcher holds the
    store.
    """
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
        "MASTER_ADDR": tcp_store.host,
        "MASTER_PORT": str(tcp_store.port),
        # the launcher holds the store: rank 0 must not start one
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def store(address: str) -> TCPStore:
    """A store in the launcher, which outlives every rank; it listens on this address alone."""
    # TCPStore itself would listen on all interfaces
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def call(fn: Callable[[], object], rank: int) -> bytes:
    """Call the function and return the report as bytes for another process.

    >>> pickle.loads(call(dict, rank=0)).value
    {}
    """
    try:
        report = Report(fn())
    except BaseException as error:
        report = Report(error, f"on rank {rank}:\n\n{traceback.format_exc()}")
    try:
        raw = pickle.dumps(report)
        pickle.loads(raw)
    except Exception as error:
        unsent = f"the result of rank {rank} cannot be sent to another process: {error}"
        raw = pickle.dumps(Report(failure=report.failure or unsent, when=report.when))
    return raw


def results(reports: Mapping[int, Report], ranks: int, timeout: float | None) -> list[Any]:
    """The results by rank; raises the first failure, or that some ranks did not report in time.

    The first failure is the cause rather than its consequences: a death, then an exception, then a
    lost peer.
    """

    def order(report: Report) -> tuple[bool, bool, float]:
        is_consequence = isinstance(report.value, (PeerError, StalledError))
        return not report.ended, is_consequence, report.when

    failures = [report for report in reports.values() if report.failure]
    if failures:
        first = min(failures, key=order)
        error = LaunchError(first.failure)
        if isinstance(first.value, BaseException):
            raise first.value from error
        raise error
    late = [rank for rank in range(ranks) if rank not in reports]
    if late:
        raise LaunchError(
            f"ranks {late} did not finish within timeout={timeout:g} seconds; all ranks were ended"
        )
    return [reports[rank].value for rank in range(ranks)]

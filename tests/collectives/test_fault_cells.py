"""Some cells of the matrix of faults (``benchmarks/trial_faults.py --matrix``): the most different
ones.
"""

from __future__ import annotations

import multiprocessing as mp
import subprocess
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from benchmarks.fault_cell import FIRST, Cell
from benchmarks.fault_matrix import Network, Outcome, run_cell
from sample import also

CELLS = (
    Cell("rank 1", "stop", "handshake", "env", "gloo"),
    Cell("rank 1", "raise", "weighted", "launch", "gloo"),
    Cell(FIRST, "cut", "pullback", "agent store", "memory"),
)
MORE = (
    Cell("rank 3", "kill", "tensor parallel", "agent store", "gloo"),
    Cell("rank 0", "kill", "mid step", "env", "memory"),
    Cell("rank 2", "stop", "ZeRO", "agent store", "memory"),
    Cell("rank 1", "slow", "trace", "launch", "memory"),
)


@pytest.fixture(scope="module")
def networks() -> Iterator[SimpleQueue[Network]]:
    mp.get_context("forkserver").set_forkserver_preload(["torch", "fpipe.collectives.setup"])
    network = Network(0)
    try:
        network.create()
    except (OSError, subprocess.CalledProcessError) as error:
        network.remove()
        pytest.skip(f"no network namespaces here ({error})")
    queue: SimpleQueue[Network] = SimpleQueue()
    queue.put(network)
    yield queue
    network.remove()


@pytest.mark.xdist_group("fault cells")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cell", [*CELLS, *also(*MORE)], ids=" ".join)
def test_survivors_end_in_time_and_name_the_culprit(cell: Cell, networks: SimpleQueue[Network]):
    outcome = run_cell(cell, 3.0, networks)
    assert isinstance(outcome, Outcome), outcome
    assert outcome.in_time, outcome.texts
    assert outcome.named, outcome.texts

"""Every schedule on real processes and in fake worlds computes the same bits as on the local group."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import fpipe
import training_steps
from fpipe.collectives.shared_memory import SWITCH
from fpipe.testing import run
from schedule_table import TABLE

NAMES = [family.name for family in TABLE]
#: (microbatches, rows of each) step by step: the count and the shapes change, and come back
PLANS = [(4, 2), (6, 3), (4, 2)]
SEEDS = int(os.environ.get("FPIPE_SEEDS", "2"))


@cache
def local(name: str, ranks: int) -> dict[Any, str]:
    return training_steps.steps(fpipe.local(ranks), name, PLANS)


@pytest.fixture(scope="module")
def on_gloo() -> dict[int, list[dict[str, dict[Any, str]]]]:
    return {ranks: fpipe.launch(training_steps.steps_under, NAMES, PLANS, ranks=ranks, timeout=110) for ranks in (2, 4)}


@pytest.mark.xdist_group("launched")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_gloo_processes_give_the_bits_of_the_local_group(on_gloo, name: str, ranks: int):
    whole: dict[Any, str] = {}
    for part in on_gloo[ranks]:
        for key, value in part[name].items():
            assert whole.setdefault(key, value) == value, f"ranks disagree on {key}"
    assert whole == local(name, ranks)


@pytest.mark.parametrize("order", ["buffered", "lockstep"])
@pytest.mark.parametrize("name", NAMES)
def test_fake_worlds_give_the_bits_of_the_local_group(name: str, order: str):
    """Under any order of delivery, and where every send blocks. FPIPE_SEEDS=200 runs as many worlds."""
    for seed in range(SEEDS):
        whole: dict[Any, str] = {}
        for part in run(lambda group: training_steps.steps(group, name, PLANS[:2]), 4, order=order, seed=seed):
            whole |= part
        assert whole == {key: value for key, value in local(name, 4).items() if key[1] < 2}, f"seed {seed}"


@pytest.fixture(scope="module", params=[2, 4])
def under_torchrun(request) -> tuple[int, dict[str, str]]:
    """The same table through sockets, as between processes of several hosts."""
    script, ranks = Path(training_steps.__file__), request.param
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(script)]
    paths = os.pathsep.join([str(script.parent), str(script.parent.parent)])
    done = subprocess.run(
        [sys.executable, *command, ",".join(NAMES)], capture_output=True, text=True, timeout=170,
        env={**os.environ, "PYTHONPATH": paths, SWITCH: "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return ranks, dict(line.split() for line in done.stdout.splitlines() if line.split()[:1][0] in NAMES)


@pytest.mark.xdist_group("under torchrun")
@pytest.mark.parametrize("name", NAMES)
def test_torchrun_gives_the_bits_of_the_local_group(under_torchrun, name: str):
    ranks, found = under_torchrun
    expected = {key: value for key, value in local(name, ranks).items() if key[1] < 2}
    assert found[name] == hashlib.sha256(repr(sorted(expected.items(), key=str)).encode()).hexdigest()[:12]

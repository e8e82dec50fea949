"""Every schedule on real processes and in fake worlds computes the same bits as on the local
group.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import fpipe
import training_steps
from carriers import OVER
from fpipe.products.training.launch import _context
from fpipe.testing import run
from sample import also
from schedule_table import TABLE

NAMES = [family.name for family in TABLE]
#: (microbatches, rows of each) step by step: the count and the shapes change, and come back
PLANS = [(4, 2), (6, 3), (4, 2)]


@cache
def local(name: str, ranks: int) -> dict[Any, str]:
    return training_steps.steps(fpipe.local(ranks), name, PLANS)


#: The schedules of the suite by number of ranks, started by ``fpipe.launch`` and by torchrun.
LAUNCHED = {2: NAMES[::8], 4: NAMES[1::4]}
TORCHRUN = {2: [], 4: NAMES[2:3]}


def rows(suite: dict[int, list[str]]) -> list[Any]:
    """Numbers of ranks and schedules: all, of which the suite runs some."""
    return [(p, name) if name in suite[p] else also((p, name))[0] for p in suite for name in NAMES]


@pytest.fixture(scope="module")
def on_gloo(long: bool) -> dict[int, list[dict[str, dict[Any, str]]]]:
    names = dict.fromkeys(LAUNCHED, NAMES) if long else LAUNCHED
    launch = lambda p: fpipe.launch(
        training_steps.steps_under, names[p], PLANS, ranks=p, timeout=110
    )
    return {ranks: launch(ranks) for ranks in names}


def whole(parts: Sequence[dict[Any, str]]) -> dict[Any, str]:
    """The table of all ranks, which agree where they hold the same."""
    table: dict[Any, str] = {}
    for part in parts:
        for key, value in part.items():
            assert table.setdefault(key, value) == value, f"ranks disagree on {key}"
    return table


@pytest.mark.timeout(300)  # of busy machines: 18 schedules on two and on four processes
@pytest.mark.xdist_group("launched")
@pytest.mark.parametrize(("ranks", "name"), rows(LAUNCHED))
def test_gloo_processes_give_the_bits_of_the_local_group(on_gloo, name: str, ranks: int):
    assert whole([part[name] for part in on_gloo[ranks]]) == local(name, ranks)


@pytest.mark.covering
@pytest.mark.parametrize("order", ["buffered", "lockstep"])
@pytest.mark.parametrize("name", NAMES)
def test_fake_worlds_give_the_bits_of_the_local_group(name: str, order: str, long: bool):
    """Under any order of delivery, and where every send blocks. FPIPE_SEEDS=200 runs as many
    worlds.
    """
    for seed in range(int(os.environ.get("FPIPE_SEEDS", 2 if long else 1))):
        parts = run(
            lambda group: training_steps.steps(group, name, PLANS[:2]), 4, order=order, seed=seed
        )
        assert whole(parts) == {
            key: value for key, value in local(name, 4).items() if key[1] < 2
        }, f"seed {seed}"


@pytest.fixture(scope="module")
def under_torchrun(long: bool) -> dict[int, list[dict[str, dict[Any, str]]]]:
    """The same table through gloo, as between processes of several hosts."""
    results = {}
    for ranks in (2, 4) if long else (4,):
        # What torchrun calls. Its processes are forked from one that has imported torch.
        config = LaunchConfig(
            1,
            1,
            ranks,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            start_method=_context(None, None).get_start_method(),
        )
        names = NAMES if long else TORCHRUN[ranks]
        found = elastic_launch(config, _as_between_hosts)(OVER["gloo"], names, PLANS[:2])
        results[ranks] = [found[rank] for rank in range(ranks)]
    return results


def _as_between_hosts(env: dict[str, str], *args: Any) -> dict[str, dict[Any, str]]:
    os.environ.update(env)
    assert "TORCHELASTIC_RUN_ID" in os.environ
    return training_steps.steps_under(*args)


@pytest.mark.xdist_group("launched")
@pytest.mark.parametrize(("ranks", "name"), rows(TORCHRUN))
def test_torchrun_gives_the_bits_of_the_local_group(under_torchrun, name: str, ranks: int):
    found = whole([part[name] for part in under_torchrun[ranks]])
    assert found == {key: value for key, value in local(name, ranks).items() if key[1] < 2}

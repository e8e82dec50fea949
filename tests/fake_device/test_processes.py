"""Pipelines on two processes, each with a fake device: through the host, over a backend that works
on streams of its own, and over backends with faults.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fpipe
from fpipe.collectives import capabilities
from fpipe.collectives.capabilities import Capabilities
from fpipe.devices import kinds
from models import MODELS, SEED
from schedule_table import Case

from .cases import host, layer, network, squared
from .loader import NAME, load, missing, register_backend

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.xdist_group("fake device"),
    pytest.mark.timeout(7200),
]

_MOVES = dict.fromkeys(("sum", "p2p", "gather"), "float half int")
#: What the table would say about the backend with the faults.
ROWS = {
    "": Capabilities(NAME, "fakeccl", {**_MOVES, "max": "float int", "parts": "float"}, "early"),
    "no-avg no-max no-scatter": Capabilities(NAME, "fakeccl", _MOVES, "early"),
    "max-is-sum no-tags": Capabilities(NAME, "fakeccl", _MOVES, "early"),
    "ordered": Capabilities(NAME, "fakeccl", _MOVES),
}


def prepare(faults: str | None, link: float = 0.0) -> Any:
    """The device in this process, with a row for the backend; None: no backend carries it."""
    device = load()
    if faults is not None:
        register_backend(faults=faults, link=link)
        row = kinds.DeviceKind(NAME, "fakeccl", double=True)
        kinds.KINDS = MappingProxyType({**kinds.KINDS, NAME: row})
        capabilities.TABLE = (*capabilities.TABLE, ROWS[faults])
    return device


CASES = (Case("1F1B", 2, 4, 2), Case("ZBVZeroBubble", 2, 4, 4), Case("DualPipeV", 2, 4, 4))


def steps(place: str, group: Any, model: str, engine: str) -> dict[str, list[torch.Tensor]]:
    """A step of each case; what other processes have is missing."""
    found = {}
    for case in CASES:
        made = MODELS[model]
        stages, params, _ = made.make(case.stages)
        x, t = made.batch(case.microbatches)
        pipe = fpipe.pipeline(
            stages, case.make(), loss=made.loss, group=group, seed=SEED, engine=engine
        )  # type: ignore[arg-type]
        step = fpipe.value_and_grad(pipe, has_aux=made.has_aux)
        found[case.name] = host(step(pipe.place(params), x, t))
    return found


def _rank(faults: str | None, seeds: int, model: str) -> list[str]:
    device = prepare(faults)
    group = fpipe.init()
    backend = "gloo" if faults is None else "fakeccl"
    assert repr(group).endswith(f"on {NAME}:{dist.get_rank()} over {backend}"), group
    wrong = []
    for engine in ("trace", "eager"):
        device.set_delays(-1)
        rank = dist.get_rank()
        expected = _reference(rank, model, engine)
        for seed in range(seeds):
            device.set_delays(seed)
            got = steps(NAME, group, model, engine)
            for name in got:
                pairs = zip(got[name], expected[name], strict=True)
                if not all(torch.equal(a, b) for a, b in pairs):
                    wrong.append(f"{name}, {engine}, seed {seed}")
    device.set_delays(-1)
    return wrong


def _reference(rank: int, model: str, engine: str) -> dict[str, list[torch.Tensor]]:
    """The results of this rank, computed on the CPU of one process."""
    found = {}
    for case in CASES:
        made = MODELS[model]
        stages, params, _ = made.make(case.stages)
        x, t = made.batch(case.microbatches)
        schedule = case.make()
        pipe = fpipe.pipeline(
            stages, schedule, loss=made.loss, group=fpipe.local(2), seed=SEED, engine=engine
        )  # type: ignore[arg-type]
        value, grads = fpipe.value_and_grad(pipe, has_aux=made.has_aux)(params, x, t)
        mine = [g if s in schedule.placement.stages_of(rank) else None for s, g in enumerate(grads)]
        found[case.name] = host(value, mine)
    return found


@pytest.mark.parametrize("faults", [None, *ROWS])
def test_steps_have_the_bits_of_the_cpu(faults: str | None, long: bool):
    seeds = 50 if long else 1
    assert fpipe.launch(_rank, faults, seeds, "mlp", ranks=2, timeout=7000) == [[], []]

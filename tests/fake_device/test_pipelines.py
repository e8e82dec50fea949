"""Pipelines on several fake devices of one process have the CPU's bits, whatever the delays.

``--long`` runs every schedule, model and engine under 50 seeds of delays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

import fpipe
from models import MODELS
from sample import covering
from schedule_table import TABLE, Case, Family, cases

from . import cases as pipelines
from .loader import NAME, load, missing
from .test_processes import PLANNED

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.xdist_group("fake device"),
    pytest.mark.timeout(7200),
]
ENGINES = ("trace", "eager")


def found(rows: list[tuple[Case, str, str]], seeds: int) -> list[str]:
    """What is wrong with a step of each row, in one process."""
    return [
        f"{row}: {what}"
        for at, row in enumerate(rows)
        for what in pipelines.wrong(
            pipelines.of_model(row), row[0].ranks, range(at, at + seeds)
        )
    ]  # fmt: off


def _columns(row: tuple[Case, str, str]) -> tuple[object, ...]:
    case, model, engine = row
    return case.name, model, engine, case.ranks


def _kinds(row: tuple[Case, str, str]) -> tuple[object, ...]:
    """Kinds of schedules in place of their names."""
    case, model, engine = row
    family = next(each for each in TABLE if each.name == case.name)
    return kind(family), model, engine, case.ranks


def kind(family: Family) -> tuple[object, ...]:
    """What the rows of ``TABLE`` say apart from the name."""
    return family.per_rank[0], family.fused, family.split, family.replicas


@pytest.mark.parametrize("model", [None, *MODELS])
def test_every_schedule_has_the_bits_of_the_cpu(model: str | None, long: bool):
    """None: rows that cover all models and kinds of schedules, with ``--long`` all schedules."""
    rows = [
        (case, name, engine)
        for case in cases(ranks=(2, 4), microbatches=(4,))
        for name in MODELS
        if model in (None, name)
        for engine in ENGINES
    ]
    assert {case.name for case, _, _ in rows} == {family.name for family in TABLE}
    if model is None:
        rows = covering(rows, _columns if long else _kinds)
    elif not long:
        pytest.skip("long: pytest --long")
    seeds = 50 if long and model else 1
    assert fpipe.launch(found, rows, seeds, ranks=1, timeout=7000) == [[]]


def _more(names: list[str], seeds: int) -> list[str]:
    return [
        f"{name}: {what}"
        for at, name in enumerate(names)
        for what in pipelines.wrong(pipelines.MORE[name], 2, range(at, at + seeds))
    ]


#: They run with ``--long``.
ALIKE = ("training", "training on autograd", "slices on autograd")


def test_whatever_else_a_pipeline_does(long: bool):
    here = [name for name in pipelines.MORE if name not in ALIKE]
    names, seeds = (list(pipelines.MORE), 50) if long else (here[::2], 1)
    assert fpipe.launch(_more, names, seeds, ranks=1, timeout=7000) == [[]]


def _ready(numbers: Sequence[int], seeds: int) -> list[str]:
    return [
        f"random schedule {number}: {what}"
        for number in numbers
        for what in pipelines.wrong(
            partial(pipelines.random_ready, number), 2 + number % 2, range(seeds)
        )
    ]


def test_random_schedules_in_the_ready_order(long: bool):
    numbers, seeds = (range(500), 20) if long else (range(2), 1)
    assert fpipe.launch(_ready, numbers, seeds, ranks=1, timeout=7000) == [[]]


# ---- memory ----
def waiting() -> list[str]:
    """Where memory differs from the plan by more than the messages that may wait for a rank."""
    device = load()
    found = []
    for name, fn, stages, zero in PLANNED:
        if zero is not None:
            continue
        draw = torch.Generator().manual_seed(0)
        normal = lambda *size, draw=draw: torch.randn(*size, generator=draw) / 8
        params = [{"a": normal(64, 128), "b": normal(128, 64)} for _ in range(stages)]
        group = fpipe.local(devices=[f"{NAME}:0", f"{NAME}:1"])
        pipe = fpipe.pipeline(
            [fn] * stages, name, loss=pipelines.squared, microbatches=4, group=group
        )
        params = pipe.place(params)
        last = pipe.schedule(4).placement.rank_of(stages - 1, 0)
        x, t = normal(256, 64).to(f"{NAME}:0"), normal(256, 64).to(f"{NAME}:{last}")
        plan = pipe.plan(params, x, t)
        for _ in range(2):  # the first call prepares
            before = []
            for number in range(2):
                device.synchronize(number)
                before.append(device.memory_allocated(number))
                device.reset_peak_memory_stats(number)
            result = fpipe.value_and_grad(pipe)(params, x, t)
            del result
        message = x.nbytes // 4
        for number in range(2):
            more = device.max_memory_allocated(number) - before[number] - plan.peak[number]
            if not -0.1 * plan.peak[number] <= more <= (3 if name == "GPipe" else 2.25) * message:
                found.append(f"{name}, {number}: {more} beyond {plan.peak[number]}")
    return found


def test_plans_of_one_process_leave_out_messages_that_wait():
    """A plan counts a message from when its rank takes it: see docs/design/limits.md."""
    assert fpipe.launch(waiting, ranks=1, timeout=300) == [[]]


# ---- the host ----
def _waits(pipe: fpipe.Pipeline, calls: int = 3) -> int:
    """How often the host waits for a device in a step."""
    device = load()
    params, x, t = pipelines.network(4)
    params = pipe.place(params)
    before = 0
    for _ in range(calls):
        before = device.host_waits()
        fpipe.value_and_grad(pipe)(params, x, t)
    return device.host_waits() - before


def waits_of_the_host() -> list[str]:
    """Pipelines in whose steps the host waits more often than for gradients that go to the CPU."""
    load()
    plain = lambda p, x: torch.tanh(x @ p["w"] + p["b"])

    def pipe(name: str, places: list[str], **options: Any) -> fpipe.Pipeline:
        group = fpipe.local(devices=places)
        return fpipe.pipeline(
            [plain] * 4, name, loss=pipelines.squared, microbatches=4, group=group, **options
        )

    two = [f"{NAME}:0", f"{NAME}:1"]
    expected = {
        "ZBV": (pipe("ZBV", two), 0),
        "on autograd": (pipe("ZBV", two, engine="eager"), 0),
        "ready": (pipe("1F1B", two, order="ready"), 0),
        "from the CPU": (pipe("Interleaved1F1B", ["cpu", two[0]]), 12),
        "captured": (pipe("ZBV", two[:1] * 2).captured(), 0),
    }
    found = {name: (_waits(made), most) for name, (made, most) in expected.items()}
    return [f"{name}: {waits}" for name, (waits, most) in found.items() if waits > most]


def test_the_host_does_not_wait_in_a_step():
    assert fpipe.launch(waits_of_the_host, ranks=1, timeout=300) == [[]]


def clocks() -> list[str]:
    """Messages that a profile on two devices has earlier than they were sent."""
    device = load()
    params, x, t = pipelines.network(4)
    group = fpipe.local(devices=[f"{NAME}:1", f"{NAME}:2"])  # neither is the current one
    pipe = fpipe.pipeline(
        [pipelines.layer] * 4, "1F1B", loss=pipelines.squared, microbatches=4, group=group, seed=1
    )
    params = pipe.place(params)
    fpipe.value_and_grad(pipe)(params, x, t)
    found = []
    for busy in (1, 2):
        device.sleep(0.3, busy)
        step = fpipe.profile(fpipe.value_and_grad(pipe))
        step(params, x, t)
        events = {run.rank: run.events for run in step.runs[-1]}
        for rank, mine in events.items():
            sent = {e.number: e.start for e in events[1 - rank] if e.kind == "SEND"}
            found += [
                f"{busy}: {e.action} {sent[e.number] - e.end}"
                for e in mine
                if e.kind == "WAIT" and e.end < sent[e.number] - 0.05
            ]
    pipe = fpipe.pipeline([_sleeping] * 4, "1F1B", microbatches=4, group=group, engine="eager")
    step = fpipe.profile(pipe)
    step(params, x)
    short = [e for run in step.runs[-1] for e in run.events if e.kind == "F"]
    return found + [f"{e.action} took {e.end - e.start}" for e in short if e.end - e.start < 0.04]


def _sleeping(p: Any, x: torch.Tensor) -> torch.Tensor:
    load().sleep(0.05, x.device)
    return torch.tanh(x @ p["w"])


def test_a_profile_has_one_clock_for_all_devices():
    assert fpipe.launch(clocks, ranks=1, timeout=300) == [[]]

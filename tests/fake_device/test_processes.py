"""Pipelines on two processes, each with a fake device: through the host, over a backend that works
on streams of its own, and over backends with faults.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fpipe
from collective_stages import WIDTH, moe_stage, parameters
from fpipe.collectives import capabilities
from fpipe.collectives.capabilities import Capabilities
from fpipe.devices import kinds
from fpipe.products.command.doctor import Finding, visit
from models import MODELS, SEED
from sample import also
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


def steps_of_a_rank(
    faults: str | None, seeds: Sequence[int], model: str, shared: bool = False
) -> list[str]:
    """The cases and seeds of delays whose results differ from those of the CPU."""
    device = prepare(faults)
    if shared:
        device.device_count = lambda: 1
    group = fpipe.init()
    backend = "gloo" if faults is None else "fakeccl"
    index = 0 if shared else dist.get_rank()
    assert repr(group).endswith(f"on {NAME}:{index} over {backend}"), group
    wrong = []
    for engine in ("trace", "eager"):
        device.set_delays(-1)
        rank = dist.get_rank()
        expected = _reference(rank, model, engine)
        for seed in seeds:
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


@pytest.mark.parametrize(
    "faults", ["ordered", *also(None, "", "no-avg no-max no-scatter", "max-is-sum no-tags")]
)
def test_steps_have_the_bits_of_the_cpu(faults: str | None, long: bool):
    seeds = range(50 if long else 1)
    found = fpipe.launch(steps_of_a_rank, faults, seeds, "mlp", ranks=2, timeout=7000)
    assert found == [[], []]


def test_processes_may_share_a_device():
    """Backends of accelerators refuse that, or hang: the host carries all."""
    found = fpipe.launch(steps_of_a_rank, "", range(1), "mlp", True, ranks=2, timeout=600)
    assert found == [[], []]


def waits_of_the_host() -> list[int]:
    """Empty where the host does not wait for the device in a step."""
    device = prepare("")
    group = fpipe.init()
    assert device.current_device() == dist.get_rank(), "the device of a rank is its current one"
    steps(NAME, group, "mlp", "trace")
    before = device.host_waits()
    params, x, t = network(2)
    pipe = fpipe.pipeline([layer] * 2, loss=squared, microbatches=4, group=group, seed=1)
    params = pipe.place(params)
    for _ in range(2):
        before = device.host_waits()
        fpipe.value_and_grad(pipe)(params, x, t)
    return [device.host_waits() - before] if device.host_waits() > before else []


def test_no_rank_waits_for_its_device():
    assert fpipe.launch(waits_of_the_host, ranks=2, timeout=300) == [[], []]


def refused_call() -> list[str]:
    """What is wrong after a call that rank 0 refuses while rank 1 waits for its message."""
    prepare(None)
    group = fpipe.init(timeout=30)
    params, x, t = network(2)
    pipe = fpipe.pipeline([layer] * 2, loss=squared, microbatches=4, group=group, seed=1)
    params = pipe.place(params)
    step = fpipe.value_and_grad(pipe)
    before = host(step(params, x, t))
    start = time.monotonic()
    with pytest.raises(fpipe.FpipeError):
        step(params, x[: 15 if group.rank == 0 else 16], t)
    late = time.monotonic() - start > 20
    same = map(torch.equal, host(step(params, x, t)), before)
    return ["after the time-out"] * late + ["other bits"] * (not all(same))


def test_a_refused_call_ends_on_a_device_that_no_backend_carries():
    assert fpipe.launch(refused_call, ranks=2, timeout=300) == [[], []]


# ---- copies of a pipeline, and collectives in stages ----
def _copies(group: Any, device: str) -> list[torch.Tensor]:
    """Training with each level of ZeRO."""
    made = []
    for zero in (0, 1, 2, 3):
        params, x, t = network(2)
        x, t = (batch.chunk(2)[group.dp.rank] for batch in (x, t))
        dp = fpipe.copies(group.dp, zero=zero, bucket_bytes=1000)
        pipe = fpipe.pipeline(
            [layer] * 2, "1F1B", loss=squared, microbatches=4, group=group, dp=dp, seed=1
        )
        clip = fpipe.clip_by_global_norm(0.1, over=pipe, exact=True)
        tx = fpipe.chain(fpipe.skip_nonfinite(over=pipe), clip, fpipe.adamw(0.01, fused=False))
        params = pipe.shard(pipe.place(params))
        state = tx.init(params)
        for number in range(2):
            loss, grads = fpipe.value_and_grad(pipe)(params, x, t, seed=number)
            updates, state = tx.update(grads, state, params)
            params = fpipe.apply_updates(params, updates)
            made.append(loss)
        made += host(pipe.unshard(params))
    return host(made)


def _woven(group: Any, device: str) -> list[torch.Tensor]:
    """Collectives of stages, woven with the computation of another microbatch."""
    stage = moe_stage(group.tp.pg, draws=True)
    pipe = fpipe.pipeline([stage] * 2, "DualPipeV", loss=squared, microbatches=4, group=group)
    draw = torch.Generator().manual_seed(group.tp.rank)
    x, t = torch.randn(2, 16, WIDTH, generator=draw)
    step = fpipe.value_and_grad(pipe)
    return host(step(pipe.place(parameters(2)), x, t, seed=1))


AXES = {"copies": (_copies, {"dp": 2}), "woven": (_woven, {"tp": 2})}


def axis(name: str, faults: str, seeds: Sequence[int]) -> list[int]:
    """The seeds of delays under which results differ from those of the CPU."""
    device = prepare(faults)
    run, shape = AXES[name]
    backend = f"cpu:gloo,{NAME}:fakeccl"
    expected = run(fpipe.init(1, **shape, device="cpu", backend=backend), "cpu")
    group = fpipe.init(1, **shape, device=f"{NAME}:{dist.get_rank()}")
    assert repr(group).endswith("over fakeccl"), group
    wrong = []
    for seed in seeds:
        device.set_delays(seed)
        pairs = zip(run(group, NAME), expected, strict=True)
        if not all(torch.equal(a, b) for a, b in pairs):
            wrong.append(seed)
    device.set_delays(-1)
    return wrong


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("copies", "no-avg no-max no-scatter"),
        *also(("woven", ""), *((name, faults) for name in AXES for faults in ROWS)),
    ],
)
def test_copies_and_collectives_of_stages(name: str, faults: str, long: bool):
    seeds = range(50 if long else 1)
    assert fpipe.launch(axis, name, faults, seeds, ranks=2, timeout=7000) == [[], []]


# ---- memory ----
def norm(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x @ p["a"]) @ p["b"]
    return x + torch.nn.functional.layer_norm(h, (64,))


def attention(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x.view(8, -1, 64)
    weights = torch.softmax(h @ h.transpose(1, 2), -1)
    return (weights @ h).reshape(x.shape) + torch.relu(x @ p["a"]) @ p["b"]


#: A schedule, a stage, the stages of the pipeline, and the level of ZeRO or None.
PLANNED: tuple[tuple[str, Any, int, int | None], ...] = (
    ("GPipe", attention, 2, None),
    ("1F1B", norm, 2, None),
    ("ZBV", norm, 4, None),
    ("ZBH1", attention, 2, None),
    ("DualPipeV", norm, 4, None),
    ("VMin", attention, 4, None),
    ("Hanayo", norm, 4, None),
    ("1F1B", fpipe.remat(norm), 2, None),
    ("ZBV", fpipe.remat(attention), 4, None),
    ("1F1B", norm, 2, 1),
    ("1F1B", attention, 2, 3),
)


def peaks(
    rows: Sequence[tuple[str, Any, int, int | None]],
    dp: int,
    faults: str | None = "",
    gpu: str = "",
) -> list[float]:
    """The peak of each plan of this rank, over the most memory that its step had on the fake device
    or a GPU that all ranks share.
    """
    device = torch.get_device_module(gpu) if gpu else prepare(faults)
    group = fpipe.init(dp=dp, device=gpu or None, backend="gloo" if gpu else None)
    draw = torch.Generator().manual_seed(0)
    found = []
    for name, fn, stages, zero in rows:
        shapes = {"a": (64, 128), "b": (128, 64)}
        normal = lambda *size: torch.randn(*size, generator=draw) / 8
        params = [{key: normal(*size) for key, size in shapes.items()} for _ in range(stages)]
        copies = None if zero is None else fpipe.copies(group.dp, zero=zero)
        pipe = fpipe.pipeline(
            [fn] * stages, name, loss=squared, microbatches=4, group=group, dp=copies
        )
        placed = pipe.shard(pipe.place(params))
        x, t = (normal(256, 64).to(group.device(group.rank)) for _ in range(2))
        plan = pipe.plan(placed, x, t)
        for _ in range(2):  # the first call prepares
            device.synchronize()
            before = device.memory_allocated()
            device.reset_peak_memory_stats()
            result = fpipe.value_and_grad(pipe)(placed, x, t)
            found.append(plan.peak[group.rank] / (device.max_memory_allocated() - before))
            del result
        del found[-2]
    return found


def test_plans_foretell_the_memory_of_a_device(long: bool):
    """Also where messages go through the host."""
    for dp, faults in ((1, ""), (2, ""), *[(1, None)] * long):
        rows = [row for row in PLANNED if (row[3] is None) == (dp == 1)]
        rows = rows if long else rows[::3]
        for ratios in fpipe.launch(peaks, rows, dp, faults, ranks=2, timeout=300):
            assert all(0.98 <= ratio <= 1.1 for ratio in ratios), list(
                zip(rows, ratios, strict=True)
            )


# ---- the doctor ----
def _visit(faults: str | None, row: str) -> tuple[str, list[Finding]]:
    if faults is not None:
        ROWS[faults] = ROWS[row]
    prepare(faults)
    return visit()


def test_the_doctor_finds_faults_that_the_table_does_not_have():
    text, faults = fpipe.launch(_visit, "max-is-sum", "", ranks=2, timeout=300)[0]
    assert {fault.what for fault in faults} == {"max"}
    assert "NOT IN THE TABLE: max of integers is wrong at 4, 8, 16" in text


def test_the_doctor_names_what_fpipe_does_instead():
    known = "no-avg no-max no-scatter"
    text, faults = fpipe.launch(_visit, known, known, ranks=2, timeout=300)[0]
    assert not faults
    assert "refused (AVG is not supported); fpipe sums, then divides" in text
    assert "refused (MAX is not supported); fpipe goes over the CPU's backend" in text


def _visit_one_device() -> tuple[str, list[Finding]]:
    prepare("").device_count = lambda: 1
    return visit()


def test_the_doctor_where_processes_share_a_device():
    text, faults = fpipe.launch(_visit_one_device, ranks=2, timeout=300)[0]
    assert not faults
    assert text.endswith("all goes through the CPU, as processes share a device")


def test_the_doctor_on_a_device_that_no_backend_carries():
    text, faults = fpipe.launch(_visit, None, "", ranks=2, timeout=300)[0]
    assert not faults
    assert "messages go through the CPU, as this backend carries no tensors of the device" in text

"""Peak memory: ``pipe.plan`` predicts what a step holds, measured by the storages that are alive
while it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe
from common import squared
from sample import also
from storage_meter import peak_bytes

D, ROWS, PARTS = 32, 16, 6


# ---- stages ----
def layer(p, x):
    return x + torch.tanh(x @ p["up"] + p["bias"]) @ p["down"]


def attention(p, x):
    h = F.layer_norm(x, (D,), p["norm"])
    q, k, v = (h @ p["qkv"]).view(*x.shape[:2], 4, -1).transpose(1, 2).chunk(3, -1)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
    x = x + F.dropout(mixed @ p["out"], 0.1)
    return x + F.gelu(x @ p["up"]) @ p["down"]


def convolution(p, state, x):
    mean, var = state["mean"].clone(), state["var"].clone()
    h = F.batch_norm(F.conv2d(x, p["w"], padding=1), mean, var, p["scale"], None, True)
    return F.relu(h), {"mean": mean, "var": var}


def balanced(p, x):
    return layer(p, x), x.square().mean()


def dense() -> dict[str, Tensor]:
    return {
        "up": torch.randn(D, 2 * D) / 8,
        "bias": torch.randn(2 * D),
        "down": torch.randn(2 * D, D) / 8,
    }


def whole() -> dict[str, Tensor]:
    return dense() | {
        "norm": torch.ones(D),
        "qkv": torch.randn(D, 3 * D) / 8,
        "out": torch.randn(D, D) / 8,
    }


def kernel() -> dict[str, Tensor]:
    return {"w": torch.randn(8, 8, 3, 3) / 8, "scale": torch.ones(8)}


MODELS: dict[str, tuple[Any, Callable[[], Any], tuple[int, ...]]] = {
    "mlp": (layer, dense, (D,)),
    "transformer": (attention, whole, (4, D)),
    "remat": (fpipe.remat(attention), whole, (4, D)),
    "cnn": (fpipe.Stage(convolution, state=True), kernel, (8, 4, 4)),
    "auxiliary loss": (fpipe.Stage(balanced, aux_loss=True), dense, (D,)),
}


def predicted_and_held(
    stages: list[Any], params: list[Any], shape: tuple[int, ...], schedule: str, **more: Any
) -> Any:
    x, t = torch.randn(PARTS * ROWS, *shape), torch.randn(PARTS * ROWS, *shape)
    argnums, state = more.pop("argnums", 0), more.pop("state", None)
    side = {} if state is None else {"state": state}
    pipe = fpipe.pipeline(
        stages, schedule, loss=squared, microbatches=PARTS, group=fpipe.local(1), **more
    )
    step = fpipe.value_and_grad(pipe, argnums)
    peak = peak_bytes(lambda: step(params, x, t, **side))
    (cached,) = pipe.cache.plans.values()
    return cached.prepared.plans[0].peak, peak


SCHEDULES = ["ZBV", "DualPipeV", "1F1B", "GPipe", "ZBH1", "InterleavedZeroBubble"]


@pytest.mark.covering
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_holds_what_its_plan_foretells(name: str, schedule: str):
    stage, make, shape = MODELS[name]
    per_rank = fpipe.make_schedule(schedule, 1, PARTS).stages
    stages = 4 if per_rank == 1 else per_rank
    fresh = {"mean": torch.zeros(8), "var": torch.ones(8)}
    state = [fresh] * stages if name == "cnn" else None
    predicted, held = predicted_and_held(
        [stage] * stages, [make() for _ in range(stages)], shape, schedule, state=state
    )
    assert abs(predicted / held - 1) < 0.02


@pytest.mark.covering
@pytest.mark.parametrize("schedule", ["1F1B", "ZBV"])
@pytest.mark.parametrize("name", ["mlp", "remat", "cnn"])
def test_a_step_on_autograd_holds_about_what_its_plan_foretells(name: str, schedule: str):
    """What autograd allocates inside a program was not counted: the prediction was down to 0.61
    times what was held.
    """
    stage, make, shape = MODELS[name]
    state = [{"mean": torch.zeros(8), "var": torch.ones(8)}] * 4 if name == "cnn" else None
    stages = fpipe.make_schedule(schedule, 1, PARTS).stages * (4 if schedule == "1F1B" else 1)
    predicted, held = predicted_and_held(
        [stage] * stages,
        [make() for _ in range(stages)],
        shape,
        schedule,
        state=state and state[:stages],
        engine="eager",
    )
    assert 0.91 < predicted / held < 1.45


@pytest.mark.parametrize(
    "schedule", ["ZBV", *also("DualPipeV", "1F1B", "GPipe", "InterleavedZeroBubble", "LoopedBFS")]
)
@pytest.mark.parametrize("name", ["mlp", *also("transformer", "remat")])
def test_mixed_lengths_in_one_step_hold_what_the_plan_foretells(name: str, schedule: str):
    """To 1 %, and the third mix of lengths is not traced."""
    stage, make, shape = MODELS[name]
    stages = (
        4
        if fpipe.make_schedule(schedule, 1, PARTS).stages == 1
        else fpipe.make_schedule(schedule, 1, PARTS).stages
    )
    params = [make() for _ in range(stages)]
    pipe = fpipe.pipeline(
        [stage] * stages, schedule, loss=squared, microbatches=PARTS, group=fpipe.local(1), seed=1
    )
    for lengths in ((7, 40, 16, 3, 64, 21), (9, 70, 30, 5, 12, 33), (50, 2, 2, 61, 8, 17)):
        batch = [torch.randn(n, *shape) for n in lengths]
        x = fpipe.Microbatches(batch)
        before = set(pipe.cache.plans)
        profile = fpipe.profile(fpipe.value_and_grad(pipe))
        peak = peak_bytes(lambda x=x, profile=profile: profile(params, x, x))
        (key,) = set(pipe.cache.plans) - before
        assert abs(pipe.cache.plans[key].prepared.plans[0].peak / peak - 1) < 0.01
    assert profile.prepared.traces == 0


def median(p, x):
    """Takes one result of an operation that makes two."""
    return layer(p, x) + torch.cat([x.detach()] * 8, -1).sort(-1)[0][:, :D]


def carry(p, x):
    return layer(p, x), x * 2


def pass_on(p, x):
    return layer(p, x[0]), x[1]


def take(p, x):
    return layer(p, x[0]) + x[1]


@pytest.mark.parametrize(
    ("stages", "more"),
    [
        ([layer] * 4, {"frozen": ["1.*"]}),
        ([layer] * 4, {"tied": [("0.up", "3.up")]}),
        ([layer] * 4, {"argnums": (0, 1)}),
        ([carry, pass_on, pass_on, take], {}),
        ([layer] * 4, {"schedule": "LoopedBFS"}),
        ([median] * 4, {"frozen": ["*"]}),
    ],
    ids=["frozen", "tied", "input gradient", "skip", "reversed", "idle results"],
)
def test_special_steps_too(stages: list[Any], more: dict[str, Any]):
    schedule = more.pop("schedule", "1F1B")
    params = [dense() for _ in range(4)]
    if "tied" in more:
        params[3]["up"] = params[0]["up"].clone()
    predicted, held = predicted_and_held(stages, params, (D,), schedule, **more)
    assert abs(predicted / held - 1) < 0.02


def spread(p, x):
    """A gradient of one number, seen as a matrix: accumulating it needs the matrix."""
    return x + p.sum()


def test_what_is_accumulated_is_counted_in_full():
    predicted, held = predicted_and_held(
        [spread] * 4, [torch.randn(64, 64) for _ in range(4)], (D,), "1F1B"
    )
    assert abs(predicted / held - 1) < 0.02
    narrow = [{k: v.bfloat16() for k, v in dense().items()} for _ in range(4)]
    wide = {"accumulate": torch.float32}
    cast = lambda p, x: layer(p, x.bfloat16()).float()
    predicted, held = predicted_and_held([cast] * 4, narrow, (D,), "1F1B", **wide)
    assert abs(predicted / held - 1) < 0.02


def test_forward_alone_holds_one_activation():
    stages, params = [layer] * 4, [dense() for _ in range(4)]
    x = torch.randn(PARTS * ROWS, D)
    pipe = fpipe.pipeline(stages, "ZBH1", loss=squared, microbatches=PARTS, group=fpipe.local(1))
    peak = peak_bytes(lambda: pipe(params, x, x))
    (cached,) = pipe.cache.plans.values()
    assert abs(cached.prepared.plans[0].peak / peak - 1) < 0.02
    assert peak <= 5 * ROWS * 2 * D * 4


def test_schedules_hold_as_much_as_they_promise():
    """Per rank, in activations of one stage: 1F1B at most its depth, GPipe all microbatches, ZBV
    like 1F1B.
    """
    params = [dense() for _ in range(8)]
    x = torch.randn(16 * ROWS, D)

    def peaks(name: str, stages: int) -> list[int]:
        pipe = fpipe.pipeline(
            [layer] * stages, name, loss=squared, microbatches=16, group=fpipe.local(4)
        )
        return list(pipe.plan(params[:stages], x, x).peak.values())

    gpipe, one_f_one_b, zbv = peaks("GPipe", 4), peaks("1F1B", 4), peaks("ZBV", 8)
    assert all(a < b for a, b in zip(one_f_one_b, gpipe, strict=True))
    assert one_f_one_b[0] > one_f_one_b[3]
    assert max(zbv) < 1.6 * min(zbv), "ZBV balances memory over ranks"


def test_a_sum_counts_where_its_first_value_is_the_callers_seed():
    """The gradient of ``x + p`` is the cotangent itself, which nothing holds: its sum was not
    counted.
    """
    pipe = fpipe.pipeline(
        [lambda p, x: x + p] * 2, loss=torch.sum, microbatches=4, group=fpipe.local(2)
    )
    whole = torch.ones(64, 64)
    frozen = fpipe.pipeline(
        [lambda p, x: x + p] * 2, loss=torch.sum, microbatches=4, group=fpipe.local(2), frozen=["1"]
    )
    peaks = [p.plan([whole] * 2, torch.ones(256, 64))[1].peak for p in (pipe, frozen)]
    assert peaks[0] >= peaks[1] + whole.nbytes - 16

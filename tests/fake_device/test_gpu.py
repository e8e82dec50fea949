"""Pipelines on a GPU: all schedules and models, what else a pipeline does, and memory."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import fpipe
from models import MODELS
from sample import covering
from schedule_table import cases

from . import cases as pipelines
from .test_processes import PLANNED, peaks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

DRAWS = {"transformer"}


@pytest.fixture(autouse=True)
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def gpu() -> str:
    return f"{torch.accelerator.current_accelerator()}:0"


def test_every_schedule_has_the_numbers_of_the_cpu(long: bool):
    """In float32, and without draws of random numbers; the engines agree to the bit."""
    rows = [
        (case, model) for case in cases(ranks=(2, 4), microbatches=(4,)) for model in sorted(MODELS)
    ]
    if not long:
        rows = covering(rows, lambda row: (row[0].name, row[1], row[0].ranks))
    wrong = []
    for case, model in rows:
        traced, eager = (
            pipelines.step(case, [gpu()] * case.ranks, model, engine)
            for engine in ("trace", "eager")
        )
        on_cpu = pipelines.step(case, ["cpu"] * case.ranks, model)
        if not all(map(torch.equal, traced, eager)):
            wrong.append((case, model, "engines differ"))
        if model in DRAWS:
            continue
        if not all(torch.allclose(a, b, 1e-3, 1e-5) for a, b in zip(traced, on_cpu, strict=True)):
            wrong.append((case, model, "not those of the CPU"))
    assert not wrong


@pytest.mark.parametrize("name", pipelines.MORE)
def test_whatever_else_a_pipeline_does(name: str):
    run = pipelines.MORE[name]
    first, second, on_cpu = run([gpu()] * 2), run([gpu()] * 2), run(["cpu"] * 2)
    assert all(map(torch.equal, first, second))
    if name.startswith(("slices", "captured")):  # the others draw
        torch.testing.assert_close(first, on_cpu, rtol=1e-3, atol=1e-5)
    else:
        assert all(
            a.shape == b.shape and a.isfinite().all() for a, b in zip(first, on_cpu, strict=True)
        )


def attention(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Causal, with four heads of 64, by the kernel that torch prefers on the device."""
    q, k, v = (x @ p["qkv"]).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + mixed.transpose(1, 2).flatten(-2) @ p["out"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("change", [lambda fn: fn, fpipe.remat])
def test_fused_attention(change: Any, dtype: torch.dtype):
    """Its backward is an operation with the tag of random draws."""
    torch.manual_seed(0)
    normal = lambda *size: torch.randn(*size, device=gpu())
    params = [{"qkv": normal(256, 768) / 16, "out": normal(256, 256) / 16} for _ in range(4)]
    params = optree.tree_map(lambda p: p.to(dtype), params)
    x, t = (normal(8, 128, 256).to(dtype) for _ in range(2))

    def of_pipeline(engine: Any, name: str) -> Any:
        pipe = fpipe.pipeline(
            [change(attention)] * 4, name, loss=pipelines.squared, microbatches=4,
            group=fpipe.local(devices=[gpu()] * 2), engine=engine,
        )  # fmt: off
        return pipelines.host(fpipe.value_and_grad(pipe)(pipe.place(params), x, t))

    leaves = [{name: p.clone().requires_grad_() for name, p in each.items()} for each in params]
    total = torch.zeros((), device=gpu())
    for rows, targets in zip(x.chunk(4), t.chunk(4), strict=True):
        for p in leaves:
            rows = attention(p, rows)
        total = total + pipelines.squared(rows, targets) / 4
    total.backward()
    want = pipelines.host(total, [{name: p.grad for name, p in each.items()} for each in leaves])
    for engine in ("trace", "eager"):
        for name in ("1F1B", "ZBV"):
            got = of_pipeline(engine, name)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(
                    a.float(), b.float(), rtol=0.02, atol=0.02 * b.abs().max().item()
                )


@pytest.mark.parametrize("row", range(len(PLANNED)))
def test_plans_foretell_its_memory(row: int):
    """Of two processes that share the GPU."""
    dp = 1 if PLANNED[row][3] is None else 2
    for ratios in fpipe.launch(peaks, [PLANNED[row]], dp, "", gpu(), ranks=2, timeout=300):
        assert 0.98 <= ratios[0] <= 1.1, (PLANNED[row], ratios)

"""`fpipe rehearse`: plans of single ranks are those of the real groups, and memory is as
predicted.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fpipe
from fpipe.products.clusters.decoder import decoder
from fpipe.products.clusters.hardware import GIB, find_gpu
from fpipe.products.clusters.layout import RECOMPUTE, Job, Layout, Recompute
from fpipe.products.clusters.model import Model
from fpipe.products.clusters.plan_file import write_plan
from fpipe.products.clusters.prediction import predict
from fpipe.products.clusters.sizes import layer_work
from fpipe.products.command import cli
from sample import also

LLAMA = Model("small", "llama", 2048, 8, 16, 32000, 5632, kv_heads=4)
GPT = Model("gpt", "gpt2", 1024, 8, 8, 32000, 4096, gated=False, dropout=True, positions=1024)
EXPERTS = Model(
    "moe", "mixtral", 1024, 8, 8, 32000, 2048, kv_heads=4, experts=8, active=2, shared=512
)


def job(model: Model = LLAMA) -> Job:
    return Job(model, 8, find_gpu("a100"), 32, 1024)


def written(layout: Layout, path: Path, which: Job | None = None) -> Path:
    path.write_text(write_plan(predict(which or job(), layout)))
    return path


# ---- layers ----
@pytest.mark.covering
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize(
    "model", [LLAMA, GPT, replace(EXPERTS, shared=0)], ids=lambda model: model.kind
)
def test_bytes_of_a_layer_are_those_of_its_programs(model: Model, recompute: Recompute, tp: int):
    """What a layer saves, and keeps for W, is what the programs of the traced layer save and
    keep.
    """
    case = job(replace(model, dropout=False))
    layout = Layout(tp, 4, 2 // tp, recompute=recompute)
    functions, params = decoder(case, layout)
    layers = params[1]["layers"]
    x = torch.empty(1, 1024 // tp, model.hidden, dtype=torch.bfloat16, device="meta")
    programs = fpipe.trace(functions[1], {"layers": layers[:1]}, x)
    expected = layer_work(case, layout)
    assert programs.saved_bytes == pytest.approx(expected.saved, rel=0.01)
    assert programs.kept_bytes == pytest.approx(expected.kept, rel=0.02)


# ---- plans ----
LAYOUTS = [
    *also((LLAMA, Layout(2, 4, 1, 0, "1F1B"))),
    (LLAMA, Layout(1, 4, 2, 1, "Interleaved1F1B", 2, recompute="selective")),
    *also((LLAMA, Layout(1, 2, 4, 3, "Interleaved1F1B", 4, recompute="full"))),
    (LLAMA, Layout(2, 4, 1, 0, "ZBVZeroBubble", 2)),
    (LLAMA, Layout(1, 4, 2, 0, "VHalf", 2, recompute="selective")),
    (GPT, Layout(2, 4, 1, 0, "1F1B")),
    (EXPERTS, Layout(1, 4, 2, 1, "1F1B", recompute="selective")),
]


@pytest.mark.parametrize(
    ("model", "layout"),
    LAYOUTS,
    ids=lambda each: each.kind if isinstance(each, Model) else repr(each),
)
def test_peaks_are_as_predicted(
    model: Model, layout: Layout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = written(layout, tmp_path / "plan.toml", job(model))
    every = ",".join(str(rank * layout.dp * layout.tp) for rank in range(layout.pp))
    status = cli.main(["rehearse", str(path), "--ranks", every, "--margin", "15", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (status, found["faults"]) == (0, [])
    assert found["traces"] <= 5, "equal stages are traced once"
    assert [each["pipeline rank"] for each in found["ranks"]] == list(range(layout.pp))


def test_with_few_microbatches_the_peak_comes_before_the_gradients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """They were counted, 22 % of the memory of 7B parameters on two ranks: the best plan did not
    pass its rehearsal.
    """
    layout, few = (
        Layout(1, 2, 4, 1, "LoopedBFS", 2),
        replace(job(replace(LLAMA, layers=4)), batch=8),
    )
    path = written(layout, tmp_path / "plan.toml", few)
    status = cli.main(["rehearse", str(path), "--ranks", "0", "--margin", "5", "--json"])
    assert (status, json.loads(capsys.readouterr().out)["faults"]) == (0, [])
    assert all(memory.late > 0.1 * memory.total for memory in predict(few, layout).memory)


def layer(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBV"])
def test_a_plan_is_that_of_a_rank_among_others(schedule: str):
    """The same instructions and the same peak as in a group of ranks apart."""
    count = 4 if schedule == "ZBV" else 2
    params, x = [torch.zeros(8, 8) for _ in range(count)], torch.zeros(8, 8)
    options = {"loss": lambda y: y.sum(), "microbatches": 4}
    alone = fpipe.pipeline(
        [layer] * count, schedule, group=fpipe.local(devices=["meta"] * 2), **options
    )
    found, spent = alone.rehearse([0, 1], [p.to("meta") for p in params], x.to("meta"))

    def planned(group: Any) -> tuple[str, int]:
        pipe = fpipe.pipeline([layer] * count, schedule, group=group, **options)
        plan = pipe.plan(pipe.place(params), x)[group.rank]
        return str(plan), plan.peak

    plans = fpipe.testing.run(planned, ranks=2, order="buffered")
    assert [(str(each.plan), each.plan.peak) for each in found.values()] == plans
    messages = 8 if schedule == "ZBV" else 4
    assert found[0].sent == (messages, messages * 2 * 8 * 4) == found[1].received
    assert found[0].received == found[1].sent
    assert found[0].parameters == count // 2 * 8 * 8 * 4
    assert spent.tracing > 0


def test_a_large_model_takes_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """405B on 1,024 GPUs: a trace for each kind of stage, however many layers it has."""
    model = Model("405B", "llama", 16384, 126, 128, 128256, 53248, kv_heads=8)
    large = Job(model, 1024, find_gpu("h200"), 256, 8192)
    layout = Layout(8, 16, 8, 1, "Interleaved1F1B", 4, recompute="selective")
    path = written(layout, tmp_path / "plan.toml", large)
    assert cli.main(["rehearse", str(path), "--ranks", "3,200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    table = lines[lines.index("") + 2 :]
    assert table[0].startswith("   3 4, from 0 to 48") and table[1].startswith(
        " 200 4, from 3 to 51"
    )


# ---- the exit status ----
def test_a_peak_above_the_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    small = replace(job(), gpu=replace(find_gpu("a100"), memory=2 * GIB))
    path = written(Layout(1, 4, 2), tmp_path / "plan.toml", small)
    assert cli.main(["rehearse", str(path), "--ranks", "0"]) == 1
    assert (
        "GiB, and 1.88 of the 2 GiB of a GPU are for tensors; plan with less --memory"
        in capsys.readouterr().err
    )


def test_a_peak_that_was_not_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = written(Layout(1, 4, 2), tmp_path / "plan.toml")
    assert cli.main(["rehearse", str(path), "--ranks", "0", "--margin", "0.01"]) == 1
    assert "GiB, and --margin allows 0.01 %" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ("8", "rank 8 is not in a job of 8 GPUs; give ranks from 0 to 7"),
        ("one", "'one' are no ranks"),
    ],
)
def test_refusals(ranks: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = written(Layout(1, 4, 2), tmp_path / "plan.toml")
    assert cli.main(["rehearse", str(path), "--ranks", ranks]) == 2
    assert words in capsys.readouterr().err

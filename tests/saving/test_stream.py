"""Whole weights as a stream: order, bits and memory on every rank, and back into any other
pipeline.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import fpipe
from checkpoint_model import Layout, by_name, model, pipeline
from common import same
from fpipe import Stage, testing
from fpipe.errors import CheckpointError
from fpipe.saving.files import stored

LAYOUTS = [
    Layout(8, "ZBV", 4),
    Layout(4, "DualPipe", 4),
    Layout(2, "1F1B", 2),
    Layout(1, "GPipe", 1),
]


def whole() -> dict[str, torch.Tensor]:
    m = model()
    blocks = {
        f"blocks.{n}.{name}": leaf
        for n, row in enumerate(m["blocks"])
        for name, leaf in row.items()
    }
    return {"embed.wte": m["embed"]["wte"], **blocks}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_stream_has_every_parameter_once_under_every_layout(layout: Layout):
    pipe, params = pipeline(layout)
    found = list(fpipe.stream(pipe, params))
    assert len(found) == len(whole()) and same(dict(found), whole())


def test_a_stream_goes_into_any_other_pipeline():
    pipe, params = pipeline(LAYOUTS[0])
    for layout in LAYOUTS:
        other, like = pipeline(layout)
        received = fpipe.receive(other, fpipe.stream(pipe, params))
        assert same(received, like), layout
        assert same(fpipe.receive(other, whole(), like=like), like)
        assert not any(
            a is b for a in optree.tree_leaves(received) for b in optree.tree_leaves(params)
        ), "copies"


def test_dtypes_are_converted():
    pipe, params = pipeline(LAYOUTS[0])
    found = dict(fpipe.stream(pipe, params, dtype=torch.bfloat16))
    assert same(found, {name: leaf.bfloat16() for name, leaf in whole().items()})


@pytest.mark.parametrize("zero", [0, 3])
def test_copies_put_their_parts_together(zero: int):
    def run(dp: Any) -> tuple[Any, Any]:
        pipe, params = pipeline(Layout(8, "ZBV", 4, zero), dp)
        found = dict(fpipe.stream(pipe, params, 200))
        return found, same(fpipe.receive(pipe, found.items()), params)

    for found, back in testing.run(run, ranks=3, order="buffered", seed=0):
        assert back and same(found, whole())


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda t: t.pop("blocks.2.b"), r"blocks.*'b'|no tensor|missing"),
        (lambda t: t.__setitem__("blocks.9.b", torch.ones(1)), r"no stage takes 'blocks\.9\.b'"),
        (
            lambda t: t.__setitem__("blocks.2.b", torch.ones(4)),
            r"'blocks\.2\.b' is float32\[4\], and .* takes .*\[5\]",
        ),
        (
            lambda t: t.__setitem__("blocks.2.b", torch.ones(5).half()),
            r"float16\[5\], and stage 3 takes float32",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: Any, fault: str):
    pipe, like = pipeline(LAYOUTS[0])
    tensors = whole()
    change(tensors)
    with pytest.raises(CheckpointError, match=fault):
        fpipe.receive(pipe, tensors, like=like)


def test_own_leaves_are_not_whole():
    def run(dp: Any) -> Any:
        pipe, params = pipeline(Layout(8, "ZBV", 4), dp, own=["*.b"])
        return fpipe.stream(pipe, params)

    with pytest.raises(CheckpointError, match="each copy has another one"):
        testing.run(run, ranks=2, order="buffered", seed=0)


# ---- processes ----
def _peak() -> int:
    """Bytes of this process that were resident at once, shared memory included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _streaming(each: int, rows: int) -> dict[str, Any]:
    """On one of four processes: names by rank, whether tensors are right, and the memory beyond the
    parameters.

    ``each`` are the bytes of a vector, of which each of the four stages has some ``rows``.
    """
    group = fpipe.init(timeout=60)
    stages = [Stage(lambda p, x: x, name=f"s{n}") for n in range(4)]
    pipe = fpipe.pipeline(stages, loss=torch.sum, microbatches=4, group=group)
    value = lambda stage, row: torch.full((each // 4,), float(100 * stage + row))
    params: list[Any] = [None] * 4
    params[group.rank] = {f"r{row}": value(group.rank, row) for row in range(rows)}
    bucket = 8 * each
    list(fpipe.stream(pipe, [None if p is None else {"x": torch.ones(1)} for p in params], bucket))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, right, order = _peak(), True, []
    for name, tensor in fpipe.stream(pipe, params, bucket):
        stage, row = name[1:].split(".r")
        right = (
            right
            and bool((tensor == float(100 * int(stage) + int(row))).all())
            and len(tensor) == each // 4
        )
        order.append(name)
    held = (_peak() - before) / bucket
    few = [None if part is None else {"r0": part["r0"][:9]} for part in params]
    last = [(name, tensor.device.type) for name, tensor in fpipe.stream(pipe, few, bucket, to=0)]
    received = fpipe.receive(pipe, fpipe.stream(pipe, few, bucket))
    return {"order": order, "right": right, "held": held, "to": last, "back": same(received, few)}


def test_a_stream_between_processes_holds_one_bucket(long: bool):
    size, rows = (9 << 20, 12) if long else (3 << 20, 5)
    found = fpipe.launch(_streaming, size, rows, ranks=4, timeout=100)
    assert all(row["right"] and row["back"] for row in found)
    assert all(row["order"] == found[0]["order"] and len(row["order"]) == 4 * rows for row in found)
    assert {device for _, device in found[0]["to"]} == {"cpu"} and {
        device for _, device in found[1]["to"]
    } == {"meta"}
    assert max(row["held"] for row in found) <= 1.2, [row["held"] for row in found]


# ---- files ----
def test_files_of_the_safetensors_package_are_received(tmp_path: Path):
    torch_files = pytest.importorskip("safetensors.torch")
    names = list(whole())
    for part, chosen in enumerate((names[:5], names[5:])):
        torch_files.save_file(
            {name: whole()[name] for name in chosen}, tmp_path / f"{part}.safetensors"
        )
    pipe, like = pipeline(LAYOUTS[0])
    assert same(fpipe.receive(pipe, tmp_path), like)
    assert same(by_name(pipe, fpipe.receive(pipe, stored(tmp_path))), whole())
    torch_files.save_file({"embed.wte": torch.ones(1)}, tmp_path / "2.safetensors")
    with pytest.raises(
        CheckpointError, match=r"'embed\.wte' is in 0\.safetensors and in 2\.safetensors"
    ):
        fpipe.receive(pipe, tmp_path)

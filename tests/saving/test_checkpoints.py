"""Checkpoints: what was written under one layout of a model resumes under any other, to the bit."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any
from unittest import mock

import optree
import pytest
import torch

import fpipe
from checkpoint_model import (
    Layout,
    adam,
    by_name,
    cut,
    first_half,
    optimizer,
    pipeline,
    second_half,
    steps,
    uninterrupted,
)
from common import same
from fpipe import testing
from fpipe.errors import CheckpointError
from fpipe.saving.files import stored, write
from fpipe.saving.manifest import Manifest
from fpipe.transforms.norms import ClipState
from fpipe.transforms.optimizers import AdamState
from sample import also

CUTS = [
    Layout(8, "ZBV", 4),
    Layout(2, "1F1B", 2),
    Layout(1, "GPipe", 1),
    Layout(4, "Interleaved1F1B", 2),
]
#: Two ranks hold each stage, and their gradients are added: the last bits are those of this layout
#: alone.
TWO_HOMES = Layout(4, "DualPipe", 4)


def on_copies(fn: Any, copies: int) -> list[Any]:
    return testing.run(fn, ranks=copies, order="buffered", seed=0)


@pytest.fixture(scope="module")
def want() -> Any:
    return uninterrupted(CUTS[2], optimizer)


@pytest.mark.parametrize("before", [CUTS[0], CUTS[-1], *also(*CUTS[1:-1])], ids=str)
def test_any_cut_resumes_under_any_other(before: Layout, tmp_path: Path, want: Any):
    first_half(before, tmp_path / "c", optimizer)
    for after in CUTS:
        assert same(second_half(after, tmp_path / "c", optimizer), want), after


def test_two_homes_resume_and_convert(tmp_path: Path):
    first_half(TWO_HOMES, tmp_path / "c", optimizer)
    assert same(
        second_half(TWO_HOMES, tmp_path / "c", optimizer), uninterrupted(TWO_HOMES, optimizer)
    )
    loaded = [second_half(layout, tmp_path / "c", optimizer) for layout in CUTS]
    assert all(same(one, loaded[0]) for one in loaded)


# ---- checkpoints that were written before ----
#: Written by fpipe 0.1.0: two steps of AdamW under the layout (2, 1F1B, 2), and other values.
FORMAT_1 = Path(__file__).parent / "format_1"
#: The classes of the states in it.
STATES = AdamState, ClipState


@pytest.mark.parametrize("layout", CUTS, ids=str)
def test_a_checkpoint_of_the_first_format_is_loaded(layout: Layout):
    pipe, _ = pipeline(layout)
    params, state, step, other = fpipe.load(FORMAT_1, pipe, "params", "state", "step", "other")
    raw = {name: read() for name, read in stored(FORMAT_1).items()}
    clip, adam = state
    assert tuple(map(type, state)) == STATES[::-1]
    assert step == 2 and int(adam.step) == 2 and same(clip.norm, raw["state.0.norm"])
    for tree, prefix in ((params, "params"), (adam.m, "state.1.m"), (adam.v, "state.1.v")):
        named = {f"{prefix}/{name}": leaf for name, leaf in by_name(pipe, tree).items()}
        assert same(named, {name: raw[name] for name in raw if name.startswith(f"{prefix}/")})
    held = deque([torch.arange(3)], 4)
    assert same(other[3]["a"], held) and other[3]["a"].maxlen == 4
    assert list(other[3]) == ["b", "a"] and other[3]["b"] == [1]
    assert other["numbers"] == (1, 2.5, float("inf"), True, None, "text")
    assert other["dtype"] is torch.float16
    assert same(other["complex"], torch.tensor([1 + 2j], dtype=torch.complex128))


def test_a_checkpoint_is_written_as_in_the_first_format(tmp_path: Path):
    """Names, structures, pieces and hashes; only the version may differ."""
    pipe, _ = pipeline(CUTS[1])
    names = "params", "state", "step", "other"
    params, *more = fpipe.load(FORMAT_1, pipe, *names)
    fpipe.save(tmp_path / "c", pipe, params=params, **dict(zip(names[1:], more, strict=True)))
    old, new = (
        json.loads((folder / "manifest.json").read_text())["manifest"]
        for folder in (FORMAT_1, tmp_path / "c")
    )
    assert new == {**old, "fpipe": new["fpipe"]}


# ---- copies ----
def whole(pipe: Any, params: Any, state: Any) -> Any:
    """Parameters and state with whole leaves."""
    clip, moments, average = state
    m, v = pipe.unshard(moments.m), pipe.unshard(moments.v)
    return pipe.unshard(params), (
        clip,
        moments._replace(m=m, v=v),
        average._replace(average=pipe.unshard(average.average)),
    )


def parts(pipe: Any, params: Any, state: Any) -> Any:
    """The inverse of ``whole``."""
    clip, moments, average = state
    m, v = pipe.shard(moments.m), pipe.shard(moments.v)
    return pipe.shard(params), (
        clip,
        moments._replace(m=m, v=v),
        average._replace(average=pipe.shard(average.average)),
    )


def trained(path: Path, layout: Layout, dp: Any) -> Any:
    """Three steps, saved; what was saved, whole."""
    pipe, params = pipeline(layout, dp)
    tx = adam(pipe)
    params, state, _ = steps(pipe, tx, params, tx.init(params), range(3))
    fpipe.save(path, pipe, params=params, state=state, step=3)
    return whole(pipe, params, state)


def resumed(path: Path, layout: Layout, saved: Any, dp: Any) -> bool:
    """Whether three steps after ``load`` are those after a conversion in memory."""
    pipe, _ = pipeline(layout, dp)
    loaded = fpipe.load(path, pipe, "params", "state")
    other, _ = pipeline(layout, dp)
    in_memory = parts(other, *saved)
    ends = [
        whole(p, *steps(p, adam(p), *start, range(3, 6))[:2])
        for p, start in ((pipe, loaded), (other, in_memory))
    ]
    return same(whole(pipe, *loaded), saved) and same(*ends)


@pytest.mark.parametrize(
    ("before", "after"),
    [((4, 3), (2, 2)), *also(((2, 0), (4, 3)), ((2, 3), (1, 0)), ((4, 1), (2, 3)))],
)
def test_zero_and_numbers_of_copies(
    before: tuple[int, int], after: tuple[int, int], tmp_path: Path
):
    layout = Layout(8, "ZBV", 4)
    saved = on_copies(
        lambda dp: trained(tmp_path / "c", layout._replace(zero=before[1]), dp), before[0]
    )
    assert all(
        on_copies(
            lambda dp: resumed(tmp_path / "c", layout._replace(zero=after[1]), saved[0], dp),
            after[0],
        )
    )
    sizes = [file.stat().st_size for file in (tmp_path / "c").glob("*.safetensors")]
    assert len(sizes) == before[0] and max(sizes) < 3 * min(sizes), "copies share the work"


def test_leaves_of_each_copy_need_as_many_copies(tmp_path: Path):
    def run(dp: Any, act: str) -> Any:
        pipe, params = pipeline(Layout(8, "ZBV", 4, zero=3), dp, own=["*.b"])
        if act == "load":
            return fpipe.load(tmp_path / "c", pipe, "params")
        params = [optree.tree_map(lambda leaf: leaf + dp.here[0], part) for part in params]
        fpipe.save(tmp_path / "c", pipe, params=params)
        return params

    saved = on_copies(lambda dp: run(dp, "save"), 2)
    assert same(on_copies(lambda dp: run(dp, "load"), 2), saved)
    assert not same(*saved)
    with pytest.raises(
        CheckpointError, match=r"'params/blocks\.0\.b'.*as many copies|no leaf 'blocks\.0\.b'"
    ):
        on_copies(lambda dp: run(dp, "load"), 4)


# ---- stages that only another process has ----
class Tied(torch.nn.Sequential):
    """A module whose last weight is the first one's."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
        self[2].weight = self[0].weight


@pytest.mark.parametrize("module", [False, True])
def test_stages_that_are_elsewhere_keep_their_names(module: bool, tmp_path: Path):
    def on_rank(group: Any) -> None:
        if module:
            stages, params = fpipe.from_module(model, cuts=["1"])
            tied = []
        else:
            stages, params, tied = cut(2)
        rank = group.here[0]
        stages = [stage if s == rank else fpipe.Stage.elsewhere() for s, stage in enumerate(stages)]
        pipe = fpipe.pipeline(stages, loss=torch.sum, microbatches=2, group=group, tied=tied)
        params = pipe.place([part if s == rank else None for s, part in enumerate(params)])
        fpipe.save(tmp_path / "c", pipe, params=params)
        assert same(fpipe.load(tmp_path / "c", pipe, "params"), params)

    model = Tied()
    testing.run(on_rank, ranks=2, order="buffered", seed=0)
    names = sorted(Manifest.read(tmp_path / "c").slots["params"])
    assert names == (
        ["0.bias", "0.weight", "2.bias"] if module else sorted(by_name(*pipeline(CUTS[0])))
    )


def test_parameters_of_stages_elsewhere_are_left_out(tmp_path: Path):
    """A list that was not placed has all stages on each rank; each writes its own."""

    def on_rank(group: Any) -> None:
        stages, params, tied = cut(2)
        pipe = fpipe.pipeline(stages, loss=torch.sum, microbatches=2, group=group, tied=tied)
        fpipe.save(tmp_path / "c", pipe, params=params)
        assert same(fpipe.load(tmp_path / "c", pipe, "params"), pipe.place(params))

    testing.run(on_rank, ranks=2, order="buffered", seed=0)
    assert Manifest.read(tmp_path / "c").trees == {"params": ["stages", "params"]}


# ---- states that stages carry ----
def test_running_statistics_follow_the_cut(tmp_path: Path):
    """On ranks that have one stage each, into another cut of the module."""
    layer = lambda: [torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)]
    net = torch.nn.Sequential(*layer(), *layer()).train()

    def pipe_of(cuts: list[str], group: Any) -> Any:
        stages, params = fpipe.from_module(net, cuts)
        return fpipe.pipeline(
            stages, "GPipe", loss=lambda y: y.sum(), microbatches=2, group=group
        ), params

    def on_rank(group: Any) -> Any:
        pipe, params = pipe_of(["2"], group)
        params = pipe.place(params)
        (_, state), _ = fpipe.value_and_grad(pipe)(params, torch.arange(24.0).view(8, 3))
        fpipe.save(tmp_path / "c", pipe, params=params, statistics=state)
        return state

    states = testing.run(on_rank, ranks=2, order="buffered", seed=0)
    pipe, _ = pipe_of([], fpipe.local(1))
    (loaded,) = fpipe.load(tmp_path / "c", pipe, "statistics")
    assert same(loaded, {**states[0][0], **states[1][1]}) and loaded["3.num_batches_tracked"] == 2


# ---- processes ----
def _on_process(folder: Path) -> bool:
    """On one of four processes: save as two copies of two ranks, load as four ranks, and the
    reverse.
    """
    two = fpipe.init(pp=2, dp=2, timeout=60)
    layout = Layout(4, "ZBV", 2, zero=3)
    pipe, params = pipeline(layout, two.dp, two)
    tx = adam(pipe)
    params, state, _ = steps(pipe, tx, params, tx.init(params), range(2))
    saving = fpipe.save(folder / "a", pipe, params=params, state=state, step=2, wait=False)
    alone = fpipe.init(pp=4)
    pipe, _ = pipeline(Layout(8, "ZBV", 4), group=alone)
    params, state, step = fpipe.load(folder / "a", pipe, "params", "state", "step")
    saving.wait()
    assert step == 2 and [stage for stage, part in enumerate(params) if part is not None] == list(
        pipe.here
    )
    params, state, _ = steps(pipe, adam(pipe), params, state, range(2, 4))
    fpipe.save(folder / "b", pipe, params=params, state=state, step=4)
    with pytest.raises(CheckpointError, match="complete checkpoint"):
        fpipe.save(folder / "b", pipe, params=params)
    with pytest.raises(CheckpointError, match="'rank' differs between processes"):
        fpipe.save(folder / "c", pipe, params=params, rank=alone.rank)
    with (
        mock.patch("fpipe.saving.writing._SEEN", 0.1),
        pytest.raises(CheckpointError, match=r"/d-0 and .* are two folde"),
    ):
        fpipe.save(folder / f"d-{alone.rank}", pipe, params=params)
    with mock.patch("fpipe.saving.writing.write", _full if alone.rank == 2 else write):
        whose = r"rank 2 on \S+: .*No space left"
        with pytest.raises(CheckpointError, match=whose):  # which rank was said nowhere
            fpipe.save(folder / "e", pipe, params=params)
    return True


def _full(*args: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_four_processes(tmp_path: Path):
    assert all(fpipe.launch(_on_process, tmp_path, ranks=4, timeout=100))
    pipe, _ = pipeline(CUTS[0])
    params, state = fpipe.load(tmp_path / "a", pipe, "params", "state")
    want, _, _ = steps(pipe, adam(pipe), params, state, range(2, 4))
    assert same(fpipe.load(tmp_path / "b", pipe, "params"), want)


def _tensor_parallel(folder: Path) -> bool:
    """On one of two processes that share a stage, each with its half of the weights."""
    group = fpipe.init(pp=1, tp=2, timeout=60)
    stages = [fpipe.Stage(lambda p, x: x, name="only")]
    pipe = fpipe.pipeline(stages, loss=torch.sum, microbatches=1, group=group)
    params = [{"half": torch.full((2,), float(group.tp.rank))}]
    fpipe.save(folder / "c", pipe, params=params)
    return same(fpipe.load(folder / "c", pipe, "params"), params)


def test_ranks_of_a_stage_keep_their_own_tensors(tmp_path: Path):
    assert all(fpipe.launch(_tensor_parallel, tmp_path, ranks=2, timeout=60))
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["tp-0-of-2", "tp-1-of-2"]

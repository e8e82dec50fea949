"""``fpipe.Loop``: a run that was interrupted, in any way and at any moment, ends with the bits of
one that was not.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fpipe
from checkpoint_model import Layout, adam, batch, by_name, optimizer, pipeline
from common import same
from fpipe import Stage, testing
from fpipe.errors import BatchError, CheckpointError
from fpipe.products.training.records import log_to
from fpipe.saving import writing

NORM = "running_mean", "running_var", "num_batches_tracked"
LAYOUTS = [Layout(8, "ZBV", 4), Layout(2, "1F1B", 2)]


def run(
    path: Path | None, layout: Layout, steps: int, make: Any = optimizer, **options: Any
) -> Any:
    """Parameters by name after a run, or its continuation."""
    pipe, params = pipeline(layout)
    return by_name(
        pipe, fpipe.Loop(pipe, make(pipe), path, **options).run(params, batch, steps).params
    )


def losses(path: Path) -> list[tuple[int, float]]:
    return [
        (row["step"], row["loss"])
        for row in map(json.loads, (path / "log.jsonl").read_text().splitlines())
    ]


def test_a_run_in_parts_is_one_run(tmp_path: Path):
    """Every part under another layout; the log is that of one run, although a step was done
    twice.
    """
    want = run(tmp_path / "whole", LAYOUTS[0], 7)
    for part, steps in enumerate((2, 5, 7)):
        got = run(tmp_path / "parts", LAYOUTS[part % 2], steps, every=2, keep=9)
        with open(tmp_path / "parts" / "log.jsonl", "a") as file:
            file.write('{"step": 99, "loss": 1}\n{"step": 1')  # of a process that was killed
    assert same(got, want)
    got = run(tmp_path / "parts", LAYOUTS[0], 7)
    assert same(got, want)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_checkpoints_that_stay(tmp_path: Path):
    pipe, params = pipeline(LAYOUTS[1])
    loop = fpipe.Loop(pipe, fpipe.sgd(0.1), tmp_path, every=2, keep=2, keep_every=4)
    loop.run(params, batch, 11)
    assert loop.checkpoints() == (4, 8, 10, 11)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "log.jsonl",
        *(f"step-{n:09}" for n in (4, 8, 10, 11)),
    ]
    (tmp_path / "step-000000010" / "manifest.json").rename(tmp_path / "aside")
    loop.run(params, batch, 12)
    assert loop.checkpoints() == (4, 8, 11, 12) and not (tmp_path / "step-000000010").exists(), (
        "left by a killed run"
    )
    (tmp_path / "step-000000012" / "manifest.json").unlink()
    assert loop.checkpoints() == (4, 8, 11)
    assert loop.run(params, batch, 11).step == 11


def dropped(p: Any, x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x * p, 0.5)


def test_draws_depend_on_seed_and_step(tmp_path: Path):
    stages = [Stage(dropped, name=name) for name in ("a", "b")]
    loss = lambda y, t: (y - t).square().mean()
    make = lambda seed: fpipe.pipeline(
        stages, loss=loss, microbatches=2, group=fpipe.local(2), seed=seed
    )
    data, params = (
        lambda step: (torch.ones(2, 64), torch.full((2, 64), 3.0)),
        [torch.ones(64), torch.ones(64)],
    )
    want = fpipe.Loop(make(1), fpipe.sgd(0.1)).run(params, data, 4)
    first = fpipe.Loop(make(1), fpipe.sgd(0.1), tmp_path).run(params, data, 2)
    assert same(fpipe.Loop(make(1), fpipe.sgd(0.1), tmp_path).run(params, data, 4), want)
    assert not same(fpipe.Loop(make(2), fpipe.sgd(0.1)).run(params, data, 2), first)
    with pytest.raises(CheckpointError, match="has seed=1, and the pipeline seed=2"):
        fpipe.Loop(make(2), fpipe.sgd(0.1), tmp_path).run(params, data, 5)


def test_parameters_may_be_donated(tmp_path: Path):
    """The bits of steps by hand, also after a resume; the caller's parameters stay."""
    stages = [Stage(lambda p, x: torch.tanh(x @ p), name=name) for name in ("a", "b")]
    loss = lambda y, t: (y - t).square().mean()
    pipe = fpipe.pipeline(stages, loss=loss, microbatches=2, group=fpipe.local(2))
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(4, 4, generator=draw).requires_grad_(at == 0) for at in range(2)]
    x, t = torch.randn(2, 8, 4, generator=draw)
    tx = fpipe.chain(fpipe.clip_by_global_norm(0.1, over=pipe), fpipe.adamw(0.1, donate=True))
    weights, state = params, tx.init(params)
    for _ in range(5):
        _, grads = fpipe.value_and_grad(pipe)(weights, x, t)
        weights, state = tx.step(grads, state, weights)
    before = [p.detach().clone() for p in params]
    make = lambda: fpipe.Loop(pipe, tx, tmp_path, every=2, donate=True)
    data = lambda step: (x, t)
    three = make().run(params, data, 3)
    assert make().checkpoints() == (2, 3)
    five = make().run(params, data, 5)
    assert same(five.params, weights)
    assert same(list(params), before) and not same(three.params, five.params)


def test_donated_steps_keep_the_memory():
    stages = [Stage(lambda p, x: x * p, name=name) for name in ("a", "b")]
    loss = lambda y, t: (y - t).square().mean()
    pipe = fpipe.pipeline(stages, loss=loss, microbatches=2, group=fpipe.local(2))
    seen: set[int] = set()

    def init(params: Any) -> Any:
        seen.update(p.data_ptr() for p in params)
        return ()

    tx = fpipe.Transform(init, lambda grads, state, params=None: (grads, state))
    data = lambda step: (torch.ones(2, 2), torch.ones(2, 2))
    params = [torch.ones(2), torch.ones(2)]
    done = fpipe.Loop(pipe, tx, donate=True).run(params, data, 3)
    assert {p.data_ptr() for p in done.params} == seen
    assert not seen & {p.data_ptr() for p in params}


def test_records_go_to_one_callable():
    seen: list[dict[str, Any]] = []
    run(None, LAYOUTS[1], 3, log=seen.append)
    assert [row["step"] for row in seen] == [1, 2, 3] and all(row["seconds"] >= 0 for row in seen)


def test_records_have_the_rate_and_the_norm():
    """Those of a loop by hand; a step that was skipped has no norm."""
    stages = [Stage(lambda p, x: x * p, name=name) for name in ("a", "b")]
    loss = lambda y, t: (y - t).square().mean()
    pipe = fpipe.pipeline(stages, loss=loss, microbatches=2, group=fpipe.local(2))
    params, rate = [torch.ones(2)] * 2, fpipe.transforms.warmup_linear(0.1, warmup=2, steps=6)
    data = lambda step: (torch.ones(2, 2), torch.full((2, 2), 3.0 + step))
    for last in (fpipe.adamw(rate), fpipe.master(fpipe.adamw(rate, donate=True), donate=True)):
        tx = fpipe.chain(
            fpipe.skip_nonfinite(over=pipe), fpipe.clip_by_global_norm(0.1, over=pipe), last
        )
        state, weights, want = tx.init(params), params, []
        for step in range(3):
            value, grads = fpipe.value_and_grad(pipe)(weights, *data(step))
            updates, state = tx.update(grads, state, weights)
            weights = fpipe.apply_updates(weights, updates)
            want.append(
                {
                    "step": step + 1,
                    "loss": value.item(),
                    "rate": rate(step),
                    "norm": state[1].norm.item(),
                }
            )
        seen: list[dict[str, Any]] = []
        fpipe.Loop(pipe, tx, log=seen.append).run(params, data, 3)
        assert [{name: row[name] for name in want[0]} for row in seen] == want
        broken = lambda step: tuple(t * (float("nan") if step == 1 else 1.0) for t in data(step))
        seen.clear()
        fpipe.Loop(pipe, tx, log=seen.append).run(params, broken, 3)
        assert ["norm" in row for row in seen] == [True, False, True]
    seen = []
    fpipe.Loop(pipe, fpipe.from_torch(torch.optim.NAdam, lr=0.02), log=seen.append).run(
        params, data, 1
    )
    fpipe.Loop(pipe, fpipe.from_torch(torch.optim.NAdam), log=seen.append).run(params, data, 1)
    assert [row["rate"] for row in seen] == [0.02, 0.002], "given, and the default of the class"


def test_running_statistics_are_saved_and_continue_under_another_cut(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3), nn.BatchNorm1d(3))
    numbers = lambda step: torch.randn(8, 3, generator=torch.Generator().manual_seed(step))

    def loop(cuts: list[str], path: Path | None) -> tuple[fpipe.Loop, Any]:
        stages, params = fpipe.from_module(model, cuts=cuts)
        pipe = fpipe.pipeline(
            stages, loss=nn.functional.mse_loss, microbatches=2, group=fpipe.local(len(stages))
        )
        return fpipe.Loop(pipe, fpipe.adamw(1e-2), path=path, every=2), params

    (whole, params), (parts, _), (other, more) = (
        loop(["2"], None),
        loop(["2"], tmp_path),
        loop(["1", "2", "3"], tmp_path),
    )
    batch = lambda step: (numbers(step), torch.zeros(8, 3))
    want = whole.run(params, batch, 6)
    parts.run(params, batch, 2)
    assert same(parts.run(params, batch, 4), whole.run(params, batch, 4))
    found = other.run(more, batch, 6)
    statistics = lambda now: {
        name: leaf for stage in now.state[1] if stage for name, leaf in stage.items()
    }
    assert statistics(found).keys() == {f"{n}.{name}" for n in "13" for name in NORM}
    assert same(statistics(found), statistics(want))


def test_a_loader_is_no_function_of_the_step():
    pipe, params = pipeline(LAYOUTS[1])
    with pytest.raises(
        fpipe.errors.BatchError, match="batch is a DataLoader; it must be a function of the step"
    ):
        fpipe.Loop(pipe, fpipe.sgd(0.1)).run(params, DataLoader([1]), 1)  # type: ignore[arg-type]


def test_side_inputs_belong_to_a_batch():
    def scaled(p: Any, x: Tensor, *, by: Tensor) -> Tensor:
        return x * p * by

    pipe = fpipe.pipeline([scaled, scaled], loss=torch.sum, microbatches=2, group=fpipe.local(2))
    data = lambda step: ((torch.ones(2),), {"by": torch.full((2,), 2.0)})
    assert fpipe.Loop(pipe, fpipe.sgd(0.0)).run([torch.ones(1)] * 2, data, 1).step == 1


def loop_of(stage: Any, loss: Any) -> fpipe.Loop:
    pipe = fpipe.pipeline([stage] * 2, loss=loss, microbatches=2, group=fpipe.local(2))
    return fpipe.Loop(pipe, fpipe.sgd(0.0))


def test_a_dict_of_targets_is_no_dict_of_side_inputs():
    seen: list[Any] = []

    def loss(y: Any, target: Any) -> Tensor:
        seen.append((type(y), type(target)))
        return (y[0] - target["t"]).square().mean()

    loop = loop_of(lambda p, x: [x[0] * p, x[1]], loss)
    data = lambda step: ([torch.ones(2), torch.ones(2)], {"t": torch.zeros(2)})
    assert loop.run([torch.ones(1)] * 2, data, 1).step == 1
    assert seen[0] == (list, dict)


@pytest.mark.parametrize("data", [torch.ones(2, 2), None, (), [], "ab", {"x": 1}])
def test_a_batch_of_another_form_is_refused(data: Any):
    loop = loop_of(lambda p, x: x * p, lambda y, t: (y - t).square().mean())
    with pytest.raises(fpipe.errors.BatchError, match=r"batch\(0\) is .*; return \(x, \*targets\)"):
        loop.run([torch.ones(1)] * 2, lambda step: data, 1)


@pytest.mark.parametrize("zero", [0, 3])
def test_copies_resume_together(tmp_path: Path, zero: int):
    def on_copy(dp: Any, steps: int, path: Path | None) -> Any:
        pipe, params = pipeline(Layout(8, "ZBV", 4, zero), dp)
        own = lambda step: tuple(t.chunk(2)[dp.here[0]] for t in batch(step))
        return pipe.unshard(
            fpipe.Loop(pipe, adam(pipe), path, every=2).run(params, own, steps).params
        )

    def on_copies(*args: Any) -> Any:
        return testing.run(lambda dp: on_copy(dp, *args), ranks=2, order="buffered", seed=0)

    want = on_copies(5, None)
    on_copies(3, tmp_path)
    assert same(on_copies(5, tmp_path), want)


class Reader:
    """Data with a position of its own."""

    def __init__(self, copy: int):
        self.copy, self.at = copy, 100 * copy

    def __call__(self, step: int) -> Any:
        self.at += 1 + step % 2
        return tuple(part.chunk(2)[0] for part in batch(self.at))

    def state_dict(self) -> Any:
        return {"at": self.at, "history": [self.at, (self.copy, "text")]}

    def load_state_dict(self, state: Any) -> None:
        assert state["history"] == [state["at"], (self.copy, "text")]
        self.at = state["at"]


def test_positions_in_the_data_of_each_copy(tmp_path: Path):
    def on_copy(dp: Any, steps: int, path: Path | None) -> Any:
        pipe, params = pipeline(LAYOUTS[0], dp)
        return fpipe.Loop(pipe, adam(pipe), path).run(params, Reader(dp.here[0]), steps).params

    def on_copies(*args: Any, ranks: int = 2) -> Any:
        return testing.run(lambda dp: on_copy(dp, *args), ranks=ranks, order="buffered", seed=0)

    want = on_copies(5, None)
    on_copies(3, tmp_path)
    assert same(on_copies(5, tmp_path), want)
    with pytest.raises(
        CheckpointError, match="positions in the data of 2 copies of the pipeline, and there are 4"
    ):
        on_copies(6, tmp_path, ranks=4)


@pytest.mark.parametrize("options", [{"every": 0}, {"keep": 0}, {"keep_every": -1}, {"every": "9"}])
def test_numbers_are_checked(options: dict[str, int]):
    with pytest.raises(CheckpointError, match="writes a checkpoint every step at most"):
        fpipe.Loop(pipeline(LAYOUTS[1])[0], fpipe.sgd(0.1), **options)  # type: ignore[arg-type]


def test_arguments_of_another_kind_are_refused():
    pipe, tx = pipeline(LAYOUTS[1])[0], fpipe.sgd(0.1)
    with pytest.raises(fpipe.errors.StageError, match="returns, not int"):
        fpipe.Loop(3, tx)  # type: ignore[arg-type]
    with pytest.raises(fpipe.errors.TransformError, match="tx= is of type int; give a transform"):
        fpipe.Loop(pipe, 3)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="path=3; give the folder"):
        fpipe.Loop(pipe, tx, path=3)  # type: ignore[arg-type]


def test_a_pipeline_without_a_loss_is_refused():
    with pytest.raises(fpipe.errors.StageError, match="the pipeline has no loss"):
        fpipe.Loop(fpipe.pipeline([dropped], microbatches=1, group=fpipe.local(1)), fpipe.sgd(0.1))


# ---- processes that end ----
STEPS = 12


def _process(path: Path, rank: int, seconds: float, number: int) -> Any:
    """One of two processes; that of a rank gets a signal after some seconds from its first step
    on.
    """
    group = fpipe.init(timeout=30)
    pipe, params = pipeline(LAYOUTS[1], group=group)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), number))
    timer.daemon = True

    def data(step: int) -> Any:
        if rank == group.rank and not timer.ident:
            timer.start()
        return batch(step)

    return by_name(
        pipe, fpipe.Loop(pipe, adam(pipe), path, every=1, keep=2).run(params, data, STEPS).params
    )


def _continued(path: Path, want: dict[str, Tensor]) -> None:
    """The run is continued, and ends as one that was not interrupted."""
    parts = fpipe.launch(_process, path, 9, 0, 0, ranks=2, timeout=60)
    assert same({**parts[0], **parts[1]}, want)
    assert [step for step, _ in losses(path)] == list(range(1, STEPS + 1))
    assert losses(path) == losses(path.parent / "whole")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("loop")
    return folder, run(folder / "whole", LAYOUTS[1], STEPS, adam)


@pytest.mark.timeout(600)
def test_a_process_that_is_killed_at_any_moment(whole: Any, long: bool):
    """Saving included: each step ends with a checkpoint that is written behind the next one.

    The suite kills one process in examples/resume.py.
    """
    if not long:
        pytest.skip("kills a process thirty times: --long")
    folder, want = whole
    draw, killed = random.Random(0), 0
    for number in range(30):
        path = folder / f"killed-{number}"
        try:
            fpipe.launch(
                _process,
                path,
                draw.randrange(2),
                draw.uniform(0, 1.0),
                signal.SIGKILL,
                ranks=2,
                timeout=60,
            )
        except fpipe.FpipeError:
            killed += 1
        _continued(path, want)
    assert killed >= 20, "most were in time"


def test_sigterm_writes_a_checkpoint_and_ends_with_the_signal(whole: Any):
    folder, want = whole
    path = folder / "terminated"
    with pytest.raises(fpipe.FpipeError, match="SIGTERM"):
        fpipe.launch(_process, path, 0, 0.0, signal.SIGTERM, ranks=2, timeout=60)
    pipe, _ = pipeline(LAYOUTS[1])
    steps = fpipe.Loop(pipe, adam(pipe), path).checkpoints()
    assert steps and steps[-1] == losses(path)[-1][0] < STEPS, "the step of the signal is saved"
    _continued(path, want)


def _shared_stage(path: Path) -> bool:
    """On one of four processes; two share each stage, and each has a half of its weights and its
    own random numbers.
    """
    group = fpipe.init(pp=2, tp=2, timeout=60)
    members = group.mesh["tp"]

    def stage(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return x + fpipe.ops.all_reduce(torch.tanh(x @ p["up"]) @ p["down"], members)

    pipe = fpipe.pipeline(
        [Stage(stage, name=name) for name in "ab"],
        "1F1B",
        loss=F.mse_loss,
        microbatches=2,
        group=group,
    )
    generator = torch.Generator().manual_seed(group.tp.rank)
    params = pipe.place(
        [{k: torch.randn(4, 4, generator=generator) for k in ("up", "down")} for _ in "ab"]
    )
    tx, few = fpipe.adamw(1e-2), lambda step: (torch.full((4, 4), step / 9), torch.ones(4, 4))
    want = fpipe.Loop(pipe, tx, path / "whole").run(params, few, 5)
    loop = fpipe.Loop(pipe, tx, path / "parts", every=1, keep=2)
    loop.run(params, few, 2)
    if group.tp.rank:  # the checkpoint of step 2 is not complete: this process was killed
        (loop.folder(2) / "tp-1-of-2" / "manifest.json").unlink(missing_ok=True)
    together = lambda: (group.barrier(), group.tp.barrier())
    together()
    loop.run(params, few, 3)
    taken = lambda step: (
        os.kill(os.getpid(), signal.SIGTERM) if group.tp.rank and group.rank else None,
        few(step),
    )[1]
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    loop.run(params, taken, 5)  # all processes end after the step in which one got the signal
    signal.signal(signal.SIGTERM, before)
    together()
    assert loop.checkpoints() == (3, 4)
    got = loop.run(params, few, 5)
    together()
    assert loop.checkpoints() == (4, 5)
    return got.step == 5 and same(got.params, want.params) and same(got.state, want.state)


@pytest.mark.long
def test_processes_that_share_stages(tmp_path: Path):
    assert fpipe.launch(_shared_stage, tmp_path, ranks=4, timeout=100) == [True] * 4
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    parts = "step-000000005/tp-0-of-2", "step-000000005/tp-1-of-2"
    assert all((tmp_path / "parts" / part / "manifest.json").is_file() for part in parts)
    pipe = fpipe.pipeline(
        [Stage(torch.matmul, name=name) for name in "ab"],
        loss=F.mse_loss,
        microbatches=2,
        group=fpipe.local(2),
    )
    loop = fpipe.Loop(pipe, fpipe.adamw(1e-2), tmp_path / "parts")
    assert loop.checkpoints() == ()
    with pytest.raises(
        CheckpointError, match="step-000000005/tp-0-of-2 with another number of ranks a stage"
    ):
        loop.run([torch.ones(4, 4)] * 2, batch, 7)


TRAIN = """
import os, signal, sys
sys.path[:0] = [{helpers!r}, {root!r}]
import fpipe
from checkpoint_model import Layout, adam, batch, pipeline

group = fpipe.init(timeout=30)
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

def data(step):
    if first and step == 5 and group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return batch(step)

pipe, params = pipeline(Layout(2, "1F1B", 2), group=group)
fpipe.Loop(pipe, adam(pipe), {path!r}, every=2).run(params, data, 12)
"""


@pytest.mark.timeout(200)
def test_torchrun_restarts_a_run(whole: Any, long: bool, tmp_path: Path):
    """torchrun starts all processes again after one was killed; the log is that of one run."""
    if not long:
        pytest.skip("starts four interpreters: --long")
    file = tmp_path / "train.py"
    root = Path(fpipe.__file__).resolve().parents[1]
    file.write_text(
        TRAIN.format(
            helpers=str(root / "tests" / "helpers"), root=str(root), path=str(tmp_path / "run")
        )
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        str(file),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "run") == losses(whole[0] / "whole")


def product() -> tuple[Any, list[Tensor], Any]:
    """A pipeline of two products, its parameters, and its data."""
    stages = [Stage(torch.mul, name=name) for name in ("a", "b")]
    pipe = fpipe.pipeline(stages, loss=torch.sum, microbatches=1, group=fpipe.local(2))
    return pipe, [torch.ones(1)] * 2, lambda step: (torch.ones(1),)


def test_a_link_to_an_archive_is_left_alone(tmp_path: Path):
    """An old checkpoint was moved and replaced by a link: nothing is deleted in the archive."""
    pipe, params, data = product()
    loop = fpipe.Loop(pipe, fpipe.sgd(0.1), tmp_path / "run", every=1, keep=1, keep_every=2)
    loop.run(params, data, 2)
    archive = tmp_path / "archive"
    loop.folder(2).rename(archive)
    loop.folder(2).symlink_to(archive)
    before = sorted(path.name for path in archive.iterdir())
    last = fpipe.Loop(pipe, fpipe.sgd(0.1), tmp_path / "run", every=1, keep=1)
    assert last.run(params, data, 5).step == 5
    assert sorted(path.name for path in archive.iterdir()) == before
    assert last.checkpoints() == (2, 5)
    (archive / "manifest.json").unlink()  # now it is incomplete
    assert last.run(params, data, 6).step == 6 and archive.is_dir()


def test_names_like_those_of_checkpoints(tmp_path: Path):
    pipe, params, data = product()
    loop = fpipe.Loop(pipe, fpipe.sgd(0.1), tmp_path, every=1, keep=1)
    (tmp_path / "step-000000001").write_text("a file")
    (tmp_path / "step-0000000003").mkdir()
    (tmp_path / "step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0662").mkdir()
    with pytest.raises(CheckpointError, match="step-000000001"):
        loop.run(params, data, 3)
    (tmp_path / "step-000000001").unlink()
    assert loop.run(params, data, 4).step == 4 and loop.checkpoints() == (4,)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file is no folder; give another path="):
        fpipe.Loop(pipe, fpipe.sgd(0.1), tmp_path / "file").run(params, data, 1)


def test_a_log_of_bytes_keeps_its_records(tmp_path: Path):
    pipe, params, data = product()
    loop = fpipe.Loop(pipe, fpipe.sgd(0.1), tmp_path, every=1)
    loop.run(params, data, 2)
    log = tmp_path / "log.jsonl"
    first, second = log.read_bytes().splitlines(True)
    junk = b"\xff\xfe\n[]\n3\n" + b"[" * 100_000 + b'\n{"step": "2"}\n{"step": null}\n'
    log.write_bytes(first + junk + second + b'{"step": 1')
    loop.run(params, data, 3)
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3]
    assert not list(tmp_path.glob(".*"))


def test_a_log_is_never_shorter_than_what_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The disk is full when a run continues: the records are there, and training goes on."""
    pipe, params, data = product()
    loop = fpipe.Loop(pipe, fpipe.sgd(0.1), tmp_path, every=100)
    loop.run(params, data, 3)
    log = tmp_path / "log.jsonl"
    records = log.read_bytes()
    log.write_bytes(b"junk\n" + records + b'{"step": 4')
    seen = []

    def full(path: Path, target: Path) -> None:
        raise OSError(28, os.strerror(28))

    class Full(FileIO):
        def write(self, raw: Any) -> int:
            seen.append(len(raw))
            return super().write(bytes(raw)[:5])  # as on a full disk

    monkeypatch.setattr("fpipe.products.training.records.FileIO", Full)
    monkeypatch.setattr(Path, "replace", full)
    begin = log.read_bytes()
    with pytest.warns(UserWarning, match="No space left") as warned:
        write = log_to(log, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", pytest.fail)  # it warned once
        for step in (4, 5, 6):
            write({"step": step})
    assert len(warned) == 1 and len(seen) == 3
    assert log.read_bytes() == begin, "half a record is removed again"


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_a_log_that_cannot_be_written_does_not_end_training(tmp_path: Path, kind: str):
    pipe, params, data = product()
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "run").mkdir()
    log = tmp_path / "run" / "log.jsonl"
    if kind == "link":
        log.symlink_to(other)
    else:
        log.mkdir()
    loop = fpipe.Loop(pipe, fpipe.sgd(0.1), tmp_path / "run", every=9)
    with pytest.warns(UserWarning, match="training goes on without the log") as warned:
        last = loop.run(params, data, 3)
    assert last.step == 3 and len(warned) == 1 and other.read_text() == "mine"


@pytest.mark.parametrize("who", ["batch", "log"])
def test_a_run_waits_for_the_save_of_one_that_failed(
    tmp_path: Path, who: str, monkeypatch: pytest.MonkeyPatch
):
    pipe, params, data = product()
    real = writing.write
    monkeypatch.setattr(writing, "write", lambda *args: time.sleep(0.3) or real(*args))

    def fails(step: Any) -> Any:
        if step == 2 or (isinstance(step, dict) and step["step"] == 3):
            raise KeyError("the user's")
        return data(step)

    loop = fpipe.Loop(pipe, fpipe.sgd(0.1), tmp_path, every=2, log=fails if who == "log" else None)
    with pytest.raises(KeyError):
        loop.run(params, fails if who == "batch" else data, 4)
    seen: list[int] = []
    again = fpipe.Loop(pipe, fpipe.sgd(0.1), tmp_path, every=2)
    again.run(params, lambda step: seen.append(step) or data(step), 4)
    assert seen == [2, 3]


@pytest.mark.parametrize("steps", [None, "3", float("nan"), torch.tensor(3), -1])
def test_steps_are_a_number(steps: Any):
    pipe, params, data = product()
    with pytest.raises(BatchError, match="steps="):
        fpipe.Loop(pipe, fpipe.sgd(0.1)).run(params, data, steps)


@pytest.mark.parametrize("given", [None, (), [], {}, torch.ones(3), 3])
def test_what_is_no_batch_is_refused(given: Any):
    pipe, params, _ = product()
    with pytest.raises(BatchError, match=r"batch\(0\) is .*return \(x, \*targets\)"):
        fpipe.Loop(pipe, fpipe.sgd(0.1)).run(params, lambda step: given, 1)

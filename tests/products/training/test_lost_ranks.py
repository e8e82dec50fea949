"""``Loop`` where stages are on several ranks: training goes on without one of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import fpipe
from common import layer, squared
from fpipe import testing
from fpipe.errors import PeerError
from sample import also

STEPS = 4


def whole_model() -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(3)
    return [torch.randn(4, 4) for _ in range(2)], torch.randn(12, 4)


def plain() -> list[torch.Tensor]:
    """The parameters after plain autograd, microbatch after microbatch, and gradient descent."""
    params, x = whole_model()
    for _ in range(STEPS):
        leaves = [p.clone().requires_grad_() for p in params]
        total = [torch.zeros(4, 4) for _ in leaves]
        for part in x.chunk(6):
            y = part
            for p in leaves:
                y = layer(p, y)
            found = torch.autograd.grad(squared(y, part) * (1 / 6), leaves)
            total = [a + g for a, g in zip(total, found, strict=True)]
        norm = torch.stack([g.norm() for g in total]).norm()
        factor = torch.clamp(1.0 / norm, max=1.0)
        params = [p - 0.5 * (g * factor) for p, g in zip(params, total, strict=True)]
    return params


def clipped(pipe: fpipe.Pipeline) -> fpipe.Transform:
    return fpipe.chain(fpipe.clip_by_global_norm(1.0, over=pipe), fpipe.sgd(0.5))


def train(group: Any, first: Any = layer, path: Path | None = None) -> tuple[int, Any, int]:
    """A stage, its parameters after training, and the number of steps."""
    params, x = whole_model()
    schedule = fpipe.make_schedule("1F1B", 4, 6, replicas=(3, 1))
    pipe = fpipe.pipeline([first, layer], schedule, loss=squared, group=group)
    loop = fpipe.Loop(pipe, clipped, path=path, every=1)
    trained = loop.run(pipe.place(params), lambda step: (x, x), STEPS)
    (stage,) = pipe.here
    return stage, trained.params[stage], trained.step


@pytest.mark.filterwarnings("ignore:rank 2 is lost in step")
@pytest.mark.parametrize("order", ["buffered", "lockstep"])
def test_a_rank_is_killed_anywhere(order: Any, long: bool) -> None:
    """Between two calls of its group too: no rank has changed its parameters before all have their
    gradients."""
    want = plain()
    for number in range(3, 60, 4 if long else 14):
        faults = [testing.Kill(2, number)]
        ends = testing.outcomes(train, 4, order=order, seed=number, faults=faults)
        for end in ends:
            if end.rank == 2:
                continue
            stage, p, step = end.value
            assert step == STEPS
            torch.testing.assert_close(p, want[stage])


def dies(path: Path, shared: str, rank: int, port: int) -> None:
    """One of four processes; rank 2 is killed within the third step."""
    job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in job.items()})
    os.environ.update(MASTER_ADDR="localhost", FPIPE_SHARED_MEMORY=shared)
    group = fpipe.init(timeout=300)
    calls = [0]

    def first(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 6 and rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return layer(p, x)

    with pytest.warns(UserWarning, match="rank 2 is lost in step 3; training goes on without it"):
        found = train(group, fpipe.Stage(first, engine="eager"), path / "run")
    torch.save(found, path / f"{rank}.pt")


@pytest.mark.parametrize("shared", ["1", *also("0")])
def test_a_process_is_killed(shared: str, tmp_path: Path) -> None:
    """Every rank that remains ends with the numbers of the whole run, and its log is complete."""
    context = multiprocessing.get_context("forkserver")
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    processes = [context.Process(target=dies, args=(tmp_path, shared, r, port)) for r in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    want = plain()
    for rank in (0, 1, 3):
        stage, p, step = torch.load(tmp_path / f"{rank}.pt")
        assert step == STEPS
        torch.testing.assert_close(p, want[stage])
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


def test_a_stage_without_a_copy_ends_training() -> None:
    """The error is that of the lost rank, not that there is no other copy."""
    ends = testing.outcomes(train, 4, order="buffered", faults=[testing.Kill(3, 20)])
    assert all(isinstance(end.error, PeerError) for end in ends if end.rank != 3)

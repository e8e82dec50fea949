"""The statements of README.md about torch.distributed.pipelining, tested on it: one process, one
rank, two stages.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fpipe

pytestmark = pytest.mark.filterwarnings("default")  # what torch warns of is not ours


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process. Stages that are neighbours on one rank greet each other by a
    message from the rank to itself in torch 2.11, which gloo refuses; they need none here.
    """
    from torch.distributed.pipelining import PipelineStage

    monkeypatch.setattr(
        PipelineStage, "_get_init_p2p_neighbors_ops", lambda stage: [], raising=False
    )
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def schedule(
    modules: list[nn.Module], make: str = "ScheduleZBVZeroBubble", microbatches: int = 2
) -> Any:
    from torch.distributed.pipelining import PipelineStage, schedules

    stages = [PipelineStage(m, i, len(modules), torch.device("cpu")) for i, m in enumerate(modules)]
    squared: Callable[..., torch.Tensor] = lambda y, t: (y - t).square().mean()
    return getattr(schedules, make)(stages, microbatches, loss_fn=squared)


class Counted(nn.Module):
    """A chain of linears under a checkpoint; counts its forwards."""

    def __init__(self, linears: int):
        super().__init__()
        self.chain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(linears)))
        self.forwards = 0

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return self.chain(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("linears", [1, 3])
def test_torch_checkpoint_under_i_and_w(alone: None, linears: int):
    """There, once a parameter group; here, once (tested in test_torch_pipelining_bugs.py)."""
    first, second = nn.Linear(4, 4), Counted(linears)
    step = schedule([first, second], microbatches=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step.step(
            torch.randn(2, 4), target=torch.randn(2, 4)
        )  # the first one also finds out shapes
        second.forwards = 0
        step.step(torch.randn(2, 4), target=torch.randn(2, 4))
    assert second.forwards == 2 + linears


def test_torch_eval_under_zbv(alone: None):
    """There it raises; here it is the loss of one process."""
    step = schedule([nn.Linear(4, 4), nn.Linear(4, 4)])
    with pytest.raises(Exception):  # noqa: B017, PT011  (which one, changes by version)
        step.eval(torch.randn(2, 4), target=torch.randn(2, 4))
    pipe = fpipe.pipeline(
        [lambda p, x: x @ p] * 2,
        "ZBV",
        loss=lambda y: y.sum(),
        microbatches=2,
        group=fpipe.local(1),
    )
    assert float(pipe([torch.eye(4)] * 2, torch.ones(2, 4))) == 4.0


def test_torch_validator_passes_a_deadlock():
    """Two ranks that wait for each other: there the order is called valid, here it is refused with
    its place.
    """
    from torch.distributed.pipelining.schedules import _Action, _validate_schedule

    text = "[0F0, 0B0, 0F1, 0B1]\n[1F0, 1F1, 1B0, 1B1]"
    rows = {
        rank: [_Action.from_str(cell) for cell in line.strip("[]").split(", ")]
        for rank, line in enumerate(text.splitlines())
    }
    _validate_schedule(rows, 2, 2, 2)  # says nothing
    with pytest.raises(fpipe.errors.ScheduleError, match="wait"):
        fpipe.Schedule.parse(text).check()


def test_torch_needs_a_process_group():
    """There a schedule needs stages, and a stage needs a process group; here it is built, checked
    and timed alone.
    """
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="process group has not been initialized"):
        schedule([nn.Linear(4, 4), nn.Linear(4, 4)])
    assert fpipe.make_schedule("ZBV", 1, 2).check().simulate().total == 12


def test_torch_names_seven():
    from torch.distributed.pipelining import schedules

    known = {
        name.removeprefix("Schedule") for name in dir(schedules) if name.startswith("Schedule")
    }
    ours = {name.lower() for name in fpipe.schedule_names()} | {"zbvzerobubble"}
    assert len([name for name in known if name.lower() in ours]) == 7

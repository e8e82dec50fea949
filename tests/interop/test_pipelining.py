"""``fpipe.interop.pipelining``: the cases of torch's own tests, restated, on two processes that run
all of them.
"""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining as peers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import schedules as peer_schedules

import fpipe
import pipelining_cases
from fpipe.interop import pipelining
from fpipe.interop.pipelining import schedules
from sample import mostly

SOME = pipelining_cases.chosen(long=False)


@pytest.fixture(scope="module")
def results(long: bool) -> list[dict[str, str]]:
    """What each process found, by case."""
    return fpipe.launch(pipelining_cases.run_cases, "", long, ranks=2, timeout=240)


@pytest.mark.xdist_group("pipelining")
@pytest.mark.parametrize("name", mostly(pipelining_cases.CASES, lambda name: name not in SOME))
def test_as_torch(results: list[dict[str, str]], name: str):
    for rank, found in enumerate(results):
        assert name in found, (
            f"an earlier case failed on rank {rank}: {[n for n, text in found.items() if text]}"
        )
        assert not found[name], f"rank {rank}: {found[name]}"


def test_number_of_cases():
    assert len(pipelining_cases.CASES) >= 60


# ---- without processes ----
def test_names_are_those_of_torch():
    """What torch exports is here too, but for the front end that traces a whole model."""
    front_end = {"Pipe", "SplitPoint", "build_stage", "pipe_split", "pipeline"}
    analysis = {
        "PipelineActivationLiveness",
        "PipelineStageInfo",
        "analyze_pipeline_activation_liveness",
    }  # of 2.15
    assert set(peers.__all__) - set(pipelining.__all__) - analysis == front_end


@pytest.mark.parametrize(
    "name",
    ["PipelineScheduleSingle", "PipelineScheduleMulti", "ScheduleGPipe", "ScheduleDualPipeV"],
)
def test_arguments_are_those_of_torch(name: str):
    for method in ("step", "eval"):
        theirs = inspect.signature(getattr(getattr(peer_schedules, name), method)).parameters
        ours = inspect.signature(getattr(getattr(pipelining, name), method)).parameters
        assert not set(theirs) - set(ours)
    theirs = inspect.signature(peers.PipelineStage.__init__).parameters
    ours = inspect.signature(pipelining.PipelineStage.__init__).parameters
    assert [name for name in ours if name in theirs] == list(theirs)  # torch 2.11 has no get_mesh


def test_classes_by_name():
    for name in (
        "1F1B",
        "interleaved1f1b",
        "GPIPE",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "zbvZeroBubble",
        "DualPipeV",
    ):
        assert (
            pipelining.get_schedule_class(name).__name__
            == peer_schedules.get_schedule_class(name).__name__
        )
    for name in fpipe.schedule_names():
        assert issubclass(pipelining.get_schedule_class(name), schedules._PipelineSchedule)
    with pytest.raises(ValueError, match=r"Unknown schedule name 'no'. The valid options are"):
        pipelining.get_schedule_class("no")


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_pipeline_of_one_process(alone: None):
    modules = [nn.Linear(2, 2) for _ in range(2)]
    stages = [pipelining.PipelineStage(m, s, 2, torch.device("cpu")) for s, m in enumerate(modules)]
    schedule = pipelining.ScheduleZBVZeroBubble(stages, 2, lambda y, t: (y - t).square().mean())
    x, losses = torch.ones(4, 2), []
    y = schedule.step(x, target=x, losses=losses)
    want = (nn.Sequential(*modules)(x) - x).square().mean()
    assert torch.allclose(torch.stack(losses).mean(), want.detach())
    grads = torch.autograd.grad(want, list(modules[0].parameters()))
    assert all(
        torch.allclose(p.grad, g) for p, g in zip(modules[0].parameters(), grads, strict=True)
    )
    assert torch.allclose(y, nn.Sequential(*modules)(x))
    stages[0].scale_grads(2)
    assert torch.allclose(modules[0].weight.grad, grads[0] / 2)  # type: ignore[arg-type]


def test_sharded_modules_are_refused(alone: None):
    """Their parameters are parts, which a pipeline would take for whole ones."""
    mesh = init_device_mesh("cpu", (1,))
    modules = [fully_shard(nn.Linear(2, 2), mesh=mesh) for _ in range(2)]
    stages = [pipelining.PipelineStage(m, s, 2, torch.device("cpu")) for s, m in enumerate(modules)]
    schedule = pipelining.ScheduleInterleaved1F1B(stages, 2, nn.functional.mse_loss)
    with pytest.raises(fpipe.errors.UnsupportedError, match="under fully_shard"):
        schedule.step(torch.ones(2, 2), target=torch.ones(2, 2))


def test_mistakes_before_the_first_step(alone: None, tmp_path):
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Stage index 2 is out of range of 2"):
        pipelining.PipelineStage(module, 2, 2, torch.device("cpu"))
    with pytest.raises(fpipe.errors.UnsupportedError, match="dw_builder"):
        pipelining.PipelineStage(module, 0, 2, torch.device("cpu"), dw_builder=lambda: None)
    stages = [pipelining.PipelineStage(module, s, 3, torch.device("cpu")) for s in range(3)]
    with pytest.raises(ValueError, match="ZBVZeroBubble takes 2 stages on 1 rank, not 3"):
        pipelining.ScheduleZBVZeroBubble(stages, 2)
    runtime = schedules._PipelineScheduleRuntime(stages, 2)
    with pytest.raises(fpipe.errors.ScheduleError, match="there is no order yet"):
        runtime.step()
    (tmp_path / "wrong.csv").write_text("0F0,1F0,2F0,2B0,1B0,0B0\n")
    with pytest.raises(fpipe.errors.ScheduleError, match="1 microbatches; there are 1, 3 and 2"):
        runtime._load_csv(tmp_path / "wrong.csv")
    with pytest.raises(NotImplementedError, match="format='xml'"):
        runtime._load_csv(tmp_path / "wrong.csv", format="xml")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one at least"):
        schedules.PipelineScheduleMulti([], 2)


def test_the_package_is_an_attribute():
    assert fpipe.interop.pipelining is pipelining
    with pytest.raises(AttributeError, match="no attribute 'no'"):
        fpipe.interop.no  # noqa: B018

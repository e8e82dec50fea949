"""Device records, and the rules that select the device of a process, with a fake accelerator where
none exists.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fpipe
from fpipe import devices
from fpipe.devices import kinds
from fpipe.engine.parts import Parts
from fpipe.errors import GroupError
from fpipe.passes import streams
from fpipe.passes.weighting import weights_of


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """Pretend that so many devices of a type are visible."""

    def act(type: str, count: int) -> None:
        monkeypatch.setattr(
            torch.accelerator,
            "current_accelerator",
            lambda check_available=False: torch.device(type),
        )
        monkeypatch.setattr(
            torch, "get_device_module", lambda _: SimpleNamespace(device_count=lambda: count)
        )

    return act


def test_index_is_0_where_one_device_is_visible(gpus):
    gpus("cuda", 1)
    assert devices.pick(local_rank=3) == torch.device("cuda", 0)


def test_index_is_the_local_rank_where_several_are(gpus):
    gpus("cuda", 4)
    assert devices.pick(local_rank=3) == torch.device("cuda", 3)
    assert devices.pick("cuda:1", local_rank=3) == torch.device("cuda", 1)
    with pytest.raises(
        GroupError,
        match=r"'cuda:4' is not available: 4 of its type are visible; .*CUDA_VISIBLE_DEVICES",
    ):
        devices.pick(local_rank=4)


def test_cpu_where_nothing_else_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None
    )
    assert devices.pick() == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [("gpu", "'gpu' is not a device; name a type, as in cpu, cuda"), ("npu", "torch_npu")],
)
def test_devices_that_are_not_there(name: str, message: str):
    with pytest.raises(GroupError, match=message):
        devices.pick(name)


def test_every_kind_says_how_it_talks():
    for type, row in devices.KINDS.items():
        assert row.type == type
        assert row.backends == row.backend or row.backends == f"cpu:gloo,{type}:{row.backend}"
    assert devices.kind("xpu").backends == "cpu:gloo,xpu:xccl"
    assert devices.kind("never heard of").backend == "gloo"


@pytest.mark.gpu
def test_a_real_accelerator():
    device = devices.pick()
    state = streams.save_streams([device])
    draw = lambda _: torch.rand(4, device=device)
    assert torch.equal(streams.drawn(draw, [], device, 3)[0], streams.drawn(draw, [], device, 3)[0])
    assert torch.equal(state[0][1], streams.save_streams([device])[0][1])


def test_the_cpu_has_one_device():
    assert devices.current("cpu:0") == devices.pick("cpu:0") == torch.device("cpu")


def test_a_type_without_index_is_the_current_device(gpus, monkeypatch: pytest.MonkeyPatch):
    gpus("cuda", 4)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert devices.current("cuda") == torch.device("cuda", 3)
    assert devices.current("cuda:1") == torch.device("cuda", 1)


@pytest.mark.parametrize("engine", ["trace", "eager"])
def test_a_stage_may_name_the_cpu_with_an_index(engine: str):
    """torch's fake tensors take cpu:0 and cpu for two devices, and refuse to add them."""

    def shifted(p, x):
        return (x.to("cpu:0") @ p + torch.ones(2, device="cpu:0")).tanh()

    stages = [shifted, shifted]
    pipe = fpipe.pipeline(
        stages,
        loss=torch.sum,
        microbatches=2,
        group=fpipe.local(devices=["cpu:0"] * 2),
        engine=engine,
    )  # type: ignore[arg-type]
    value, _ = fpipe.value_and_grad(pipe)(
        [torch.eye(2, device="cpu:0")] * 2, torch.ones(4, 2, device="cpu")
    )
    assert torch.equal(value, shifted(torch.eye(2), shifted(torch.eye(2), torch.ones(2, 2))).sum())


class NoDouble(torch.Tensor):
    """A tensor of a device that has no float64, such as an Apple GPU, until it is on the host."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cpu:
            with torch._C.DisableTorchFunctionSubclass():
                return args[0].as_subclass(torch.Tensor)
        if func is torch.Tensor.double or any(arg is torch.float64 for arg in args):
            raise TypeError("this device has no float64")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_weights_are_counted_on_the_host_where_a_device_has_no_float64(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(kinds, "KINDS", {"cpu": devices.kind("cpu")._replace(double=False)})
    targets = Parts(torch.ones(4).as_subclass(NoDouble), 2, "target 0")
    weights = weights_of(fpipe.weighted(lambda y: y.sum()), [targets], {}, 2, None)
    assert [(weight.item(), weight.dtype) for weight in weights] == [(0.5, torch.float32)] * 2

"""Device records, and the rules by which a process finds its device (the accelerator is acted where there is none)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fpipe import devices
from fpipe.errors import GroupError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """Say that so many devices of a type are visible."""

    def act(type: str, count: int) -> None:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(type))
        monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(device_count=lambda: count))

    return act


def test_index_is_0_where_one_device_is_visible(gpus):
    gpus("cuda", 1)
    assert devices.pick(local_rank=3) == torch.device("cuda", 0)


def test_index_is_the_local_rank_where_several_are(gpus):
    gpus("cuda", 4)
    assert devices.pick(local_rank=3) == torch.device("cuda", 3)
    assert devices.pick("cuda:1", local_rank=3) == torch.device("cuda", 1)
    with pytest.raises(GroupError, match=r"cuda:4 of 4 visible ones; .*CUDA_VISIBLE_DEVICES"):
        devices.pick(local_rank=4)


def test_cpu_where_nothing_else_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert devices.pick() == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "said"), [("gpu", "'gpu' is not a device; name a type, as in cpu, cuda"), ("npu", "torch_npu")]
)
def test_devices_that_are_not_there(name: str, said: str):
    with pytest.raises(GroupError, match=said):
        devices.pick(name)


def test_every_kind_says_how_it_talks():
    for type, row in devices.KINDS.items():
        assert row.type == type
        assert row.backends == row.backend or row.backends == f"cpu:gloo,{type}:{row.backend}"
    assert devices.kind("xpu").backends == "cpu:gloo,xpu:xccl"
    assert not devices.kind("xpu").compile_many
    assert devices.kind("never heard of").backend == "gloo"


def test_cpu_is_a_null_device():
    cpu = torch.device("cpu")
    devices.synchronize(cpu)
    assert devices.memory(cpu) is None


@pytest.mark.gpu
def test_a_real_accelerator():
    device = devices.pick()
    devices.seed(device, 3)
    a = torch.rand(4, device=device)
    devices.seed(device, 3)
    assert torch.equal(a, torch.rand(4, device=device))
    held = devices.memory(device)
    assert held is None or held.peak >= held.now > 0
    devices.synchronize(device)

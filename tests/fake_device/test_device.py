"""The fake device itself: that it is asynchronous, that what a GPU would make wrong is wrong on it,
and that its numbers are the CPU's.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fpipe

from .loader import NAME, load, missing

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.xdist_group("fake device"),
    pytest.mark.timeout(600),  # the first use compiles
]


def on_device(check: Callable[[Any], object]) -> Any:
    """The result of a function of the module, in a process that has the device."""
    return fpipe.launch(_called, check, ranks=1, timeout=590)[0]


def _called(check: Callable[[Any], object]) -> object:
    return check(load())


# ---- numbers ----
def _operators(_: Any) -> list[str]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, generator=draw)
    index = torch.tensor([2, 0, 3])
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "matmul": lambda x: torch.tanh(x @ x.T),
        "norm": lambda x: F.layer_norm(x, (6,)),
        "loss": lambda x: F.cross_entropy(x, torch.tensor([1, 2, 0, 3], device=x.device)),
        "views": lambda x: torch.cat([x.T[1:, ::2], x[:2].T[1:]]).unfold(0, 2, 1) * 2,
        "index": lambda x: x[index.to(x.device)],
        "mask": lambda x: x[x > 0].sum().expand(1),
        "sort": lambda x: x.sort()[0].topk(2)[0],
        "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)).conj() * 2j),
        "convolution": lambda x: F.conv1d(x.view(1, 4, 6), x.view(2, 4, 3)),
        "inplace": lambda x: (x * 1).add_(x).mul_(2).index_fill_(0, index[:1].to(x.device), 3.0),
        "scalar": lambda x: x * x.sum().item() + torch.tensor(2.0),
    }
    wrong = []
    for name, fn in functions.items():
        ours, theirs = x.clone().requires_grad_(), x.to(NAME).requires_grad_()
        a, b = fn(ours), fn(theirs)
        a.sum().backward()
        b.sum().backward()
        assert ours.grad is not None and theirs.grad is not None
        if not torch.equal(a, b.cpu()) or not torch.equal(ours.grad, theirs.grad.cpu()):
            wrong.append(name)
    return wrong


def test_numbers_are_those_of_the_cpu():
    assert on_device(_operators) == []


def _draws(device: Any) -> list[bool]:
    def drawn(where: str) -> list[torch.Tensor]:
        torch.manual_seed(5)
        seeded = torch.Generator(where).manual_seed(3)
        return [
            torch.randn(100, device=where),
            F.dropout(torch.ones(50, device=where), 0.25),
            torch.randint(9, (5,), device=where),
            torch.randperm(10, generator=seeded, device=where),
            torch.multinomial(torch.ones(5, device=where), 3, generator=seeded),
        ]

    return [torch.equal(a, b.cpu()) for a, b in zip(drawn("cpu"), drawn(f"{NAME}:0"), strict=True)]


def test_draws_are_those_of_the_cpu():
    assert all(on_device(_draws))


# ---- streams ----
def _asynchronous(device: Any) -> dict[str, Any]:
    start = time.perf_counter()
    first, last = (torch.Event(NAME, enable_timing=True) for _ in range(2))
    first.record()
    device.sleep(0.2)
    last.record()
    y = torch.randn(8, device=NAME).exp()
    copy = torch.empty(8, pin_memory=True).fill_(-1).copy_(y, non_blocking=True)
    early = copy.clone()
    on_host = time.perf_counter() - start
    done = last.query()
    torch.accelerator.synchronize()
    return {
        "the host went on": on_host < 0.1 and not done,
        "a copy is late": bool((early == -1).all()),
        "a copy comes": torch.equal(copy, y.cpu()),
        "events have times": 150 < first.elapsed_time(last) < 2000,
        "torch knows it": str(torch.accelerator.current_accelerator()) == NAME,
        "devices": torch.accelerator.device_count() == 4,
    }


def test_kernels_copies_and_events_are_asynchronous():
    found = on_device(_asynchronous)
    assert all(found.values()), found


def _races(device: Any) -> dict[str, bool]:
    side = torch.Stream(f"{NAME}:0")

    def read(wait: bool) -> torch.Tensor:
        torch.accelerator.synchronize()  # what was freed is spoiled
        device.sleep(0.3)
        x = torch.ones(4, device=NAME)
        if wait:
            side.wait_stream(torch.accelerator.current_stream())
        with side:
            y = x * 2
        side.synchronize()
        torch.accelerator.synchronize()
        return y.cpu()

    def kept(record: bool) -> torch.Tensor:
        x = torch.ones(4, device=NAME)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            device.sleep(0.3)
            y = x * 2
        if record:
            x.record_stream(side)
        del x  # its memory is free for the current stream
        z = torch.zeros(4, device=NAME)
        torch.accelerator.synchronize()
        return y.cpu() + z.cpu()

    two = torch.full((4,), 2.0)
    source = torch.ones(4).pin_memory()
    device.sleep(0.3)
    sent = source.to(NAME, non_blocking=True)
    source.fill_(3)  # before it was read
    plain = torch.ones(4)
    device.sleep(0.3)
    staged = plain.to(NAME, non_blocking=True)
    plain.fill_(3)
    return {
        "with a wait": torch.equal(read(True), two),
        "without": not torch.equal(read(False), two),
        "recorded": torch.equal(kept(True), two),
        "not recorded": not torch.equal(kept(False), two),
        "pinned memory is read later": sent.tolist() == [3] * 4,
        "other memory is read at once": staged.tolist() == [1] * 4,
        "between devices": (torch.ones(4, device=NAME).to(f"{NAME}:1") + 1).tolist() == [2] * 4,
    }


def test_a_missing_wait_or_record_is_seen():
    found = on_device(_races)
    assert all(found.values()), found


# ---- mistakes ----
def _mistakes(device: Any) -> list[str]:
    def error(run: Callable[[], object]) -> str:
        try:
            run()
        except RuntimeError as raised:
            return str(raised)
        return ""

    x = torch.ones(3, device=NAME)
    x[torch.tensor([7], device=NAME)]  # found by the kernel
    return [
        error(torch.accelerator.synchronize),
        error(lambda: x + torch.ones(3)),
        error(lambda: x @ torch.ones(3, device=f"{NAME}:1")),
    ]


def test_mistakes_are_errors():
    late, host, other = on_device(_mistakes)
    assert "index 7 is out of bounds" in late
    assert "fakegpu:0 and cpu" in host
    assert "fakegpu:0 and fakegpu:1" in other


def _read_by_host(_: Any) -> bytes:
    return ctypes.string_at(torch.ones(3, device=NAME).data_ptr(), 4)


def test_the_host_cannot_read_memory_of_a_device():
    with pytest.raises(fpipe.errors.LaunchError, match="SIGSEGV"):
        on_device(_read_by_host)


# ---- memory ----
def _memory(device: Any) -> dict[str, bool]:
    before = device.memory_allocated(1)
    x = torch.zeros(1000, device=f"{NAME}:1")
    held = device.memory_allocated(1) - before
    place = x.data_ptr()
    del x
    device.reset_peak_memory_stats(1)
    y = torch.zeros(1000, device=f"{NAME}:1")
    return {
        "counted": held == 4096 and device.max_memory_allocated(1) - before == 4096,
        "used again": y.data_ptr() == place,
        "of a device": device.memory_allocated(0) == 0,
    }


def test_memory_is_counted_and_used_again():
    found = on_device(_memory)
    assert all(found.values()), found

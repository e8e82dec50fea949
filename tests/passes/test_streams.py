"""Random streams of devices, with stand-ins for devices that are not there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fpipe.passes import streams

CPU = torch.device("cpu")


def test_the_device_of_the_rank_is_seeded_and_not_the_current_one(monkeypatch: pytest.MonkeyPatch):
    """``torch.cuda.manual_seed`` seeds the current device."""
    real = torch.Generator
    generators = {0: real(), 1: real()}
    module = SimpleNamespace(
        get_rng_state=lambda device: generators[device.index].get_state(),
        set_rng_state=lambda state, device: generators[device.index].set_state(state),
        manual_seed=lambda seed: generators[0].manual_seed(seed),  # of the current device
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch, "Generator", lambda device: real())
    before = {index: generator.get_state() for index, generator in generators.items()}

    def run(box: list[None]) -> torch.Tensor:
        assert torch.equal(generators[0].get_state(), before[0])
        return torch.rand(4, generator=generators[1])

    found, state = streams.drawn(run, [], torch.device("cuda", 1), 5, leaves=True)
    assert torch.equal(found, torch.rand(4, generator=real().manual_seed(5)))
    assert state is not None
    assert all(
        torch.equal(generator.get_state(), before[index]) for index, generator in generators.items()
    )


def test_a_stream_is_as_before_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        streams.drawn(lambda box: torch.rand(2) / (1 // 0), [], CPU, 3)
    assert torch.equal(torch.get_rng_state(), before)

"""The example with experts: its loss falls, weaving changes no bits, and the choices of its routers
are saved.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fpipe
from sample import also


@pytest.fixture(scope="module")
def moe() -> ModuleType:
    folder = str(Path(__file__).parents[2] / "examples")
    if folder not in sys.path:
        sys.path.insert(
            0, folder
        )  # as Python does for a script: moe.py imports its block from beside it
    return import_module("moe")


@pytest.mark.parametrize("schedule", ["Overlapped1F1B", *also("DualPipeV")])
def test_the_example_learns_alike_however_its_actions_overlap(moe: ModuleType, schedule: str):
    arguments = ["--steps", "4", "--schedule", schedule]
    woven = moe.main(arguments)
    assert woven == moe.main([*arguments, "--overlap", "sequential"])
    assert woven[-1] < woven[0]


def test_choices_of_the_router_are_saved_and_experts_computed_again(moe: ModuleType):
    params = moe.parameters(3, 0, 1)[1]
    programs = fpipe.trace(moe.block(None, 1), params, torch.randn(2, 12, moe.WIDTH))
    forward = {n.name: str(n.target) for n in programs.f.operations}
    backward = [str(n.target) for n in programs.b.operations]
    assert any("topk" in target for target in forward.values())
    assert not any("topk" in target or "one_hot" in target for target in backward), "chosen twice"
    assert any("bmm" in target for target in backward)
    again = [n for n in programs.b.operations if n.name in forward]
    assert any("gelu" in str(n.target) for n in again), "the experts are saved, not computed again"

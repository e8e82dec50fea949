# SPDX-License-Identifier: Apache-2.0
"""Processes find the outputs of stages in turn, and trace their stages at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fpipe
from fpipe.collectives.group import Group
from fpipe.engine import preview

RANKS = 4


def layers(seen: list[int]) -> list[fpipe.Stage]:
    def layer(number: int) -> fpipe.Stage:
        def fn(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            seen.append(number)
            return torch.tanh(x @ p).mT.contiguous().mT

        return fpipe.Stage(fn)

    return [layer(number) for number in range(RANKS)]


def step(group: Group, seen: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    pipe = fpipe.pipeline(
        layers(seen),
        loss=lambda y, t: (y - t).square().mean(),
        microbatches=4,
        group=group,
    )
    params = [torch.eye(3) + number for number in range(RANKS)]
    x = torch.arange(24.0).reshape(8, 3) / 24
    value, grads = fpipe.value_and_grad(pipe)(pipe.place(params), x, x)
    return value, [grad for grad in grads if grad is not None]


def test_stages_run_once_in_turn_and_then_all_are_traced():
    seen: list[int] = []
    fpipe.testing.run(lambda group: step(group, seen), RANKS)
    assert seen[:RANKS] == list(range(RANKS))
    assert sorted(set(seen[RANKS:])) == list(range(RANKS))


def test_one_process_runs_no_stage_in_advance():
    local, several = list[int](), list[int]()
    step(fpipe.local(RANKS), local)
    fpipe.testing.run(lambda group: step(group, several), RANKS)
    assert len(several) == len(local) + RANKS


@pytest.mark.parametrize("wrong", ["nothing", "strides", "shape"])
def test_stages_are_traced_again_where_an_output_was_another(
    monkeypatch: pytest.MonkeyPatch, wrong: str
):
    _, expected = step(fpipe.local(RANKS), [])
    right = preview.returned

    def returned(*args: object) -> object:
        y = right(*args)  # type: ignore[arg-type]
        assert y is not None
        (leaf,) = y.leaves
        if wrong == "nothing":
            return None
        change = {"stride": (4, 1)} if wrong == "strides" else {"shape": (1, 3)}
        return replace(y, leaves=(leaf._replace(**change),))

    monkeypatch.setattr(preview, "returned", returned)
    results = fpipe.testing.run(lambda group: step(group, []), RANKS)
    found = [grad for _, grads in results for grad in grads]
    assert all(map(torch.equal, found, expected))
    assert len(found) == RANKS


def test_a_stage_that_fails_raises_as_in_one_process():
    def fails(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x @ p.view(7)

    def run(group: Group) -> str:
        pipe = fpipe.pipeline([fails, fails], loss=lambda y: y.sum(), microbatches=2, group=group)
        params = pipe.place([torch.eye(3), torch.eye(3)])
        with pytest.raises(fpipe.errors.FpipeError) as caught:
            fpipe.grad(pipe)(params, torch.ones(4, 3))
        return str(caught.value)

    local = run(fpipe.local(2))
    first, second = fpipe.testing.run(run, 2)
    assert first == local
    assert "rank 0" in second

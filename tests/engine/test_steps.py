"""The functions of instructions: how much Python a warm step runs for each, beside the programs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

import fpipe
from common import layer, squared
from effort import lines


@pytest.mark.parametrize(("schedule", "ranks"), [("GPipe", 4), ("1F1B", 4), ("ZBV", 2)])
def test_an_instruction_takes_a_dozen_lines(schedule: str, ranks: int):
    def effort(microbatches: int) -> tuple[int, int]:
        """The lines of a warm step, and its instructions."""
        pipe = fpipe.pipeline(
            [layer] * 4, schedule, loss=squared, microbatches=microbatches, group=fpipe.local(ranks)
        )
        params, x = [torch.eye(3)] * 4, torch.ones(2 * microbatches, 3)
        step = fpipe.value_and_grad(pipe)
        step(params, x, x)
        count = sum(len(plan.instructions) for plan in pipe.plan(params, x, x).by_rank.values())
        return lines(lambda: step(params, x, x), without="<fpipe program"), count

    (few, short), (many, long) = effort(4), effort(12)
    assert (many - few) / (long - short) < 12
    assert few < 12 * short + 1500, "what a call costs beside its instructions"


def test_a_value_that_is_not_wanted_is_not_kept():
    """A program returns several values, of which the plan keeps some: the others are freed with its
    step.
    """
    pipe = fpipe.pipeline(
        [lambda p, x: (x * p, x.sin()), lambda p, xs: xs[0] * p],
        "1F1B",
        microbatches=2,
        group=fpipe.local(2),
    )
    x = torch.arange(4.0)
    with fpipe.debug():
        assert pipe([torch.tensor(2.0), torch.tensor(3.0)], x).equal(6 * x)


@pytest.mark.parametrize("how", ["value_and_grad", "each", "forward", "vjp"])
def test_a_call_leaves_no_reference_cycle(how: str):
    """A cycle would hold the registers, with the batch and the gradients, until the next
    collection.
    """
    loss = None if how == "vjp" else squared
    pipe = fpipe.pipeline([layer] * 2, "1F1B", loss=loss, microbatches=2, group=fpipe.local(2))
    params = [torch.eye(3)] * 2
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "value_and_grad": lambda x: fpipe.value_and_grad(pipe)(params, x, x),
        "each": lambda x: fpipe.value_and_grad(pipe, each=lambda *_: None)(params, x, x),
        "forward": lambda x: pipe(params, x, x),
        "vjp": lambda x: fpipe.vjp(pipe, params, x)[1](x),
    }

    def batch() -> weakref.ref[torch.Tensor]:
        x = torch.ones(4, 3)
        calls[how](x)
        return weakref.ref(x)

    batch()  # its tracing leaves cycles
    gc.disable()
    try:
        assert batch()() is None
    finally:
        gc.enable()

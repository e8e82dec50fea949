"""Models cut into stages, their losses, the way back to a module, and gradient transforms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fpipe
from fpipe.interop import huggingface

LABELS = torch.full((2, 5), -100)


def test_a_microbatch_without_tokens_counts_nothing():
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    targets = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(1))
    pipe = fpipe.pipeline(
        [lambda p, x: x * p], loss=huggingface.causal_loss, microbatches=2, group=fpipe.local(1),
        reduction=fpipe.weighted(lambda target: (target[:, 1:] != -100).sum()),
    )  # fmt: skip
    value, grads = fpipe.value_and_grad(pipe)(
        [torch.ones(7)], torch.cat([logits, logits]), torch.cat([targets, LABELS])
    )
    alone = fpipe.pipeline([lambda p, x: x * p], loss=huggingface.causal_loss, microbatches=1, group=fpipe.local(1))
    other, expected = fpipe.value_and_grad(alone)([torch.ones(7)], logits, targets)
    torch.testing.assert_close(value, other)
    torch.testing.assert_close(grads[0], expected[0])


def test_a_pattern_of_masked_that_fits_nothing_is_refused():
    tx = fpipe.masked(fpipe.sgd(0.1), ["*.ww"])
    with pytest.raises(fpipe.TransformError, match=r"\*\.ww"):
        tx.init([{"w": torch.ones(2)}])


def test_small_updates_of_bfloat16_parameters_are_not_lost():
    params = [torch.ones(4, dtype=torch.bfloat16)]
    tx = fpipe.master(fpipe.sgd(1e-3))
    state = tx.init(params)
    for _ in range(8):
        updates, state = tx.update([torch.full((4,), -1.0, dtype=torch.bfloat16)], state, params)
        params = fpipe.apply_updates(params, updates)
    assert torch.equal(params[0], torch.full((4,), 1.0078125, dtype=torch.bfloat16))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def _stale(group: Any) -> str:
    model = Tiny()
    stages, params = fpipe.from_module(model, cuts=["layers.2"])
    pipe = fpipe.pipeline(stages, group=group, microbatches=1)
    try:
        fpipe.to_module(model, pipe.place(params))
    except fpipe.FpipeError as error:
        return str(error)
    return ""


def test_to_module_refuses_stages_of_other_ranks():
    messages = fpipe.testing.run(_stale, ranks=2)
    assert all("gather" in message for message in messages), messages


def test_to_module_gathers():
    def work(group: Any) -> bool:
        model = Tiny()
        stages, params = fpipe.from_module(model, cuts=["layers.2"])
        pipe = fpipe.pipeline(stages, group=group, microbatches=1)
        changed = fpipe.tree.tree_map(lambda t: t + 1, pipe.place(params))
        before = [p.clone() for p in model.parameters()]
        fpipe.to_module(model, changed, gather=pipe)
        return all(torch.equal(p, q + 1) for p, q in zip(model.parameters(), before, strict=True))

    torch.manual_seed(0)
    assert fpipe.testing.run(work, ranks=2) == [True, True]

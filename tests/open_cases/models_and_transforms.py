"""Models cut into stages, their losses, the way back to a module, and gradient transforms."""

from __future__ import annotations

import torch

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


def test_small_updates_of_bfloat16_parameters_are_not_lost():
    params = [torch.ones(4, dtype=torch.bfloat16)]
    tx = fpipe.master(fpipe.sgd(1e-3))
    state = tx.init(params)
    for _ in range(8):
        updates, state = tx.update([torch.full((4,), -1.0, dtype=torch.bfloat16)], state, params)
        params = fpipe.apply_updates(params, updates)
    assert torch.equal(params[0], torch.full((4,), 1.0078125, dtype=torch.bfloat16))

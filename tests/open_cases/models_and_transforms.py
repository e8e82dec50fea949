"""Models cut into stages, their losses, the way back to a module, and gradient transforms."""

from __future__ import annotations

import torch

import fpipe


def test_small_updates_of_bfloat16_parameters_are_not_lost():
    params = [torch.ones(4, dtype=torch.bfloat16)]
    tx = fpipe.master(fpipe.sgd(1e-3))
    state = tx.init(params)
    for _ in range(8):
        updates, state = tx.update([torch.full((4,), -1.0, dtype=torch.bfloat16)], state, params)
        params = fpipe.apply_updates(params, updates)
    assert torch.equal(params[0], torch.full((4,), 1.0078125, dtype=torch.bfloat16))

"""Forward-only calls over processes: logits on the rank of the last stage, zeros of their shape
elsewhere, and no trace of it in the training steps around them.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch

import fpipe
from common import layer
from module_model import CUTS, batch, cross_entropy, language_model

SCHEDULES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
    "VMin",
)
#: those that run without ``--long``
SOME = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
MICROBATCHES = 4


def _everything(names: tuple[str, ...]) -> list[str]:
    """What went wrong on this rank."""
    group = fpipe.init()
    model = language_model()
    tokens, targets = batch(2 * MICROBATCHES)
    want = model(tokens).detach()
    return [fault for name in names for fault in _one(name, group, model, tokens, targets, want)]


def _one(name: str, group: Any, model: Any, tokens: Any, targets: Any, want: Any) -> list[str]:
    stages, params = fpipe.from_module(model, CUTS[1:2] if name in SCHEDULES[:2] else CUTS)
    ask = {"microbatches": MICROBATCHES, "group": group}
    outputs = fpipe.pipeline(stages, name, **ask)
    train = fpipe.value_and_grad(fpipe.pipeline(stages, name, loss=cross_entropy, **ask))
    params = outputs.place(params)
    faults = []

    def forward(when: str) -> None:
        with torch.inference_mode():
            y = outputs(params, tokens)
        here = group.rank == outputs.output_rank
        if y.shape != want.shape or y.dtype != want.dtype or y.requires_grad:
            faults.append(f"{name} {when}: {y.shape}, {y.dtype}")
        elif not torch.allclose(y, want if here else torch.zeros_like(want), rtol=1e-5, atol=1e-5):
            faults.append(f"{name} {when}: not {'the logits' if here else 'zeros'}")

    if outputs.output_rank != (0 if name in ("ZBVZeroBubble", "DualPipeV", "VMin") else 1):
        faults.append(f"{name}: outputs on rank {outputs.output_rank}")
    forward("before any training")
    loss, grads = train(params, tokens, targets)
    forward("between steps")
    again, same = train(params, tokens, targets)
    pairs = [(own[n], other[n]) for own, other in zip(grads, same, strict=True) for n in own or ()]
    if not torch.equal(loss, again) or not all(
        a is b is None or torch.equal(a, b) for a, b in pairs
    ):
        faults.append(f"{name}: the gradient changed")
    everywhere = fpipe.pipeline(stages, name, outputs="everywhere", **ask)(params, tokens)
    if not torch.allclose(everywhere, want, rtol=1e-5, atol=1e-5):
        faults.append(f"{name}: not the logits everywhere")
    return faults


def test_forward_only_on_two_processes(long: bool):
    names = SCHEDULES if long else SOME
    assert fpipe.launch(_everything, names, ranks=2, timeout=90) == [[], []]


@pytest.mark.parametrize(("name", "ranks"), [("VMin", 4), ("Hanayo", 4), ("Chimera", 4)])
def test_outputs_in_the_shorter_order_have_the_same_bits(name: str, ranks: int):
    """Of these the forwards run in another order than in the schedule."""
    torch.manual_seed(0)
    schedule = fpipe.make_schedule(name, ranks, 8)
    params = [torch.randn(3, 3) for _ in range(schedule.stages)]
    x = torch.randn(16, 3)
    pipe = fpipe.pipeline([layer] * schedule.stages, schedule, group=fpipe.local(ranks))
    assert torch.equal(
        pipe(params, x),
        torch.cat([reduce(lambda y, p: layer(p, y), params, part) for part in x.chunk(8)]),
    )

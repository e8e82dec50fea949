"""Distillation: a student learns from the outputs of a teacher, and both run in one pipeline.

Each stage has some layers of the teacher and one of the student. The teacher's parameters are frozen, so its layers
have no backward. The loss compares what both return at the end: half of it is the distance between the words that they
expect (as probabilities, softened by TEMPERATURE), half is the student's cross entropy. It falls, but not to zero: this
teacher has random weights and expects other words than the targets, so no student fits both.

python examples/distillation.py                                   # four ranks in one process
torchrun --nproc-per-node 4 examples/distillation.py              # or a process for each
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

import fpipe

STAGES, LAYERS, WIDE, NARROW, WORDS, TEMPERATURE = 8, 2, 48, 16, 32, 2.0


def layers(weights: Tensor, x: Tensor) -> Tensor:
    for w in weights:
        x = x + torch.tanh(x @ w)
    return x


def first(p: dict[str, Any], tokens: Tensor) -> dict[str, Tensor]:
    return block(p, {"teacher": p["teacher words"][tokens], "student": p["student words"][tokens]})


def block(p: dict[str, Any], x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {who: layers(p[who], x[who]) for who in ("teacher", "student")}


def last(p: dict[str, Any], x: dict[str, Tensor]) -> dict[str, Tensor]:
    x = block(p, x)
    return {who: x[who] @ p[f"{who} words"].T for who in ("teacher", "student")}


def loss(logits: dict[str, Tensor], targets: Tensor) -> Tensor:
    soft = {who: (value / TEMPERATURE).log_softmax(-1).flatten(0, -2) for who, value in logits.items()}
    distance = kl_div(soft["student"], soft["teacher"], log_target=True, reduction="batchmean")
    hard = cross_entropy(logits["student"].flatten(0, -2), targets.flatten())
    return 0.5 * TEMPERATURE**2 * distance + 0.5 * hard


def main(steps: int = 30) -> list[float]:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw) * 0.2
    params = [{"teacher": normal(LAYERS, WIDE, WIDE), "student": normal(1, NARROW, NARROW)} for _ in range(STAGES)]
    for end in (params[0], params[-1]):
        end |= {"teacher words": normal(WORDS, WIDE), "student words": normal(WORDS, NARROW)}
    tokens = torch.randint(WORDS, (16, 12), generator=draw)
    targets = (3 * tokens + 1) % WORDS

    group = fpipe.init(pp=4)
    stages = [first, *[block] * (STAGES - 2), last]
    pipe = fpipe.pipeline(stages, "1F1B", loss=loss, microbatches=8, group=group, frozen=["*.teacher*"])
    params = pipe.place(params)
    step, tx = fpipe.value_and_grad(pipe), fpipe.adamw(1e-2)
    state, losses = tx.init(params), []
    for number in range(steps):
        value, grads = step(params, tokens, targets)
        updates, state = tx.update(grads, state, params)
        params = fpipe.apply_updates(params, updates)
        losses.append(value.item())
        if 0 in group.here and number % 5 == 4:
            print(f"step {number + 1:3d}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()

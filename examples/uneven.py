"""Uneven layers, and measure the bubble (load balancing): time the layers, and cut them so that ranks are idle less.

The slowest stage determines the time of a step, and the other ranks wait for it. Here the first layers are wide, as in
a network for images. The layers are measured as twelve stages, ``fpipe.balance`` chooses the cut into four stages, and
the table has the share of a step for which each rank is idle, with layers of equal counts and with the chosen cut.

The cut changes no number: both pipelines have the same losses, to the last bit. They fall as targets are learned.

python examples/uneven.py                                   # four ranks in one process
torchrun --nproc-per-node 4 examples/uneven.py              # or a process for each
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

import fpipe

RANKS, WIDTH, HIDDEN = 4, 64, (1024, 1024, 1024, *[128] * 9)
Layer = dict[str, Tensor]


def layer(p: Layer, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["up"]) @ p["down"]


def stage(layers: list[Layer], x: Tensor) -> Tensor:
    """As many layers as it has parameters of."""
    for p in layers:
        x = layer(p, x)
    return x


def loss(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean()


def main(steps: int = 20) -> list[float]:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw)
    layers = [{"up": normal(WIDTH, n) / 8, "down": normal(n, WIDTH) / (4 * n**0.5)} for n in HIDDEN]
    x, t = normal(256, WIDTH), normal(256, WIDTH)

    group = fpipe.init(pp=RANKS)
    fine = fpipe.pipeline([layer] * len(HIDDEN), "Interleaved1F1B", loss=loss, microbatches=16, group=group)
    costs = fpipe.measure_costs(fine, fine.place(layers), x, t, steps=5)  # the same on every process
    times = [f + b for f, b in zip(costs.F, costs.B, strict=True)]
    plan = fpipe.balance(times, RANKS, "1F1B", microbatches=16)

    def train(starts: Sequence[int]) -> list[float]:
        """Train with stages that begin at these layers."""
        pipe = fpipe.pipeline([stage] * RANKS, "1F1B", loss=loss, microbatches=16, group=group)
        params = pipe.place([layers[low:high] for low, high in pairwise([*starts, len(layers)])])
        step, tx = fpipe.value_and_grad(pipe), fpipe.adamw(3e-3)
        state, losses = tx.init(params), []
        for _ in range(steps):
            value, grads = step(params, x, t)
            updates, state = tx.update(grads, state, params)
            params = fpipe.apply_updates(params, updates)
            losses.append(value.item())
        return losses

    losses = train(plan.starts)
    assert losses == train(plan.even)
    if 0 in group.here:
        print("milliseconds of each layer", " ".join(f"{1e3 * time:.2f}" for time in times))
        for name, starts, timeline in (
            ("equal counts", plan.even, plan.even_timeline),
            ("chosen cut", plan.starts, plan.timeline),
        ):
            idle = " ".join(f"{1 - busy / timeline.total:4.0%}" for busy in timeline.busy)
            print(f"{name:>12s}: stages begin at layers {starts}, idle by rank {idle}, bubble {timeline.bubble:.0%}")
        print(f"a step takes {1 / plan.gain:.0%} of the time, by the simulator")
        print("losses", " ".join(f"{value:.4f}" for value in losses[::5]))
    return losses


if __name__ == "__main__":
    main()

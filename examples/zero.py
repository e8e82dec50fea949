"""Data parallel x pipeline parallel with ZeRO: copies of a pipeline that share parameters and optimizer state.

torchrun --nproc-per-node 4 examples/zero.py               # 2 copies of a pipeline of 2 ranks, sharded parameters
torchrun --nproc-per-node 4 examples/zero.py --zero 0      # whole parameters: the same losses
torchrun --nproc-per-node 4 examples/zero.py --plan        # with UNSHARD, RESHARD and REDUCE, and bytes, for one rank
python examples/zero.py                                    # one process: a pipeline of two ranks, one copy

The same code works for every level: the optimizer and the pipeline take the result of ``pipe.shard``, and gradients
have the same form.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import fpipe

WIDTH, STAGES, MICROBATCHES, ROWS = 64, 8, 4, 16  # the last: rows of the batch, of all copies together


def block(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x @ p["w1"] + p["b"]) @ p["w2"]


def squared(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


def network() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"w1": (WIDTH, WIDTH), "b": (WIDTH,), "w2": (WIDTH, WIDTH)}
    return [{name: torch.randn(shape, generator=draw) * 0.1 for name, shape in shapes.items()} for _ in range(STAGES)]


def batch(step: int, copy: int, copies: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This copy's rows of a step's batch."""
    draw = torch.Generator().manual_seed(step % 4)
    x, y = torch.randn(2, ROWS, WIDTH, generator=draw)
    return x.chunk(copies)[copy], y.chunk(copies)[copy]


def held(params: list[Any]) -> int:
    """Bytes of parameters between steps."""
    return sum(leaf.nbytes for stage in params if stage is not None for leaf in stage.values())


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, and return the losses, which are those of all copies together."""
    told = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    told.add_argument("--zero", type=int, default=3)
    told.add_argument("--steps", type=int, default=20)
    told.add_argument("--plan", action="store_true")
    given = told.parse_args(arguments)
    torch.set_num_threads(1)

    several = torch.distributed.is_torchelastic_launched()
    group = fpipe.init(pp=2, dp=2) if several else fpipe.local(2)
    copies = group.dp
    pipe = fpipe.pipeline(
        [block] * STAGES,
        "Interleaved1F1B",
        loss=squared,
        microbatches=MICROBATCHES,
        group=group,
        dp=fpipe.copies(copies, zero=given.zero, unsharded=2) if several else None,
    )
    params = pipe.shard(network())
    tx = fpipe.chain(fpipe.clip_by_global_norm(1.0, over=pipe), fpipe.adamw(3e-3, donate=True))
    state = tx.init(params)
    first = 0 in group.here and 0 in copies.here
    if first:
        print(f"rank 0 of copy 0 holds {held(params):,} of {held(network()):,} bytes of parameters between steps")
    if given.plan:
        plans = pipe.plan(params, *batch(0, copies.here[0], copies.size))
        print(plans if first else "", end="\n" * first)

    losses = []
    for step in range(given.steps):
        loss, grads = fpipe.value_and_grad(pipe)(params, *batch(step, copies.here[0], copies.size))
        params, state = tx.step(grads, state, params, donate=True)
        losses.append(loss.item())
        if first and step % 5 == 4:
            print(f"step {step + 1:3d}  loss {losses[-1]:.6f}")
    whole = pipe.unshard(params)  # for a checkpoint: the stages of this rank, whole again
    assert all(stage["w1"].shape == (WIDTH, WIDTH) for stage in whole if stage is not None)
    return losses


if __name__ == "__main__":
    main()

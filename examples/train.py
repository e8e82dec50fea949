"""A small GPT on Shakespeare's sonnets. This file runs unchanged in each of these ways:

python examples/train.py                                                              # 4 ranks in this process
torchrun --nproc-per-node 4 examples/train.py                                         # 4 processes
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/train.py

and prints the same loss in each, to the last digit, at every step.
"""

import argparse

import torch

import fpipe
from fpipe.products.demo import Sizes, cross_entropy, gpt, sonnets


def main(schedule: str = "ZBV", steps: int = 20, ranks: int = 4, width: int = 32) -> list[float]:
    """Train, and return the losses; every rank has them."""
    torch.set_num_threads(1)  # sums made by more threads have other bits
    group = fpipe.init(pp=ranks)
    plan = fpipe.make_schedule(schedule, ranks=ranks, microbatches=2 * ranks)
    text = sonnets()
    stages, params = gpt(Sizes(len(text.letters), width=width), plan.stages)
    pipe = fpipe.pipeline(stages, plan, loss=cross_entropy, group=group)
    params = pipe.place(params)
    step = fpipe.value_and_grad(pipe)
    tx = fpipe.chain(fpipe.clip_by_global_norm(1.0, over=pipe), fpipe.adamw(3e-3))
    state = tx.init(params)

    losses = []
    for number in range(steps):
        x, y = text.batch(number, rows=2 * plan.microbatches, length=32)  # a function of the step: the same everywhere
        loss, grads = step(params, x, y)
        updates, state = tx.update(grads, state, params)
        params = fpipe.apply_updates(params, updates)
        losses.append(loss.item())
        if 0 in group.here:
            print(f"step {number} loss {losses[-1]!r}", flush=True)
    return losses


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--schedule", default="ZBV")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--width", type=int, default=32)
    main(**vars(options.parse_args()))

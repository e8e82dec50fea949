"""A transformer with a mixture of experts: expert parallelism x pipeline parallelism, fused actions interleaved.

    torchrun --nproc-per-node 4 examples/moe.py                        # 2 x 2 processes: DualPipeV, woven
    torchrun --nproc-per-node 4 examples/moe.py --schedule Overlapped1F1B
    torchrun --nproc-per-node 4 examples/moe.py --overlap sequential   # the same bits, without the overlap
    python examples/moe.py --plan                                      # one process; prints the plan and its weaves

The members of an expert group hold different experts and equal copies of all other parameters. The block is in
moe_block.py.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.nn.functional as F
from moe_block import WIDTH, block, block_parameters
from torch import Tensor

import fpipe

VOCABULARY, MICROBATCHES, ROWS, LENGTH = 64, 8, 16, 12


def stages_of(count: int, members: Any, size: int) -> list[Any]:
    """Blocks; the first with an embedding before it, the last with the logits after it."""
    stages = [block(members, size)] * count
    first, stages[0] = stages[0], lambda p, tokens: first(p, p["embedding"][tokens])
    last, stages[-1] = stages[-1], lambda p, x: F.layer_norm(last(p, x), (WIDTH,)) @ p["head"]
    return stages


def parameters(count: int, member: int, size: int) -> list[dict[str, Tensor]]:
    """Every stage's parameters; of the experts, those of one member."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator) / shape[-2] ** 0.5
    made = [block_parameters(draw, member, size) for _ in range(count)]
    made[0]["embedding"] = draw(VOCABULARY, WIDTH) * 4
    made[-1]["head"] = draw(WIDTH, VOCABULARY)
    return made


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def batch(step: int, member: int) -> tuple[Tensor, Tensor]:
    """Tokens of which every other one is a repetition, and the tokens that follow them."""
    generator = torch.Generator().manual_seed(100 * step + member)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    tokens[:, 1::2] = tokens[:, :-1:2]
    return tokens[:, :-1], tokens[:, 1:]


def main(arguments: list[str] | None = None) -> list[float]:
    """Train for a few steps; returns the losses."""
    told = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told.add_argument("--schedule", default="DualPipeV")
    told.add_argument("--overlap", default="weave", choices=["weave", "sequential"])
    told.add_argument("--members", type=int, default=2, help="of an expert group, where there are several processes")
    told.add_argument("--steps", type=int, default=10)
    told.add_argument("--plan", action="store_true", help="print what each rank here will run")
    given = told.parse_args(sys.argv[1:] if arguments is None else arguments)
    torch.set_num_threads(1)

    group = fpipe.init(dp=given.members) if torch.distributed.is_torchelastic_launched() else fpipe.local(2)
    spread = group.dp
    members, size, member = spread.pg, spread.size, spread.here[0]
    schedule = fpipe.make_schedule(given.schedule, group.size, MICROBATCHES)
    stages = stages_of(schedule.stages, members, size)
    # members are copies of the pipeline with rows of their own, and hold the experts each for itself
    copies = {"dp": fpipe.copies(spread, own=["*.up", "*.down"])} if size > 1 else {}
    pipe = fpipe.pipeline(stages, schedule, loss=cross_entropy, group=group, overlap=given.overlap, **copies)
    params, losses, tx = pipe.place(parameters(schedule.stages, member, size)), [], fpipe.sgd(0.5)
    state = tx.init(params)
    for step in range(given.steps):
        x, y = batch(step, member)
        if given.plan and step == 0:
            print(pipe.plan(params, x, y))
        loss, grads = fpipe.value_and_grad(pipe)(params, x, y)
        updates, state = tx.update(grads, state, params)
        params = fpipe.apply_updates(params, updates)
        losses.append(float(loss))
        if group.here[0] == 0 and member == 0:
            print(f"step {step}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()

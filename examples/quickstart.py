"""A pipeline is a function, and its gradient is a transform of it. The same file, three ways:

python examples/quickstart.py                                 # four ranks in this process
torchrun --nproc-per-node 4 examples/quickstart.py            # four processes, one rank each
fpipe draw ZBV --ranks 4 --microbatches 8                     # the schedule that it runs
"""

import torch

import fpipe

WORDS, WIDTH, STAGES = 50, 32, 8


# A stage is a pure function of its parameters (any pytree) and its input (any pytree).
def embed(p, tokens):
    return p["wte"][tokens]


def block(p, x):
    return x + torch.tanh(x @ p["w1"]) @ p["w2"]


def head(p, x):
    return x @ p["wte"].T


def cross_entropy(logits, y):
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())


def main(steps: int = 20) -> list[float]:
    """Train on a sequence that can be learned, and return the losses."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stages = [embed, *[block] * (STAGES - 2), head]
    draw = lambda *shape: torch.randn(*shape) * 0.1
    params = [
        {"wte": draw(WORDS, WIDTH)},
        *({"w1": draw(WIDTH, WIDTH), "w2": draw(WIDTH, WIDTH)} for _ in range(STAGES - 2)),
        {"wte": draw(WORDS, WIDTH)},
    ]
    tokens = torch.randint(WORDS, (16, 12))
    targets = (3 * tokens + 1) % WORDS

    group = fpipe.init(pp=4)  # under torchrun each process is one rank; without it, all four live here
    pipe = fpipe.pipeline(stages, "ZBV", loss=cross_entropy, microbatches=8, group=group)
    params = pipe.place(params)  # stages that live elsewhere become None
    step = fpipe.value_and_grad(pipe)
    tx = fpipe.chain(fpipe.clip_by_global_norm(1.0, over=pipe), fpipe.adamw(1e-2))
    state = tx.init(params)
    losses = []
    for number in range(steps):
        loss, grads = step(params, tokens, targets)
        updates, state = tx.update(grads, state, params)
        params = fpipe.apply_updates(params, updates)
        losses.append(loss.item())
        if 0 in group.here and number % 5 == 4:
            print(f"step {number + 1:3d}  loss {losses[-1]:.4f}")
    if 0 in group.here:
        print(f"forward only: {pipe(params, tokens, targets).item():.4f} on rank 0, which holds stages {pipe.here}")
    else:
        pipe(params, tokens, targets)  # every rank takes part
    return losses


if __name__ == "__main__":
    main()

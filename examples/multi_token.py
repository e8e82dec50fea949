"""Multi-token prediction: beside the next word, extra heads predict the words after it.

Each head is a stage of its own at the end: it computes on from the hidden state before it, predicts one word further,
and passes the predictions so far on. All heads read one embedding, which is tied over the first stage and theirs: its
gradients are summed.

The loss is the cross entropy of the next word, and SHARE of that of each later one. It begins above that of guesses,
1.6 times the logarithm of WORDS, and falls below 0.5: each word is 5 times the one before, so all can be predicted.

python examples/multi_token.py                                   # four ranks in one process
torchrun --nproc-per-node 4 examples/multi_token.py              # or a process for each
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fpipe

WORDS, WIDTH, BLOCKS, HEADS, SHARE = 32, 24, 5, 3, 0.3
STAGES = BLOCKS + HEADS  # the first block embeds


def block(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Each word sees the mean of those before it."""
    before = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
    return x + torch.tanh(torch.cat([x, before], -1) @ p["w"])


def first(p: dict[str, Tensor], tokens: Tensor) -> Tensor:
    return block(p, p["wte"][tokens])


def next_word(p: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """The first head, which starts the predictions."""
    return further(p, {"x": x})


def further(p: dict[str, Tensor], given: dict[str, Tensor]) -> dict[str, Tensor]:
    x = block(p, given["x"])
    return {**given, "x": x, f"{len(given) - 1}": x @ p["wte"].T}


def loss(y: dict[str, Tensor], words: Tensor) -> Tensor:
    """``words`` go on HEADS words beyond the input."""
    total = torch.zeros(())
    for head in range(HEADS):
        logits = y[str(head)]
        targets = words[:, head : head + logits.shape[1]]
        total = total + (SHARE if head else 1.0) * cross_entropy(logits.flatten(0, -2), targets.flatten())
    return total


def main(steps: int = 30) -> list[float]:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw) * 0.2
    embedding = normal(WORDS, WIDTH)
    reads = [0, *range(BLOCKS, STAGES)]  # the stages that read the embedding
    params = [{"w": normal(2 * WIDTH, WIDTH)} for _ in range(STAGES)]
    for stage in reads:
        params[stage]["wte"] = embedding.clone()
    start = torch.randint(WORDS, (16, 1), generator=draw)
    words = (start * 5 ** torch.arange(12 + HEADS)) % WORDS  # each is 5 times the one before
    x, targets = words[:, :12], words[:, 1:]

    group = fpipe.init(pp=4)
    stages = [first, *[block] * (BLOCKS - 1), next_word, *[further] * (HEADS - 1)]
    tied = [tuple(f"{stage}.wte" for stage in reads)]
    pipe = fpipe.pipeline(stages, "ZBV", loss=loss, microbatches=8, group=group, tied=tied)
    params = pipe.place(params)
    step, tx = fpipe.value_and_grad(pipe), fpipe.adamw(1e-2)
    state, losses = tx.init(params), []
    for number in range(steps):
        value, grads = step(params, x, targets)
        updates, state = tx.update(grads, state, params)
        params = fpipe.apply_updates(params, updates)
        losses.append(value.item())
        if 0 in group.here and number % 5 == 4:
            print(f"step {number + 1:3d}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()

"""A head with a large vocabulary (chunked_cross_entropy): the last stage computes the loss without whole logits.

Logits are tokens x vocabulary, often the largest tensors of a training step. ``fpipe.chunked_cross_entropy`` computes
a part of their columns at a time. The last stage returns the loss; its labels are a side input.

The loss begins near the logarithm of VOCABULARY, that of guesses, and falls to 0.02: each word decides the next one.
With VOCABULARY = 262144 (262k) it takes half a minute of a core and falls from 13.1 to 0.02.

python examples/large_vocabulary.py                                # two ranks in this process
torchrun --nproc-per-node 2 examples/large_vocabulary.py           # two processes, one rank each
"""

import torch

import fpipe

VOCABULARY, WIDTH, ROWS, LENGTH, MICROBATCHES, CHUNK = 32768, 32, 16, 24, 4, 2048
IGNORED = -100  # the label of tokens that do not count


def embed(p, tokens):
    return p["table"][tokens]


def block(p, x):
    return x + torch.tanh(x @ p["in"]) @ p["out"]


def head(p, x, *, labels):
    """The mean over the tokens of a microbatch that count."""
    hidden = torch.nn.functional.layer_norm(x, (WIDTH,))
    return fpipe.chunked_cross_entropy(hidden, p["head"], labels, chunk=CHUNK)


def tokens_that_count(labels):
    """The weight of a microbatch: the loss of a step is then the mean over all its tokens."""
    return (labels != IGNORED).sum()


def batch(step: int):
    """Sequences of words in which each word decides the next; rows end at different places."""
    draw = torch.Generator().manual_seed(step)
    words = torch.randint(64, (ROWS, 1), generator=draw) + 5 * torch.arange(LENGTH + 1)
    text = words % 64 * (VOCABULARY // 64)
    labels = text[:, 1:].clone()
    ends = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=draw)
    labels[torch.arange(LENGTH) >= ends] = IGNORED
    return text[:, :-1], labels


def main(steps: int = 30) -> list[float]:
    """Train for a few steps, and return the losses."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    normal = lambda *sizes: torch.randn(*sizes, generator=draw)
    hidden = [{"in": normal(WIDTH, WIDTH) / 6, "out": normal(WIDTH, WIDTH) / 6} for _ in range(2)]
    params = [{"table": normal(VOCABULARY, WIDTH)}, *hidden, {"head": normal(VOCABULARY, WIDTH) / 6}]
    group = fpipe.init(pp=2)
    pipe = fpipe.pipeline(
        [embed, block, block, head],
        "Interleaved1F1B",
        loss=lambda value, labels: value,  # the last stage has computed it
        reduction=fpipe.weighted(tokens_that_count),
        microbatches=MICROBATCHES,
        group=group,
    )
    params, step = pipe.place(params), fpipe.value_and_grad(pipe)
    tx = fpipe.adamw(2e-2, weight_decay=0.0)
    state, losses = tx.init(params), []
    for number in range(steps):
        tokens, labels = batch(number)
        loss, grads = step(params, tokens, labels, labels=labels)  # for the weights, and for the head
        params, state = tx.step(grads, state, params)
        losses.append(loss.item())
        if 0 in group.here and number % 5 in (0, 4):
            print(f"step {number + 1:3d}  loss {losses[-1]:.4f}", flush=True)
    if 0 in group.here:
        rows = ROWS * LENGTH // MICROBATCHES
        whole, part = (rows * columns * 4 / 2**20 for columns in (VOCABULARY, CHUNK))
        print(f"logits of a microbatch: {whole:.0f} MiB as a whole, {part:.1f} MiB at a time")
    return losses


if __name__ == "__main__":
    main()

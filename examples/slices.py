"""Long sequences in slices: causal attention, whose keys and values go from each slice to the next (Seq1F1B).

Each sequence repeats a random phrase. To predict the second half, a model must attend to tokens of earlier slices.

python examples/slices.py
"""

import torch

import fpipe

WORDS, WIDTH, PHRASE, SLICES, MICROBATCHES = 12, 32, 16, 4, 4


def embed(p, x):
    """Tokens with their predecessors, at positions within the phrase."""
    words, before, where = x.unbind(-1)
    return p["word"][words] + p["before"][before] + p["where"][where]


def attention(p, carry, x):
    """Causal attention: the carry is the keys and values of earlier slices."""
    q, k, v = (x @ p["qkv"]).chunk(3, -1)
    if carry is not None:
        k, v = torch.cat([carry[0], k], 1), torch.cat([carry[1], v], 1)
    seen = torch.ones(x.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - x.shape[1])
    return x + torch.nn.functional.scaled_dot_product_attention(q, k, v, seen) @ p["out"], (k, v)


def head(p, x):
    return torch.nn.functional.layer_norm(x, (WIDTH,)) @ p["words"]


def cross_entropy(logits, target):
    """The mean over the tokens that can be known; a slice may have none."""
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-1, reduction="sum")
    return total / tokens(target).clamp(min=1)


def tokens(target):
    """The weight of a slice."""
    return (target >= 0).sum()


def batch(rows: int):
    """Tokens with predecessors and positions, and the next tokens where they can be known."""
    phrase = torch.randint(WORDS, (rows, PHRASE))
    text = torch.cat([phrase, phrase, phrase[:, :1]], 1)
    x = torch.stack([text[:, :-1], text[:, :-1].roll(1, 1), torch.arange(2 * PHRASE).expand(rows, -1) % PHRASE], -1)
    target = text[:, 1:].clone()
    target[:, : PHRASE - 1] = -1
    return x, target


def main(steps: int = 60, rows: int = 32) -> list[float]:
    """Train the model, and return the losses."""
    torch.manual_seed(0)
    draw = lambda *sizes: torch.randn(*sizes) * sizes[0] ** -0.5
    carrying = fpipe.Stage(attention, carry=True, initial_carry=None)
    stages = [embed, carrying, carrying, head]
    params = [
        {"word": draw(WORDS, WIDTH), "before": draw(WORDS, WIDTH), "where": draw(PHRASE, WIDTH)},
        *({"qkv": draw(WIDTH, 3 * WIDTH), "out": draw(WIDTH, WIDTH)} for _ in range(2)),
        {"words": draw(WIDTH, WORDS)},
    ]
    pipe = fpipe.pipeline(
        stages,
        "Seq1F1B",
        slices=SLICES,
        loss=cross_entropy,
        reduction=fpipe.weighted(tokens),
        microbatches=MICROBATCHES,
        group=fpipe.init(pp=4),
    )
    params, step = pipe.place(params), fpipe.value_and_grad(pipe)
    tx = fpipe.adamw(1e-2)
    state, losses = tx.init(params), []
    for _ in range(steps):
        loss, grads = step(params, *batch(rows))
        updates, state = tx.update(grads, state, params)
        params = fpipe.apply_updates(params, updates)
        losses.append(loss.item())
    print(f"{2 * PHRASE} tokens in {SLICES} slices: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()

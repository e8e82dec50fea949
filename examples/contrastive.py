"""A loss over the WHOLE batch: each row is compared with every other row of all microbatches (InfoNCE).

The loss function of a pipeline receives one microbatch. ``fpipe.vjp`` returns the outputs of the whole batch and a
pullback; between the two is ordinary PyTorch.

python examples/contrastive.py
"""

import torch

import fpipe


def layer(p, x):
    return x + torch.tanh(x @ p["in"]) @ p["out"]


def info_nce(z, temperature=0.2):
    """Rows 2k and 2k + 1 are two views of one thing, and every other row is something else."""
    z = torch.nn.functional.normalize(z, dim=-1)
    alike = (z @ z.T / temperature).fill_diagonal_(float("-inf"))
    partner = torch.arange(len(z)) ^ 1
    return torch.nn.functional.cross_entropy(alike, partner)


def main(steps: int = 20, rows: int = 32, width: int = 16) -> list[float]:
    """Train an encoder, and return the losses."""
    torch.manual_seed(0)
    params = [{"in": torch.randn(width, width) * 0.2, "out": torch.randn(width, width) * 0.2} for _ in range(8)]
    things = torch.randn(rows // 2, width).repeat_interleave(2, dim=0)
    views = things + 0.7 * torch.randn(rows, width)

    # outputs="everywhere": the loss is computed on every rank, from the same rows
    encoder = fpipe.pipeline([layer] * 8, "ZBV", microbatches=8, group=fpipe.init(pp=4), outputs="everywhere")
    params = encoder.place(params)
    tx = fpipe.adamw(1e-2)
    state, losses = tx.init(params), []
    for _ in range(steps):
        z, pullback = fpipe.vjp(encoder, params, views)  # all forwards of the schedule
        dz, loss = torch.func.grad_and_value(info_nce)(z)
        grads, _ = pullback(dz)  # all its backwards
        updates, state = tx.update(grads, state, params)
        params = fpipe.apply_updates(params, updates)
        losses.append(loss.item())
    print(f"{rows} rows in 8 microbatches, each compared with all: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()

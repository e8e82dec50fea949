"""An existing nn.Module is cut into stages, trained through a pipeline, and gets its parameters back.

python examples/module.py
"""

import torch
from torch import nn

import fpipe


class Residual(nn.Module):
    """A block of a user's model."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def main(steps: int = 30) -> list[float]:
    """Train a classifier: inside or outside of a circle."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), *(Residual(16) for _ in range(6)), nn.Linear(16, 2))
    model[0].requires_grad_(False)  # a frozen layer stays frozen, and costs nothing

    # One cut before each submodule that begins a stage. Names, frozen and tied parameters are carried along.
    stages, params = fpipe.from_module(model, cuts=["2", "4", "6"])
    points = torch.rand(64, 2) * 2 - 1
    inside = (points.square().sum(1) < 0.6).long()
    pipe = fpipe.pipeline(stages, "1F1B", loss=nn.functional.cross_entropy, microbatches=8, group=fpipe.init(pp=4))
    params = pipe.place(params)
    step, tx = fpipe.value_and_grad(pipe), fpipe.adamw(2e-2)
    state, losses = tx.init(params), []
    for _ in range(steps):
        loss, grads = step(params, points, inside)
        updates, state = tx.update(grads, state, params)
        params = fpipe.apply_updates(params, updates)
        losses.append(loss.item())
    fpipe.to_module(model, params, gather=pipe)  # on every process, with the stages of all
    right = (model(points).argmax(1) == inside).float().mean().item()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the module itself is now right in {right:.0%}")
    return losses


if __name__ == "__main__":
    main()

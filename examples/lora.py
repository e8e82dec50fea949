"""LoRA, low-rank adapters, with save and merge: the weights stay as they are; adapters are trained, saved and merged.

The loss is the mean squared error to random targets. It falls because the adapters learn 32 rows by heart. The last
line is the loss with the adapters that were saved and loaded, and with weights into which they were merged: the same.

python examples/lora.py                                   # four ranks in one process
torchrun --nproc-per-node 4 examples/lora.py              # or a process for each
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

import fpipe

STAGES, WIDTH, RANK, SCALE = 8, 32, 4, 2.0


def layer(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """With an adapter: ``down`` and ``up`` are a change of ``w`` that has rank RANK."""
    y = x @ p["w"]
    if "up" in p:
        y = y + SCALE * (x @ p["down"]) @ p["up"]
    return x + torch.tanh(y)


def merged(p: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
    """The same layer without an adapter."""
    return p and {"w": p["w"] + SCALE * p["down"] @ p["up"]}


def loss(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean()


def main(steps: int = 30) -> list[float]:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw)
    base = [{"w": normal(WIDTH, WIDTH) / WIDTH**0.5} for _ in range(STAGES)]
    # ``up`` is zero at first, so the model begins as it was
    adapters = [{"down": normal(WIDTH, RANK) / WIDTH, "up": torch.zeros(RANK, WIDTH)} for _ in range(STAGES)]
    x, t = normal(32, WIDTH), normal(32, WIDTH)

    group = fpipe.init(pp=4)
    # "*.w" gets no gradient: its stages compute no W for it, and the optimizer has no state of it
    pipe = fpipe.pipeline([layer] * STAGES, "ZBV", loss=loss, microbatches=8, group=group, frozen=["*.w"])
    params = pipe.place([{**w, **adapter} for w, adapter in zip(base, adapters, strict=True)])
    step, tx = fpipe.value_and_grad(pipe), fpipe.adamw(1e-2)
    state, losses = tx.init(params), []
    for number in range(steps):
        value, grads = step(params, x, t)
        updates, state = tx.update(grads, state, params)
        params = fpipe.apply_updates(params, updates)
        losses.append(value.item())
        if 0 in group.here and number % 5 == 4:
            print(f"step {number + 1:3d}  loss {losses[-1]:.4f}")

    only_adapters = [p and {name: p[name] for name in ("down", "up")} for p in params]
    with tempfile.TemporaryDirectory() as own:
        folder = Path(group.gather_objects(own)[0]) / "adapters"  # that of rank 0
        fpipe.save(folder, pipe, params=only_adapters)
        loaded = fpipe.load(folder, pipe, "params")
        bytes_of = lambda tree: sum(leaf.nbytes for p in tree if p for leaf in p.values())
        if 0 in group.here:
            print(f"rank 0 saved {bytes_of(only_adapters):,} bytes of {bytes_of(params):,}")

    tuned = [w and {**w, **p} for w, p in zip(pipe.place(base), loaded, strict=True)]
    plain = fpipe.pipeline([layer] * STAGES, "ZBV", loss=loss, microbatches=8, group=group)
    with_adapters, without = pipe(tuned, x, t), plain([merged(p) for p in tuned], x, t)
    torch.testing.assert_close(without, with_adapters)
    if 0 in group.here:
        print(f"loss with adapters {with_adapters:.6f}, merged into the weights {without:.6f}")
    return losses


if __name__ == "__main__":
    main()

"""A big tower on several ranks (multimodal, vision-language): a vision tower before a small text model.

The tower is taken to cost three times as much as the text model: with a rank each, that of the text would wait.
``replicas=(3, 1)`` puts the tower on three ranks, each of which runs every third microbatch, and the text model on one.
The text is a side input of its stage: it is not sent between ranks.

The loss is the cross entropy of the next word of a caption; it falls, because the kind of an image determines its
caption. Gradients of the three copies are added in the order of
microbatches, so the losses are those of two ranks, to the last bit.

python examples/tower.py                                   # four ranks in one process
torchrun --nproc-per-node 4 examples/tower.py              # or a process for each
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fpipe

PATCHES, WIDTH, LAYERS, KINDS, WORDS, LENGTH = 16, 32, 6, 4, 12, 6


def tower(p: dict[str, Tensor], images: Tensor) -> Tensor:
    """Patches of an image -> one vector."""
    x = images @ p["in"]
    for w in p["layers"]:
        x = x + torch.tanh((x + x.mean(1, keepdim=True)) @ w)
    return x.mean(1)


def text(p: dict[str, Tensor], seen: Tensor, *, words: Tensor) -> Tensor:
    """Each word sees the image, and the mean of the words so far."""
    x = p["wte"][words]
    x = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None] + x + seen[:, None]
    return torch.tanh(x @ p["w"]) @ p["wte"].T


def loss(logits: Tensor, following: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, -2), following.flatten())


def main(steps: int = 40) -> list[float]:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw)
    params = [
        {"in": normal(WIDTH, WIDTH) / 8, "layers": normal(LAYERS, WIDTH, WIDTH) / 16},
        {"wte": normal(WORDS, WIDTH) / 2, "w": normal(WIDTH, WIDTH) / 6},
    ]
    kind = torch.randint(KINDS, (48,), generator=draw)  # of each image, and the caption that it has
    images = normal(KINDS, 1, WIDTH)[kind] + normal(48, PATCHES, WIDTH)
    captions = torch.randint(WORDS, (KINDS, LENGTH + 1), generator=draw)[kind]
    words, following = captions[:, :-1], captions[:, 1:]

    costs = fpipe.Costs(F=[3, 1], I=[3, 1], W=[3, 1])  # measured ones: fpipe.measure_costs
    schedule = fpipe.make_schedule("1F1B", ranks=4, microbatches=12, replicas=(3, 1))
    chosen = fpipe.solve(costs, ranks=4, microbatches=12, placement="replicated")
    assert str(chosen.placement) == str(schedule.placement)  # the solver puts the tower on three ranks too

    group = fpipe.init(pp=4)
    pipe = fpipe.pipeline([tower, text], schedule, loss=loss, group=group)
    params = pipe.place(params)
    step, tx = fpipe.value_and_grad(pipe), fpipe.adamw(1e-2)
    state, losses = tx.init(params), []
    for number in range(steps):
        value, grads = step(params, images, following, words=words)
        updates, state = tx.update(grads, state, params)
        params = fpipe.apply_updates(params, updates)
        losses.append(value.item())
        if 0 in group.here and number % 5 == 4:
            print(f"step {number + 1:3d}  loss {losses[-1]:.4f}")
    if 0 in group.here:
        alone = fpipe.make_schedule("1F1B", ranks=2, microbatches=12).simulate(costs)
        print(
            f"simulated time of a step {schedule.simulate(costs).total:g}, with a rank for each stage {alone.total:g}"
        )
    return losses


if __name__ == "__main__":
    main()

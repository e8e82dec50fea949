"""PyTorch in one process, with as many threads as the others have processes."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.peers.job import Job
from benchmarks.peers.model import Layer, Setting, Update, batch, loss


def build(setting: Setting, rank: int) -> Job:
    """A module, whose gradients are accumulated over microbatches."""
    torch.set_num_threads(setting.ranks)
    layers = [Layer(setting, n) for n in setting.names()]
    module = nn.Sequential(*layers)
    ran = torch.compile(module) if setting.compile else module
    update = Update(setting, layers)
    x, t = map(torch.from_numpy, batch(setting))
    pairs = list(zip(x.split(setting.rows), t.split(setting.rows), strict=True))

    def step() -> float:
        total = torch.zeros(())
        for a, b in pairs:
            value = loss(ran(a), b) / setting.microbatches
            value.backward()
            total += value.detach()
        update()
        return total.item()

    return Job(step, update.norms)

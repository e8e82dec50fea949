"""torchgpipe: GPipe by threads of one process."""

from __future__ import annotations

import torch
from torch import nn
from torchgpipe import GPipe

from benchmarks.peers.job import Job
from benchmarks.peers.model import Layer, Setting, Update, batch, loss


def build(setting: Setting, rank: int) -> Job:
    """A module that is cut over threads; the loss is that of the whole batch."""
    layers = [Layer(setting, n) for n in setting.names()]
    module = GPipe(
        nn.Sequential(*layers),
        balance=[len(names) for names in setting.cuts(setting.ranks, "loop")],
        devices=["cpu"] * setting.ranks,
        chunks=setting.microbatches,
        checkpoint="always" if setting.recompute else "never",
    )
    update = Update(setting, layers)
    x, t = map(torch.from_numpy, batch(setting))

    def step() -> float:
        value = loss(module(x), t)
        value.backward()
        update()
        return value.item()

    return Job(step, update.norms)

"""A small language model as an ``nn.Module``, the positions where tests cut it into stages, and
data for it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.mix, self.up = nn.Linear(width, width, bias=False), nn.Linear(width, width)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        x = x + torch.tanh(self.mix(x)).cumsum(1)
        return self.up(x) if keep is None else self.up(x) * keep


class LanguageModel(nn.Module):
    """A decoder with what public models have around their blocks: a check of sizes, computed
    positions, a buffer, a long residual, a head tied to the embedding, an optional mask.
    """

    def __init__(self, blocks: int = 4, width: int = 6):
        super().__init__()
        self.embed, self.position = nn.Embedding(11, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
        _, length = tokens.shape
        assert length <= self.position.num_embeddings, "too long"
        positions = torch.arange(0, length, device=tokens.device)
        x = first = self.embed(tokens) * self.scale + self.position(positions)
        mask = None if keep is None else keep.unsqueeze(-1)
        for block in self.blocks:
            x = block(x, mask)
        return nn.functional.linear(self.norm(x + first) * self.scale, self.embed.weight)


CUTS = ["blocks.1", "blocks.2", "norm"]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def language_model() -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel()
    model.norm.bias.requires_grad_(False)
    model.blocks[2].mix.weight.requires_grad_(False)
    return model


def batch(rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 11, (rows, 5), generator=generator), torch.randint(
        0, 11, (rows, 5), generator=generator
    )

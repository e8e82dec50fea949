"""The transformer that every library trains: sizes, weights, tokens, cuts, and its layers in torch.

Weights and tokens come from numpy by name, so that each library makes the same ones.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

#: layers, width, heads, vocabulary
MODELS = {
    "tiny": (4, 64, 4, 256),
    "16M": (8, 384, 6, 256),
    "GPT-2 small": (12, 768, 12, 50257),
}
RATE = 1e-2


@dataclass(frozen=True)
class Setting:
    """What a job trains, and how."""

    library: str
    schedule: str
    model: str = "tiny"
    ranks: int = 2
    microbatches: int = 8
    rows: int = 1  # of a microbatch
    tokens: int = 128
    dtype: str = "float32"
    optimizer: str = "sgd"
    recompute: bool = False
    compile: str = ""  # "addmm" or "inductor"
    steps: int = 5

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Layers, width, heads and vocabulary of the model."""
        return MODELS[self.model]

    @property
    def kind(self) -> torch.dtype:
        """The type of the parameters."""
        return getattr(torch, self.dtype)

    def names(self) -> list[str]:
        """The layers in order: the embedding, the blocks, the head."""
        return ["embedding", *(f"block{i}" for i in range(self.shape[0])), "head"]

    def cuts(self, stages: int, placement: str) -> list[list[str]]:
        """The layers of each stage: those cuts that load the fullest rank least.

        Args:
            stages: how many stages.
            placement: "loop" (stage s on rank s mod ranks) or "V".
        """
        _, width, _, vocabulary = self.shape
        names = self.names()
        cost = [0.0, *(12.0 * width + 2 * self.tokens for _ in names[1:-1]), float(vocabulary)]
        ranks = self.ranks
        homes = [
            s % ranks if placement == "loop" else min(s, 2 * ranks - 1 - s) for s in range(stages)
        ]

        def load(bounds: Sequence[int]) -> tuple[float, float]:
            sums = [sum(cost[a:b]) for a, b in itertools.pairwise(bounds)]
            return max(
                sum(s for s, home in zip(sums, homes, strict=True) if home == r)
                for r in range(ranks)
            ), max(sums)

        inner = itertools.combinations(range(1, len(names)), stages - 1)
        best = min(((0, *cut, len(names)) for cut in inner), key=load)
        return [names[a:b] for a, b in itertools.pairwise(best)]


def weights(setting: Setting, layer: str) -> dict[str, np.ndarray]:
    """The parameters of a layer, in float32."""
    _, width, _, vocabulary = setting.shape

    def normal(name: str, *shape: int) -> np.ndarray:
        source = np.random.default_rng(zlib.crc32(f"{layer}.{name}".encode()))
        return source.standard_normal(shape, dtype=np.float32) * np.float32(0.02)

    def ones() -> np.ndarray:
        return np.ones(width, np.float32)

    def zeros(n: int) -> np.ndarray:
        return np.zeros(n, np.float32)

    if layer == "embedding":
        return {
            "wte": normal("wte", vocabulary, width),
            "wpe": normal("wpe", setting.tokens, width),
        }
    if layer == "head":
        return {"norm": ones(), "bias": zeros(width), "out": normal("out", vocabulary, width)}
    return {
        "norm1": ones(),
        "bias1": zeros(width),
        "qkv": normal("qkv", 3 * width, width),
        "bqkv": zeros(3 * width),
        "proj": normal("proj", width, width),
        "bproj": zeros(width),
        "norm2": ones(),
        "bias2": zeros(width),
        "up": normal("up", 4 * width, width),
        "bup": zeros(4 * width),
        "down": normal("down", width, 4 * width),
        "bdown": zeros(width),
    }


def tensors(setting: Setting, layer: str) -> dict[str, torch.Tensor]:
    """The parameters of a layer, as tensors of the type that is trained."""
    return {k: torch.from_numpy(v).to(setting.kind) for k, v in weights(setting, layer).items()}


def batch(setting: Setting) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets: (rows of all microbatches, tokens)."""
    rows = setting.microbatches * setting.rows
    drawn = np.random.default_rng(0).integers(0, setting.shape[3], (rows, setting.tokens + 1))
    return drawn[:, :-1].copy(), drawn[:, 1:].copy()


def embedding(p: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Sum of the embeddings of tokens and positions."""
    return F.embedding(tokens, p["wte"]) + p["wpe"]


def block(p: Any, x: torch.Tensor, heads: int) -> torch.Tensor:
    """A block of GPT-2: causal attention and a perceptron, with norms and residuals."""
    width = x.shape[-1]
    h = F.linear(F.layer_norm(x, (width,), p["norm1"], p["bias1"]), p["qkv"], p["bqkv"])
    q, k, v = (t.unflatten(-1, (heads, width // heads)).transpose(1, 2) for t in h.chunk(3, -1))
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = x + F.linear(a, p["proj"], p["bproj"])
    h = F.layer_norm(x, (width,), p["norm2"], p["bias2"])
    h = F.gelu(F.linear(h, p["up"], p["bup"]), approximate="tanh")
    return x + F.linear(h, p["down"], p["bdown"])


def head(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Logits."""
    return F.linear(F.layer_norm(x, (x.shape[-1],), p["norm"], p["bias"]), p["out"])


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def layer(name: str, heads: int, p: Any, x: torch.Tensor) -> torch.Tensor:
    """The layer of a name."""
    if name == "embedding":
        return embedding(p, x)
    return head(p, x) if name == "head" else block(p, x, heads)


class Layer(nn.Module):
    """A layer, for the libraries that train modules."""

    def __init__(self, setting: Setting, name: str):
        super().__init__()
        self.name, self.heads, self.recompute = name, setting.shape[2], setting.recompute
        given = tensors(setting, name)
        self.p = nn.ParameterDict({k: nn.Parameter(v) for k, v in given.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer; blocks are computed again in the backward where the setting says so."""
        if self.recompute and self.name.startswith("block") and torch.is_grad_enabled():
            from torch.utils.checkpoint import checkpoint

            return checkpoint(self.run, x, use_reentrant=False)
        return self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """The arithmetic."""
        return layer(self.name, self.heads, self.p, x)


def optimizer(setting: Setting, parameters: Any) -> torch.optim.Optimizer:
    """torch's optimizer of the setting."""
    if setting.optimizer == "adamw":
        return torch.optim.AdamW(parameters, RATE, fused=True)
    return torch.optim.SGD(parameters, RATE, foreach=True)


class Update:
    """The end of a step of a library that trains modules.

    Attributes:
        norms: those of the gradients of the first step, by name.
    """

    def __init__(self, setting: Setting, layers: Sequence[Layer]):
        self.layers = layers
        self.optimizer = optimizer(setting, [p for one in layers for p in one.parameters()])
        self.norms: dict[str, float] = {}

    def note(self) -> None:
        """Keep the norms of the first step."""
        if not self.norms:
            self.norms.update({k: v for one in self.layers for k, v in norms(one).items()})

    def __call__(self) -> None:
        self.note()
        self.optimizer.step()
        self.optimizer.zero_grad()


def norms(one: Layer) -> dict[str, float]:
    """By name, the norm of the gradient of each parameter."""
    return {
        f"{one.name}.{key}": torch.linalg.vector_norm(p.grad, dtype=torch.float64).item()
        for key, p in one.p.items()
    }

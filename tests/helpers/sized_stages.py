"""Stage functions of many kinds whose inputs may have any size, with parameters and inputs for
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import fpipe

WIDTH, HEADS = 8, 2


def attention(p: Any, x: torch.Tensor) -> torch.Tensor:
    batch, length, _ = x.shape
    q, k, v = (x @ w for w in p["qkv"])
    split = lambda t: t.view(batch, length, HEADS, -1).transpose(1, 2)
    y = F.scaled_dot_product_attention(split(q), split(k), split(v), is_causal=True)
    return x + y.transpose(1, 2).reshape(batch, length, WIDTH) @ p["out"]


def rotary(p: Any, x: torch.Tensor) -> torch.Tensor:
    angle = torch.arange(x.shape[1])[:, None] / torch.arange(1, WIDTH // 2 + 1)
    a, b = F.rms_norm(x, (WIDTH,), p["scale"]).chunk(2, -1)
    return (
        torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
        @ p["out"]
    )


def convolution(p: Any, x: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.conv1d(x.transpose(1, 2), p["kernel"], padding=1, stride=2)).transpose(1, 2)


def statistics(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (
        F.layer_norm(x, (WIDTH,), p["scale"]) - x.mean(1, keepdim=True) + x.var((0, 1)) / x.shape[1]
    )


def pieces(p: Any, x: torch.Tensor) -> Any:
    first, rest = x[:, :1], x[:, 1:]
    return {
        "y": torch.cat([rest, first], 1) @ p["out"],
        "flat": x.flatten(0, 1).cumsum(0),
        "last": x[:, -1],
        "x": x,
    }


def masked(p: Any, x: torch.Tensor, *, keep: torch.Tensor) -> torch.Tensor:
    scores = x @ p["out"] @ x.transpose(1, 2)
    return scores.masked_fill(~keep[:, None, :], -1e9).softmax(-1) @ x


def recomputed(p: Any, x: torch.Tensor) -> torch.Tensor:
    return fpipe.remat(lambda p, x: torch.tanh(x @ p["out"]).exp())(p, attention(p, x))


def written(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, ::2] *= 2
    y += torch.ones(x.shape[0], 1, 1)
    return y.mul_(3) @ p["out"]


def gathered(p: Any, x: torch.Tensor) -> torch.Tensor:
    order = torch.arange(x.shape[1]).flip(0)
    return torch.stack([x[:, order], F.pad(x, (0, 0, 1, 0))[:, :-1]]).sum(0) @ p["out"].T


def mapped(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: torch.tanh(row @ p["out"]))(x)


FUNCTIONS: list[Callable[..., Any]] = [
    attention,
    rotary,
    convolution,
    statistics,
    pieces,
    masked,
    recomputed,
    written,
    gathered,
    mapped,
]


def parameters() -> dict[str, Any]:
    weight = lambda *shape: torch.randn(*shape) * 0.3
    return {
        "qkv": [weight(WIDTH, WIDTH) for _ in range(3)],
        "out": weight(WIDTH, WIDTH),
        "scale": weight(WIDTH),
        "kernel": weight(WIDTH, WIDTH, 3),
    }


def inputs(fn: Callable[..., Any], batch: int, length: int) -> tuple[torch.Tensor, dict[str, Any]]:
    x = torch.randn(batch, length, WIDTH)
    return x, {"keep": torch.rand(batch, length) < 0.7} if fn is masked else {}


def leaves(*values: Any) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_leaves(values)

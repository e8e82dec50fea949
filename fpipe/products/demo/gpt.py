# SPDX-License-Identifier: Apache-2.0
"""A small GPT as pure stages: one function, and a pytree of parameters for each stage.

The parameters of a stage determine its computation: an embedding, some blocks, a head. A block's
initial values depend on its number, so the model is the same for any number of stages. Knows
neither ranks nor schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NotRequired, TypeAlias, TypedDict

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

#: Parameters of a block, of the embedding or of the head.
Tensors: TypeAlias = dict[str, Tensor]


class Params(TypedDict):
    """The parameters of a stage."""

    blocks: list[Tensors]
    embed: NotRequired[Tensors]
    head: NotRequired[Tensors]


StageFunction: TypeAlias = Callable[[Params, Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model; ``vocabulary`` is the number of distinct tokens, ``length`` the longest
    sequence.
    """

    vocabulary: int
    length: int = 64
    width: int = 64
    heads: int = 4
    layers: int = 8


def gpt(sizes: Sizes, stages: int, seed: int = 0) -> tuple[list[StageFunction], list[Params]]:
    """``(functions, params)`` of the model cut into ``stages`` stages, layers spread evenly.

    With more stages than layers, some stages have no layer and return their input.

    >>> functions, params = gpt(Sizes(vocabulary=5, width=8, layers=3), stages=2)
    >>> [(sorted(p), len(p["blocks"])) for p in params]
    [(['blocks', 'embed'], 1), (['blocks', 'head'], 2)]
    >>> x = torch.zeros(1, 4, dtype=torch.int64)
    >>> functions[1](params[1], functions[0](params[0], x)).shape
    torch.Size([1, 4, 5])
    """
    edges = [stage * sizes.layers // stages for stage in range(stages + 1)]
    params: list[Params] = [
        {"blocks": [_block_params(sizes, seed, layer) for layer in range(first, end)]}
        for first, end in pairwise(edges)
    ]
    width = sizes.width
    normal = _normal(seed, layer=-1)
    params[0]["embed"] = {
        "token": normal(sizes.vocabulary, width),
        "place": normal(sizes.length, width),
    }
    params[-1]["head"] = {
        "norm": torch.ones(width),
        "out": normal(sizes.vocabulary, width),
    }
    return [partial(stage_of_gpt, sizes.heads)] * stages, params


def cross_entropy(logits: Tensor, following: Tensor) -> Tensor:
    """Mean cross-entropy of the next character.

    >>> float(cross_entropy(torch.zeros(1, 2, 4), torch.tensor([[0, 3]])))
    1.386...
    """
    return F.cross_entropy(logits.flatten(0, -2), following.flatten())


def stage_of_gpt(heads: int, p: Params, x: Tensor) -> Tensor:
    """One stage: the embedding if it has one, its blocks, and the head if it has one."""
    if "embed" in p:
        places = p["embed"]["place"][: x.shape[1]]
        x = p["embed"]["token"][x] + places
    for block in p["blocks"]:
        x = x + _attention(heads, block, x)
        x = x + F.gelu(_norm(x, block["norm2"]) @ block["up"]) @ block["down"]
    if "head" in p:
        x = _norm(x, p["head"]["norm"]) @ p["head"]["out"].T
    return x


def _attention(heads: int, p: Tensors, x: Tensor) -> Tensor:
    qkv = _norm(x, p["norm1"]) @ p["qkv"]
    q, k, v = rearrange(qkv, "row t (qkv head d) -> qkv row head t d", qkv=3, head=heads)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return rearrange(mixed, "row head t d -> row t (head d)") @ p["mix"]


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def _block_params(sizes: Sizes, seed: int, layer: int) -> Tensors:
    normal = _normal(seed, layer)
    w = sizes.width
    scale = 1 / (2 * sizes.layers) ** 0.5
    return {
        "norm1": torch.ones(w),
        "qkv": normal(w, 3 * w),
        "mix": normal(w, w) * scale,
        "norm2": torch.ones(w),
        "up": normal(w, 4 * w),
        "down": normal(4 * w, w) * scale,
    }


def _normal(seed: int, layer: int) -> Callable[..., Tensor]:
    """Normal random numbers of a layer, the same in every process."""
    generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + layer)
    return lambda *shape: torch.randn(*shape, generator=generator) * 0.08

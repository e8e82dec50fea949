"""A transformer block with a mixture of experts, spread over the members of a group: a part of moe.py.

    torchrun --nproc-per-node 4 examples/moe.py

A block is attention, a router, dispatch (all_to_all), experts, combine (all_to_all), each a segment, so that a fused
action knows what it may weave. What is in ``fpipe.remat`` is computed again in the backward; the router stands outside,
so its choices are saved, and a token goes to the same experts both times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe

WIDTH, HIDDEN, HEADS = 32, 64, 4
EXPERTS, CHOICES, CAPACITY = 4, 2, 1.5  # in all; of each token; places an expert has, as a share of an even load


def attention(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Causal self-attention with its residual."""
    h = F.layer_norm(x, (WIDTH,), p["norm1"])
    q, k, v = (h @ p["qkv"]).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + mixed.transpose(1, 2).reshape(x.shape) @ p["out"]


def route(p: dict[str, Tensor], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Which place of which expert each token takes, as 0 and 1, and with what weight: both (token, expert, place)."""
    gates = torch.softmax(tokens @ p["router"], -1)
    top, index = gates.topk(CHOICES, -1)
    chosen = F.one_hot(index, EXPERTS).sum(1)  # (token, expert)
    places = int(CAPACITY * CHOICES * tokens.shape[0] / EXPERTS)
    place = chosen.cumsum(0) * chosen - 1  # -1: not chosen; beyond the last: the token is dropped
    taken = F.one_hot(place.clamp(-1, places) + 1, places + 2)[..., 1:-1].to(tokens.dtype)
    weight = torch.zeros_like(gates).scatter(-1, index, top / top.sum(-1, keepdim=True))
    return taken, taken * weight[..., None]


def experts(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """The experts that live here, on (source, expert, place, width)."""
    sources, here, places, width = x.shape
    h = x.transpose(0, 1).reshape(here, sources * places, width)
    h = F.gelu(h @ p["up"]) @ p["down"]
    return h.view(here, sources, places, width).transpose(0, 1)


def block(members: Any, size: int) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """A block whose experts are spread over the members of a process group."""

    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        with fpipe.segment("attention"):
            x = fpipe.remat(attention)(p, x)
            h = F.layer_norm(x, (WIDTH,), p["norm2"])
            taken, weight = route(p, h.flatten(0, 1))
            sent = torch.einsum("nec,nd->ecd", taken, h.flatten(0, 1))
        with fpipe.segment("dispatch"):
            had = fpipe.ops.all_to_all(sent, members)
        with fpipe.segment("experts"):
            made = fpipe.remat(experts)(p, had.view(size, EXPERTS // size, *sent.shape[1:])).reshape(sent.shape)
        with fpipe.segment("combine"):
            back = fpipe.ops.all_to_all(made, members)
            return x + torch.einsum("nec,ecd->nd", weight, back).view(x.shape)

    return fn


def block_parameters(draw: Callable[..., Tensor], member: int, size: int) -> dict[str, Tensor]:
    """A block's parameters; of the experts, those of one member."""
    p = {"norm1": torch.ones(WIDTH), "qkv": draw(WIDTH, 3 * WIDTH), "out": draw(WIDTH, WIDTH)}
    p |= {"norm2": torch.ones(WIDTH), "router": draw(WIDTH, EXPERTS)}
    mine = slice(member * EXPERTS // size, (member + 1) * EXPERTS // size)  # all are drawn, so that all draw alike
    return p | {"up": draw(EXPERTS, WIDTH, HIDDEN)[mine], "down": draw(EXPERTS, HIDDEN, WIDTH)[mine]}

"""A transformer block with a mixture of experts, which are spread over the members of a group: a part of moe.py.

    torchrun --nproc-per-node 4 examples/moe.py

A block is attention, a router, dispatch (all_to_all), experts, combine (all_to_all); fused actions interleave the
parts of two. The backward pass recomputes what is inside ``fpipe.remat``. The router is outside, so its
choices are saved, and each token goes to the same experts in both passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

import fpipe

WIDTH, HIDDEN, HEADS = 32, 64, 4
EXPERTS, CHOICES, CAPACITY = 4, 2, 1.5  # in total; per token; slots of an expert, relative to an even load


def attention(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Causal self-attention with its residual."""
    h = F.layer_norm(x, (WIDTH,), p["norm1"])
    q, k, v = rearrange(h @ p["qkv"], "row t (qkv head d) -> qkv row head t d", qkv=3, head=HEADS)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + rearrange(mixed, "row head t d -> row t (head d)") @ p["out"]


def route(p: dict[str, Tensor], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """One-hot slots of the tokens, and their weights: both (token, expert, slot)."""
    gates = torch.softmax(tokens @ p["router"], -1)
    top, index = gates.topk(CHOICES, -1)
    chosen = F.one_hot(index, EXPERTS).sum(1)  # (token, expert)
    slots = int(CAPACITY * CHOICES * tokens.shape[0] / EXPERTS)
    slot = chosen.cumsum(0) * chosen - 1  # -1: not chosen; beyond the last slot: the token is dropped
    taken = F.one_hot(slot.clamp(-1, slots) + 1, slots + 2)[..., 1:-1].to(tokens.dtype)
    weight = torch.zeros_like(gates).scatter(-1, index, top / top.sum(-1, keepdim=True))
    return taken, taken * weight[..., None]


def experts(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """The experts of this member, on (source, expert, slot, width)."""
    h = rearrange(x, "source expert slot width -> expert (source slot) width")
    h = F.gelu(h @ p["up"]) @ p["down"]
    return rearrange(h, "expert (source slot) width -> source expert slot width", source=x.shape[0])


def block(members: Any, size: int) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """A block whose experts are spread over the members of a process group."""

    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        x = fpipe.remat(attention)(p, x)
        h = F.layer_norm(x, (WIDTH,), p["norm2"])
        taken, weight = route(p, h.flatten(0, 1))
        sent = torch.einsum("nec,nd->ecd", taken, h.flatten(0, 1))
        received = fpipe.ops.all_to_all(sent, members)
        received = rearrange(received, "(source expert) slot width -> source expert slot width", source=size)
        outputs = rearrange(fpipe.remat(experts)(p, received), "source expert ... -> (source expert) ...")
        returned = fpipe.ops.all_to_all(outputs, members)
        return x + torch.einsum("nec,ecd->nd", weight, returned).view(x.shape)

    return fn


def block_parameters(draw: Callable[..., Tensor], member: int, size: int) -> dict[str, Tensor]:
    """A block's parameters; of the experts, those of one member."""
    p = {"norm1": torch.ones(WIDTH), "qkv": draw(WIDTH, 3 * WIDTH), "out": draw(WIDTH, WIDTH)}
    p |= {"norm2": torch.ones(WIDTH), "router": draw(WIDTH, EXPERTS)}
    held = slice(
        member * EXPERTS // size, (member + 1) * EXPERTS // size
    )  # every member draws all experts, so that all random numbers agree
    return p | {"up": draw(EXPERTS, WIDTH, HIDDEN)[held], "down": draw(EXPERTS, HIDDEN, WIDTH)[held]}

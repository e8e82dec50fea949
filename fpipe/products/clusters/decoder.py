# SPDX-License-Identifier: Apache-2.0
"""A plain decoder of the sizes of a plan as pure stages: the part of one tensor-parallel rank, on
the device meta.

Shapes and memory are those of one rank. Collectives of tensor-parallel ranks are operations with
their shapes: a gather repeats the part of a rank, a reduction over parts of the sequence adds them
up. Values do not matter. Rotations of queries and keys are left out. Knows neither schedules nor
ranks of a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from ...programs import block, remat
from .layout import Job, Layout
from .model import Model

Params: TypeAlias = dict[str, Tensor | list[dict[str, Tensor]]]
Layer: TypeAlias = dict[str, Tensor]
Function: TypeAlias = Callable[[Any, Tensor], Tensor]
DROPOUT = 0.1


def decoder(job: Job, layout: Layout) -> tuple[list[Function], list[Params]]:
    """The functions and the parameters of all stages; stages with as many layers have one function.

    Args:
        job: what is trained.
        layout: how it is distributed.

    Returns:
        One function and one pytree of parameters for each stage.
    """
    rank, last = _Rank(job.model, layout), layout.stages - 1
    ends = [(stage == 0, stage == last) for stage in range(layout.stages)]
    functions = {each: rank.stage(*each) for each in set(ends)}
    params = [
        rank.params(count, *each)
        for count, each in zip(layout.counts(job.model), ends, strict=True)
    ]
    return [functions[each] for each in ends], params


def batch(job: Job, layout: Layout) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one copy of the pipeline, without data."""
    tokens = torch.empty(job.batch // layout.dp, job.sequence, dtype=torch.int64, device="meta")
    return tokens, tokens.clone()


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy over the vocabulary of one rank."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class _Rank:
    """One tensor-parallel rank's part of a model."""

    model: Model
    layout: Layout

    # ---- parameters ----
    def params(self, layers: int, first: bool, last: bool) -> Params:
        """The parameters of a stage."""
        model = self.model
        vocabulary = -(-model.vocabulary // self.layout.tp)
        found: Params = {"layers": [self._layer_params() for _ in range(layers)]}
        if first:
            found["embedding"] = _empty(vocabulary, model.hidden)
        if first and model.positions:
            found["positions"] = _empty(model.positions, model.hidden)
        if last:
            found["norm"] = _empty(model.hidden)
            found["head"] = _empty(model.hidden, vocabulary)
        return found

    def _layer_params(self) -> Layer:
        model, t = self.model, self.layout.tp
        h, gate = model.hidden, model.matrices - 1
        experts = (model.experts,) if model.experts else ()
        found = {
            "norm1": _empty(h),
            "norm2": _empty(h),
            "qkv": _empty(h, (model.queries + 2 * model.keys) // t),
            "out": _empty(model.queries // t, h),
            "up": _empty(*experts, h, gate * model.feed_forward // t),
            "down": _empty(*experts, model.feed_forward // t, h),
        }
        if model.experts:
            found["router"] = _empty(h, model.experts)
        if model.shared:
            found["shared_up"] = _empty(h, gate * model.shared // t)
            found["shared_down"] = _empty(model.shared // t, h)
        return found

    # ---- functions ----
    def stage(self, first: bool, last: bool) -> Function:
        """The function of a stage."""
        layer = block(remat(self.layer) if self.layout.recompute == "full" else self.layer)

        def stage(params: Any, x: Tensor) -> Tensor:
            if first:
                x = self._embedded(params, x)
            for each in params["layers"]:
                x = layer(each, x)
            return self._joined(x, params["norm"], params["head"]).float() if last else x

        return stage

    def _embedded(self, params: Layer, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens % params["embedding"].shape[0], params["embedding"])
        if "positions" in params:
            x = x + params["positions"][: tokens.shape[1]]
        return self._dropped(self._scattered(x))

    def layer(self, p: Layer, x: Tensor) -> Tensor:
        """One layer."""
        attended = self._attention(self._joined(x, p["norm1"], p["qkv"])) @ p["out"]
        x = x + self._dropped(self._scattered(attended))
        if self.model.experts:
            return x + self._scattered(self._experts(p, self._gathered(_norm(x, p["norm2"]))))
        inner = self._inner(self._joined(x, p["norm2"], p["up"]), p["down"])
        return x + self._dropped(self._scattered(inner))

    def _joined(self, x: Tensor, norm: Tensor, matrix: Tensor) -> Tensor:
        """The product of a matrix with the norm of the whole sequence.

        Without selective recompute it keeps a part of the norm, and gathers it again in the
        backward.
        """
        if self.layout.recompute == "selective":
            return remat(self._normed)(x, norm, matrix)
        gathers = self.layout.tp > 1 and self.layout.recompute == "none"
        product = remat(self._product) if gathers else self._product
        return product(_norm(x, norm), matrix)

    def _normed(self, x: Tensor, norm: Tensor, matrix: Tensor) -> Tensor:
        return self._product(_norm(x, norm), matrix)

    def _product(self, y: Tensor, matrix: Tensor) -> Tensor:
        return self._gathered(y) @ matrix

    def _inner(self, y: Tensor, down: Tensor) -> Tensor:
        """The rest of a feed-forward, after its first product."""
        product = partial(_activated, gated=self.model.gated)
        return (remat(product) if self.layout.recompute == "selective" else product)(y, down)

    def _experts(self, p: Layer, y: Tensor) -> Tensor:
        """Tokens in equal numbers to all experts, and those that every token uses."""
        model, (b, s, h) = self.model, y.shape
        weights = torch.topk(torch.softmax(y @ p["router"], -1), model.active).values
        routed = b * s * model.active
        each = -(-routed // model.experts)
        times = -(-each * model.experts // (b * s))
        rows = y.reshape(-1, h).repeat(times, 1)[: each * model.experts]
        products = torch.bmm(rows.view(model.experts, each, h), p["up"])
        results = self._inner(products, p["down"]).flatten(0, 1)[:routed]
        scaled = results.view(model.active, b, s, h) * weights.permute(2, 0, 1).unsqueeze(-1)
        if not model.shared:
            return scaled.sum(0)
        return scaled.sum(0) + self._inner(y @ p["shared_up"], p["shared_down"])

    def _attention(self, qkv: Tensor) -> Tensor:
        heads, shared = self.model.heads // self.layout.tp, self.model.kv_heads // self.layout.tp
        parts = qkv.unflatten(-1, (-1, self.model.head_dim)).transpose(1, 2)
        q, k, v = parts.split([heads, shared, shared], 1)
        y = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
        return y.transpose(1, 2).flatten(2)

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, DROPOUT) if self.model.dropout else x

    # ---- tensor-parallel collectives ----
    def _gathered(self, x: Tensor) -> Tensor:
        """The whole sequence, of the part of a rank."""
        return x.repeat(1, self.layout.tp, 1) if self.layout.tp > 1 else x

    def _scattered(self, x: Tensor) -> Tensor:
        """The part of a rank of the sum over ranks."""
        return x.unflatten(1, (self.layout.tp, -1)).sum(1) if self.layout.tp > 1 else x


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight)  # an RMS norm is several operations on "meta"


def _activated(y: Tensor, down: Tensor, gated: bool) -> Tensor:
    if gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    else:
        y = F.gelu(y)
    return y @ down

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
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from ...programs import block, remat
from .layout import Job, Layout
from .model import Model

Layer: TypeAlias = dict[str, Tensor]
Params: TypeAlias = dict[str, Tensor | list[Layer]]
Function: TypeAlias = Callable[[Any, Tensor], Tensor]
DROPOUT = 0.1


def decoder(job: Job, layout: Layout) -> tuple[list[Function], list[Params]]:
    """The functions and the parameters of all stages. All stages have one function: the parameters
    determine whether it embeds tokens or computes logits.

    Args:
        job: what is trained.
        layout: how it is distributed.

    Returns:
        One function and one pytree of parameters for each stage.
    """
    rank = _Rank(job.model, layout)
    layer = block(remat(rank.layer) if layout.recompute == "full" else rank.layer)

    def stage(params: Any, x: Tensor) -> Tensor:
        if "embedding" in params:
            x = rank.embed(params, x)
        for layer_params in params["layers"]:
            x = layer(layer_params, x)
        if "head" in params:
            x = rank.norm_and_multiply(x, params["norm"], params["head"]).float()
        return x

    params: list[Params] = [
        {"layers": [rank.layer_params() for _ in range(count)]}
        for count in layout.counts(job.model)
    ]
    hidden = job.model.hidden
    vocabulary = -(-job.model.vocabulary // layout.tp)
    params[0]["embedding"] = _empty(vocabulary, hidden)
    if job.model.positions:
        params[0]["positions"] = _empty(job.model.positions, hidden)
    params[-1] |= {"norm": _empty(hidden), "head": _empty(hidden, vocabulary)}
    return [stage] * layout.stages, params


def batch(job: Job, layout: Layout) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one copy of the pipeline, without data."""
    shape = job.batch // layout.dp, job.sequence
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
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
    def layer_params(self) -> Layer:
        """The parameters of a layer."""
        model = self.model
        tp = self.layout.tp
        hidden = model.hidden
        gate = model.matrices - 1
        experts = (model.experts,) if model.experts else ()
        queries = model.queries // tp
        keys = model.keys // tp
        width = model.feed_forward // tp
        params = {
            "norm1": _empty(hidden),
            "norm2": _empty(hidden),
            "qkv": _empty(hidden, queries + 2 * keys),
            "out": _empty(queries, hidden),
            "up": _empty(*experts, hidden, gate * width),
            "down": _empty(*experts, width, hidden),
        }
        if model.experts:
            params["router"] = _empty(hidden, model.experts)
        if model.shared:
            width = model.shared // tp
            params["shared_up"] = _empty(hidden, gate * width)
            params["shared_down"] = _empty(width, hidden)
        return params

    # ---- functions ----
    def embed(self, params: Layer, tokens: Tensor) -> Tensor:
        """This rank's part of the embedded sequence."""
        matrix = params["embedding"]
        x = F.embedding(tokens % matrix.shape[0], matrix)
        if "positions" in params:
            x = x + params["positions"][: tokens.shape[1]]
        return self._dropout(self._scatter(x))

    def layer(self, p: Layer, x: Tensor) -> Tensor:
        """One layer."""
        qkv = self.norm_and_multiply(x, p["norm1"], p["qkv"])
        y = self._attention(qkv) @ p["out"]
        x = x + self._dropout(self._scatter(y))
        if self.model.experts:
            y = self._gather(_norm(x, p["norm2"]))
            return x + self._scatter(self._experts(p, y))
        y = self.norm_and_multiply(x, p["norm2"], p["up"])
        y = self._activate_and_multiply(y, p["down"])
        return x + self._dropout(self._scatter(y))

    def norm_and_multiply(self, x: Tensor, norm: Tensor, matrix: Tensor) -> Tensor:
        """The product of a matrix with the norm of the whole sequence.

        Without selective recompute it keeps a part of the norm, and gathers it again in the
        backward.
        """
        recompute = self.layout.recompute
        product = self._product
        if recompute == "none" and self.layout.tp > 1:
            product = remat(product)

        def normed_product(x: Tensor, norm: Tensor, matrix: Tensor) -> Tensor:
            return product(_norm(x, norm), matrix)

        function = remat(normed_product) if recompute == "selective" else normed_product
        return function(x, norm, matrix)

    def _product(self, y: Tensor, matrix: Tensor) -> Tensor:
        return self._gather(y) @ matrix

    def _activate_and_multiply(self, y: Tensor, down: Tensor) -> Tensor:
        """The rest of a feed-forward, after its first product."""
        function = _gated if self.model.gated else _plain
        if self.layout.recompute == "selective":
            function = remat(function)
        return function(y, down)

    def _experts(self, p: Layer, y: Tensor) -> Tensor:
        """Tokens in equal numbers to all experts, and those that every token uses."""
        model = self.model
        b, s, h = y.shape
        weights = torch.softmax(y @ p["router"], -1).topk(model.active).values
        # rows are repeated until all experts have as many
        routed = b * s * model.active
        rows = -(-routed // model.experts)
        total = rows * model.experts
        inputs = y.reshape(-1, h).repeat(-(-total // (b * s)), 1)[:total]
        products = torch.bmm(inputs.view(model.experts, rows, h), p["up"])
        results = self._activate_and_multiply(products, p["down"])
        results = results.flatten(0, 1)[:routed].view(model.active, b, s, h)
        weights = weights.permute(2, 0, 1).unsqueeze(-1)
        summed = (results * weights).sum(0)
        if not model.shared:
            return summed
        return summed + self._activate_and_multiply(y @ p["shared_up"], p["shared_down"])

    def _attention(self, qkv: Tensor) -> Tensor:
        model = self.model
        tp = self.layout.tp
        heads = model.heads // tp
        kv_heads = model.kv_heads // tp
        by_head = qkv.unflatten(-1, (-1, model.head_dim)).transpose(1, 2)
        q, k, v = by_head.split([heads, kv_heads, kv_heads], 1)
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return attention(q, k, v, 0.0, True)[0].transpose(1, 2).flatten(2)

    def _dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, DROPOUT) if self.model.dropout else x

    # ---- tensor-parallel collectives ----
    def _gather(self, x: Tensor) -> Tensor:
        """The whole sequence, of the part of a rank."""
        tp = self.layout.tp
        return x.repeat(1, tp, 1) if tp > 1 else x

    def _scatter(self, x: Tensor) -> Tensor:
        """The part of a rank of the sum over ranks."""
        tp = self.layout.tp
        return x.unflatten(1, (tp, -1)).sum(1) if tp > 1 else x


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight)  # an RMS norm is several operations on "meta"


def _gated(y: Tensor, down: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return (F.silu(gate) * up) @ down


def _plain(y: Tensor, down: Tensor) -> Tensor:
    return F.gelu(y) @ down

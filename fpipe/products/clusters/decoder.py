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
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...stage import block, remat
from .layout import Job, Layout

Params = dict[str, Any]
Function = Callable[[Any, Any], Any]
DROPOUT = 0.1


def decoder(job: Job, layout: Layout) -> tuple[list[Function], list[Params]]:
    """The functions and the parameters of all stages; stages with as many layers have one function.

    Args:
        job: what is trained.
        layout: how it is distributed.

    Returns:
        One function and one pytree of parameters for each stage.
    """
    part = _Part(job, layout)
    counts, last = layout.counts(job.model), layout.stages - 1
    functions = {ends: part.stage(*ends) for ends in {(s == 0, s == last) for s in range(last + 1)}}
    params = [part.params(count, first=s == 0, last=s == last) for s, count in enumerate(counts)]
    return [functions[s == 0, s == last] for s in range(last + 1)], params


def batch(job: Job, layout: Layout) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one copy of the pipeline, without data."""
    shape = (job.batch // layout.dp, job.sequence)
    return torch.empty(shape, dtype=torch.int64, device="meta"), torch.empty(
        shape, dtype=torch.int64, device="meta"
    )


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy over the vocabulary of one rank."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class _Part:
    """One tensor-parallel rank's part of a model."""

    job: Job
    layout: Layout

    # ---- parameters ----
    def _empty(self, *shape: int) -> Tensor:
        dtype = {2: torch.bfloat16, 4: torch.float32}[self.job.precision.parameters]
        return torch.empty(shape, dtype=dtype, device="meta")

    def params(self, layers: int, *, first: bool, last: bool) -> Params:
        """The parameters of a stage."""
        model, t = self.job.model, self.layout.tp
        found: Params = {"layers": [self._layer_params() for _ in range(layers)]}
        if first:
            found["embedding"] = self._empty(-(-model.vocabulary // t), model.hidden)
        if first and model.positions:
            found["positions"] = self._empty(model.positions, model.hidden)
        if last:
            found["norm"] = self._empty(model.hidden)
            found["head"] = self._empty(model.hidden, -(-model.vocabulary // t))
        return found

    def _layer_params(self) -> Params:
        model, t = self.job.model, self.layout.tp
        h, gate = model.hidden, model.matrices - 1
        experts = (model.experts,) if model.experts else ()
        found: Params = {
            "norm1": self._empty(h),
            "norm2": self._empty(h),
            "qkv": self._empty(h, (model.queries + 2 * model.keys) // t),
            "out": self._empty(model.queries // t, h),
            "up": self._empty(*experts, h, gate * model.feed_forward // t),
            "down": self._empty(*experts, model.feed_forward // t, h),
        }
        if model.experts:
            found["router"] = self._empty(h, model.experts)
        if model.shared:
            found["shared_up"] = self._empty(h, gate * model.shared // t)
            found["shared_down"] = self._empty(model.shared // t, h)
        return found

    @property
    def _cheap_again(self) -> bool:
        """Whether norms and activation functions are computed again; of attention that keeps
        scores, these are.
        """
        return self.layout.recompute == "selective" and self.job.attention == "flash"

    # ---- functions ----
    def stage(self, first: bool, last: bool) -> Function:
        """The function of a stage."""
        layer = block(remat(self.layer) if self.layout.recompute == "full" else self.layer)
        head = remat(self._normed) if self._cheap_again else self._unkept

        def stage(params: Params, x: Tensor) -> Tensor:
            if first:
                x = self._embedded(params, x)
            for each in params["layers"]:
                x = layer(each, x)
            return head(x, params["norm"], params["head"]).float() if last else x

        return stage

    def _embedded(self, params: Params, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens % params["embedding"].shape[0], params["embedding"])
        if "positions" in params:
            x = x + params["positions"][: tokens.shape[1]]
        return self._dropped(self._scattered(x))

    def layer(self, p: Params, x: Tensor) -> Tensor:
        """One layer."""
        joined = remat(self._normed) if self._cheap_again else self._unkept
        x = x + self._dropped(
            self._scattered(self._attention(joined(x, p["norm1"], p["qkv"])) @ p["out"])
        )
        if not self.job.model.experts:
            return x + self._dropped(
                self._scattered(self._inner(joined(x, p["norm2"], p["up"]), p["down"]))
            )
        return x + self._scattered(self._experts(p, self._gathered(self._norm(x, p["norm2"]))))

    def _normed(self, x: Tensor, norm: Tensor, matrix: Tensor) -> Tensor:
        """The product of a matrix with the norm of the whole sequence."""
        return self._gathered(self._norm(x, norm)) @ matrix

    def _unkept(self, x: Tensor, norm: Tensor, matrix: Tensor) -> Tensor:
        """The same, which keeps a part of the sequence and gathers it again in the backward."""
        y = self._norm(x, norm)
        product = self._product if self.layout.recompute == "full" else remat(self._product)
        return y @ matrix if self.layout.split == 1 else product(y, matrix)

    def _product(self, y: Tensor, matrix: Tensor) -> Tensor:
        return self._gathered(y) @ matrix

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.layer_norm(
            x, weight.shape, weight
        )  # an RMS norm is several operations on the device meta

    def _inner(self, y: Tensor, down: Tensor) -> Tensor:
        """The rest of a feed-forward, after its first product."""
        product = partial(_activated, gated=self.job.model.gated)
        return (remat(product) if self._cheap_again else product)(y, down)

    def _experts(self, p: Params, y: Tensor) -> Tensor:
        """Tokens in equal numbers to all experts, and those that every token uses."""
        model, (b, s, h) = self.job.model, y.shape
        weights = torch.topk(torch.softmax(y @ p["router"], -1), model.active).values
        each = -(-b * s * model.active // model.experts)
        sorted_ = y.reshape(-1, h).repeat(-(-each * model.experts // (b * s)), 1)[
            : each * model.experts
        ]
        results = self._inner(
            torch.bmm(sorted_.view(model.experts, each, h), p["up"]), p["down"]
        ).flatten(0, 1)
        results = results[: b * s * model.active].view(model.active, b, s, h)
        total = (results * weights.permute(2, 0, 1).unsqueeze(-1)).sum(0)
        return total + self._inner(y @ p["shared_up"], p["shared_down"]) if model.shared else total

    def _attention(self, qkv: Tensor) -> Tensor:
        model, t = self.job.model, self.layout.tp
        heads, shared = model.heads // t, model.kv_heads // t
        split = qkv.unflatten(-1, (heads + 2 * shared, model.head_dim)).transpose(1, 2)
        q, k, v = split[:, :heads], split[:, heads : heads + shared], split[:, heads + shared :]
        if self.job.attention == "flash":
            y = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
        else:
            k, v = (
                each.repeat_interleave(heads // shared, 1) if heads > shared else each
                for each in (k, v)
            )
            scored = remat(self._scored) if self.layout.recompute == "selective" else self._scored
            y = scored(q, k, v)
        return y.transpose(1, 2).flatten(2)

    def _scored(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention as products, with a causal mask."""
        scores = q @ k.transpose(-1, -2)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return self._dropped(torch.softmax(scores.masked_fill(later, float("-inf")), -1)) @ v

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, DROPOUT) if self.job.model.dropout else x

    # ---- tensor-parallel collectives ----
    def _gathered(self, x: Tensor) -> Tensor:
        """The whole sequence, of the part of a rank."""
        return x.repeat(1, self.layout.split, 1) if self.layout.split > 1 else x

    def _scattered(self, x: Tensor) -> Tensor:
        """The part of a rank of the sum over ranks."""
        return x.unflatten(1, (self.layout.split, -1)).sum(1) if self.layout.split > 1 else x


def _activated(y: Tensor, down: Tensor, gated: bool) -> Tensor:
    if gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    else:
        y = F.gelu(y)
    return y @ down

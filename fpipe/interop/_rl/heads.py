# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens, and entropies, from logits in chunks of rows: no other tensor of the
logits' size.

This module must not know models or trainers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Scores(NamedTuple):
    """Of each row of logits: the log-probability of its label, the entropy, and the sum of squared
    probabilities.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    squares: Tensor | None = None


def scores(
    logits: Tensor,
    labels: Tensor,
    temperature: Tensor | None = None,
    *,
    chunk: int = 1024,
    entropy: bool = False,
    squares: bool = False,
) -> Scores:
    """Scores of rows of logits, in float32 at least; differentiable but for the squares.

    Forward saves the logits and one number a row. Backward allocates their gradient, and a chunk.

    Args:
        logits: of any shape, with the vocabulary as last axis.
        labels: a token for each row.
        temperature: divides the logits of each row.
        chunk: how many rows are converted at a time.
        entropy: whether to compute entropies.
        squares: whether to compute sums of squared probabilities.

    >>> found = scores(torch.zeros(2, 4), torch.tensor([0, 3]), entropy=True)
    >>> found.log_probs, found.entropy
    (tensor([-1.3863, -1.3863]), tensor([1.3863, 1.3863]))
    """
    flat, shape = logits.flatten(0, -2), labels.shape
    divisor = None if temperature is None else temperature.reshape(-1)
    found = _Scores.apply(flat, labels.reshape(-1), divisor, max(chunk, 1), entropy, squares)
    rows: list[Tensor] = [column.view(shape) for column in found]
    return Scores(rows.pop(0), rows.pop(0) if entropy else None, rows.pop(0) if squares else None)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        temperature: Tensor | None,
        chunk: int,
        entropy: bool,
        squares: bool,
    ) -> tuple[Tensor, ...]:
        wide = torch.promote_types(logits.dtype, torch.float32)
        columns = [logits.new_empty(len(logits), dtype=wide) for _ in range(2 + entropy + squares)]
        for part, z in _chunks(logits, temperature, chunk):
            total = z.logsumexp(-1)
            columns[0][part] = total
            columns[1][part] = z.gather(-1, labels[part, None]).squeeze(-1) - total
            if entropy or squares:
                p = (z - total[:, None]).exp_()
                if entropy:
                    columns[2][part] = total - (p * z).sum(-1)
                if squares:
                    columns[-1][part] = p.square_().sum(-1)
        totals, *found = columns
        ctx.save_for_backward(logits, labels, temperature, totals, found[1] if entropy else None)
        ctx.chunk = chunk
        if squares:
            ctx.mark_non_differentiable(found[-1])
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, temperature, totals, entropies = ctx.saved_tensors
        of_labels = cotangents[0]
        gradient = torch.empty_like(logits)
        for part, z in _chunks(logits, temperature, ctx.chunk):
            logs = z - totals[part, None]
            p = logs.exp()
            if entropies is None:
                d = p.mul_(-of_labels[part, None])
            else:
                d = (
                    logs.add_(entropies[part, None])
                    .mul_(cotangents[1][part, None])
                    .add_(of_labels[part, None])
                )
                d = d.mul_(p).neg_()
            d.scatter_add_(-1, labels[part, None], of_labels[part, None])
            if temperature is not None:
                d /= temperature[part, None]
            gradient[part] = d
        return gradient, None, None, None, None, None


def _chunks(
    logits: Tensor, temperature: Tensor | None, chunk: int
) -> Iterator[tuple[slice, Tensor]]:
    """Rows of the logits in a wide dtype, divided by the temperature."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    for first in range(0, len(logits), chunk):
        part = slice(first, first + chunk)
        z = logits[part].to(wide)
        yield part, z if temperature is None else z / temperature[part, None].to(wide)

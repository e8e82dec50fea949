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
    """Return scores of rows of logits, in float32 at least; differentiable but for the squares.

    Forward saves the logits. Backward allocates their gradient, and computes a chunk again at a
    time.

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
    divisor = None if temperature is None else temperature.reshape(-1)
    columns = _ScoresInChunks.apply(
        logits.flatten(0, -2), labels.reshape(-1), divisor, max(chunk, 1), entropy, squares
    )
    rows = iter([column.view(labels.shape) for column in columns])
    return Scores(next(rows), next(rows) if entropy else None, next(rows) if squares else None)


class _ScoresInChunks(torch.autograd.Function):
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
        ctx.save_for_backward(logits, labels, temperature)
        ctx.chunk, ctx.entropy = chunk, entropy
        parts = [
            _of_chunk(*part, entropy, squares)
            for _, part in _chunks(logits, labels, temperature, chunk)
        ]
        columns = tuple(torch.cat(column) for column in zip(*parts, strict=True))
        if squares:
            ctx.mark_non_differentiable(columns[-1])
        return columns

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, temperature = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows, (part, target, scale) in _chunks(logits.detach(), labels, temperature, ctx.chunk):
            with torch.enable_grad():
                outputs = _of_chunk(part.requires_grad_(), target, scale, ctx.entropy, False)
            here = [column[rows] for column in cotangents[: len(outputs)]]
            (gradient[rows],) = torch.autograd.grad(outputs, part, here)
        return gradient, None, None, None, None, None


def _chunks(
    logits: Tensor, labels: Tensor, temperature: Tensor | None, chunk: int
) -> Iterator[tuple[slice, tuple[Tensor, Tensor, Tensor | None]]]:
    for first in range(0, max(len(logits), 1), chunk):
        rows = slice(first, first + chunk)
        scale = None if temperature is None else temperature[rows]
        yield rows, (logits[rows], labels[rows], scale)


def _of_chunk(
    logits: Tensor, labels: Tensor, temperature: Tensor | None, entropy: bool, squares: bool
) -> list[Tensor]:
    """Return the scores of some rows."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature is not None:
        wide = wide / temperature[:, None].to(wide.dtype)
    logs = wide.log_softmax(-1)
    columns = [logs.gather(-1, labels[:, None]).squeeze(-1)]
    if entropy:
        columns.append(-(logs.exp() * logs).sum(-1))
    if squares:
        columns.append(logs.exp().square().sum(-1))
    return columns

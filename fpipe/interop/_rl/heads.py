# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens, and entropies, from logits in chunks of rows: no other tensor of the
logits' size.

This module must not know models or trainers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

#: Logits, labels, and temperatures if there are any.
Rows: TypeAlias = tuple[Tensor, Tensor, Tensor | None]


class Scores(NamedTuple):
    """Of each row of logits: the log-probability of its label, and the entropy."""

    log_probs: Tensor
    entropy: Tensor | None = None


def scores(
    logits: Tensor,
    labels: Tensor,
    temperature: Tensor | None = None,
    *,
    chunk: int = 1024,
    entropy: bool = False,
) -> Scores:
    """Return scores of rows of logits, differentiable, in float32 at least.

    Forward saves the logits. Backward allocates their gradient, and computes a chunk again at a
    time.

    Args:
        logits: of any shape, with the vocabulary as last axis.
        labels: a token for each row.
        temperature: divides the logits of each row.
        chunk: how many rows are converted at a time.
        entropy: whether to compute entropies.

    >>> found = scores(torch.zeros(2, 4), torch.tensor([0, 3]), entropy=True)
    >>> found.log_probs, found.entropy
    (tensor([-1.3863, -1.3863]), tensor([1.3863, 1.3863]))
    """
    divisor = None if temperature is None else temperature.reshape(-1)
    columns = _ScoresInChunks.apply(
        logits.flatten(0, -2), labels.reshape(-1), divisor, max(chunk, 1), entropy
    )
    return Scores(*(column.view(labels.shape) for column in columns))


class _ScoresInChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        temperature: Tensor | None,
        chunk: int,
        entropy: bool,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(logits, labels, temperature)
        ctx.chunk, ctx.entropy = chunk, entropy
        rows = (logits, labels, temperature)
        parts = [_of_chunk(*part, entropy) for _, part in _chunks(rows, chunk)]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, temperature = ctx.saved_tensors
        gradient, rows = torch.empty_like(logits), (logits.detach(), labels, temperature)
        for place, (part, label, scale) in _chunks(rows, ctx.chunk):
            with torch.enable_grad():
                outputs = _of_chunk(part.requires_grad_(), label, scale, ctx.entropy)
            here = [column[place] for column in cotangents]
            (gradient[place],) = torch.autograd.grad(outputs, part, here)
        return gradient, None, None, None, None


def _chunks(rows: Rows, chunk: int) -> Iterator[tuple[slice, Rows]]:
    logits, labels, temperature = rows
    for first in range(0, max(len(logits), 1), chunk):
        place = slice(first, first + chunk)
        scale = None if temperature is None else temperature[place]
        yield place, (logits[place], labels[place], scale)


def _of_chunk(
    logits: Tensor, labels: Tensor, temperature: Tensor | None, entropy: bool
) -> list[Tensor]:
    """Return the scores of some rows."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature is not None:
        wide = wide / temperature[:, None].to(wide.dtype)
    logs = wide.log_softmax(-1)
    columns = [logs.gather(-1, labels[:, None]).squeeze(-1)]
    if entropy:
        columns.append(-(logs.exp() * logs).sum(-1))
    return columns

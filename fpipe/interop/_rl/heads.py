# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens, and entropies, from logits in chunks of rows: no other tensor of the
logits' size.

This module must not know models or trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


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

    >>> result = scores(torch.zeros(2, 4), torch.tensor([0, 3]), entropy=True)
    >>> result.log_probs, result.entropy
    (tensor([-1.3863, -1.3863]), tensor([1.3863, 1.3863]))
    """
    rows = logits.flatten(0, -2)
    targets = labels.reshape(-1, 1)
    divisors = None if temperature is None else temperature.reshape(-1, 1)

    def of_chunk(part: Tensor, place: slice) -> list[Tensor]:
        wide = part.to(torch.promote_types(part.dtype, torch.float32))
        if divisors is not None:
            wide = wide / divisors[place].to(wide.dtype)
        logs = wide.log_softmax(-1)
        columns = [logs.gather(-1, targets[place]).squeeze(-1)]
        if entropy:
            columns.append(-(logs.exp() * logs).sum(-1))
        return columns

    size = max(chunk, 1)
    places = [slice(first, first + size) for first in range(0, max(len(rows), 1), size)]
    columns = _InChunks.apply(rows, places, of_chunk)
    return Scores(*(column.view(labels.shape) for column in columns))


class _InChunks(torch.autograd.Function):
    """Columns of a function of rows, some rows at a time; they are computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        places: Sequence[slice],
        fn: Callable[[Tensor, slice], list[Tensor]],
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(rows)
        ctx.places = places
        ctx.fn = fn
        parts = [fn(rows[place], place) for place in places]
        return tuple(map(torch.cat, zip(*parts, strict=True)))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        gradient = torch.empty_like(rows)
        for place in ctx.places:
            part = rows[place].detach().requires_grad_()
            with torch.enable_grad():
                outputs = ctx.fn(part, place)
            weights = [column[place] for column in cotangents]
            (gradient[place],) = torch.autograd.grad(outputs, part, weights)
        return gradient, None, None

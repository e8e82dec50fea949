# SPDX-License-Identifier: Apache-2.0
"""Sequences of different lengths (nested tensors) as a model takes them: all in one row, without
padding.

This module must not know models or trainers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import BatchError


class Tokens(NamedTuple):
    """A microbatch as the model takes it: all sequences in one row, where positions that begin at 0
    again tell them apart.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor  # the token behind each
    temperature: Tensor | None
    offsets: Tensor  # where sequences begin in the row, and its length

    def nested(self, values: Tensor) -> Tensor:
        """Return the values of the tokens, sequence by sequence."""
        return torch.nested.nested_tensor_from_jagged(values.reshape(-1), self.offsets)


def tokens_of(input_ids: Any, position_ids: Tensor, temperature: float | Tensor = 1.0) -> Tokens:
    """Return a microbatch of nested (jagged) tokens and positions as a model takes it.

    ``temperature`` is that of all sequences, or of each.

    Raises:
        BatchError: if the tensors are not nested, or positions have several axes.

    >>> ids = torch.nested.nested_tensor([torch.tensor([5, 6]), torch.tensor([7])],
    ...     layout=torch.jagged)
    >>> positions = torch.nested.nested_tensor([torch.arange(2), torch.arange(1)],
    ...     layout=torch.jagged)
    >>> tokens = tokens_of(ids, positions)
    >>> tokens.input_ids.tolist(), tokens.position_ids.tolist(), tokens.labels.tolist()
    ([[5, 6, 7]], [[0, 1, 0]], [[6, 7, 5]])
    """
    if not input_ids.is_nested or not position_ids.is_nested or position_ids.dim() != 2:
        raise BatchError(
            "input_ids and position_ids must be nested (jagged) tensors, with an entry of one axis "
            "for each sequence"
        )
    offsets = input_ids.offsets().to(torch.long)
    row = input_ids.values()[None]
    scale = None
    if isinstance(temperature, Tensor):
        rates = temperature.to(row.device, torch.float32).clamp(min=1e-8)
        scale = rates.repeat_interleave(offsets.diff())[None]
    elif temperature != 1.0:
        scale = torch.full(row.shape, max(float(temperature), 1e-8), device=row.device)
    return Tokens(row, position_ids.values()[None], row.roll(-1), scale, offsets)

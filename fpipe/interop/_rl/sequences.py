# SPDX-License-Identifier: Apache-2.0
"""Sequences of different lengths (nested tensors) as a model takes them: in one line, or in rows
with padding.

This module must not know models or trainers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...errors import BatchError


class Tokens(NamedTuple):
    """A microbatch as the model takes it.

    Without ``attention_mask`` all sequences are in one row, and positions that begin at 0 again
    tell them apart.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    labels: Tensor  # the token behind each, in a line of all sequences
    temperature: Tensor | None
    offsets: Tensor  # where sequences begin in the line, and its length

    @property
    def total(self) -> int:
        """How many tokens there are, without padding."""
        return int(self.offsets[-1])

    def without_padding(self, values: Tensor) -> Tensor:
        """Return the values of the tokens in a line, from those of all places."""
        if self.attention_mask is None:
            return values.reshape(-1)[: self.total]
        return values[self.attention_mask.bool()]

    def nested(self, values: Tensor) -> Tensor:
        """Return the values of the tokens, sequence by sequence."""
        return torch.nested.nested_tensor_from_jagged(self.without_padding(values), self.offsets)


def longest(input_ids: Tensor, packed: bool) -> int:
    """Return the length of a row of the sequences: of all together, or of the longest.

    >>> ids = torch.nested.nested_tensor([torch.arange(3), torch.arange(5)], layout=torch.jagged)
    >>> longest(ids, packed=True), longest(ids, packed=False)
    (8, 5)
    """
    offsets = offsets_of(input_ids)
    return int(offsets[-1]) if packed else int(offsets.diff().max())


def offsets_of(nested: Any) -> Tensor:
    """Return where the parts of a nested tensor begin, and its length."""
    return nested.offsets().to(torch.long)


def padded_lengths(lengths: Sequence[int], multiple: int = 1, uniform: bool = False) -> list[int]:
    """Return lengths with padding: multiples of a number, and all alike if they shall be uniform.

    >>> padded_lengths([3, 5], multiple=4), padded_lengths([3, 5], uniform=True)
    ([4, 8], [5, 5])
    """
    if multiple < 1:
        raise BatchError(f"lengths cannot be padded to multiples of {multiple}; give 1 or more")
    padded = [-(-length // multiple) * multiple for length in lengths]
    return [max(padded)] * len(padded) if uniform else padded


def tokens_of(
    input_ids: Tensor,
    position_ids: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    packed: bool,
    length: int,
    pad_token: int = 0,
) -> Tokens:
    """Return a microbatch of nested (jagged) tokens and positions as a model takes it, padded on
    the right to a length.

    ``packed`` puts all sequences in one row, without padding between them. ``temperature`` is that
    of all sequences, or of each.

    Raises:
        BatchError: if the tensors are not nested, positions have several axes, or a row is too
        short.

    >>> ids = torch.nested.nested_tensor([torch.tensor([5, 6]), torch.tensor([7])],
    ...     layout=torch.jagged)
    >>> positions = torch.nested.nested_tensor([torch.arange(2), torch.arange(1)],
    ...     layout=torch.jagged)
    >>> tokens = tokens_of(ids, positions, packed=True, length=4)
    >>> tokens.input_ids.tolist(), tokens.position_ids.tolist(), tokens.labels.tolist()
    ([[5, 6, 7, 0]], [[0, 1, 0, 0]], [[6, 7, 5, 0]])
    """
    if not input_ids.is_nested or not position_ids.is_nested:
        raise BatchError(
            "input_ids and position_ids must be nested (jagged) tensors, one entry for each "
            "sequence"
        )
    if position_ids.dim() != 2:
        raise BatchError(
            f"position_ids have {position_ids.dim()} axes; positions of several kinds are not "
            "supported"
        )
    offsets = offsets_of(input_ids)
    lengths, ids = offsets.diff(), input_ids.values()
    scale = _temperatures(temperature, lengths, ids.device)
    if packed:
        mask, more = None, length - len(ids)
        if more < 0:
            raise BatchError(
                f"a row of {length} does not hold {len(ids)} tokens; say a length of {len(ids)} "
                "or more"
            )
        again = torch.arange(more, device=ids.device)
        positions = torch.cat([position_ids.values(), again])[None]
    else:
        kept = torch.arange(length, device=ids.device) < lengths[:, None]
        mask = kept.to(torch.long)
        positions = _placed(position_ids.values(), mask, length, 0)
    return Tokens(
        _placed(ids, mask, length, pad_token),
        positions,
        mask,
        _placed(ids.roll(-1), mask, length, pad_token),
        None if scale is None else _placed(scale, mask, length, 1.0),
        offsets,
    )


def _placed(line: Tensor, mask: Tensor | None, length: int, fill: float) -> Tensor:
    """Return a line of tokens as one row, or as rows where the mask is 1."""
    if mask is None:
        return pad(line, (0, length - len(line)), value=fill)[None]
    return line.new_full(mask.shape, fill).masked_scatter(mask.bool(), line)


def _temperatures(
    temperature: float | Tensor, lengths: Tensor, device: torch.device
) -> Tensor | None:
    """Return the temperature of each token; None where it is 1."""
    if not isinstance(temperature, Tensor):
        if float(temperature) == 1.0:
            return None
        temperature = torch.full((len(lengths),), float(temperature), device=device)
    return (
        temperature.to(device, torch.float32).clamp(min=1e-8).repeat_interleave(lengths.to(device))
    )

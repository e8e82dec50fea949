# SPDX-License-Identifier: Apache-2.0
"""Scalars of a step, such as its losses, as a row of bytes that one rank sends to the others."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import string_at
from functools import lru_cache

import torch

from ..collectives.group import Group
from ..errors import MismatchError
from ..tree import Spec


def shared(
    group: Group,
    tag: torch.Tensor,
    number: int,
    values: Sequence[torch.Tensor] | None,
    dtypes: Sequence[torch.dtype],
    rank: int,
) -> Sequence[torch.Tensor]:
    """The scalars of a rank on every rank. Their row begins with the tag of the plan, a tensor, of
    which ``number`` is the value here.
    """
    kinds = (tag.dtype, *dtypes)
    (row,) = group.share(None if values is None else (packed([tag, *values]),), row_of(kinds), rank)
    if values is not None:
        return values
    their_tag, *scalars = unpacked(row, kinds)
    if (
        int(their_tag) != number
    ):  # shapes may agree by chance: then the loss is that of another step
        raise MismatchError(
            f"rank {rank} ran another step than rank {group.here[0]} (other shapes, "
            "schedule or number of "
            "microbatches); make the same calls in the same order on every rank"
        )
    return [value.to(tag.device) for value in scalars]


def packed(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their bytes in a row.

    >>> unpacked(packed([torch.tensor(7), torch.tensor(0.5)]), [torch.int64, torch.float32])
    [tensor(7), tensor(0.5000)]
    """
    if all(value.is_cpu for value in values):
        plain = [value.resolve_neg() for value in values]
        row = bytearray(b"".join([string_at(value.data_ptr(), value.itemsize) for value in plain]))
        return torch.frombuffer(row, dtype=torch.uint8)
    return torch.cat([value.reshape(1).view(torch.uint8) for value in values])


@lru_cache(maxsize=256)
def row_of(dtypes: tuple[torch.dtype, ...]) -> tuple[Spec]:
    """What a row of scalars is as a message."""
    return (Spec((sum(dtype.itemsize for dtype in dtypes),), (1,), torch.uint8),)


def unpacked(row: torch.Tensor, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """The scalars of a row, on the CPU."""
    content, at, scalars = bytearray(row.tolist()), 0, []
    for dtype in dtypes:
        scalars.append(torch.frombuffer(content, dtype=dtype, count=1, offset=at).reshape(()))
        at += dtype.itemsize
    return scalars

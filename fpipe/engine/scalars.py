# SPDX-License-Identifier: Apache-2.0
"""Scalars of a step, such as its losses: added in the order of their microbatches, and as a row of
bytes.

On a CPU they go through Python's own numbers, since a few operations on single elements cost as
much as a small stage. A product or a sum of two float32 numbers, taken in float64 and rounded once,
has the bits of float32's own. Knows nothing of stages and ranks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_float, string_at
from functools import lru_cache

import torch

from ..tree import Spec

#: The dtypes whose numbers can be computed with here, and how they are rounded: Python's own are
#: float64.
_NARROW = {torch.float64: False, torch.float32: True}


def added(values: Sequence[torch.Tensor], weight: float | None = None) -> torch.Tensor:
    """Their sum, in order, each times the weight: as one process that runs the microbatches in turn
    adds them.

    >>> added([torch.tensor(1.0), torch.tensor(2.0)], 0.5)
    tensor(1.5000)
    """
    where, dtype = values[0].device, values[0].dtype
    narrow = _NARROW.get(dtype)
    if narrow is not None and all(value.is_cpu and value.dtype is dtype for value in values):
        total = _in_python([value.item() for value in values], weight, narrow)
        return torch.full((), total, dtype=dtype, device="cpu")  # whatever the default device is
    row = torch.stack([value.to(where) for value in values])
    total, *rest = (row if weight is None else row.mul_(weight)).unbind()
    total = total.clone()
    for value in rest:
        total.add_(value)
    return total


def _in_python(numbers: Sequence[float], weight: float | None, narrow: bool) -> float:
    if weight is not None:
        weight = c_float(weight).value if narrow else weight
        numbers = [number * weight for number in numbers]
        numbers = array("f", numbers) if narrow else numbers
    total = numbers[0]
    for number in numbers[1:]:
        total += number
        total = c_float(total).value if narrow else total
    return total


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

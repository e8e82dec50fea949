"""``Spec``: the shape, strides and dtype of one tensor as it is stored and sent, and the rules for its strides.

Programs, plans and messages all describe tensors by it. Knows no program, no rank and no group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Spec(NamedTuple):
    """One tensor of a message: what sender and receiver must agree on before it is sent.

    >>> Spec.of(torch.zeros(2, 3).T)
    Spec(shape=(3, 2), stride=(1, 3), dtype=torch.float32)
    >>> Spec.of(torch.zeros(4, 4)[:, :2]).stride  # gaps are not sent: it arrives contiguous
    (2, 1)
    >>> Spec.of(torch.zeros(1, 3).expand(5, 3)).stride  # nor are repeated rows: one row is sent
    (0, 1)
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        """The Spec under which a tensor (fake tensors included) arrives at its receiver."""
        shape = tuple(tensor.shape)
        return cls(shape, arriving(shape, tuple(tensor.stride())), tensor.dtype)

    @property
    def stored(self) -> int:
        """The number of elements stored and sent: expanded axes count once."""
        count = 1
        for size, step in zip(self.shape, self.stride, strict=True):
            count *= size if step or not size else 1
        return count

    @property
    def bytes(self) -> int:
        """The number of bytes sent."""
        return self.stored * self.dtype.itemsize

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.shape)}"


def arriving(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The strides with which a tensor arrives: unchanged where its memory has no gaps, contiguous otherwise.

    Strides of 0 are kept: only what is stored is sent. Axes of one element, and tensors without elements, do not
    determine a memory layout and get the strides of a contiguous tensor.

    >>> arriving((2, 3), (1, 2)), arriving((2, 3), (8, 2)), arriving((4, 3), (0, 1))
    ((1, 2), (3, 1), (0, 1))
    """
    if 0 in shape:
        return contiguous(shape)
    repeats = [step == 0 and size > 1 for size, step in zip(shape, stride, strict=True)]
    stored = [1 if repeat else size for size, repeat in zip(shape, repeats, strict=True)]
    plain = contiguous(stored)
    expected, dense = 1, True
    for step, size in sorted((step, size) for step, size in zip(stride, stored, strict=True) if size > 1):
        dense = dense and step == expected
        expected *= size
    axes = zip(stored, stride if dense else plain, plain, repeats, strict=True)
    return tuple(0 if repeat else step if size > 1 else other for size, step, other, repeat in axes)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))

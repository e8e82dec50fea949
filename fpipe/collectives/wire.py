# SPDX-License-Identifier: Apache-2.0
"""The wire format of messages: few flat buffers, the same on both sides, computed from the Specs
alone.

A tensor is sent as its memory, in memory order. Small tensors of one message share one buffer of
bytes; a single small tensor, and each large one, is sent without a copy. Sender and receiver use
the same :class:`WireFormat`, so a wrong size or dtype is detected before anything is sent. This
module must not know backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import MismatchError
from ..tree import Spec, contiguous
from .group import check_message

#: Alignment of tensors in a shared buffer: that of torch's allocator, since the bits of a product
#: may depend on it.
ALIGN = 64
#: From this size on, copying a tensor into a shared buffer costs more than a separate message.
ALONE = 256 * 1024


class Buffer(NamedTuple):
    """One buffer: (index of a tensor, its offset in bytes). The buffer of a single tensor has its
    dtype.
    """

    items: tuple[tuple[int, int], ...]
    bytes: int
    dtype: torch.dtype


def layout(specs: tuple[Spec, ...]) -> tuple[Buffer, ...]:
    """The buffers of a message. Tensors without elements need none.

    >>> row = Spec((8,), (1,), torch.float32)
    >>> [(buffer.items, buffer.dtype) for buffer in layout((row, row))]
    [(((0, 0), (1, 64)), torch.uint8)]
    """
    sizes = [spec.bytes for spec in specs]
    small = [index for index, size in enumerate(sizes) if 0 < size < ALONE]
    alone = [index for index, size in enumerate(sizes) if size >= ALONE or small == [index]]
    buffers = [Buffer(((index, 0),), sizes[index], specs[index].dtype) for index in alone]
    if len(small) > 1:
        items, end = [], 0
        for index in small:
            items.append((index, end))
            end += -(-sizes[index] // ALIGN) * ALIGN
        buffers.append(Buffer(tuple(items), end, torch.uint8))
    return tuple(buffers)


class WireFormat:
    """Packs, receives and unpacks messages of one tuple of Specs; cached by :func:`wire_format`.

    >>> x = torch.arange(6.).view(2, 3).T
    >>> form = wire_format((Spec.of(x),))
    >>> form.pack((x,), src=0, dst=1)
    [tensor([0., 1., 2., 3., 4., 5.])]
    >>> form.unpack(form.pack((x,), src=0, dst=1))[0].equal(x)
    True
    """

    __slots__ = ("_alone", "_plain", "buffers", "simple", "sizes", "specs")

    def __init__(self, specs: tuple[Spec, ...]):
        self.specs = specs
        self.buffers = layout(specs)
        self.sizes = tuple(buffer.bytes for buffer in self.buffers)
        self._plain = tuple(spec.stride == contiguous(spec.shape) for spec in specs)
        # Most messages are one tensor: those take a shorter path.
        self._alone = len(specs) == 1 and len(self.buffers) == 1
        self.simple = self._alone and self._plain[0] and not specs[0].dtype.is_complex

    def pack(self, tensors: Sequence[Tensor], src: int, dst: int) -> list[Tensor]:
        """The contiguous buffers to send; checks every tensor against its Spec."""
        specs = self.specs
        fits = len(tensors) == len(specs)
        for tensor, spec in zip(tensors, specs, strict=False):
            fits = fits and tensor.shape == spec.shape and tensor.dtype is spec.dtype
        if not fits:
            check_message(tensors, specs, src, dst)
        if self._alone:
            return [self._memory(tensors[0], 0)]
        return [self._joined(tensors, buffer) for buffer in self.buffers]

    def empty(self, device: torch.device) -> list[Tensor]:
        """Buffers to receive a message into."""
        if self._alone and self._plain[0]:
            return [torch.empty(self.specs[0].shape, dtype=self.specs[0].dtype, device=device)]
        return [
            torch.empty(buffer.bytes // buffer.dtype.itemsize, dtype=buffer.dtype, device=device)
            for buffer in self.buffers
        ]

    def unpack(
        self, buffers: Sequence[Tensor], device: torch.device | None = None
    ) -> tuple[Tensor, ...]:
        """The tensors of a message, as views of its buffers; tensors without elements are created
        on ``device``.
        """
        if self._alone and self._plain[0] and buffers[0].shape == self.specs[0].shape:
            return (buffers[0],)
        tensors: list[Tensor | None] = [None] * len(self.specs)
        for (items, _, dtype_sent), received in zip(self.buffers, buffers, strict=True):
            typed = {dtype_sent: received}
            for index, start in items:
                shape, stride, dtype = self.specs[index]
                memory = typed.get(dtype)
                if memory is None:
                    memory = typed[dtype] = received.view(dtype)
                tensors[index] = memory.as_strided(
                    shape, stride, memory.storage_offset() + start // dtype.itemsize
                )
        return tuple(
            torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
            if tensor is None
            else tensor
            for tensor, spec in zip(tensors, self.specs, strict=True)
        )

    def _memory(self, tensor: Tensor, index: int) -> Tensor:
        """The memory of a tensor, in memory order; the tensor itself if it is contiguous."""
        spec = self.specs[index]
        tensor = lay_out(tensor, spec)
        return (
            tensor
            if self._plain[index]
            else tensor.as_strided((spec.stored,), (1,), tensor.storage_offset())
        )

    def _joined(self, tensors: Sequence[Tensor], buffer: Buffer) -> Tensor:
        if len(buffer.items) == 1:
            return self._memory(tensors[buffer.items[0][0]], buffer.items[0][0])
        pieces = []
        for index, _ in buffer.items:
            memory = self._memory(tensors[index], index).view(-1)
            pieces.append(memory if memory.dtype is torch.uint8 else memory.view(torch.uint8))
            short = -self.specs[index].bytes % ALIGN
            if short:
                pieces.append(_padding(memory.device, short))
        return torch.cat(pieces)


@lru_cache(maxsize=256)
def _padding(device: torch.device, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


@lru_cache(maxsize=4096)
def wire_format(specs: tuple[Spec, ...]) -> WireFormat:
    """The WireFormat of some Specs.

    >>> wire_format((Spec((2,), (1,), torch.float32),)) is wire_format((Spec((2,), (1,),
    ...     torch.float32),))
    True
    """
    return WireFormat(specs)


def lay_out(tensor: Tensor, spec: Spec) -> Tensor:
    """The tensor with the strides of its Spec; itself if it has them. Lazy conjugates and negations
    are resolved.
    """
    if tensor.stride() == spec.stride and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    for axis, step in enumerate(spec.stride):
        if step == 0:
            if tensor.stride(axis) != 0:
                raise MismatchError(
                    f"a tensor of strides {tuple(tensor.stride())} was planned with strides "
                    f"{spec.stride}, of which "
                    f"only a part is stored; call .contiguous() on it where the stage returns it"
                )
            tensor = tensor.narrow(axis, 0, 1)
    memory = torch.empty_strided(tensor.shape, spec.stride, dtype=spec.dtype, device=tensor.device)
    return memory.copy_(tensor).as_strided(spec.shape, spec.stride)

"""What a message looks like on a wire: few flat buffers, the same on both sides, computed from the Specs alone.

A tensor travels as its memory, in memory order. Small tensors of one message share one buffer of bytes; one alone, or
a large one, goes by itself, uncopied. Receiver and sender cut their buffers by the same :class:`Wire`, so a size or a
dtype that does not match is found before anything is sent. Knows no backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import MismatchError
from ..specs import Spec, contiguous
from .group import check_message

#: Starts of tensors in a shared buffer: as torch aligns its own, since bits of a product may depend on it.
ALIGN = 64
#: From this size on, copying costs more than a message of its own.
ALONE = 256 * 1024


class Parcel(NamedTuple):
    """One buffer: tensors by their index, each with its offset in bytes. One tensor alone keeps its dtype."""

    items: tuple[tuple[int, int], ...]
    bytes: int
    dtype: torch.dtype


def layout(specs: tuple[Spec, ...]) -> tuple[Parcel, ...]:
    """The buffers of a message. Tensors of no elements take none.

    >>> row = Spec((8,), (1,), torch.float32)
    >>> [(parcel.items, parcel.dtype) for parcel in layout((row, row))]
    [(((0, 0), (1, 64)), torch.uint8)]
    """
    sizes = [spec.bytes for spec in specs]
    small = [index for index, size in enumerate(sizes) if 0 < size < ALONE]
    alone = [index for index, size in enumerate(sizes) if size >= ALONE or small == [index]]
    parcels = [Parcel(((index, 0),), sizes[index], specs[index].dtype) for index in alone]
    if len(small) > 1:
        items, end = [], 0
        for index in small:
            items.append((index, end))
            end += -(-sizes[index] // ALIGN) * ALIGN
        parcels.append(Parcel(tuple(items), end, torch.uint8))
    return tuple(parcels)


class Wire:
    """How messages of given Specs are packed, received and unpacked; made once, by :func:`wire`.

    >>> x = torch.arange(6.).view(2, 3).T
    >>> way = wire((Spec.of(x),))
    >>> way.pack((x,), src=0, dst=1)
    [tensor([0., 1., 2., 3., 4., 5.])]
    >>> way.unpack(way.pack((x,), src=0, dst=1))[0].equal(x)
    True
    """

    __slots__ = ("_alone", "_pads", "_plain", "parcels", "simple", "sizes", "specs")

    def __init__(self, specs: tuple[Spec, ...]):
        self.specs = specs
        self.parcels = layout(specs)
        self.sizes = tuple(parcel.bytes for parcel in self.parcels)
        self._plain = tuple(spec.stride == contiguous(spec.shape) for spec in specs)
        # The most common message by far is one tensor: it has a short way of its own.
        self._alone = len(specs) == 1 and len(self.parcels) == 1
        self.simple = self._alone and self._plain[0] and not specs[0].dtype.is_complex
        self._pads: dict[tuple[torch.device, int], Tensor] = {}

    def pack(self, tensors: Sequence[Tensor], src: int, dst: int) -> list[Tensor]:
        """The contiguous buffers to send, one per parcel; checks every tensor against its Spec."""
        specs = self.specs
        fits = len(tensors) == len(specs)
        for tensor, spec in zip(tensors, specs, strict=False):
            fits = fits and tensor.shape == spec.shape and tensor.dtype is spec.dtype
        if not fits:
            check_message(tensors, specs, src, dst)
        if self._alone:
            return [self._memory(tensors[0], 0)]
        return [
            self._memory(tensors[parcel.items[0][0]], parcel.items[0][0])
            if len(parcel.items) == 1
            else self._together(tensors, parcel)
            for parcel in self.parcels
        ]

    def empty(self, device: torch.device) -> list[Tensor]:
        """Buffers to receive a message into."""
        if self._alone and self._plain[0]:
            return [torch.empty(self.specs[0].shape, dtype=self.specs[0].dtype, device=device)]
        return [
            torch.empty(parcel.bytes // parcel.dtype.itemsize, dtype=parcel.dtype, device=device)
            for parcel in self.parcels
        ]

    def unpack(self, buffers: Sequence[Tensor], device: torch.device | None = None) -> tuple[Tensor, ...]:
        """The tensors of a message, as views of the buffers it came in; empty ones are made on ``device``."""
        if self._alone and self._plain[0] and buffers[0].shape == self.specs[0].shape:
            return (buffers[0],)
        found: list[Tensor | None] = [None] * len(self.specs)
        for parcel, buffer in zip(self.parcels, buffers, strict=True):
            typed = {parcel.dtype: buffer}
            for index, start in parcel.items:
                shape, stride, dtype = self.specs[index]
                memory = typed.get(dtype)
                if memory is None:
                    memory = typed[dtype] = buffer.view(dtype)
                found[index] = memory.as_strided(shape, stride, memory.storage_offset() + start // dtype.itemsize)
        return tuple(
            torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device) if tensor is None else tensor
            for tensor, spec in zip(found, self.specs, strict=True)
        )

    def _memory(self, tensor: Tensor, index: int) -> Tensor:
        """A tensor's memory, in memory order; the tensor itself where that is plain."""
        spec = self.specs[index]
        tensor = lay_out(tensor, spec)
        return tensor if self._plain[index] else tensor.as_strided((spec.stored,), (1,), tensor.storage_offset())

    def _together(self, tensors: Sequence[Tensor], parcel: Parcel) -> Tensor:
        pieces = []
        for index, _ in parcel.items:
            spec, tensor = self.specs[index], lay_out(tensors[index], self.specs[index])
            memory = tensor.as_strided((spec.stored,), (1,), tensor.storage_offset())
            pieces.append(memory if spec.dtype is torch.uint8 else memory.view(torch.uint8))
            short = -spec.bytes % ALIGN
            if short:
                pieces.append(self._pad(memory.device, short))
        return torch.cat(pieces)

    def _pad(self, device: torch.device, size: int) -> Tensor:
        found = self._pads.get((device, size))
        if found is None:
            found = self._pads[device, size] = torch.zeros(size, dtype=torch.uint8, device=device)
        return found


@lru_cache(maxsize=4096)
def wire(specs: tuple[Spec, ...]) -> Wire:
    """The Wire of some Specs.

    >>> wire((Spec((2,), (1,), torch.float32),)) is wire((Spec((2,), (1,), torch.float32),))
    True
    """
    return Wire(specs)


def lay_out(tensor: Tensor, spec: Spec) -> Tensor:
    """The tensor with the strides of its Spec; itself where it has them. Lazy conjugates are made real."""
    if tensor.stride() == spec.stride and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    for axis, step in enumerate(spec.stride):
        if step == 0:
            if tensor.stride(axis) != 0:
                raise MismatchError(
                    f"a tensor of strides {tuple(tensor.stride())} was planned with strides {spec.stride}, of which "
                    f"only a part is stored; call .contiguous() on it where the stage returns it"
                )
            tensor = tensor.narrow(axis, 0, 1)
    memory = torch.empty_strided(tensor.shape, spec.stride, dtype=spec.dtype, device=tensor.device)
    return memory.copy_(tensor).as_strided(spec.shape, spec.stride)

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
from .group import Specs, Tensors

#: Alignment of tensors in a shared buffer: that of torch's allocator, since the bits of a product
#: may depend on it.
ALIGN = 64
#: From this size on, copying a tensor into a shared buffer costs more than a separate message.
ALONE = 256 * 1024


def as_bytes(buffer: Tensor) -> Tensor:
    """The memory of a contiguous tensor.

    >>> as_bytes(torch.ones(1))
    tensor([  0,   0, 128,  63], dtype=torch.uint8)
    """
    return buffer.view(-1).view(torch.uint8)


def part_of(memory: Tensor, part: int, parts: int) -> Tensor:
    """One of ``parts`` equal parts of memory, as a view.

    >>> part_of(torch.arange(6), 1, 3)
    tensor([2, 3])
    """
    if memory.dim() != 1 or memory.numel() % parts:
        raise MismatchError(
            f"{list(memory.shape)} elements do not make {parts} equal parts; lay tensors out "
            "along one axis and pad it"
        )
    size = memory.numel() // parts
    return memory.narrow(0, part * size, size)


def as_planned(tensors: Tensors, specs: Specs, src: int, dst: int) -> Tensors:
    """A message with the strides of its Specs; MismatchError if it differs in number, shapes or
    dtypes of tensors.

    Kernels, and so bits, may depend on strides.

    >>> row = torch.ones(2)
    >>> as_planned((row,), (Spec.of(row),), 0, 1)[0] is row
    True
    """
    if len(tensors) == len(specs) and all(map(_fits, tensors, specs)):
        return tensors
    if len(tensors) != len(specs):
        raise MismatchError(
            f"rank {src} sent {len(tensors)} tensors and rank {dst} expected {len(specs)}; both "
            "must run one plan"
        )
    for index, (tensor, spec) in enumerate(zip(tensors, specs, strict=True)):
        if tensor.shape != spec.shape or tensor.dtype is not spec.dtype:
            raise MismatchError(
                f"tensor {index} of a message from rank {src} to rank {dst} is {Spec.of(tensor)}, "
                f"expected {spec}; a stage's shapes must be those it was planned with"
            )
    return tuple(map(lay_out, tensors, specs))


def _fits(tensor: Tensor, spec: Spec) -> bool:
    """Whether the memory of a tensor is laid out as its Spec says."""
    shape, stride, dtype = spec
    return (
        tensor.stride() == stride
        and tensor.shape == shape
        and tensor.dtype is dtype
        and not tensor.is_neg()
        and not (dtype.is_complex and tensor.is_conj())
    )


def lay_out(tensor: Tensor, spec: Spec) -> Tensor:
    """The tensor with the strides of its Spec; itself if it has them. Lazy conjugates and negations
    are resolved.
    """
    if _fits(tensor, spec):
        return tensor
    for axis, step in enumerate(spec.stride):
        if step == 0:
            if tensor.stride(axis) != 0:
                raise MismatchError(
                    f"a tensor of strides {tuple(tensor.stride())} was planned with strides "
                    f"{spec.stride}, of which only a part is stored; call .contiguous() on it "
                    "where the stage returns it"
                )
            tensor = tensor.narrow(axis, 0, 1)
    memory = torch.empty_strided(tensor.shape, spec.stride, dtype=spec.dtype, device=tensor.device)
    return memory.copy_(tensor).as_strided(spec.shape, spec.stride)


def aligned(nbytes: int) -> int:
    """The bytes that a tensor takes in a buffer that it shares."""
    return -(-nbytes // ALIGN) * ALIGN


def layout(specs: Specs) -> tuple[tuple[int, ...], ...]:
    """The buffers of a message: the numbers of the tensors in each. Tensors without elements need
    none.

    >>> row = Spec((8,), (1,), torch.float32)
    >>> layout((row, row))
    ((0, 1),)
    """
    sizes = [spec.bytes for spec in specs]
    small = tuple(index for index, size in enumerate(sizes) if 0 < size < ALONE)
    large = tuple((index,) for index, size in enumerate(sizes) if size >= ALONE)
    return (*large, small) if small else large


class WireFormat(NamedTuple):
    """Packs, receives and unpacks messages of one tuple of Specs; cached by :func:`wire_format`.

    ``stored`` are the elements that are sent of each tensor, ``sizes`` the bytes of each buffer.
    ``plain``: a message is one contiguous tensor, as most are, and its own buffer.

    >>> x = torch.arange(6.).view(2, 3).T
    >>> form = wire_format((Spec.of(x),))
    >>> form.pack((x,), src=0, dst=1)[0].view(torch.float32)
    tensor([0., 1., 2., 3., 4., 5.])
    >>> form.unpack(form.pack((x,), src=0, dst=1))[0].equal(x)
    True
    """

    specs: Specs
    buffers: tuple[tuple[int, ...], ...]
    stored: tuple[int, ...]
    sizes: tuple[int, ...]
    plain: bool

    def pack(self, tensors: Tensors, src: int, dst: int) -> Sequence[Tensor]:
        """The buffers to send; checks every tensor against its Spec."""
        tensors = as_planned(tensors, self.specs, src, dst)
        if self.plain:
            return tensors
        flat = [
            tensor.as_strided((count,), (1,), tensor.storage_offset()).view(torch.uint8)
            for tensor, count in zip(tensors, self.stored, strict=True)
        ]
        return [_joined([flat[index] for index in indices]) for indices in self.buffers]

    def empty(self, device: torch.device) -> list[Tensor]:
        """Buffers to receive a message into."""
        if self.plain:
            shape, stride, dtype = self.specs[0]  # empty_strided is faster than empty
            return [torch.empty_strided(shape, stride, dtype=dtype, device=device)]
        return [torch.empty(size, dtype=torch.uint8, device=device) for size in self.sizes]

    def unpack(self, buffers: Sequence[Tensor], device: torch.device | None = None) -> Tensors:
        """The tensors of a message, as views of its buffers; tensors without elements are created
        on ``device``.
        """
        if self.plain:
            return tuple(buffers)
        tensors: dict[int, Tensor] = {}
        for indices, received in zip(self.buffers, buffers, strict=True):
            start = 0
            for index in indices:
                shape, stride, dtype = self.specs[index]
                memory = received.view(dtype)
                offset = memory.storage_offset() + start // dtype.itemsize
                tensors[index] = memory.as_strided(shape, stride, offset)
                start += aligned(self.stored[index] * dtype.itemsize)
        return tuple(
            tensors[index]
            if index in tensors
            else torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
            for index, spec in enumerate(self.specs)
        )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Bytes of tensors in one buffer; those of one tensor as they are."""
    if len(parts) == 1:
        return parts[0]
    padded = []
    for part in parts:
        padded += [part, _padding(part.device, -len(part) % ALIGN)]
    return torch.cat(padded)


@lru_cache(maxsize=256)
def _padding(device: torch.device, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


@lru_cache(maxsize=4096)
def wire_format(specs: Specs) -> WireFormat:
    """The WireFormat of some Specs.

    >>> row = Spec((2,), (1,), torch.float32)
    >>> wire_format((row,)) is wire_format((row,))
    True
    """
    buffers = layout(specs)
    stored = tuple(spec.stored for spec in specs)
    sizes = [
        specs[indices[0]].bytes
        if len(indices) == 1
        else sum(aligned(specs[index].bytes) for index in indices)
        for indices in buffers
    ]
    plain = len(specs) == len(buffers) == 1 and specs[0].stride == contiguous(specs[0].shape)
    return WireFormat(specs, buffers, stored, tuple(sizes), plain)

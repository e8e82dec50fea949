"""What a message looks like on a wire: few flat buffers, the same on both sides, computed from the Specs alone.

A tensor travels as its memory, in memory order. Small tensors of one message share one buffer of bytes; a large one
goes by itself, uncopied. Receiver and sender call the same :func:`layout`, so a size or a dtype that does not match
is found before anything is sent. Knows no backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import MismatchError
from .group import Spec, check_message, contiguous

#: Starts of tensors in a shared buffer: as torch aligns its own, since bits of a product may depend on it.
ALIGN = 64
#: From this size on, copying costs more than a message of its own.
ALONE = 256 * 1024


class Parcel(NamedTuple):
    """One buffer: tensors by their index, each with its offset in bytes. One tensor alone keeps its dtype."""

    items: tuple[tuple[int, int], ...]
    bytes: int
    dtype: torch.dtype


@lru_cache(maxsize=4096)
def layout(specs: tuple[Spec, ...]) -> tuple[Parcel, ...]:
    """The buffers of a message. Tensors of no elements take none.

    >>> row = Spec((8,), (1,), torch.float32)
    >>> [(parcel.items, parcel.dtype) for parcel in layout((row, row))]
    [(((0, 0), (1, 64)), torch.uint8)]
    """
    large = [index for index, spec in enumerate(specs) if spec.bytes >= ALONE]
    small = [index for index, spec in enumerate(specs) if 0 < spec.bytes < ALONE]
    parcels = [Parcel(((index, 0),), specs[index].bytes, specs[index].dtype) for index in large]
    if len(small) == 1:
        parcels.append(Parcel(((small[0], 0),), specs[small[0]].bytes, specs[small[0]].dtype))
    elif small:
        items, end = [], 0
        for index in small:
            items.append((index, end))
            end += -(-specs[index].bytes // ALIGN) * ALIGN
        parcels.append(Parcel(tuple(items), end, torch.uint8))
    return tuple(parcels)


@lru_cache(maxsize=4096)
def plain(specs: tuple[Spec, ...]) -> bool:
    """Whether a message is one contiguous tensor, which travels as it is.

    >>> plain((Spec((2, 3), (3, 1), torch.float32),))
    True
    """
    return len(specs) == 1 and specs[0].stored > 1 and specs[0].stride == contiguous(specs[0].shape)


def pack(tensors: Sequence[Tensor], specs: tuple[Spec, ...], src: int, dst: int) -> list[Tensor]:
    """The flat buffers to send, one per parcel; checks every tensor against its Spec.

    >>> x = torch.arange(6.).view(2, 3).T
    >>> pack((x,), (Spec.of(x),), src=0, dst=1)
    [tensor([0., 1., 2., 3., 4., 5.])]
    """
    check_message(tensors, specs, src, dst)
    if plain(specs):
        return [lay_out(tensors[0], specs[0])]
    buffers = []
    for parcel in layout(specs):
        if len(parcel.items) == 1:
            index = parcel.items[0][0]
            buffers.append(flat(lay_out(tensors[index], specs[index]), specs[index]))
            continue
        buffer = torch.empty(parcel.bytes, dtype=torch.uint8, device=tensors[parcel.items[0][0]].device)
        for index, start in parcel.items:
            spec = specs[index]
            memory = flat(lay_out(tensors[index], spec), spec)
            buffer[start : start + spec.bytes].view(spec.dtype).copy_(memory)
        buffers.append(buffer)
    return buffers


def empty(specs: tuple[Spec, ...], device: torch.device) -> list[Tensor]:
    """Buffers to receive a message into."""
    if plain(specs):
        return [torch.empty(specs[0].shape, dtype=specs[0].dtype, device=device)]
    return [
        torch.empty(parcel.bytes // parcel.dtype.itemsize, dtype=parcel.dtype, device=device)
        for parcel in layout(specs)
    ]


def unpack(buffers: Sequence[Tensor], specs: tuple[Spec, ...], device: torch.device) -> tuple[Tensor, ...]:
    """The tensors of a message, as views of the buffers it came in.

    >>> specs = (Spec((2,), (1,), torch.int64), Spec((0, 3), (3, 1), torch.bool))
    >>> unpack([torch.tensor([3, 4])], specs, torch.device("cpu"))
    (tensor([3, 4]), tensor([], size=(0, 3), dtype=torch.bool))
    """
    if plain(specs):
        return (buffers[0],)
    found: dict[int, Tensor] = {}
    for parcel, buffer in zip(layout(specs), buffers, strict=True):
        for index, start in parcel.items:
            spec = specs[index]
            memory = buffer if len(parcel.items) == 1 else buffer[start : start + spec.bytes].view(spec.dtype)
            found[index] = memory.as_strided(spec.shape, spec.stride, memory.storage_offset())
    return tuple(
        found[index]
        if index in found
        else torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
        for index, spec in enumerate(specs)
    )


def flat(tensor: Tensor, spec: Spec) -> Tensor:
    """A laid out tensor's memory, in memory order."""
    return tensor.as_strided((spec.stored,), (1,), tensor.storage_offset())


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

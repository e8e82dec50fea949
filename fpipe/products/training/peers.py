# SPDX-License-Identifier: Apache-2.0
"""Sums and messages among the ranks of several copies, over gloo; a wait ends when a member is
lost.

Tensors of accelerators pass through host memory. This module must not know what is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...collectives._store import Store, gloo
from ...collectives.codec import decode, encode
from ...errors import GroupError
from ...tree import Tree, flatten, unflatten

LOOK = 0.05  #: seconds between two looks for a change of members
_BYTES = 64 << 20  #: of gradients that are added up at once


class _Shape(NamedTuple):
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        """A tensor to receive into."""
        return torch.empty(self.shape, dtype=self.dtype)


class Peers:
    """The processes of all members that hold the same part of the pipeline; ``rank`` of ``size``.

    ``disturbed`` says whether a member is lost. Every method raises RuntimeError where one is.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: float, disturbed: Callable[[], bool]
    ):
        self.rank, self.size, self._timeout, self._disturbed = rank, size, timeout, disturbed
        self._group: Any = gloo(store, rank, size, timedelta(seconds=timeout)) if size > 1 else None

    def means(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The means of tensors over the members, added in their order; of several tensors at once,
        by dtype.
        """
        if self.size == 1:
            return [tensor.clone() for tensor in tensors]
        results: list[Tensor] = list(tensors)
        for places in _buckets(tensors):
            flat = self._mean(
                torch.cat([tensors[place].detach().reshape(-1).cpu() for place in places])
            )
            for place, part in zip(
                places, flat.split([tensors[place].numel() for place in places]), strict=True
            ):
                like = tensors[place]
                results[place] = part.reshape(like.shape).to(like.device)
        return results

    def _mean(self, flat: Tensor) -> Tensor:
        """The mean of a vector: each member adds up a part, and sends it to all."""
        number = flat.numel()
        padded = torch.nn.functional.pad(flat, (0, -number % self.size))
        received = torch.empty_like(padded)
        self._wait(self._group.alltoall_base(received, padded, [], []))
        part = reduce(torch.add, received.chunk(self.size)) / self.size
        parts = list(padded.chunk(self.size))
        self._wait(self._group.allgather([parts], [part]))
        return torch.cat(parts)[:number]

    def numbers(self, number: int) -> list[int]:
        """A number of each member."""
        if self.size == 1:
            return [number]
        mine = torch.tensor([number])
        every = [torch.zeros_like(mine) for _ in range(self.size)]
        self._wait(self._group.allgather([every], [mine]))
        return [int(each) for each in every]

    def state(self, state: Tree, root: int) -> Tree:
        """The state of one member; every member calls with its own."""
        leaves, spec = flatten(state)
        described = [
            _Shape(tuple(each.shape), each.dtype) if isinstance(each, Tensor) else each
            for each in leaves
        ]
        described = self._data(described, root)
        if len(described) != len(leaves):
            raise GroupError(
                f"one copy of the pipeline has {len(described)} leaves of parameters and state, "
                "and another "
                f"{len(leaves)}; all copies must have the same pipeline and the same transform"
            )
        for place, value in enumerate(described):
            if isinstance(value, _Shape):
                mine = leaves[place]
                sent = mine.detach().cpu().contiguous() if self.rank == root else value.empty()
                self._broadcast(sent, root)
                leaves[place] = sent.to(mine.device) if isinstance(mine, Tensor) else sent
            else:
                leaves[place] = value
        return unflatten(spec, leaves)

    def _data(self, value: Any, root: int) -> Any:
        """Data of one member."""
        raw = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
        size = torch.tensor([len(raw)])
        self._broadcast(size, root)
        buffer = raw if self.rank == root else torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(buffer, root)
        return decode(bytes(buffer.tolist()))

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        options: Any = dist.BroadcastOptions()
        options.rootRank = root
        self._wait(self._group.broadcast([tensor], options))

    def _wait(self, work: Any) -> None:
        """Wait for a collective."""
        end, look = time.monotonic() + self._timeout, time.monotonic() + LOOK
        while not work.is_completed():
            if (now := time.monotonic()) > look:
                look = now + LOOK
                if now > end or self._disturbed():
                    raise RuntimeError("a member was lost")
            time.sleep(0.0005)
        work.wait()


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """The places of tensors of one dtype that are added up at once."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket: list[int] = []
        held = 0
        for place, tensor in enumerate(tensors):
            if tensor.dtype == dtype:
                if bucket and held + tensor.nbytes > _BYTES:
                    yield bucket
                    bucket, held = [], 0
                bucket.append(place)
                held += tensor.nbytes
        yield bucket

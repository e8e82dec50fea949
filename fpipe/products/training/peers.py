# SPDX-License-Identifier: Apache-2.0
"""Sums and messages among the ranks of several copies, over gloo; a wait ends when a member is
lost.

Tensors of accelerators pass through host memory. This module must not know what is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...collectives import decode, encode
from ...errors import GroupError
from ...tree import Tree, flatten, unflatten

LOOK = 0.05  #: seconds between two looks for a change of members
_ELEMENTS = 16 << 20  #: of gradients that are added up at once
#: For documented names that the stubs of torch.distributed do not export.
DIST: Any = dist


class _Shape(NamedTuple):
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Peers:
    """The processes of all members that hold the same part of the pipeline; ``rank`` of ``size``.

    ``disturbed`` says whether a member is lost. Every method raises RuntimeError where one is.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout: float, disturbed: Callable[[], bool]
    ):
        self.rank, self.size, self._timeout, self._disturbed = rank, size, timeout, disturbed
        self._group: Any = None
        if size > 1:
            self._group = DIST.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))

    def means(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The means of tensors over the members, added in their order."""
        if self.size == 1:
            return [tensor.clone() for tensor in tensors]
        results = list(tensors)
        for dtype in {tensor.dtype: None for tensor in tensors}:
            places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
            same = [tensors[place].detach() for place in places]
            flat = torch.cat([tensor.reshape(-1).cpu() for tensor in same])
            mean = torch.cat([self._mean(part) for part in flat.split(_ELEMENTS)])
            parts = mean.split([tensor.numel() for tensor in same])
            for place, like, part in zip(places, same, parts, strict=True):
                results[place] = part.reshape(like.shape).to(like.device)
        return results

    def _mean(self, mine: Tensor) -> Tensor:
        return reduce(torch.add, self._gathered(mine)) / self.size

    def numbers(self, number: int) -> list[int]:
        """A number of each member."""
        return [int(each) for each in self._gathered(torch.tensor([number]))]

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        """A tensor of each member."""
        if self.size == 1:
            return [mine]
        every = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(self._group.allgather([every], [mine]))
        return every

    def state(self, state: Tree, root: int) -> Tree:
        """The state of one member; every member calls with its own."""
        mine, spec = flatten(state)
        described = [
            _Shape(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
            for leaf in mine
        ]
        described = self._data(described, root)
        if len(described) != len(mine):
            raise GroupError(
                f"one copy of the pipeline has {len(described)} leaves of parameters and state, "
                f"and another {len(mine)}; all copies must have the same pipeline and the same "
                "transform"
            )
        pairs = zip(mine, described, strict=True)
        return unflatten(spec, [self._leaf(leaf, what, root) for leaf, what in pairs])

    def _leaf(self, mine: object, described: object, root: int) -> object:
        if not isinstance(described, _Shape):
            return described
        if self.rank == root and isinstance(mine, Tensor):
            sent = mine.detach().cpu().contiguous()
        else:
            sent = torch.empty(described.shape, dtype=described.dtype)
        self._broadcast(sent, root)
        return sent.to(mine.device) if isinstance(mine, Tensor) else sent

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

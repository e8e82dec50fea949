# SPDX-License-Identifier: Apache-2.0
"""Sums and messages between the processes that hold the same part of several copies, over gloo.

Tensors of accelerators pass through host memory. Every function raises RuntimeError where a member
is lost. This module must not know what is sent, nor how members are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...collectives import decode, encode
from ...errors import GroupError
from ...tree import Spec, Tree, flatten, unflatten

_ELEMENTS = 16 << 20  #: of gradients that are added up at once
#: For documented names that the stubs of torch.distributed do not export.
_DIST: Any = dist


class Peers(NamedTuple):
    """The process of each member that holds this part of the pipeline.

    ``copies`` are the numbers of the members, and ``quorum`` is the number of this set of members.
    """

    copies: tuple[int, ...] = ()
    quorum: int = 0
    gloo: Any = None

    @classmethod
    def connect(
        cls, address: str, rank: int, copies: tuple[int, ...], quorum: int, timeout: float
    ) -> Peers:
        """Connect to the others through a store of torchft."""
        from torchft.process_group import create_store_client  # torchft is an extra

        seconds = timedelta(seconds=timeout)
        store = create_store_client(address, seconds)
        return cls(copies, quorum, _DIST.ProcessGroupGloo(store, rank, len(copies), seconds))

    def abort(self) -> None:
        """Close the connections, so that the others notice it at once."""
        if self.gloo is not None:
            self.gloo.abort()

    # ---- all members ----
    def means(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The means of tensors over the members, added in their order."""
        results = list(tensors)
        for dtype in {tensor.dtype: None for tensor in tensors}:
            same = {n: tensor.detach() for n, tensor in enumerate(tensors) if tensor.dtype == dtype}
            flat = torch.cat([tensor.reshape(-1).cpu() for tensor in same.values()])
            sums = [reduce(torch.add, self.gathered(part)) for part in flat.split(_ELEMENTS)]
            mean = torch.cat(sums) / len(self.copies)
            parts = mean.split([tensor.numel() for tensor in same.values()])
            for (n, like), part in zip(same.items(), parts, strict=True):
                results[n] = part.reshape(like.shape).to(like.device)
        return results

    def gathered(self, mine: Tensor) -> list[Tensor]:
        """A tensor of each member."""
        every = [torch.empty_like(mine) for _ in self.copies]
        self.gloo.allgather([every], [mine]).wait()
        return every

    # ---- from one to another ----
    def send(self, state: Tree, to: int) -> None:
        """Send a pytree of tensors and data, a tensor at a time."""
        leaves, _ = flatten(state)
        header = [Spec.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        raw = torch.frombuffer(bytearray(encode(header)), dtype=torch.uint8)
        self._send(torch.tensor([len(raw)]), to)
        self._send(raw, to)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self._send(leaf.detach().cpu().contiguous(), to)

    def receive(self, like: Tree, source: int) -> Tree:
        """Receive what another member sends; the form and the devices are those of ``like``."""
        mine, spec = flatten(like)
        size = self._receive(torch.zeros(1, dtype=torch.int64), source)
        raw = self._receive(torch.empty(int(size), dtype=torch.uint8), source)
        header = decode(bytes(raw.tolist()))
        if len(header) != len(mine):
            raise GroupError(
                f"one copy of the pipeline has {len(header)} leaves of parameters and state, and "
                f"another {len(mine)}; all copies must have the same pipeline and the same "
                "transform"
            )
        leaves: list[object] = []
        for leaf, described in zip(mine, header, strict=True):
            if isinstance(described, Spec):
                tensor = torch.empty(described.shape, dtype=described.dtype)
                self._receive(tensor, source)
                if isinstance(leaf, Tensor):
                    described = tensor.to(leaf.device)
                else:
                    described = tensor
            leaves.append(described)
        return unflatten(spec, leaves)

    def _send(self, tensor: Tensor, to: int) -> None:
        if tensor.numel():
            self.gloo.send([tensor], to, 0).wait()

    def _receive(self, tensor: Tensor, source: int) -> Tensor:
        if tensor.numel():
            self.gloo.recv([tensor], source, 0).wait()
        return tensor

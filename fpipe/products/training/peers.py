# SPDX-License-Identifier: Apache-2.0
"""Sums and states of the processes that hold the same part of several copies, over gloo.

Tensors of accelerators pass through host memory. Every function raises RuntimeError where a member
is lost. This module must not know what is sent, nor how members are chosen.
"""

from __future__ import annotations

import socket
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
#: What members may take to connect, and ranks to vote: all begin at one time, unless one was lost.
PROMPT = timedelta(seconds=3)
#: For documented names that the stubs of torch.distributed do not export.
_DIST: Any = dist


class Peers(NamedTuple):
    """The process of each member that holds this part of the pipeline.

    ``copies`` are the numbers of the members, and ``quorum`` is the number of this set of members.
    They wait for each other's messages for ``timeout``. Gloo closes connections when nothing refers
    to it, not when told to abort; then the others notice at once.
    """

    copies: tuple[int, ...] = ()
    quorum: int = 0
    timeout: timedelta = PROMPT
    gloo: Any = None

    @classmethod
    def connect(
        cls,
        address: str,
        rank: int,
        copies: tuple[int, ...],
        quorum: int,
        timeout: float,
    ) -> Peers:
        """Connect to the others through a store of torchft; OSError if it is gone."""
        from torchft.process_group import create_store_client  # torchft is an extra

        host, _, port = address.partition("/")[0].rpartition(":")
        # raises at once if the store is gone, to which a client would try to connect three times
        socket.create_connection((host, int(port)), PROMPT.total_seconds()).close()
        store = create_store_client(address, PROMPT)
        gloo = _DIST.ProcessGroupGloo(store, rank, len(copies), PROMPT)
        return cls(copies, quorum, timedelta(seconds=timeout), gloo)

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
        options = _DIST.distributed_c10d.AllgatherOptions()
        options.timeout = self.timeout
        self.gloo.allgather([every], [mine], options).wait()
        return every

    # ---- from one to all ----
    def share(self, state: Tree, source: int, takes: bool) -> Tree:
        """Send the pytree of tensors and data that a member has to all of them, a tensor at a time.

        Returns:
            What was sent, where this member takes it over, and its own state otherwise. Form and
            devices are those of its own.
        """
        mine, spec = flatten(state)
        header = [Spec.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in mine]
        raw = torch.frombuffer(bytearray(encode(header)), dtype=torch.uint8)
        size = int(self._broadcast(torch.tensor([len(raw)]), source))
        if size != len(raw):
            raw = torch.empty(size, dtype=torch.uint8)
        header = decode(bytes(self._broadcast(raw, source).tolist()))
        if len(header) != len(mine):
            raise GroupError(
                f"one copy of the pipeline has {len(header)} leaves of parameters and state, and "
                f"another {len(mine)}; all copies must have the same pipeline and the same "
                "transform"
            )
        leaves: list[object] = []
        for leaf, sent in zip(mine, header, strict=True):
            if isinstance(sent, Spec):
                if self.gloo.rank() == source:
                    tensor = leaf.detach().cpu().contiguous()
                else:
                    tensor = torch.empty(sent.shape, dtype=sent.dtype)
                sent = self._broadcast(tensor, source)
            if takes and isinstance(leaf, Tensor) and isinstance(sent, Tensor):
                sent = sent.to(leaf.device)
            leaves.append(sent if takes else leaf)
        return unflatten(spec, leaves) if takes else state

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        if tensor.numel():
            options = _DIST.BroadcastOptions()
            options.rootRank = source
            options.timeout = self.timeout
            self.gloo.broadcast([tensor.reshape(-1).view(torch.uint8)], options).wait()
        return tensor

# SPDX-License-Identifier: Apache-2.0
"""Reductions by the methods of ``capabilities``, over a process group of torch.distributed.

The functions take over the memory of their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .capabilities import Reduction
from .wire import as_bytes, part_of

_ASK = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "mean": torch.add}
#: By its name since torch 2.13, or the earlier one.
_SCATTER: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
#: A work of torch (None: nothing to wait for), and a function that returns the result once it is
#: complete.
Started: TypeAlias = tuple[dist.Work | None, Callable[[], Tensor]]


def start_reduce(
    memory: Tensor,
    method: Reduction,
    group: dist.ProcessGroup,
    scatter: bool,
    native: bool,
) -> Started:
    """Start ``all_reduce``, in ``memory`` itself where possible. ``native``: the backend can
    scatter the result.

    Where it cannot, everything is reduced and the other parts are dropped: more bytes sent, the
    same bits.
    """
    rank = group.rank()
    size = group.size()
    part_of(memory, 0, size if scatter else 1)
    if not memory.numel():
        return None, lambda: memory
    device = torch.device("cpu") if method.staged else memory.device
    carried = memory.detach().to(device, method.carry).contiguous()
    pieces = [carried]
    if method.ask == "gather":
        pieces = [torch.empty_like(carried) for _ in range(size)]
        work = dist.all_gather(
            list(map(as_bytes, pieces)), as_bytes(carried), group=group, async_op=True
        )
    elif scatter and native:
        pieces = [torch.empty_like(part_of(carried, rank, size))]
        work = _SCATTER(pieces[0], carried, _ASK[method.ask], group=group, async_op=True)
    else:
        work = dist.all_reduce(carried, _ASK[method.ask], group=group, async_op=True)

    def finish() -> Tensor:
        result = reduced(pieces, method, size, memory)
        if scatter and result.numel() == memory.numel() and size > 1:
            result = part_of(result, rank, size).clone()  # so that the rest can be freed
        return result

    return work, finish


def start_gather(memory: Tensor, staged: bool, group: dist.ProcessGroup) -> Started:
    """Start filling ``memory`` with the parts of all processes, as bytes, which every backend
    carries.
    """
    buffer = memory.cpu() if staged else memory
    parts = [as_bytes(part_of(buffer, rank, group.size())) for rank in range(group.size())]
    work = (
        dist.all_gather(parts, parts[group.rank()].clone(), group=group, async_op=True)
        if memory.numel()
        else None
    )
    return work, lambda: memory.copy_(buffer) if staged else memory


def reduced(pieces: Sequence[Tensor], method: Reduction, size: int, like: Tensor) -> Tensor:
    """The result for ``size`` ranks, of the tensors of all or of the one that a backend reduced."""
    # by rank: the same order, and so the same bits, everywhere
    total = reduce(_COMBINE[method.op], pieces)
    if method.divide:
        total = total / size
    if like.dtype == torch.bool:
        total = total != 0
    return total.to(like.device, like.dtype)

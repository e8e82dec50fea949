# SPDX-License-Identifier: Apache-2.0
"""Reductions by the methods of ``capabilities``, over a process group of torch.distributed.

The functions take over the memory of their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .capabilities import Reduction
from .wire import part_of

_ASK = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
#: By its name since torch 2.13, or the earlier one.
_SCATTER: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
#: A work of torch (None: nothing to wait for), and a function that returns the result once it is
#: complete.
Started: TypeAlias = tuple[dist.Work | None, Callable[[], Tensor]]


def start_reduce(
    memory: Tensor, method: Reduction, group: dist.ProcessGroup, scatter: bool, native: bool
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
    if method.staged:
        device = torch.device("cpu")
    else:
        device = memory.device
    carried = memory.detach().to(device, method.carry).contiguous()
    pieces = [carried]
    if method.ask == "gather":
        pieces = [torch.empty_like(carried) for _ in range(size)]
        work = dist.all_gather(list(map(_raw, pieces)), _raw(carried), group=group, async_op=True)
    elif scatter and native:
        pieces = [torch.empty_like(part_of(carried, rank, size))]
        work = _SCATTER(pieces[0], carried, _ASK[method.ask], group=group, async_op=True)
    else:
        work = dist.all_reduce(carried, _ASK[method.ask], group=group, async_op=True)

    def finish() -> Tensor:
        if method.ask == "gather":
            result = add_up(pieces, method.op)
        else:
            result = pieces[0]
        if scatter and result.numel() == memory.numel() and size > 1:
            result = part_of(result, rank, size).clone()  # so that the rest can be freed
        if method.divide:
            result = result.div_(size)
        if memory.dtype == torch.bool:
            result = result != 0
        return result.to(memory.device, memory.dtype)

    return work, finish


def start_gather(memory: Tensor, staged: bool, group: dist.ProcessGroup) -> Started:
    """Start filling ``memory`` with the parts of all processes, as bytes, which every backend
    carries.
    """
    buffer = memory.cpu() if staged else memory
    parts = [_raw(part_of(buffer, rank, group.size())) for rank in range(group.size())]
    work = (
        dist.all_gather(parts, parts[group.rank()].clone(), group=group, async_op=True)
        if memory.numel()
        else None
    )
    return work, lambda: memory.copy_(buffer) if staged else memory


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def add_up(pieces: Sequence[Tensor], op: str) -> Tensor:
    """The tensors of all ranks, reduced; a mean is their sum."""
    if op in ("max", "min"):
        return (torch.amax if op == "max" else torch.amin)(torch.stack(tuple(pieces)), 0)
    total = pieces[0]
    for piece in pieces[1:]:  # by rank: the same order, and so the same bits, everywhere
        total = total + piece
    return total

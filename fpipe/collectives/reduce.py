"""Carrying out what ``adapt`` chose, over a torch process group. Arguments are never changed; results are returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .adapt import Way
from .group import part_of

_ASK = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
#: The name that torch 2.13 gave it, or the one that it had before.
_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Wait = Callable[[Any], None]
#: A work of torch's (None: nothing to wait for), and what makes the result once it is done.
Started: TypeAlias = tuple[Any, Callable[[], Tensor]]


def all_reduce(tensor: Tensor, way: Way, group: dist.ProcessGroup, wait: Wait) -> Tensor:
    """The reduction of every process's tensor, by the chosen way; ``wait`` waits for a work of torch's."""
    carried = tensor.detach().to("cpu" if way.staged else tensor.device, way.carry)
    carried = carried.clone(memory_format=torch.contiguous_format)
    if way.ask == "gather":
        found = _reduce_here(all_gather(carried, group, wait), way.op)
    else:
        wait(dist.all_reduce(carried, _ASK[way.ask], group=group, async_op=True))
        found = carried
    if way.divide:
        found = found / group.size()
    return found.to(tensor.device, tensor.dtype) if tensor.dtype != torch.bool else (found != 0).to(tensor.device)


def start_reduce(memory: Tensor, way: Way, group: dist.ProcessGroup, scatter: bool, native: bool) -> Started:
    """``all_reduce`` under way, in ``memory`` itself where that may be; scattered by the backend where it can.

    Where it cannot, everything is reduced and the others' parts are dropped: more bytes, the same bits.
    """
    rank, size = group.rank(), group.size()
    part_of(memory, 0, size if scatter else 1)
    carried = memory.detach().to("cpu" if way.staged else memory.device, way.carry).contiguous()
    if not memory.numel():
        return None, lambda: memory
    if way.ask == "gather":
        pieces = [torch.empty_like(carried) for _ in range(size)]
        work = dist.all_gather([_raw(piece) for piece in pieces], _raw(carried), group=group, async_op=True)
    elif scatter and native:
        pieces = [torch.empty_like(part_of(carried, rank, size))]
        work = _SCATTER(pieces[0], carried, _ASK[way.ask], group=group, async_op=True)
    else:
        pieces = [carried]
        work = dist.all_reduce(carried, _ASK[way.ask], group=group, async_op=True)

    def finish() -> Tensor:
        found = _reduce_here(pieces, way.op) if way.ask == "gather" else pieces[0]
        if scatter and found.numel() == memory.numel() and size > 1:
            found = part_of(found, rank, size).clone()  # so that the rest can be freed
        found = found.div_(size) if way.divide else found
        return (found != 0 if memory.dtype == torch.bool else found).to(memory.device, memory.dtype)

    return work, finish


def start_gather(memory: Tensor, staged: bool, group: dist.ProcessGroup) -> Started:
    """Every process's part into ``memory``, as bytes, which every backend carries."""
    landing = memory.cpu() if staged else memory
    parts = [_raw(part_of(landing, rank, group.size())) for rank in range(group.size())]
    work = dist.all_gather(parts, parts[group.rank()].clone(), group=group, async_op=True) if memory.numel() else None
    return work, lambda: memory.copy_(landing) if staged else memory


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def all_gather(tensor: Tensor, group: dist.ProcessGroup, wait: Wait) -> list[Tensor]:
    """Every process's tensor, by rank; they travel as bytes, which every backend carries."""
    memory = tensor.reshape(-1).view(torch.uint8)
    landing = [torch.empty_like(memory) for _ in range(group.size())]
    if memory.numel():
        wait(dist.all_gather(landing, memory, group=group, async_op=True))
    return [piece.view(tensor.dtype).view(tensor.shape) for piece in landing]


def _reduce_here(pieces: Sequence[Tensor], op: str) -> Tensor:
    stacked = torch.stack(tuple(pieces))
    if op == "max":
        return stacked.amax(0)
    if op == "min":
        return stacked.amin(0)
    total = pieces[0]
    for piece in pieces[1:]:  # by rank: the same order, and so the same bits, everywhere
        total = total + piece
    return total

"""Carrying out what ``adapt`` chose, over a torch process group. Arguments are never changed; results are returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .adapt import Way

_ASK = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
Wait = Callable[[Any], None]


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

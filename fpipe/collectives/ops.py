"""Differentiable collectives for the inside of a stage: all_to_all, all_gather, reduce_scatter, all_reduce.

Each one is a start and a wait of torch's functional collectives, forward and backward, so that a trace shows both and a
weave can put work between them. The gradient is that of the sum of all members' losses. This module knows process
groups, and nothing of stages, schedules or ranks of a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import GroupError

Members = Any  # a ProcessGroup, a DeviceMesh of one axis, or None: this process alone

_FUNCTIONAL = torch.ops._c10d_functional


def all_to_all(
    x: Tensor, group: Members = None, *, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
) -> Tensor:
    """Cut ``x`` along its first axis, give part ``j`` to member ``j``, and join what comes from all, in their order.

    ``send`` and ``receive`` are the rows given to and had from each member; left out, all parts are even.

    >>> all_to_all(torch.arange(4.0))  # alone: every part is one's own
    tensor([0., 1., 2., 3.])
    """
    pg = _members(group)
    if pg is None:
        return x
    size = pg.size()
    if send is None or receive is None:
        if send is not None or receive is not None:
            raise GroupError("all_to_all needs both send= and receive=, the rows to and from each member, or neither")
        if x.shape[0] % size:
            raise GroupError(
                f"all_to_all cuts {x.shape[0]} rows for {size} members; make it a multiple, or say send= and receive="
            )
        even = (x.shape[0] // size,) * size
        return _AllToAll.apply(x, even, even, pg.group_name)  # type: ignore[no-any-return]
    given, had = tuple(send), tuple(receive)
    if len(given) != size or len(had) != size or sum(given) != x.shape[0]:
        raise GroupError(
            f"all_to_all with send={given} and receive={had} does not fit {x.shape[0]} rows and {size} members; "
            "give one number a member, those to send adding up to the rows"
        )
    return _AllToAll.apply(x, given, had, pg.group_name)  # type: ignore[no-any-return]


def all_gather(x: Tensor, group: Members = None) -> Tensor:
    """Every member's ``x``, joined along the first axis. The gradient is summed and scattered.

    >>> all_gather(torch.ones(2))
    tensor([1., 1.])
    """
    pg = _members(group)
    return x if pg is None else _AllGather.apply(x, pg.size(), pg.group_name)  # type: ignore[no-any-return]


def reduce_scatter(x: Tensor, group: Members = None) -> Tensor:
    """The sum of every member's ``x``, of which member ``j`` gets part ``j`` of the rows. The gradient is gathered.

    >>> reduce_scatter(torch.ones(2))
    tensor([1., 1.])
    """
    pg = _members(group)
    if pg is None:
        return x
    if x.shape[0] % pg.size():
        raise GroupError(f"reduce_scatter cuts {x.shape[0]} rows for {pg.size()} members; make it a multiple")
    return _ReduceScatter.apply(x, pg.size(), pg.group_name)  # type: ignore[no-any-return]


def all_reduce(x: Tensor, group: Members = None) -> Tensor:
    """The sum of every member's ``x``, for all. So is the gradient: each member's result hangs on every ``x``.

    >>> all_reduce(torch.ones(2))
    tensor([1., 1.])
    """
    pg = _members(group)
    return x if pg is None else _AllReduce.apply(x, pg.group_name)  # type: ignore[no-any-return]


def _members(group: Members) -> Any:
    """The process group, or None where there is but one member."""
    if hasattr(group, "get_group"):  # a mesh
        group = group.get_group()
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise GroupError(
            f"group={group!r}; give a process group of torch.distributed, a mesh of one axis, or None for this process"
        )
    return group if group.size() > 1 else None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: tuple[int, ...], receive: tuple[int, ...], name: str) -> Tensor:
        ctx.told = (receive, send, name)
        started = _FUNCTIONAL.all_to_all_single(x.contiguous(), list(receive), list(send), name)
        return _FUNCTIONAL.wait_tensor(started)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return _AllToAll.apply(dys[0], *ctx.told), None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, name: str) -> Tensor:
        ctx.told = (size, name)
        return _FUNCTIONAL.wait_tensor(_FUNCTIONAL.all_gather_into_tensor(x.contiguous(), size, name))

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return _ReduceScatter.apply(dys[0], *ctx.told), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, name: str) -> Tensor:
        ctx.told = (size, name)
        return _FUNCTIONAL.wait_tensor(_FUNCTIONAL.reduce_scatter_tensor(x.contiguous(), "sum", size, name))

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return _AllGather.apply(dys[0], *ctx.told), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.told = name
        return _FUNCTIONAL.wait_tensor(_FUNCTIONAL.all_reduce(x.contiguous(), "sum", name))

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return _AllReduce.apply(dys[0], ctx.told), None

# SPDX-License-Identifier: Apache-2.0
"""Differentiable collectives for use in a stage: all_to_all, all_gather, reduce_scatter,
all_reduce.

Each one is a start and a wait of torch's functional collectives, forward and backward, so that a
trace contains both and a weave can place work between them. The gradient is that of the sum of the
losses of all members. This module knows process groups; it must not know stages, schedules or ranks
of a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives.faults import watched
from ..errors import GroupError

Members = Any  # a ProcessGroup, a DeviceMesh of one axis, or None: this process only

Rows = tuple[int, ...]
_FUNCTIONAL = torch.ops._c10d_functional
#: Collective -> the one that computes its gradient, and how it is started: (tensor, name and size
#: of the process group, rows to and from each member).
_KINDS: dict[str, tuple[str, Callable[[Tensor, str, int, Rows, Rows], Tensor]]] = {
    "all_to_all": (
        "all_to_all",
        lambda x, name, _, to, of: _FUNCTIONAL.all_to_all_single(x, list(of), list(to), name),
    ),
    "all_gather": (
        "reduce_scatter",
        lambda x, name, size, *_: _FUNCTIONAL.all_gather_into_tensor(x, size, name),
    ),
    "reduce_scatter": (
        "all_gather",
        lambda x, name, size, *_: _FUNCTIONAL.reduce_scatter_tensor(x, "sum", size, name),
    ),
    "all_reduce": ("all_reduce", lambda x, name, *_: _FUNCTIONAL.all_reduce(x, "sum", name)),
}


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        kind: str,
        name: str,
        size: int,
        sent: Rows,
        received: Rows,
    ) -> Tensor:
        backward, start = _KINDS[kind]
        ctx.reverse = (backward, name, size, received, sent)
        with nullcontext() if torch.compiler.is_compiling() else watched(name)():
            return _FUNCTIONAL.wait_tensor(start(x.contiguous(), name, size, sent, received))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Collective.apply(grads[0], *ctx.reverse), *(None,) * 5


def all_to_all(
    x: Tensor,
    group: Members = None,
    *,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
) -> Tensor:
    """Split ``x`` along its first axis, send part ``j`` to member ``j``, and join the received
    parts by member.

    ``send`` and ``receive`` are the numbers of rows sent to and received from each member; by
    default all are equal.

    >>> all_to_all(torch.arange(4.0))  # one member: it sends its only part to itself
    tensor([0., 1., 2., 3.])
    """
    pg = _members(group)
    if pg is None:
        return x
    size = pg.size()
    if send is None or receive is None:
        if send is not None or receive is not None:
            raise GroupError(
                "all_to_all needs both send= and receive=, the rows to and from each member, or "
                "neither"
            )
        if x.shape[0] % size:
            raise GroupError(
                f"all_to_all cuts {x.shape[0]} rows for {size} members; make it a multiple, or "
                "say send= and receive="
            )
        send = receive = (x.shape[0] // size,) * size
    sent = tuple(send)
    received = tuple(receive)
    if len(sent) != size or len(received) != size or sum(sent) != x.shape[0]:
        raise GroupError(
            f"all_to_all with send={sent} and receive={received} does not fit {x.shape[0]} rows "
            f"and {size} members; give one number a member, those to send adding up to the rows"
        )
    return _apply("all_to_all", x, pg, sent, received)


def all_gather(x: Tensor, group: Members = None) -> Tensor:
    """The ``x`` of all members, joined along the first axis. The gradient is summed and scattered.

    >>> all_gather(torch.ones(2))
    tensor([1., 1.])
    """
    return _apply("all_gather", x, _members(group))


def reduce_scatter(x: Tensor, group: Members = None) -> Tensor:
    """Part ``j`` of the rows of the sum of all members' ``x``, on member ``j``. The gradient is
    gathered.

    >>> reduce_scatter(torch.ones(2))
    tensor([1., 1.])
    """
    pg = _members(group)
    if pg is not None and x.shape[0] % pg.size():
        raise GroupError(
            f"reduce_scatter cuts {x.shape[0]} rows for {pg.size()} members; make it a multiple"
        )
    return _apply("reduce_scatter", x, pg)


def all_reduce(x: Tensor, group: Members = None) -> Tensor:
    """The sum of all members' ``x``. The gradient is summed as well: every result depends on every
    ``x``.

    >>> all_reduce(torch.ones(2))
    tensor([1., 1.])
    """
    return _apply("all_reduce", x, _members(group))


def _apply(
    kind: str,
    x: Tensor,
    pg: dist.ProcessGroup | None,
    sent: Rows = (),
    received: Rows = (),
) -> Tensor:
    if pg is None:
        return x
    return _Collective.apply(x, kind, pg.group_name, pg.size(), sent, received)


def _members(group: Members) -> dist.ProcessGroup | None:
    """The process group; None if this process is its only member."""
    if hasattr(group, "get_group"):  # a mesh
        group = group.get_group()
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise GroupError(
            f"group={group!r}; give a process group of torch.distributed, a mesh of one axis, or "
            "None for this process"
        )
    return group if group.size() > 1 else None

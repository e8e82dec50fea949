# SPDX-License-Identifier: Apache-2.0
"""The same gradients without a pipeline: plain autograd, one process, one microbatch after another.

The reference of the comparison, so it uses nothing of the engine. A schedule determines only the
order in which the gradients of a stage are added, since sums of floating-point numbers depend on
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ... import tree
from ...actions import plain
from ...schedule import Schedule


def one_process(
    functions: Sequence[Callable[..., Any]],
    params: Sequence[Any],
    loss: Callable[..., Tensor],
    x: Tensor,
    *targets: Tensor,
    schedule: Schedule,
) -> tuple[Tensor, list[Any]]:
    """Loss and gradients of the mean over microbatches, by plain autograd.

    >>> from fpipe.generators import make_schedule
    >>> double = lambda p, x: 2 * p * x
    >>> x, y = torch.tensor([1.0, 3.0]), torch.zeros(2)
    >>> params, schedule = [torch.tensor(1.0)], make_schedule("1F1B", 1, 2)
    >>> one_process([double], params, lambda y, t: (y - t).sum(), x, y, schedule=schedule)
    (tensor(4.), [tensor(4.)])
    """
    m = schedule.microbatches
    leaves = [[leaf.detach().clone().requires_grad_() for leaf in tree.leaves(p)] for p in params]
    specs = [tree.flatten(p)[1] for p in params]
    losses, grads = [], []
    for piece in zip(*(batch.chunk(m) for batch in (x, *targets)), strict=True):
        y = piece[0]
        for fn, stage_leaves, spec in zip(functions, leaves, specs, strict=True):
            y = fn(tree.unflatten(spec, stage_leaves), y)
        weighted = loss(y, *piece[1:]) * (1.0 / m)
        flat = iter(
            torch.autograd.grad(
                weighted, [leaf for stage_leaves in leaves for leaf in stage_leaves]
            )
        )
        losses.append(weighted.detach())
        grads.append([[next(flat) for _ in stage_leaves] for stage_leaves in leaves])
    summed = [
        tree.unflatten(spec, _summed(grads, stage, schedule)) for stage, spec in enumerate(specs)
    ]
    return reduce(torch.add, losses), summed


def _summed(
    grads: Sequence[Sequence[Sequence[Tensor]]], stage: int, schedule: Schedule
) -> list[Tensor]:
    """One stage's gradients: summed on each rank that holds it, in its order, and then over these
    ranks.
    """
    sums = []
    for rank in schedule.placement.ranks_of(stage):
        order = [a.microbatch for a in plain(schedule[rank]) if a.stage == stage and a.op in "BW"]
        if order:
            sums.append(
                [
                    reduce(torch.add, column)
                    for column in zip(*(grads[k][stage] for k in order), strict=True)
                ]
            )
    return [reduce(torch.add, column) for column in zip(*sums, strict=True)]

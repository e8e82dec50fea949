# SPDX-License-Identifier: Apache-2.0
"""The same gradients without a pipeline: plain autograd, one process, one microbatch after another.

The reference of the comparison, so it uses nothing of the engine. A schedule determines only the
order in which the gradients of a stage are added, since sums of floating-point numbers depend on
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce

import torch
from torch import Tensor

from ... import tree
from ...actions import unfused
from ...schedule import Schedule
from ...tree import Tree


def one_process(
    functions: Sequence[Callable[..., Tensor]],
    params: Sequence[Tree],
    loss: Callable[..., Tensor],
    x: Tensor,
    *targets: Tensor,
    schedule: Schedule,
) -> tuple[Tensor, list[Tree]]:
    """Loss and gradients of the mean over microbatches, by plain autograd.

    >>> from fpipe.generators import make_schedule
    >>> double = lambda p, x: 2 * p * x
    >>> x, y = torch.tensor([1.0, 3.0]), torch.zeros(2)
    >>> params, schedule = [torch.tensor(1.0)], make_schedule("1F1B", 1, 2)
    >>> one_process([double], params, lambda y, t: (y - t).sum(), x, y, schedule=schedule)
    (tensor(4.), [tensor(4.)])
    """
    count = schedule.microbatches
    tensors, structure = tree.flatten([*params])
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    stages = tree.unflatten(structure, leaves)
    pieces = [batch.chunk(count) for batch in (x, *targets)]
    losses: list[Tensor] = []
    grads: list[list[Tree]] = []  # by microbatch and stage
    for y, *rest in zip(*pieces, strict=True):
        for fn, p in zip(functions, stages, strict=True):
            y = fn(p, y)
        weighted = loss(y, *rest) * (1.0 / count)
        losses.append(weighted.detach())
        grads.append(tree.unflatten(structure, torch.autograd.grad(weighted, leaves)))
    sums = [
        _sum(of_stage, stage, schedule) for stage, of_stage in enumerate(zip(*grads, strict=True))
    ]
    return reduce(torch.add, losses), sums


def _sum(grads: Sequence[Tree], stage: int, schedule: Schedule) -> Tree:
    """One stage's gradients: summed on each rank that holds it, in its order, and then over these
    ranks.
    """
    add = partial(tree.tree_map, torch.add)
    sums: list[Tree] = []
    for rank in schedule.placement.ranks_of(stage):
        actions = [action for action in unfused(schedule[rank]) if action.stage == stage]
        ordered = [grads[action.microbatch] for action in actions if action.op in "BW"]
        if ordered:
            sums.append(reduce(add, ordered))
    return reduce(add, sums)

# SPDX-License-Identifier: Apache-2.0
"""Gradients of tensors with several copies: means over data-parallel replicas, sums over copies of
a tied parameter.

One reduction per dtype, of all leaves as one flat tensor. This module must not know optimizers or
schedules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..collectives.group import Group, as_group
from ..errors import TransformError
from ..tree import names
from .boards import EVERY_LEAF, Board, Over, as_over, board_device, copies_of, wide
from .leaves import map_kinds, places
from .norms import Tied
from .transform import Params, State, Transform, Updates, on_leaves


def mean_over(group: Group, *, dtype: torch.dtype | None = None) -> Transform:
    """The mean over the processes of a group, such as the data-parallel replicas of a stage.

    Args:
        group: the processes; each of them calls with trees of the same form.
        dtype: in which gradients are sent and added, by default each leaf's; the result has the
            leaf's dtype.

    Returns:
        A ``Transform``.

    >>> from fpipe.collectives.local import local
    >>> mean_over(local(1)).update([torch.ones(2), None], ())
    ([tensor([1., 1.]), None], ())
    """
    as_group("mean_over", group)

    def kernel(leaves: list[Tensor]) -> list[Tensor]:
        flat = torch.cat([leaf.detach().reshape(-1) for leaf in leaves])
        mean = group.all_reduce(flat if dtype is None else flat.to(dtype), "mean").to(flat.dtype)
        parts = mean.split([leaf.numel() for leaf in leaves])
        return [part.view(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]

    return on_leaves(lambda leaves: map_kinds(kernel, leaves))


class TiedState(NamedTuple):
    """``sizes``: elements of each copy of each tied parameter, on any process; ``double``: one of
    them is float64.
    """

    sizes: Tensor
    double: Tensor


def sum_tied(tied: Tied | None = None, *, over: Over | None = None) -> Transform:
    """Replace the gradient of each copy of a tied parameter by the sum over all copies, on any
    process.

    For pipelines built without ``tied=``; those built with it have summed already. Copies are added
    in the order of their group, so the sum has the same bits for any number of ranks. Parameters of
    a group must have one shape, and must not be complex.

    Args:
        tied: groups of names, by default those of ``over``.
        over: the pipeline.

    Returns:
        A ``Transform``.

    Raises:
        TransformError: if neither ``tied`` nor ``over`` is given, or a group does not fit the
        parameters.

    >>> tx = sum_tied([("0.w", "1.w")])
    >>> params = [{"w": torch.zeros(1)}, {"w": torch.zeros(1)}]
    >>> tx.update([{"w": torch.ones(1)}, {"w": torch.ones(1) * 2}], tx.init(params))[0]
    [{'w': tensor([3.])}, {'w': tensor([3.])}]
    """
    over = as_over(over)
    if tied is None and over is None:
        raise TransformError(
            "sum_tied needs groups of names, as in sum_tied([('0.wte', '7.wte')]), or over=pipe"
        )
    if copies_of(over)[1] == EVERY_LEAF:
        raise TransformError(
            "sum_tied needs whole gradients, and zero= gives shards; build the pipeline with tied="
        )
    groups = [tuple(group) for group in (tied if tied is not None else over.tied if over else ())]
    copies = [name for group in groups for name in group]
    slots = {name: slot for slot, name in enumerate(copies)}
    if len(slots) < len(copies):
        raise TransformError(
            f"tied={groups} names a leaf twice; write all copies of one parameter as one group"
        )

    def init(params: Params) -> State:
        """The sizes of all copies, which are checked, and whether one is float64."""
        device, leaves = board_device(params, over), places(params).leaves
        facts = {
            slots[name]: torch.tensor([leaf.numel(), leaf.dtype == torch.float64])
            for name, leaf in zip(names(params), leaves, strict=True)
            if name in slots
        }
        rows = Board([2] * len(slots), device, over, wide(device)).complete(facts).view(-1, 2).cpu()
        sizes = rows[:, 0].to(torch.int64)
        _check_sizes(groups, dict(zip(copies, sizes.tolist(), strict=True)))
        return TiedState(sizes, rows[:, 1].any())

    def update(grads: Updates, state: State, params: Params = None) -> tuple[Updates, State]:
        at, sizes = places(grads), state.sizes.tolist()
        here = {name: index for index, name in enumerate(names(grads)) if name in slots}
        values = {slots[name]: at.leaves[index].detach() for name, index in here.items()}
        dtype = torch.float64 if state.double.item() else torch.float32
        rows = Board(sizes, board_device(grads, over), over, dtype).complete(values).split(sizes)
        after = list(at.leaves)
        for group in groups:
            first, *others = (rows[slots[name]] for name in group)
            total = sum(others, start=first)
            for index in (here[name] for name in group if name in here):
                old = at.leaves[index]
                after[index] = total.to(old.device, old.dtype).view(old.shape)
        return at.tree(after), state

    return Transform(init, update)


def _check_sizes(groups: Tied, sizes: Mapping[str, int]) -> None:
    for group in groups:
        counts = {name: sizes[name] for name in group}
        if len(set(counts.values())) != 1 or 0 in counts.values():
            raise TransformError(
                "these leaves cannot be tied, by their numbers of elements (0: no such leaf): "
                f"{counts}; name leaves of one shape as 'stage.key.key'"
            )

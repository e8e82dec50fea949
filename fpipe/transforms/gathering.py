# SPDX-License-Identifier: Apache-2.0
"""Means of gradients over data-parallel replicas.

One reduction per dtype, of all leaves as one flat tensor. This module must not know optimizers or
schedules.
"""

from __future__ import annotations

import torch

from ..collectives.group import Group, as_group
from ..errors import StageError, check_floating, checked
from .leaves import map_kinds
from .transform import Transform, on_leaves


@checked
def mean_over(group: Group, *, dtype: torch.dtype | None = None) -> Transform:
    """The mean over the processes of a group, such as the data-parallel replicas of a stage.

    Args:
        group: the processes; each of them calls with trees of the same form. Gradients of
            ``fpipe.copies(zero=1)`` or more are shards, and means already.
        dtype: in which gradients are sent and added, by default each leaf's; the result has the
            leaf's dtype.

    Raises:
        StageError: if the leaves are such shards.

    >>> from fpipe import local
    >>> mean_over(local(1)).update([torch.ones(2), None], ())
    ([tensor([1., 1.]), None], ())
    """
    as_group("mean_over", group)
    check_floating("dtype", dtype)

    def kernel(leaves):
        zero = max(getattr(leaf, "zero", 0) for leaf in leaves)
        if zero:
            raise StageError(
                f"mean_over got shards of gradients, which fpipe.copies(zero={zero}) has averaged: "
                "those of another process are of other elements; leave mean_over out"
            )
        flat = torch.cat([leaf.detach().reshape(-1) for leaf in leaves])
        mean = group.all_reduce(flat if dtype is None else flat.to(dtype), "mean").to(flat.dtype)
        parts = mean.split([leaf.numel() for leaf in leaves])
        return [part.view(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]

    return on_leaves(lambda leaves: map_kinds(kernel, leaves))

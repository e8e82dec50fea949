# SPDX-License-Identifier: Apache-2.0
"""What a transform needs of a pipeline to reduce over all stages, and boards that every process
reads alike.

``over=pipe`` takes any object with the Protocol below; ``over=None`` means that the tree is
complete. A board has one number per stage. Each process fills in those of its stages, and one sum
completes the board: only zeros are added to a value, which keeps its bits, so what is computed from
a board does not depend on the number of processes.
This module must not know schedules or any single transform.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives.group import Group
from ..devices import wide
from ..errors import TransformError
from ..tree import NAMESPACE, Tree

EVERY_LEAF = ("*",)


@runtime_checkable
class Over(Protocol):
    """The part of a pipeline that a transform uses.

    ``tied`` are groups of names of leaves that are one parameter, such as
    ``(("0.wte", "7.wte"),)``. ``all_sum`` returns its sum on every process and does not change its
    argument.
    """

    group: Group  # the ranks
    here: tuple[int, ...]  # the stages on this process
    stages: int  # how many there are
    tied: tuple[tuple[str, ...], ...]

    def all_sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over the processes."""
        ...


def as_over(over: object) -> Over | None:
    """``over=`` as it is, or TransformError where it is no pipeline."""
    if over is None or isinstance(over, Over):
        return over
    raise TransformError(f"over={over!r}; give the pipeline, what fpipe.pipeline returned")


def copies_of(over: Over | None) -> tuple[Group | None, tuple[str, ...]]:
    """The copies of a pipeline, and patterns of the leaves that differ between them:
    :data:`EVERY_LEAF` where copies hold shards (``zero=``), or those of ``own=``; None and no
    patterns where copies are alike.
    """
    copies = getattr(over, "copies", None)  # an Over need not have the attribute
    if copies is None or not (copies.cut or copies.own):
        return None, ()
    return copies.group, EVERY_LEAF if copies.cut else copies.own


def stages_here(tree: Tree, over: Over | None) -> dict[int, Tree]:
    """The stages on this process. Without a pipeline, the entries of a list, or the whole tree as
    one stage.

    >>> stages_here([5, None, 6], None), stages_here({"w": 5}, None)
    ({0: 5, 1: None, 2: 6}, {0: {'w': 5}})
    """
    if over is None:
        if listed(tree):
            return dict(enumerate(tree))
        return {0: tree}
    if not listed(tree) or len(tree) != over.stages:
        got = f"{len(tree)} entries" if listed(tree) else f"a {type(tree).__name__}"
        raise TransformError(
            f"{got} for a pipeline of {over.stages} stages; pass a list with one entry per stage, "
            f"None for stages on other processes"
        )
    return {stage: tree[stage] for stage in over.here}


def listed(tree: Tree) -> bool:
    """Whether a tree has one entry for each stage."""
    return isinstance(tree, list) or type(tree) is tuple


def check_whole(tree: Tree, over: Over | None) -> None:
    """Raise TransformError where a tree has the stages of one process alone, and nothing says where
    the others are.
    """
    if over is not None or not listed(tree):
        return
    there = [str(stage) for stage, part in enumerate(tree) if part is not None]
    if not 0 < len(there) < len(tree) or not dist.is_initialized():
        return
    if dist.get_world_size() > 1:
        raise TransformError(
            f"only stages {', '.join(there)} of {len(tree)} are here, and over= is missing: the "
            "gradients of other processes are not counted, so processes differ; pass over=pipe to "
            "the transform, or a dict of the parameters if no process has others"
        )


def board_device(tree: Tree, over: Over | None) -> torch.device:
    """The device on which this process reduces."""
    if over is not None:
        return over.group.device(over.group.here[0])
    for leaf in optree.tree_iter(tree, namespace=NAMESPACE):
        if isinstance(leaf, Tensor):
            return leaf.device
    return torch.device("cpu")


def by_stage(tree: Tree, over: Over | None, values: Mapping[int, Tensor]) -> Tensor:
    """A board with one number for each stage, from those of the stages on this process.

    Several processes may have a value of one stage, as replicas, with the same bits: the sum is
    divided by their number.

    >>> by_stage([1, None, 3], None, {2: torch.tensor(2.0)}).tolist()
    [0.0, 0.0, 2.0]
    """
    stages = range(len(stages_here(tree, None)) if over is None else over.stages)
    device = board_device(tree, over)
    zero = torch.zeros((), device=device, dtype=wide(device))
    row = torch.stack([values[s].to(zero) if s in values else zero for s in stages])
    if over is None:
        return row
    filled = [float(stage in values) for stage in stages]
    total = over.all_sum(torch.cat([row, torch.tensor(filled).to(zero)]))
    sums, counts = total.chunk(2)
    return sums / counts.clamp(min=1)

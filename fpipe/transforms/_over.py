# SPDX-License-Identifier: Apache-2.0
"""What a transform needs of a pipeline to reduce over all stages, and boards that every process
reads alike.

``over=pipe`` takes any object with the Protocol below; ``over=None`` means that the tree is
complete. A board has one entry per slot (a stage, or a copy of a tied parameter). Each process
fills in the slots of its stages, and one sum completes the board: only zeros are added to a value,
which keeps its bits, so what is computed from a board does not depend on the number of processes.
This module must not know schedules or any single transform.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives.group import Group
from ..engine.copies import Copies
from ..errors import TransformError
from ..tree import NAMESPACE, Tree

#: Devices that have float64; elsewhere boards are float32.
DOUBLE_DEVICES = ("cpu", "cuda")


@runtime_checkable
class Over(Protocol):
    """The part of a pipeline that a transform uses.

    ``group`` are its ranks, ``here`` the stages on this process of ``stages`` in all, and ``tied``
    groups of names of leaves that are one parameter, such as ``("0.wte", "7.wte")``. ``all_sum``
    returns the sum of a tensor over the pipeline's processes, on each of them, and does not change
    its argument.
    """

    @property
    def group(self) -> Group: ...
    @property
    def here(self) -> tuple[int, ...]: ...
    @property
    def stages(self) -> int: ...
    @property
    def tied(self) -> tuple[tuple[str, ...], ...]: ...
    def all_sum(self, tensor: Tensor) -> Tensor: ...


def as_over(over: object) -> Over | None:
    """``over=`` as it is, or TransformError where it is no pipeline."""
    if over is None or isinstance(over, Over):
        return over
    raise TransformError(f"over={over!r}; give the pipeline, what fpipe.pipeline returned")


class Sharded(Over, Protocol):
    """A pipeline whose copies hold shards; ``unshard`` returns whole leaves from a list with one
    entry per stage.
    """

    def unshard(self, parts: Sequence[Any]) -> list[Any]: ...


def shards_of(over: Over | None) -> Group | None:
    """The group whose processes hold shards of the same leaves (``zero=``); None where leaves are
    whole.
    """
    copies: Copies | None = getattr(over, "copies", None)  # an Over need not have the attribute
    return copies.group if copies is not None and copies.cut else None


def own_leaves(over: Over | None) -> tuple[Group, tuple[str, ...]] | None:
    """For copies with whole leaves of which some differ (``own=``): their group, and patterns of
    those leaves.
    """
    copies: Copies | None = getattr(over, "copies", None)
    return None if copies is None or copies.cut or not copies.own else (copies.group, copies.own)


def stages_here(tree: Tree, over: Over | None) -> dict[int, Tree]:
    """The stages on this process. Without a pipeline, the entries of a list, or the whole tree as
    one stage.

    >>> stages_here([5, None, 6], None), stages_here({"w": 5}, None)
    ({0: 5, 1: None, 2: 6}, {0: {'w': 5}})
    """
    listed = isinstance(tree, list) or type(tree) is tuple
    if over is None:
        return dict(enumerate(tree)) if listed else {0: tree}
    if not listed or len(tree) != over.stages:
        got = f"{len(tree)} entries" if listed else f"a {type(tree).__name__}"
        raise TransformError(
            f"{got} for a pipeline of {over.stages} stages; pass a list with one entry per stage, "
            f"None for stages on other processes"
        )
    return {stage: tree[stage] for stage in over.here}


def warn_of_parts(tree: Tree, over: Over | None) -> None:
    """Warn where a tree has the stages of one process alone, and nothing says where the others
    are.
    """
    listed = isinstance(tree, list) or type(tree) is tuple
    if (
        over is not None
        or not listed
        or all(part is not None for part in tree)
        or all(part is None for part in tree)
    ):
        return
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        there = [stage for stage, part in enumerate(tree) if part is not None]
        warnings.warn(
            f"only stages {', '.join(map(str, there))} of {len(tree)} are here, and over= is "
            "missing: the gradients of "
            "other processes are not counted, so processes differ; pass over=pipe to the transform",
            stacklevel=2,
        )


def board_device(tree: Tree, over: Over | None) -> torch.device:
    """The device on which this process reduces."""
    if over is not None:
        return over.group.device(over.group.here[0])
    every = optree.tree_iter(tree, namespace=NAMESPACE)  # no list: the first leaf will do
    return next((leaf.device for leaf in every if isinstance(leaf, Tensor)), torch.device("cpu"))


def wide(device: torch.device) -> torch.dtype:
    """The dtype in which a device adds numbers up."""
    return torch.float64 if device.type in DOUBLE_DEVICES else torch.float32


class Board(NamedTuple):
    """Numbers by slot that every process reads alike; 0 where no process has one.

    Several processes may fill one slot, replicas of a stage, with the same bits: the sum is divided
    by their number.

    >>> Board([1, 2], torch.device("cpu"), None,
    ...     torch.float32).complete({1: torch.tensor([2.0, 0.5])}).tolist()
    [0.0, 2.0, 0.5]
    """

    sizes: Sequence[int]  # how many numbers each slot holds
    device: torch.device
    over: Over | None
    dtype: torch.dtype

    @classmethod
    def of_stages(cls, tree: Tree, over: Over | None) -> Board:
        """A board with one number for each stage."""
        stages, device = (
            len(stages_here(tree, None)) if over is None else over.stages,
            board_device(tree, over),
        )
        return cls([1] * stages, device, over, wide(device))

    def part(self, values: Mapping[int, Tensor]) -> Tensor:
        """What one process adds to the sum that is the board: its values, and which slots it
        filled.
        """
        filled = [float(slot in values) for slot in range(len(self.sizes))]
        return torch.cat(
            [self._rows(values), torch.tensor(filled, device=self.device, dtype=self.dtype)]
        )

    def _rows(self, values: Mapping[int, Tensor]) -> Tensor:
        to = {"device": self.device, "dtype": self.dtype}
        slots = enumerate(self.sizes)
        rows = [
            values[slot].view(-1) if slot in values else torch.zeros(size, **to)
            for slot, size in slots
        ]
        return torch.cat([row.to(**to) for row in rows])

    def complete(self, values: Mapping[int, Tensor]) -> Tensor:
        """The board from the values of all processes."""
        return (
            self._rows(values)
            if self.over is None
            else self.whole(self.over.all_sum(self.part(values)))
        )

    def whole(self, total: Tensor) -> Tensor:
        """The board from the sum of its parts."""
        size, sizes = sum(self.sizes), torch.tensor(self.sizes, device=self.device)
        return total[:size] / total[size:].clamp(min=1).repeat_interleave(sizes, output_size=size)

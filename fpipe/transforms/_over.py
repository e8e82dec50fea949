"""What a transform needs of a pipeline to see all its stages, and boards that every process reads alike.

``over=pipe`` takes anything with this little Protocol; ``over=None`` means that the tree is whole. A board has one
entry per slot (a stage, or a copy of a tied parameter). Each process fills in what lives on it and one sum makes it
whole: zeros are added to a single value, which keeps its bits, so what is made of a board does not depend on how many
processes there are. Knows no schedule and no single transform.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ..collectives.group import Group
from ..errors import TransformError
from ..tree import Tree, leaves

#: devices that have float64; elsewhere boards are float32
_DOUBLE = ("cpu", "cuda")


class Over(Protocol):
    """The part of a pipeline that a transform sees."""

    @property
    def group(self) -> Group:
        """Its ranks."""
        ...

    @property
    def here(self) -> tuple[int, ...]:
        """The stages on this process."""
        ...

    @property
    def stages(self) -> int:
        """How many stages there are in all."""
        ...

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names of leaves that are one parameter, such as ``("0.wte", "7.wte")``."""
        ...

    def all_sum(self, tensor: Tensor) -> Tensor:
        """The sum over the pipeline's processes, on each of them; the argument is left as it is."""
        ...

    def gather(self, obj: Any) -> list[Any]:
        """What every process passed."""
        ...


def stages_here(tree: Tree, over: Over | None) -> dict[int, Tree]:
    """The stages that this process answers for. Without a pipeline, the entries of a list, or the tree as one stage.

    >>> stages_here([5, None, 6], None), stages_here({"w": 5}, None)
    ({0: 5, 1: None, 2: 6}, {0: {'w': 5}})
    """
    listed = isinstance(tree, list) or type(tree) is tuple
    if over is None:
        return dict(enumerate(tree)) if listed else {0: tree}
    if not listed or len(tree) != over.stages:
        found = f"{len(tree)} entries" if listed else f"a {type(tree).__name__}"
        raise TransformError(
            f"{found} for a pipeline of {over.stages} stages; pass a list with one entry per stage, "
            f"None where the stage lives elsewhere"
        )
    return {stage: tree[stage] for stage in over.here}


def apart(over: Over | None) -> tuple[Group, tuple[str, ...]] | None:
    """Where copies of a pipeline hold whole leaves, and some for themselves (``own=``): their group, and which."""
    copies = getattr(over, "copies", None)
    return None if copies is None or copies.cut or not copies.own else (copies.group, copies.own)


def number_of_slots(tree: Tree, over: Over | None) -> int:
    """How many stages a board of stages needs."""
    return len(stages_here(tree, None)) if over is None else over.stages


def board_device(tree: Tree, over: Over | None) -> torch.device:
    """Where this process talks to the others."""
    if over is not None:
        return over.group.device(over.group.here[0])
    return next((leaf.device for leaf in leaves(tree) if isinstance(leaf, Tensor)), torch.device("cpu"))


def board(values: Mapping[int, Tensor], slots: int, device: torch.device, over: Over | None) -> Tensor:
    """Numbers by slot, on every process; 0 where nobody has one.

    Several processes may fill one slot, replicas of a stage, with the same bits: the number is divided by how many.

    >>> board({0: torch.tensor(2.0), 2: torch.tensor(0.5)}, 3, torch.device("cpu"), None).tolist()
    [2.0, 0.0, 0.5]
    """
    both = board_part(values, slots, device)
    return board_whole(both if over is None else over.all_sum(both))


def board_part(values: Mapping[int, Tensor], slots: int, device: torch.device) -> Tensor:
    """What one process adds to the sum that is a board."""
    dtype = torch.float64 if device.type in _DOUBLE else torch.float32
    blank = torch.zeros((), dtype=dtype, device=device)
    row = torch.stack([values[slot].to(device, dtype) if slot in values else blank for slot in range(slots)])
    filled = torch.tensor([float(slot in values) for slot in range(slots)], dtype=dtype, device=device)
    return torch.stack([row, filled])


def board_whole(both: Tensor) -> Tensor:
    """The board from the sum of its parts."""
    return both[0] / both[1].clamp(min=1)

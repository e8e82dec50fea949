# SPDX-License-Identifier: Apache-2.0
"""``fpipe.elsewhere``: stands for an argument of a call that only another process has.

What plans need of such an argument, its structure, shapes, dtypes and strides, comes from a process
that has it, once for each signature of a call. Knows pytrees; no pipeline and no group.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from ...engine.arguments import Call
from ...engine.config import Config
from ...engine.microbatches import Absent
from ...engine.parts import Parts
from ...errors import BatchError
from ...tree import AbstractTree

#: Microbatches of arguments by name. Those of a whole batch are alike: one describes all.
Descriptions: TypeAlias = dict[str, Sequence[AbstractTree]]


def elsewhere(shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Absent:
    """Stands for an argument of a pipeline on the processes that do not have it.

    ``x`` is read by the processes that have the first stage, targets by those that have the last,
    side inputs by those whose stages name them; all others may pass ``fpipe.elsewhere(...)``. With
    a shape and a dtype it stands for one leaf, so an argument of several leaves is a pytree of
    them, and nothing is sent in a call. Without them it stands for a whole argument, or for all of
    its Microbatches; its shapes are received in the first call, and must then stay as they are.
    Outputs are joined as those of a whole batch. Calls with the argument on every process and calls
    with it elsewhere have plans of their own: pass one or the other from the first call on, for
    each shape.

    Args:
        shape: of the tensor, as the processes have it that pass it.
        dtype: of the tensor; by default torch's default dtype.

    Returns:
        a value to pass as an argument of a call, or as a leaf of one.

    Raises:
        BatchError: if a shape is no sequence of sizes, or a dtype is none or is given without a
        shape.

    >>> elsewhere((8, 128), torch.long)
    Absent(shape=(8, 128), dtype=torch.int64)
    """
    if shape is None:
        if dtype is not None:
            raise BatchError(
                f"elsewhere(dtype={dtype}) has no shape; give both, or neither for a whole argument"
            )
        return Absent()
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise BatchError(f"elsewhere(dtype={dtype!r}); give a dtype such as torch.float32")
    if not isinstance(shape, Sequence) or not all(
        isinstance(size, int) and size >= 0 for size in shape
    ):
        raise BatchError(f"elsewhere(shape={shape!r}); give a sequence of sizes, as in (8, 128)")
    return Absent(tuple(shape), torch.get_default_dtype() if dtype is None else dtype)


def stand_ins(leaves: Sequence[object], name: str) -> tuple[list[object], bool]:
    """Leaves with stand-ins for those that are elsewhere, and whether the argument is; all of its
    tensors are, or none.

    >>> stand_ins([elsewhere((2,)), 3], "x")
    ([tensor(..., device='meta', size=(2,)), 3], True)
    """
    if not any(isinstance(leaf, Absent) for leaf in leaves):
        return list(leaves), False
    here = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
    if here is not None:
        raise BatchError(
            f"{name} holds a tensor of shape {list(here.shape)} beside fpipe.elsewhere(...); pass "
            "all of it, or elsewhere for each of its tensors"
        )
    if len(leaves) > 1 and any(leaf == Absent() for leaf in leaves):
        raise BatchError(
            f"{name} holds fpipe.elsewhere() without a shape, which stands for a whole argument; "
            f"pass it in place of {name}, or give shapes"
        )
    return [leaf.stand_in() if isinstance(leaf, Absent) else leaf for leaf in leaves], True


# ---- of a call ----
def describe(call: Call, absent: Iterable[str]) -> Descriptions:
    """Describe the arguments that other processes lack and this one has.

    A description has one abstract tree for each microbatch, or one for all of a whole batch.
    """
    names = set(absent)
    return {
        part.name: tuple(part.abstract(m) for m in range(1 if part.uniform else call.units))
        for part in call.batch_parts
        if part.name in names and not part.absent
    }


def completed(
    call: Call, absent: Sequence[Sequence[str]], descriptions: Sequence[Descriptions]
) -> Call:
    """The call with descriptions of the arguments that are elsewhere.

    ``absent`` and ``descriptions`` have an entry for each rank, so all raise the same errors.
    """
    by_name = ChainMap(*descriptions)
    for name in dict.fromkeys(name for names in absent for name in names):
        if name not in by_name:
            raise BatchError(f"{name} is elsewhere on every rank; pass it where it is read")

    def known(part: Parts) -> Parts:
        return part.described(by_name[part.name]) if part.absent else part

    sides = {name: known(part) for name, part in call.sides.items()}
    return replace(call, x=known(call.x), targets=tuple(map(known, call.targets)), sides=sides)


def check(config: Config, x: Parts, targets: Sequence[Parts], sides: Mapping[str, Parts]) -> None:
    """Raise BatchError where an argument is elsewhere that a stage of this process, or the loss,
    reads.
    """
    last = config.stages - 1
    readers = [(x, [0]), *((target, [last]) for target in targets)]
    for name, part in sides.items():
        takers = [min(s, last) for s, names in enumerate(config.sides) if name in names]
        readers.append((part, takers))
    for part, stages in readers:
        here = [stage for stage in stages if stage in config.here]
        if part.absent and (here or config.local):
            stage = next(iter(here), 0)
            raise BatchError(
                f"{part.name} is elsewhere, but it is read with stage {stage}, which is on rank "
                f"{config.rank_here(stage)} of this process; pass it here"
            )
    if any(stage.aux_loss for stage in config.functions) and not isinstance(config.reduction, str):
        raise BatchError(
            "a stage has an auxiliary loss, and fpipe.weighted needs the targets on every rank; "
            "pass them on all"
        )

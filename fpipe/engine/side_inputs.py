# SPDX-License-Identifier: Apache-2.0
"""Arguments of a call beside its batch: side inputs, cut as the batch is, and states of stages.

Knows configurations; no plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import tree
from ..actions.product import feature
from ..errors import StageError
from ..tree import AbstractTree, Tree
from .config import Config
from .mistakes import check_sides
from .parts import Parts


def names_of(config: Config) -> set[str]:
    """The names of all side inputs: of stages, the loss and the weights of microbatches."""
    return set(getattr(config.reduction, "sides", ())).union(*config.sides)


def cut(config: Config, side: Mapping[str, Tree], microbatches: int) -> dict[str, Parts]:
    """Cut side inputs into microbatches. Raise BatchError for a name that nothing reads."""
    check_sides(names_of(config), side)
    return {
        name: Parts(value, microbatches, f"side input {name!r}", True, config.slices)
        for name, value in side.items()
    }


def of_stage(names: Sequence[str], sides: Mapping[str, Parts], mb: int) -> dict[str, Tree]:
    """The side inputs of one stage, or of the loss, for a microbatch; ``names`` are theirs."""
    return {name: sides[name].tree(mb) for name in names if name in sides}


def leaves(
    names: Sequence[Sequence[str]], sides: Mapping[str, Parts], number: int
) -> dict[tuple[int, int], list[Any]]:
    """The leaves of the side inputs, by stage and microbatch.

    ``names`` are the side inputs that each stage reads, and ``number`` counts the microbatches.
    """
    readers = [stage for stage, read in enumerate(names) if read]
    return {
        (stage, mb): tree.leaves(of_stage(names[stage], sides, mb))
        for stage in readers
        for mb in range(number)
    }


def abstract(
    names: Sequence[str],
    sides: Mapping[str, Parts],
    mb: int,
    descriptions: Mapping[str, Sequence[AbstractTree]],
) -> AbstractTree:
    """The side inputs of one stage, or of the loss, for a microbatch in abstract form.

    Those that are elsewhere have ``descriptions`` of other processes.
    """
    values = of_stage(names, sides, mb)
    for name in values:
        side = sides[name]
        if side.absent and side.name in descriptions:
            arguments = feature("elsewhere.arguments")
            described = arguments.described(descriptions[side.name], mb, False)
            empty = (
                torch.empty_strided(aval.shape, aval.stride, dtype=aval.dtype, device="meta")
                for aval in described.avals.values()
            )
            values[name] = described.fill(empty)
    return AbstractTree.of(values)


def states(config: Config, given: Sequence[Tree] | None) -> Sequence[Tree]:
    """The state of each stage: the one that the caller passed, or the initial one."""
    if given is None:
        return [stage.initial_state for stage in config.functions]
    if not isinstance(given, (list, tuple)) or len(given) != config.stages:
        raise StageError(
            f"state must be a list with one entry for each of the {config.stages} stages, None "
            "where none"
        )
    return given

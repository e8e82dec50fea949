# SPDX-License-Identifier: Apache-2.0
"""Arguments of a call beside its batch: side inputs, cut as the batch is, and states of stages.

Knows configurations; no plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import optree

from .. import tree
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


def of_stage(names: Iterable[str], sides: Mapping[str, Parts]) -> dict[str, Parts]:
    """The side inputs of one stage, or of the loss, in the order of their leaves; ``names`` are
    theirs.
    """
    return {name: sides[name] for name in sorted(names) if name in sides}


def leaves(
    names: Sequence[Sequence[str]], sides: Mapping[str, Parts], number: int
) -> dict[tuple[int, int], list[Any]]:
    """The leaves of the side inputs, by stage and microbatch.

    ``names`` are the side inputs that each stage reads, and ``number`` counts the microbatches.
    """
    return {
        (stage, mb): [leaf for part in of_stage(read, sides).values() for leaf in part.rows[mb]]
        for stage, read in enumerate(names)
        if read
        for mb in range(number)
    }


def abstract(names: Iterable[str], sides: Mapping[str, Parts], mb: int) -> AbstractTree:
    """The side inputs of one stage, or of the loss, for a microbatch in abstract form."""
    trees = {name: part.abstract(mb) for name, part in of_stage(names, sides).items()}
    structures = {name: each.structure for name, each in trees.items()}
    return AbstractTree(
        optree.treespec_dict(structures, namespace=tree.NAMESPACE),
        tuple(leaf for each in trees.values() for leaf in each.leaves),
    )


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

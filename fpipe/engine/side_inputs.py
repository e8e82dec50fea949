# SPDX-License-Identifier: Apache-2.0
"""What a call is given beside its batch: side inputs, cut as the batch is, and states of stages.

Knows configurations; no plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import tree
from ..errors import StageError
from ..tree import AbstractTree, Tree
from .config import Config
from .mistakes import check_sides
from .parts import Parts


def cut(config: Config, side: Mapping[str, Tree], microbatches: int) -> dict[str, Parts]:
    """Side inputs by name, cut into microbatches; BatchError for a name that nobody takes."""
    check_sides([*config.sides, getattr(config.reduction, "sides", ())], side)
    return {
        name: Parts(value, microbatches, f"side input {name!r}", True, config.slices)
        for name, value in side.items()
    }


def of_stage(names: Sequence[str], sides: Mapping[str, Parts], mb: int) -> dict[str, Tree]:
    """What one microbatch has of these side inputs, those of a stage or of the loss."""
    return {name: sides[name].tree(mb) for name in names if name in sides}


def leaves(
    names: Sequence[Sequence[str]], sides: Mapping[str, Parts], number: int
) -> dict[tuple[int, int], list[Any]]:
    """The leaves of the side inputs by stage and microbatch; ``names`` are those of each stage."""
    takers = [stage for stage, taken in enumerate(names) if taken]
    return {
        (stage, mb): tree.leaves(of_stage(names[stage], sides, mb))
        for stage in takers
        for mb in range(number)
    }


def abstract(
    names: Sequence[str],
    sides: Mapping[str, Parts],
    mb: int,
    offers: Mapping[str, Sequence[AbstractTree]],
) -> AbstractTree:
    """What one microbatch has of these side inputs in abstract form; ``offers`` are those of other
    processes.
    """
    values = of_stage(names, sides, mb)
    for name in values:
        if sides[name].absent and sides[name].name in offers:
            of_microbatches = offers[sides[name].name]
            described = of_microbatches[mb if len(of_microbatches) > 1 else 0]
            empty = (
                torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device="meta")
                for a in described.avals.values()
            )
            values[name] = described.fill(empty)
    return AbstractTree.of(values)


def states(config: Config, given: Sequence[Tree] | None) -> Sequence[Tree]:
    """The state of each stage: what the caller passed, or the first one."""
    if given is None:
        return [stage.initial_state for stage in config.functions]
    if not isinstance(given, (list, tuple)) or len(given) != config.stages:
        raise StageError(
            f"state must be a list with one entry for each of the {config.stages} stages, None "
            "where none"
        )
    return given

# SPDX-License-Identifier: Apache-2.0
"""Checks of the options of a pipeline. A pipeline without options runs none of them.

Knows configurations; no plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import get_args

from .. import tree
from ..actions.product import load_pass
from ..errors import StageError, WeaveError
from ..schedule import Schedule
from ..stage import MISSING, Stage
from .config import Config, Outputs
from .microbatches import Weighted
from .mistakes import check_seed
from .options import Overlap
from .side_inputs import names_of

#: Arguments of a call, whose names no side input of a stage can have.
RESERVED = frozenset({"seed", "each", "has_aux", "loss_scale", "state", "_value"})


def check(config: Config) -> None:
    """Raise StageError or WeaveError where an option has a value that is not allowed."""
    for index, stage in enumerate(config.functions):
        if stage.carry or stage.initial_carry is not MISSING:
            load_pass("slices").check_carry(f"stage {index} ({stage.label})", stage)
    for name, value, valid, allowed in _checks(config):
        if not valid:
            raise StageError(f"{name}={value!r}; give {allowed}")
    if isinstance(config.loss, Stage) and config.loss.carry:
        raise StageError(
            "the loss has carry=True, and only stages have carries; return what it needs from a "
            "stage"
        )
    if config.overlap not in get_args(Overlap):
        raise WeaveError(f"overlap={config.overlap!r}; give 'weave' or 'sequential'")
    check_seed(config.seed)
    if config.tied:
        load_pass("ties").check_frozen_alike(config.tied, config.frozen)
    for name in names_of(config) & RESERVED:
        raise StageError(
            f"{name!r} cannot be a side input, since a call has an argument of that name; rename it"
        )


def _checks(config: Config) -> Iterator[tuple[str, object, bool, str]]:
    """For each option its name, its value, whether that is valid, and which values are allowed."""
    schedule = config.schedule
    valid = isinstance(schedule, (str, PathLike, Schedule)) or callable(schedule)
    allowed = "a name, a Schedule, a path to a CSV or a function (ranks, microbatches)"
    yield "schedule", schedule, valid, allowed
    slices = config.requested_slices
    valid = slices is None or (type(slices) is int and slices >= 1)
    yield "slices", slices, valid, "a number of slices of a sequence, 1 or more"
    valid = config.loss is None or callable(config.loss)
    allowed = "a function loss(y, *targets) that returns a scalar, or None"
    yield "loss", config.loss, valid, allowed
    reduction = config.reduction
    valid = reduction in ("mean", "sum") or isinstance(reduction, Weighted)
    yield "reduction", reduction, valid, "'mean', 'sum' or fpipe.weighted(fn)"
    outputs = config.outputs
    yield "outputs", outputs, outputs in get_args(Outputs), "'zeros', 'everywhere' or 'last'"
    dtype = config.accumulate
    valid = dtype is None or getattr(dtype, "is_floating_point", False)
    yield "accumulate", dtype, valid, "a floating dtype, such as torch.float32"


def check_patterns(config: Config, leaves: Sequence[Sequence[str]]) -> None:
    """Raise StageError for a pattern of ``frozen=`` or ``own=`` that matches no parameter.

    Otherwise a parameter that a misspelled pattern should freeze would be trained. ``leaves`` are
    the paths of the parameters of each stage.
    """
    names = [f"{stage}.{leaf}" for stage, paths in enumerate(leaves) for leaf in paths]
    own = config.copies.own if config.copies else ()
    for option, patterns in (("frozen", config.frozen), ("own", own)):
        fault = tree.unmatched(patterns, names)
        if fault:
            bare = re.sub(r"\.(?=,|$)", "", fault)  # a stage that is one tensor
            raise StageError(f"{option}={bare}")

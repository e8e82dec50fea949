# SPDX-License-Identifier: Apache-2.0
"""``Request``: what the plans of a call depend on, beside the configuration: shapes, no values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from ..schedule import Schedule
from ..tree import AbstractTree

Mode: TypeAlias = Literal["grad", "forward", "vjp"]


class MicrobatchKind(NamedTuple):
    """A kind of microbatch. ``sides`` are by stage, with those of the loss at the end."""

    x: AbstractTree
    targets: tuple[AbstractTree, ...]
    sides: tuple[AbstractTree, ...]


@dataclass(frozen=True)
class Request:
    """What the plans of a call depend on, beside the configuration.

    ``params[s]`` is ``None`` where stage s is on another process. Microbatch m is of kind
    ``kinds[kind_of[m]]``.
    """

    mode: Mode
    schedule: Schedule
    params: tuple[AbstractTree | None, ...]
    states: tuple[AbstractTree | None, ...]
    kinds: tuple[MicrobatchKind, ...]
    kind_of: tuple[int, ...]
    wants_dx: bool
    layouts: Mapping[int, Any]  # by stage, where the pipeline has copies
    each: bool  # outputs, and what the loss returns, go to a function of the caller
    has_aux: bool
    debug: bool  # results are checked for NaN
    pipeline_id: object = field(compare=False, repr=False)  # shared by its calls
    chain: int  # of stages with carries: the slices of a microbatch, whose kinds are in a row

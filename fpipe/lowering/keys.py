# SPDX-License-Identifier: Apache-2.0
"""Keys: how a plan names the values that it moves.

A key is a pair ``(source, microbatch)``. The source says what the value is: one of the named tuples
below. The microbatch is ``None`` for values that belong to the whole call, such as parameters. The
last field of every source is a constant, so that sources of different classes are never equal
although they are plain tuples, which hash and compare fast.

This module knows no ranks, messages, slots or tensors.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Value(NamedTuple):
    """What a program of a stage computes, under the program's name for it; the loss is one stage
    past the last.
    """

    stage: int
    name: str
    kind: str = "value"


class BatchLeaf(NamedTuple):
    """A leaf of x."""

    leaf: int
    kind: str = "batch"


class Target(NamedTuple):
    """A leaf of the targets, counted through all of them."""

    leaf: int
    kind: str = "target"


class Side(NamedTuple):
    """A leaf of a stage's side inputs, or of the loss's."""

    stage: int
    leaf: int
    kind: str = "side"


class Seed(NamedTuple):
    """The cotangent of a stage's auxiliary loss or, one stage past the last, of the loss."""

    stage: int
    kind: str = "seed"


class OutputCotangent(NamedTuple):
    """The cotangent of a leaf of the last stage's outputs, where the caller passes it."""

    leaf: int
    kind: str = "output cotangent"


class Param(NamedTuple):
    """A leaf of a stage's parameters as the caller passes it: whole, or this copy's part."""

    stage: int
    leaf: int
    kind: str = "param"


class WholeParam(NamedTuple):
    """A leaf of a stage's parameters, gathered from the parts of all copies."""

    stage: int
    leaf: int
    kind: str = "whole param"


class State(NamedTuple):
    """A leaf of a stage's state before the first microbatch."""

    stage: int
    leaf: int
    kind: str = "state"


class Grad(NamedTuple):
    """The gradient of a parameter, accumulated over microbatches."""

    stage: int
    leaf: int
    kind: str = "grad"


class ReducedGrad(NamedTuple):
    """The gradient of a parameter reduced over all copies, or this copy's part of it."""

    stage: int
    leaf: int
    kind: str = "reduced grad"


class PartialGrad(NamedTuple):
    """Another rank's gradient of a parameter, received to be summed as part of a group."""

    stage: int
    leaf: int
    rank: int
    group: int
    kind: str = "partial grad"


class GradSum(NamedTuple):
    """The sum of the gradients of a group: of the ranks of a replicated stage, or of tied
    parameters.
    """

    group: int
    kind: str = "grad sum"


Source: TypeAlias = (
    Value
    | BatchLeaf
    | Target
    | Side
    | Seed
    | OutputCotangent
    | Param
    | WholeParam
    | State
    | Grad
    | ReducedGrad
    | PartialGrad
    | GradSum
)
Key: TypeAlias = tuple[Source, int | None]

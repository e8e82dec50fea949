# SPDX-License-Identifier: Apache-2.0
"""Types of what ``fpipe.pipeline`` takes, and of the functions that its transforms return.

They are for type checkers alone. A pipeline has two type parameters: ``Y``, the outputs of its last
stage, and ``R``, what its loss function returns, or None without one. Knows no pipeline and no
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, overload

import torch

from ..stage import Stage
from ..tree import Tree

A = TypeVar("A")
E = TypeVar("E")
P = TypeVar("P")
R = TypeVar("R")
X = TypeVar("X")
Y = TypeVar("Y")
V = TypeVar("V", covariant=True)

LossScale: TypeAlias = float | torch.Tensor | None
#: One stage or more; functions of one result type, or stages, whose results no type describes.
Stages: TypeAlias = Sequence[Callable[..., Y] | Stage]
#: ``each=`` of a pipeline with a loss: of the number of a microbatch, its output, and what the loss
#: returned.
EachLoss: TypeAlias = Callable[[int, Y, A], E]


class ParamGrads(Protocol[V]):
    """A function that returns a value, and gradients with the form of the parameters.

    A pipeline with state, passed as ``state=``, adds the new state to the value.
    """

    @overload
    def __call__(
        self,
        params: Sequence[P],
        x: Tree,
        /,
        *targets: Tree,
        state: Sequence[Tree],
        seed: int | None = None,
        loss_scale: LossScale = None,
        **side: Tree,
    ) -> tuple[Any, list[P]]: ...
    @overload
    def __call__(
        self,
        params: Sequence[P],
        x: Tree,
        /,
        *targets: Tree,
        seed: int | None = None,
        loss_scale: LossScale = None,
        **side: Tree,
    ) -> tuple[V, list[P]]: ...


class InputGrads(Protocol[V]):
    """A function that returns a value and the gradient of the input: None where the first stage is
    elsewhere.
    """

    def __call__(
        self,
        params: Sequence[Tree],
        x: X,
        /,
        *targets: Tree,
        seed: int | None = None,
        loss_scale: LossScale = None,
        **side: Tree,
    ) -> tuple[V, X | None]: ...


class BothGrads(Protocol[V]):
    """A function that returns a value, and the gradients of the parameters and of the input."""

    def __call__(
        self,
        params: Sequence[P],
        x: X,
        /,
        *targets: Tree,
        seed: int | None = None,
        loss_scale: LossScale = None,
        **side: Tree,
    ) -> tuple[V, tuple[list[P], X | None]]: ...


class Grads(Protocol):
    """A function that returns gradients with the form of the parameters."""

    def __call__(
        self,
        params: Sequence[P],
        x: Tree,
        /,
        *targets: Tree,
        seed: int | None = None,
        loss_scale: LossScale = None,
        **side: Tree,
    ) -> list[P]: ...


class GradsAndAux(Protocol[V]):
    """A function that returns gradients with the form of the parameters, and what the loss returned
    beside it.
    """

    def __call__(
        self,
        params: Sequence[P],
        x: Tree,
        /,
        *targets: Tree,
        seed: int | None = None,
        loss_scale: LossScale = None,
        **side: Tree,
    ) -> tuple[list[P], V]: ...


class Pullback(Protocol[P, V]):
    """What ``fpipe.vjp`` returns beside the outputs: cotangents to gradients of the parameters and
    of the input.
    """

    def __call__(self, dy: Tree, *, retain: bool = False) -> tuple[list[P], V | None]:
        """Run the backwards of the schedule; frees what they used, unless ``retain`` is set."""
        ...

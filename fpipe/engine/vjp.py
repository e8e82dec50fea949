# SPDX-License-Identifier: Apache-2.0
"""``fpipe.grad`` and ``fpipe.vjp``: the gradient alone, and outputs with a pullback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch

from ..errors import StageError
from ..tree import Tree
from . import pullback
from .gradients import Argnums, WithAux, check_pipeline, value_and_grad
from .pipeline import Pipeline
from .signatures import A, Grads, GradsAndAux, P, Pullback, X, Y


@overload
def grad(pipe: Pipeline[Y, torch.Tensor], argnums: Literal[0] = 0) -> Grads: ...


@overload
def grad(
    pipe: WithAux[Y, A], argnums: Literal[0] = 0, *, has_aux: Literal[True]
) -> GradsAndAux[list[A]]: ...


@overload
def grad(
    pipe: Pipeline[Any, Any], argnums: Argnums, *, has_aux: bool = False
) -> Callable[..., Any]: ...


def grad(
    pipe: Pipeline[Any, Any], argnums: Argnums = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that runs the schedule and returns the gradient alone, without waiting for the
    loss.

    Args:
        pipe: a pipeline with a loss.
        argnums: as for ``value_and_grad``.
        has_aux: the loss returns ``(scalar, aux)``.

    Returns:
        A function with the arguments of that of ``value_and_grad``, whose result is the gradients,
        or with ``has_aux=True`` ``(grads, [aux, ...])``.

    Raises:
        StageError: as ``value_and_grad``.

    >>> from fpipe import local, pipeline
    >>> pipe = pipeline([torch.mul] * 2, loss=torch.sum, microbatches=2, group=local(2))
    >>> grad(pipe)([torch.tensor(2.0), torch.tensor(3.0)], torch.arange(4.0))
    [tensor(9.), tensor(6.)]
    """
    both = value_and_grad(pipe, argnums, has_aux=has_aux)

    def call(params: Sequence[Tree], x: Tree, /, *targets: Tree, **keywords: Any) -> Any:
        value, grads = both(params, x, *targets, _value=has_aux, **keywords)
        if has_aux:
            return (grads, value[1])
        return grads

    return call


@overload
def vjp(
    pipe: Pipeline[Y, None],
    params: Sequence[P],
    x: X,
    /,
    *,
    state: Sequence[Tree],
    seed: int | None = None,
    **side: Tree,
) -> tuple[tuple[Y, list[Tree]], Pullback[P, X]]: ...


@overload
def vjp(
    pipe: Pipeline[Y, None], params: Sequence[P], x: X, /, *, seed: int | None = None, **side: Tree
) -> tuple[Y, Pullback[P, X]]: ...


def vjp(
    pipe: Pipeline[Any, Any],
    params: Sequence[Tree],
    x: Tree,
    /,
    *targets: Tree,
    seed: int | None = None,
    **side: Tree,
) -> tuple[Tree, Pullback[Any, Any]]:
    """Outputs of the whole batch, and a pullback from their cotangents to ``(dparams, dx)``.

    The forwards of the schedule run now, the backwards when the pullback is called, so that a loss
    over the whole batch can be computed in between. Where parameters, the batch or outputs that it
    needs were changed in place, the pullback raises an error.

    Args:
        pipe: a pipeline without a loss.
        params, x, seed, side: as for a call of the pipeline.
        targets: none, since there is no loss that takes them.

    Returns:
        ``(outputs, pullback)``. ``pullback(dy)`` takes cotangents with the outputs' structure,
        shapes and dtypes, or None for a leaf that has none, and returns the gradients of the
        parameters and of the input. It frees what it used: it can be called once, or several times
        with ``retain=True``.

    Raises:
        StageError: if the pipeline has a loss, or a stage an auxiliary one.
        BatchError: as a call of the pipeline.

    >>> from fpipe import local, pipeline
    >>> pipe = pipeline([torch.mul] * 2, microbatches=2, group=local(2))
    >>> y, pullback = vjp(pipe, [torch.tensor(2.0), torch.tensor(3.0)], torch.arange(4.0))
    >>> dy = torch.softmax(y, 0)  # of log(sum(exp(y))) over the whole batch
    >>> pullback(dy)[0]
    [tensor(8.9925), tensor(5.9950)]
    """
    check_pipeline("vjp", pipe)
    if pipe.config.loss is not None or targets:
        raise StageError(
            "vjp takes a pipeline without a loss; leave loss= out, or use value_and_grad"
        )
    scalar = next((stage.label for stage in pipe.config.functions if stage.aux_loss), None)
    if scalar is not None:
        raise StageError(
            f"stage {scalar} has aux_loss=True, and without a loss there is no total that it "
            "could join"
        )
    return pullback.vjp(
        pipe.call("vjp", params, x, (), side, seed=seed, argnums=(0, 1)), pipe.cache
    )

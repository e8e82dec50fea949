# SPDX-License-Identifier: Apache-2.0
"""``fpipe.value_and_grad``, ``fpipe.grad`` and ``fpipe.vjp``: their arguments are checked here.
``Pipeline.stepper`` and ``pullback`` do the rest. Knows no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, overload

import torch

from ..errors import StageError
from ..tree import Tree
from . import pullback
from .arguments import Each
from .pipeline import Pipeline
from .signatures import (
    A,
    BothGrads,
    E,
    EachLoss,
    Grads,
    GradsAndAux,
    InputGrads,
    P,
    ParamGrads,
    Pullback,
    R,
    X,
    Y,
)

Argnums: TypeAlias = Literal[0, 1] | tuple[Literal[0, 1], ...]
_Both: TypeAlias = tuple[Literal[0], Literal[1]]
WithAux: TypeAlias = Pipeline[Y, tuple[torch.Tensor, A]]
_Results: TypeAlias = tuple[torch.Tensor, list[E] | None]


@overload
def value_and_grad(
    pipe: Pipeline[Y, torch.Tensor], argnums: Literal[0] = 0
) -> ParamGrads[torch.Tensor]: ...
@overload
def value_and_grad(
    pipe: Pipeline[Y, torch.Tensor], argnums: Literal[1]
) -> InputGrads[torch.Tensor]: ...
@overload
def value_and_grad(pipe: Pipeline[Y, torch.Tensor], argnums: _Both) -> BothGrads[torch.Tensor]: ...
@overload
def value_and_grad(
    pipe: WithAux[Y, A], argnums: Literal[0] = 0, *, has_aux: Literal[True]
) -> ParamGrads[tuple[torch.Tensor, list[A]]]: ...
@overload
def value_and_grad(
    pipe: WithAux[Y, A], argnums: Literal[1], *, has_aux: Literal[True]
) -> InputGrads[tuple[torch.Tensor, list[A]]]: ...
@overload
def value_and_grad(
    pipe: WithAux[Y, A], argnums: _Both, *, has_aux: Literal[True]
) -> BothGrads[tuple[torch.Tensor, list[A]]]: ...
@overload
def value_and_grad(
    pipe: Pipeline[Y, R], argnums: Literal[0] = 0, *, has_aux: bool = False, each: EachLoss[Y, R, E]
) -> ParamGrads[_Results[E]]: ...
@overload
def value_and_grad(
    pipe: Pipeline[Y, R], argnums: Literal[1], *, has_aux: bool = False, each: EachLoss[Y, R, E]
) -> InputGrads[_Results[E]]: ...
@overload
def value_and_grad(
    pipe: Pipeline[Y, R], argnums: _Both, *, has_aux: bool = False, each: EachLoss[Y, R, E]
) -> BothGrads[_Results[E]]: ...
@overload
def value_and_grad(
    pipe: Pipeline[Any, Any],
    argnums: Argnums = 0,
    *,
    has_aux: bool = False,
    each: Each | None = None,
) -> Callable[..., Any]: ...
def value_and_grad(
    pipe: Pipeline[Any, Any],
    argnums: Argnums = 0,
    *,
    has_aux: bool = False,
    each: Each | None = None,
) -> Callable[..., Any]:
    """A function that runs the schedule and returns ``(value, grads)``.

    The function takes the arguments of a call of the pipeline,
    ``(params, x, *targets, seed=, **side)``, and ``loss_scale=``: gradients, not the value, are
    multiplied by it, for an optimizer that divides them in a wider dtype, as
    ``fpipe.dynamic_loss_scale`` does. Every process calls it.

    Args:
        pipe: a pipeline with a loss.
        argnums: what is differentiated: 0 the parameters, 1 the input, ``(0, 1)`` both.
        has_aux: the loss returns ``(scalar, aux)``.
        each: ``each(number, output, loss)`` is called once the loss of a microbatch is computed, on
            the rank of the last stage alone, outside of traces: with the microbatch's number, the
            output of the last stage, which it must not change, and the unweighted loss, or with
            ``has_aux=True`` all that the loss returned. It may return anything. A loss with
            ``engine="eager"`` may return anything as ``aux``, such as plain numbers that differ in
            every step. Either all ranks pass ``each=``, or none.

    Returns:
        A function. What it returns, by these arguments:
        ``value_and_grad(pipe)``: ``(loss, grads)``. The loss is on every rank. ``grads`` is a list
            of one pytree for each stage, None for stages of other processes and for frozen leaves.
        ``value_and_grad(pipe, 1)``: ``(loss, dx)``. The gradient of the input is on the rank of the
            first stage, None on others.
        ``value_and_grad(pipe, (0, 1))``: ``(loss, (grads, dx))``.
        ``value_and_grad(pipe, has_aux=True)``: ``((loss, [aux, ...]), grads)``, in microbatch
            order.
        ``value_and_grad(pipe, each=each)``: ``((loss, results), grads)``. Results are None on ranks
            without the last stage, unless ``outputs="everywhere"``.
        ``state=[...]`` in the call, for stages that carry state: the first part is a tuple that
            ends with the new state.

    Raises:
        StageError: if ``pipe`` is no pipeline with a loss, or ``argnums`` is wrong. The function
            raises the errors of a call of the pipeline.

    >>> from fpipe import local, pipeline
    >>> pipe = pipeline(
    ...     [torch.mul] * 2,
    ...     loss=torch.sum, microbatches=2, group=local(2)
    ... )
    >>> params = [torch.tensor(2.0), torch.tensor(3.0)]
    >>> x = torch.arange(4.0)
    >>> value_and_grad(pipe, argnums=(0, 1))(params, x)
    (tensor(18.), ([tensor(9.), tensor(6.)], tensor([3., 3., 3., 3.])))
    >>> def each(number, y, loss): return f"{number}: {y.max():.0f}, {loss:.0f}"
    >>> value_and_grad(pipe, each=each)(params, x)[0]
    (tensor(18.), ['0: 6, 6', '1: 18, 30'])
    """
    check_pipeline("value_and_grad", pipe)
    if pipe.config.loss is None:
        raise StageError(
            "this pipeline has no loss to differentiate; say pipeline(..., loss=) or use fpipe.vjp"
        )
    given: tuple[object, ...] = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    numbers = tuple(number for number in given if type(number) is int and number in (0, 1))
    if not numbers or len(numbers) < len(given):
        raise StageError(
            f"argnums={argnums!r}; 0 is the parameters and 1 the input, nothing else is "
            "differentiated"
        )
    return pipe.stepper(numbers, isinstance(argnums, int), has_aux, each)


def check_pipeline(name: str, pipe: object) -> None:
    """Raise StageError unless it is a pipeline."""
    if not isinstance(pipe, Pipeline):
        raise StageError(f"{name} takes what fpipe.pipeline returns, not {type(pipe).__name__}")


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
    >>> pipe = pipeline(
    ...     [torch.mul] * 2,
    ...     loss=torch.sum, microbatches=2, group=local(2)
    ... )
    >>> params = [torch.tensor(2.0), torch.tensor(3.0)]
    >>> grad(pipe)(params, torch.arange(4.0))
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
    >>> pipe = pipeline(
    ...     [torch.mul] * 2, microbatches=2, group=local(2)
    ... )
    >>> params = [torch.tensor(2.0), torch.tensor(3.0)]
    >>> y, pullback = vjp(pipe, params, torch.arange(4.0))
    >>> dy = torch.softmax(y, 0)  # of log(sum(exp(y)))
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

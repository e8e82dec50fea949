# SPDX-License-Identifier: Apache-2.0
"""``fpipe.value_and_grad``: checks its arguments; ``Pipeline.stepper`` does the rest. Knows no
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, overload

import torch

from ..errors import StageError
from .arguments import Each
from .pipeline import Pipeline
from .signatures import (
    A,
    BothGrads,
    E,
    EachLoss,
    InputGrads,
    ParamGrads,
    R,
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
        A function whose result is ``(value, grads)``. The value is the loss, on every rank; with
        ``has_aux=True`` ``(loss, [aux, ...])`` in microbatch order; with ``each``
        ``(loss, results)``, where results are None on ranks without the last stage, unless
        ``outputs="everywhere"``; with stages that carry state, passed as ``state=[...]``, a tuple
        that ends with the new state. The gradients are a list with one pytree for each stage, None
        for stages of other processes and for frozen leaves. The gradient of the input is on the
        rank of the first stage, None on others. With several ``argnums`` they are a tuple.

    Raises:
        StageError: if ``pipe`` is no pipeline with a loss, or ``argnums`` is wrong. The function
        raises the errors of
            a call of the pipeline.

    >>> from fpipe import local, pipeline
    >>> pipe = pipeline([torch.mul] * 2, loss=torch.sum, microbatches=2, group=local(2))
    >>> params, x = [torch.tensor(2.0), torch.tensor(3.0)], torch.arange(4.0)
    >>> value_and_grad(pipe, argnums=(0, 1))(params, x)
    (tensor(18.), ([tensor(9.), tensor(6.)], tensor([3., 3., 3., 3.])))
    >>> step = value_and_grad(pipe, each=lambda number, y,
    ...     loss: f"{number}: {y.max():.0f}, {loss:.0f}")
    >>> step(params, x)[0]
    (tensor(18.), ['0: 6, 6', '1: 18, 30'])
    """
    numbers = _argnums_of(pipe, argnums)
    return pipe.stepper(numbers, isinstance(argnums, int), has_aux, each)


def check_pipeline(name: str, pipe: object) -> None:
    """Raise StageError unless it is a pipeline."""
    if not isinstance(pipe, Pipeline):
        raise StageError(f"{name} takes what fpipe.pipeline returns, not {type(pipe).__name__}")


def _argnums_of(pipe: Pipeline[Any, Any], argnums: object) -> tuple[int, ...]:
    """The arguments that are differentiated."""
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
    return numbers

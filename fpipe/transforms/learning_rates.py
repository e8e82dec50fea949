# SPDX-License-Identifier: Apache-2.0
"""Learning rates as functions of the step, for ``lr=`` of an optimizer and for
``scale_by_schedule``.

The step is an int that counts from 0: the number of steps before this one. A function returns the
rate of that step. After its last step the rate stays what it is there. This module must not know
gradients or parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..errors import TransformError, checked

LearningRate = Callable[[int], float]


@checked
def warmup_constant(peak: float, *, warmup: int) -> LearningRate:
    """A linear rise to ``peak``, which step ``warmup`` is the first to have; then ``peak``.

    Args:
        peak: the highest rate.
        warmup: how many steps have a lower rate; the first has ``peak / (warmup + 1)``.

    Returns:
        a function from the step to the rate.

    Raises:
        TransformError: if a count is negative or no integer.

    >>> [round(warmup_constant(1.0, warmup=3)(step), 3) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return _after_warmup(peak, warmup, warmup + 1, lambda done: 1.0)


@checked
def warmup_cosine(peak: float, *, warmup: int, steps: int, end: float = 0.0) -> LearningRate:
    """A linear rise to ``peak``, then half a cosine down to ``end``, which step ``steps`` is the
    first to have.

    Args:
        peak: the highest rate.
        warmup: how many steps have a lower rate than ``peak`` at the beginning; may be 0.
        steps: how many steps there are in all, those of the warm-up included.
        end: the rate after the last step.

    Returns:
        a function from the step to the rate.

    Raises:
        TransformError: if a count is negative or no integer, or ``steps`` is not above ``warmup``.

    >>> rate = warmup_cosine(1.0, warmup=1, steps=5, end=0.2)
    >>> [round(rate(step), 3) for step in range(7)]
    [0.5, 1.0, 0.883, 0.6, 0.317, 0.2, 0.2]
    """
    return _after_warmup(peak, warmup, steps, lambda done: (1 + math.cos(math.pi * done)) / 2, end)


@checked
def warmup_linear(peak: float, *, warmup: int, steps: int, end: float = 0.0) -> LearningRate:
    """A linear rise to ``peak``, then a linear fall to ``end``.

    Args:
        peak: the highest rate.
        warmup: how many steps the rise takes.
        steps: how many steps there are in all.
        end: the last rate.

    Returns:
        A function of the step, which counts from 0.

    Raises:
        TransformError: if an argument is out of its range.

    >>> rate = warmup_linear(1.0, warmup=1, steps=5)
    >>> [rate(step) for step in range(7)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    return _after_warmup(peak, warmup, steps, lambda done: 1 - done, end)


@checked
def warmup_stable_decay(
    peak: float,
    *,
    warmup: int,
    decay: int,
    steps: int,
    end: float = 0.0,
) -> LearningRate:
    """A linear rise to ``peak``, then ``peak``, then over the last ``decay`` of ``steps`` a linear
    fall to ``end``.

    Args:
        peak: the highest rate.
        warmup: how many steps have a lower rate at the beginning.
        decay: how many steps there are from the last step with ``peak`` to the first with ``end``.
        steps: how many steps there are in all.
        end: the rate after the last step.

    Returns:
        a function from the step to the rate.

    Raises:
        TransformError: if a count is negative or no integer, or the warm-up and the decay are
        longer than ``steps``.

    >>> rate = warmup_stable_decay(1.0, warmup=1, decay=2, steps=5)
    >>> [rate(step) for step in range(7)]
    [0.5, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    _check(decay=decay)
    if warmup + decay > steps or not decay:
        raise TransformError(
            f"warmup={warmup} and decay={decay} do not fit into steps={steps}; give a decay of 1 "
            "step at least, and "
            "as many steps as both together"
        )
    return _after_warmup(
        peak,
        warmup,
        steps,
        lambda done: min(1.0, (1 - done) * (steps - warmup) / decay),
        end,
    )


def _after_warmup(
    peak: float,
    warmup: int,
    steps: int,
    shape: Callable[[float], float],
    end: float = 0.0,
) -> LearningRate:
    """A rise to ``peak``, then ``shape`` of the part of the rest that is done: 1 stands for
    ``peak``, 0 for ``end``.
    """
    _check(warmup=warmup, steps=steps)
    if steps <= warmup:
        raise TransformError(
            f"steps={steps} is not above warmup={warmup}; steps counts those of the warm-up too"
        )

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / (warmup + 1)
        return end + (peak - end) * shape(min(1.0, (step - warmup) / (steps - warmup)))

    return rate


def _check(**counts: int) -> None:
    for name, count in counts.items():
        if type(count) is not int or count < 0:
            raise TransformError(
                f"{name}={count!r}; give a number of steps, an integer of 0 or more"
            )

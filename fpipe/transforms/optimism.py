# SPDX-License-Identifier: Apache-2.0
"""An optimizer step that assumes that gradients are neither clipped nor left out, and verifies that
later.

Every process updates at once under that assumption and begins one sum over the pipeline that
decides. The next step runs meanwhile. If the assumption was wrong, which all processes decide
alike, parameters and state from before the step are still there, and the step is repeated in the
ordinary way. This module must not know any single transform or any schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..collectives.group import Done
from ..errors import TransformError
from .boards import Over, as_over, copies_of
from .transform import Params, Speculation, State, Transform, Updates, apply_updates

V = TypeVar("V")


#: Updates under the assumption, this process's summands, and the state as a function of their sums.
_Guess: TypeAlias = tuple[Updates, list[Tensor], Callable[[Iterator[Tensor]], State]]


class _WrongAssumptionError(Exception):
    """A transform would have changed the gradients."""


@dataclass(eq=False, repr=False)
class Step:
    """An optimizer step whose assumption may not be settled: ``params`` can be used at once.

    >>> from fpipe.transforms import sgd
    >>> opt = optimistic(sgd(1.0))
    >>> step = opt.update([torch.ones(1)], opt.init([torch.ones(1)]), [torch.ones(1)])
    >>> step.params, step.settle()
    ([tensor([0.])], True)
    """

    params: Params
    _state: State = None
    _settle: Callable[[], tuple[bool, Params, State]] | None = None
    _right: bool = True

    def settle(self) -> bool:
        """Wait for the sum; whether the assumption was right, on all processes alike.

        If not, the step is repeated: ``params`` change.
        """
        if self._settle is not None:
            self._right, self.params, self._state = self._settle()
            self._settle = None  # frees the parameters and gradients from before the step
        return self._right

    @property
    def state(self) -> State:
        """The optimizer's state after the step; waits for the sum."""
        self.settle()
        return self._state


class Optimistic(NamedTuple):
    """Optimizer steps without a barrier; the result of :func:`optimistic`."""

    tx: Transform
    over: Over | None = None

    def init(self, params: Params) -> State:
        """The transform's state."""
        return self.tx.init(params)

    def update(self, grads: Updates, state: State, params: Params) -> Step:
        """Update under the assumption, and begin to verify it."""
        tx, over = self
        guess, summands, confirm = _guess(tx, grads, state, params, over)
        after, work = apply_updates(params, guess), None
        if summands:
            flat = torch.cat([part.reshape(-1) for part in summands])
            work = Done((flat,)) if over is None else over.group.start_reduce(flat)

        def settle() -> tuple[bool, Params, State]:
            sums = () if work is None else work.wait()[0].split([part.numel() for part in summands])
            totals = (part.view(like.shape) for part, like in zip(sums, summands, strict=True))
            try:
                return True, after, confirm(totals)
            except _WrongAssumptionError:
                updates, other = tx.update(grads, state, params)
                return False, apply_updates(params, updates), other

        return Step(after, None, settle)

    def first(self, params: Params, state: State = None) -> Step:
        """A settled step, from which a loop starts; ``state`` is that of a checkpoint, by default a
        new one.
        """
        return Step(params, self.init(params) if state is None else state)

    def step(
        self, value_and_grad: Callable[..., tuple[V, Updates]], last: Step, *batch: Any, **side: Any
    ) -> tuple[V, Step]:
        """One training step, ``(value, step)``: gradients at ``last.params``, again if those turn
        out to be wrong.
        """
        value, grads = value_and_grad(last.params, *batch, **side)
        if not last.settle():
            value, grads = value_and_grad(last.params, *batch, **side)
        return value, self.update(grads, last.state, last.params)


def optimistic(tx: Transform, over: Over | None = None) -> Optimistic:
    """Make optimizer steps that do not wait for a global norm or for a check for infinities.

    The assumption is that ``clip_by_global_norm`` and ``skip_nonfinite`` in the chain, with the
    same ``over``, leave the gradients unchanged. A step updates the parameters at once and begins
    one sum over the processes, which verifies the assumption. The sum runs while the next gradients
    are computed.

    If the assumption was wrong, all processes repeat the step with the ordinary transform, from the
    parameters, state and gradients from before the step; :meth:`Optimistic.step` then computes the
    next gradients again. Results have the bits of the ordinary step. The parameters, state and
    gradients from before a step are held until :meth:`Step.settle` has confirmed or repeated it.

    Other transforms that reduce over processes wait as usual, and so do norms over copies of the
    pipeline (``zero=``, ``own=``).

    Args:
        tx: the transform, usually a chain.
        over: the pipeline, the same as in the transforms.

    Returns:
        A value with ``first(params)`` and ``step(value_and_grad, step, *args)``.

    Raises:
        TransformError: if a part of the transform has ``donate=True``.

    >>> from fpipe.transforms import chain, clip_by_global_norm, sgd
    >>> opt = optimistic(chain(clip_by_global_norm(1.0), sgd(1.0)))
    >>> value_and_grad = lambda params, x: (None, [x])
    >>> step = opt.first([torch.zeros(1)])
    >>> for x in torch.tensor([[0.5], [3.0], [0.25]]):
    ...     _, step = opt.step(value_and_grad, step, x)
    >>> step.settle(), [round(p.item(), 4) for p in step.params]
    (True, [-1.75])
    """
    if tx.donates:
        raise TransformError(
            "a transform with donate=True overwrites the state from which a step is repeated; "
            "leave donate=True out "
            "of the transform passed to optimistic()"
        )
    return Optimistic(tx, as_over(over))


def _guess(
    tx: Transform, grads: Updates, state: State, params: Params, over: Over | None
) -> _Guess:
    summands: list[Tensor] = []
    if tx.parts and len(tx.parts) == len(state):
        confirms: list[Callable[[Iterator[Tensor]], State]] = []
        for part, before in zip(tx.parts, state, strict=True):
            confirm, more = partial(_unchanged, before), []
            if grads is not None:
                grads, more, confirm = _guess(part, grads, before, params, over)
            summands += more
            confirms.append(confirm)
        return grads, summands, lambda sums: tuple(confirm(sums) for confirm in confirms)
    speculation, summand = tx.speculation, _summand(tx.speculation, grads, over)
    if speculation is None or summand is None:
        updates, after = tx.update(grads, state, params)
        return updates, [], partial(_unchanged, after)

    def confirmed(sums: Iterator[Tensor]) -> State:
        after = speculation.confirm(next(sums), state)
        if after is None:
            raise _WrongAssumptionError
        return after

    return grads, [summand], confirmed


def _unchanged(state: State, sums: Iterator[Tensor]) -> State:
    return state


def _summand(speculation: Speculation | None, grads: Updates, over: Over | None) -> Tensor | None:
    """This process's summand; None where the transform has to run."""
    if speculation is None or copies_of(over)[1]:
        return None  # over copies a norm is several sums, one after another
    if speculation.over is over:
        return speculation.measure(grads)
    if speculation.over is not None:
        raise TransformError(
            f"a transform was made with over={speculation.over!r} and optimistic() with "
            f"over={over!r}; give both the same pipeline, as in optimistic(tx, over=pipe)"
        )
    return None

"""An optimizer step that does not wait to hear whether gradients are clipped or left out: it guesses, and is told.

Every process updates at once as if there were nothing to clip and to skip, and begins one sum over the pipeline that
will tell. The next step runs meanwhile. Where the guess was wrong, and all processes find so alike, parameters and
state from before the step are still there, and the step is made again in the plain way. Knows no single transform and
no schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..collectives.group import Work
from ..errors import TransformError
from ..tree import Tree
from ._base import State, Transform, apply_updates
from ._late import CHAINS, DONATING, LATE, Late
from ._over import Over, apart


class _Asked(NamedTuple):
    """A transform that waits for its answer."""

    late: Late
    state: State
    part: Tensor  # this process's


class Step:
    """An optimizer step whose guess has not been settled: ``params`` can be used at once.

    >>> from fpipe.transforms import sgd
    >>> opt = optimistic(sgd(1.0))
    >>> step = opt.update([torch.ones(1)], opt.init([torch.ones(1)]), [torch.ones(1)])
    >>> step.params, step.settle()
    ([tensor([0.])], True)
    """

    def __init__(self, params: Tree, again: Callable[[], tuple[Tree, State]], asked: list[_Asked],
                 state: Callable[[list[Any]], State], work: Work | None):  # fmt: skip
        self.params = params
        self._again, self._asked, self._make, self._work = again, asked, state, work
        self._state: State = None
        self._right: bool | None = None

    def settle(self) -> bool:
        """Wait for the answer; whether the guess was right. If not, ``params`` are others now. The same everywhere."""
        if self._right is None:
            totals: list[Tensor] = []
            if self._work is not None:
                (total,) = self._work.wait()
                totals = list(total.split([asked.part.numel() for asked in self._asked]))
            after = [a.late.judge(t.view(a.part.shape), a.state) for a, t in zip(self._asked, totals, strict=True)]
            self._right = all(state is not None for state in after)
            if self._right:
                self._state = self._make(after)
            else:
                self.params, self._state = self._again()
            self._again, self._asked, self._make, self._work = _nothing, [], _nothing, None
        return self._right

    @property
    def state(self) -> State:
        """The optimizer's state after the step; waits for the answer."""
        self.settle()
        return self._state


def _nothing(*_: Any) -> Any:
    """What is left of a settled step."""


class Optimistic:
    """What :func:`optimistic` makes."""

    def __init__(self, tx: Transform, over: Over | None):
        self.tx, self.over = tx, over

    def init(self, params: Tree) -> State:
        """The transform's own state."""
        return self.tx.init(params)

    def update(self, grads: Tree, state: State, params: Tree) -> Step:
        """Update by the guess, and begin to ask."""
        asked: list[_Asked] = []
        updates, make = _guess(self.tx, grads, state, params, asked, self.over)
        work = None
        if asked:
            memory = torch.cat([one.part.reshape(-1) for one in asked])
            work = _Kept(memory) if self.over is None else self.over.group.start_reduce(memory)

        def again() -> tuple[Tree, State]:
            updates, after = self.tx.update(grads, state, params)
            return apply_updates(params, updates), after

        return Step(apply_updates(params, updates), again, asked, make, work)

    def first(self, params: Tree, state: State = None) -> Step:
        """A step that is settled: where a loop begins."""
        state = self.init(params) if state is None else state
        return Step(params, _nothing, [], lambda _: state, None)

    def step(self, value_and_grad: Callable[..., tuple[Any, Tree]], last: Step, *batch: Any, **side: Any) -> Any:
        """One training step, ``(value, step)``: gradients by the last step's guess, and again if that was wrong."""
        value, grads = value_and_grad(last.params, *batch, **side)
        if not last.settle():
            value, grads = value_and_grad(last.params, *batch, **side)
        return value, self.update(grads, last.state, last.params)


def optimistic(tx: Transform, over: Over | None = None) -> Optimistic:
    """Make optimizer steps without the barrier of a global norm or of a check for infinities.

    ``clip_by_global_norm`` and ``skip_nonfinite`` in the chain (made with the same ``over``) are guessed to have
    nothing to do; whatever else asks the other processes is waited for as ever, and so are norms over copies of the
    pipeline (``zero=``, ``own=``).
    Results have the bits of the plain step. A wrong guess costs the step that began with it; until a guess is settled,
    parameters, state and gradients from before it are held, so ``donate=True`` is refused.

    >>> from fpipe.transforms import chain, clip_by_global_norm, sgd
    >>> opt = optimistic(chain(clip_by_global_norm(1.0), sgd(1.0)))
    >>> value_and_grad = lambda params, x: (None, [x])
    >>> step = opt.first([torch.zeros(1)])
    >>> for x in torch.tensor([[0.5], [3.0], [0.25]]):
    ...     _, step = opt.step(value_and_grad, step, x)
    >>> step.settle(), [round(p.item(), 4) for p in step.params]
    (True, [-1.75])
    """
    if tx.update in DONATING:
        raise TransformError(
            "a transform with donate=True writes over the state that a wrong guess goes back to; leave donate=True out "
            "of what optimistic() is given"
        )
    return Optimistic(tx, over)


class _Kept(NamedTuple):
    """A sum over one process."""

    memory: Tensor

    def done(self) -> bool:
        return True

    def wait(self) -> tuple[Tensor, ...]:
        return (self.memory,)


def _guess(
    tx: Transform, grads: Tree, state: State, params: Tree, asked: list[_Asked], over: Over | None
) -> tuple[Tree, Callable[[list[Any]], State]]:
    """Updates by the guess, and a function from the asked transforms' states to the whole one."""
    parts = CHAINS.get(tx.update)
    if parts is not None and len(parts) == len(state):
        makers = []
        for part, own in zip(parts, state, strict=True):
            if grads is None:
                makers.append(lambda _, own=own: own)
            else:
                grads, make = _guess(part, grads, own, params, asked, over)
                makers.append(make)
        return grads, lambda after: tuple(make(after) for make in makers)
    several = getattr(over, "parts", None) is not None or apart(over) is not None  # several sums, one after another
    late = None if several else LATE.get(tx.update)
    if late is not None and late.over is not over:
        _same_pipeline(late, over)
        late = None
    part = None if late is None else late.measure(grads)
    if late is not None and part is not None:
        place = len(asked)
        asked.append(_Asked(late, state, part))
        return grads, lambda after: after[place]
    updates, after = tx.update(grads, state, params)
    return updates, lambda _: after


def _same_pipeline(late: Late, over: Over | None) -> None:
    """A transform that asks nobody is no matter; one that asks others than the guess does is a mistake."""
    if late.over is not None:
        raise TransformError(
            f"a transform was made with over={late.over!r} and optimistic() with over={over!r}; "
            "give both the same pipeline, as in optimistic(tx, over=pipe)"
        )

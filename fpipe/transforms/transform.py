# SPDX-License-Identifier: Apache-2.0
"""The transform record, chains of transforms, and how updates are added to parameters.

One rule goes beyond optax: updates of ``None`` for the whole tree mean "no step". A chain stops
there and keeps the states of the transforms behind it, and ``apply_updates`` returns the parameters
unchanged. This module must not know any single transform, nor ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement, pairwise
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..errors import TransformError, checked
from ..tree import Tree
from . import foreach as F
from .leaves import Column, Places, map_kinds, places, recording, scaled

#: A tree of parameters: one entry per stage, None for stages on other processes.
Params: TypeAlias = Tree
#: A tree of gradients or updates: as the parameters, and None for frozen leaves; None for the whole
#: tree is "no step".
Updates: TypeAlias = Tree
#: What a transform keeps between steps: a tree of tensors.
State: TypeAlias = Tree
#: Makes the first state.
Init: TypeAlias = Callable[[Params], State]
#: The learning rate of the next step.
RateOf: TypeAlias = Callable[[State], float]
T = TypeVar("T")


class Update(Protocol):
    """``update(grads, state, params) -> (updates, state)``; updates have the form of the
    gradients.
    """

    def __call__(self, grads: T, state: State, params: Params = None, /) -> tuple[T, State]: ...


class Pass(NamedTuple):
    """How a step changes parameters: whether it may write into their memory, and what the gradients
    are multiplied by first, a tensor without axes; None stands for 1.
    """

    donate: bool = False
    factor: Tensor | None = None


#: An update, or a step if ``how`` is given: ``(grads, state, params, how) -> (tree, state)``, where
#: the tree has updates, or the parameters after a step.
Run: TypeAlias = Callable[[Updates, State, Params, Pass | None], tuple[Tree, State]]


@checked
@dataclass(frozen=True)
class Transform:
    """A pair of pure functions, and what a caller must know of them.

    Args:
        init: ``init(params) -> state``.
        update: ``update(grads, state, params) -> (updates, state)``.
        factor: for a transform that multiplies all gradients by one factor:
            ``factor(grads) -> (factor, state)``, where a factor of None is 1. The optimizer behind
            it then multiplies in its pass.
        run: how :meth:`step` updates the parameters without a tree of updates; None where it adds
            updates.
        rate: the learning rate of the next step, ``rate(state)``; None where there is none, or more
            than one.
        name: what is printed, such as ``fpipe.sgd(0.1)``.

    A transform of the user's is written the same way as those of this package:

    >>> from optree import tree_map
    >>> def centralize():
    ...     def init(params):
    ...         return ()
    ...     def update(grads, state, params=None):
    ...         return tree_map(lambda g: g - g.mean(), grads), state
    ...     return Transform(init, update)
    >>> tx = chain(centralize(), identity())
    >>> tx.update([None, torch.tensor([1.0, 3.0])], tx.init([None, torch.zeros(2)]))
    ([None, tensor([-1.,  1.])], ((), ()))
    """

    init: Init
    update: Update
    factor: Callable[[Updates], tuple[Tensor | None, State]] | None = None
    run: Run | None = None
    rate: RateOf | None = None
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("init", "update"):
            object.__setattr__(self, name, checked(getattr(self, name)))

    def __repr__(self) -> str:
        """The call that made it, where that is known."""
        return self.name or f"<a transform of {getattr(self.update, '__module__', 'fpipe')}>"

    @checked
    def step(
        self,
        grads: Updates,
        state: State,
        params: T,
        *,
        donate: bool = False,
    ) -> tuple[T, State]:
        """Update and :func:`apply_updates` together, which for an optimizer is one pass over memory
        instead of two.

        Last bits can differ from those of the two functions where the optimizer says so
        (:func:`adamw`).

        Args:
            grads: what ``value_and_grad`` returned.
            state: what ``init`` or the step before returned.
            params: the parameters of which these are gradients.
            donate: write into the memory of ``params`` and return them; for the memory of the state
                see the optimizer.

        Returns:
            The new parameters, which are ``params`` if the transform makes no step, and the new
            state.

        >>> from fpipe.transforms import adamw
        >>> tx, params = adamw(0.1, weight_decay=0.0), [torch.ones(2)]
        >>> params, state = tx.step([torch.ones(2)], tx.init(params), params)
        >>> params, state.step.item()
        ([tensor([0.9000, 0.9000])], 1)
        """
        if donate or params is None:
            at = places(grads)
            refuse_shared(at, weights_of(at, params, "a step"))
        return run(self, grads, state, params, Pass(donate))


def run(
    tx: Transform,
    grads: Updates,
    state: State,
    params: Params,
    how: Pass | None,
) -> tuple[Tree, State]:
    """``tx.update`` or, if ``how`` is given, a step."""
    if how is None:
        return tx.update(grads, state, params)
    if tx.run is not None:
        return tx.run(grads, state, params, how)
    updates, state = tx.update(times(grads, how.factor), state, params)
    return apply_updates(params, updates, donate=how.donate), state


def both_ways(init: Init, run: Run) -> Transform:
    """A transform whose update and step are one function."""

    def update(grads, state, params=None):
        return run(grads, state, params, None)

    return Transform(init, update, run=run)


def one_pass(
    init: Init,
    body: Callable[[Places, State, Params, Pass | None], tuple[Tree, State]],
) -> Transform:
    """As :func:`both_ways`, from a function of the places of the gradients.

    A step is an update and a sum where derivatives are taken.
    """

    def call(grads, state, params, how):
        at = places(grads)
        with recording(at.leaves, () if how is None else [how.factor]):
            if how is None or not F.differentiated():
                return body(at, state, params, how)
            updates, state = body(places(times(grads, how.factor)), state, params, None)
            return apply_updates(params, updates, donate=how.donate), state

    return both_ways(init, call)


def times(grads: Updates, factor: Tensor | None) -> Updates:
    """Gradients times a factor; None stands for 1."""
    if factor is None or grads is None:
        return grads
    at = places(grads)
    with recording(at.leaves, [factor]):
        return at.tree(scaled(at.leaves, factor))


def leafwise(
    init: Init,
    step: Callable[[Places, State, Params], tuple[Column, State]],
    *inputs: object,
) -> Transform:
    """A transform from ``step(places, state, params) -> (leaves, state)``.

    Autograd records the step where a gradient, or one of the ``inputs`` that the step reads,
    requires a gradient.
    """

    def update(grads, state, params=None):
        at = places(grads)
        with recording(at.leaves, inputs):
            leaves, state = step(at, state, params)
            return at.tree(leaves), state

    return Transform(init, update)


def on_leaves(function: Callable[[list[Tensor]], list[Tensor]], *inputs: object) -> Transform:
    """A transform without state from a function of the leaves; ``inputs`` are other tensors that it
    reads.

    >>> on_leaves(lambda leaves: [leaf + 1 for leaf in leaves]).update([None, torch.ones(1)], ())[0]
    [None, tensor([2.])]
    """
    return leafwise(
        lambda params: (), lambda at, state, params: (function(at.leaves), state), *inputs
    )


def identity() -> Transform:
    """Return gradients unchanged.

    >>> identity().update([torch.ones(1)], ())
    ([tensor([1.])], ())
    """
    return Transform(lambda params: (), lambda grads, state, params=None: (grads, state))


@checked
def chain(*transforms: Transform) -> Transform:
    """Apply transforms one after another; the state is the tuple of their states.

    Args:
        transforms: in the order in which they see the gradients.

    Raises:
        TransformError: if one is no transform; by ``update``, if the state is that of another
        chain.

    >>> from fpipe.transforms import scale, sgd
    >>> tx = chain(scale(2.0), sgd(0.5))
    >>> updates, state = tx.update([torch.ones(1)], tx.init([torch.ones(1)]), [torch.ones(1)])
    >>> updates
    [tensor([-1.])]
    """
    for transform in transforms:
        if not isinstance(transform, Transform):
            raise TransformError(
                f"chain takes transforms such as fpipe.adamw(3e-4), not {shown(transform)}"
            )
    if not transforms:
        return identity()

    def init(params):
        return tuple(tx.init(params) for tx in transforms)

    def call(grads, state, params, how):
        if not isinstance(state, Sequence) or len(state) != len(transforms):
            given = f"the state {shown(state)}"
            if isinstance(state, Sequence):
                given = f"a state of {len(state)} parts"
            raise TransformError(
                f"{given} for a chain of {len(transforms)} transforms; pass the state that this "
                "chain's init, update or step returned, or what was saved of it"
            )
        after = []
        factor = None if how is None else how.factor  # what gradients are yet to be multiplied by
        for index, (tx, part) in enumerate(zip(transforms, state, strict=True), 1):
            if grads is None:  # no step
                pass
            elif how is not None and index == len(transforms):
                params, part = run(tx, grads, part, params, Pass(how.donate, factor))
            elif tx.factor is not None:
                grads = times(grads, factor)
                factor, part = tx.factor(grads)
            else:
                grads, part = tx.update(times(grads, factor), part, params)
                factor = None
            after.append(part)
        return times(grads, factor) if how is None else params, tuple(after)

    made = replace(both_ways(init, call), name=f"fpipe.chain({', '.join(map(repr, transforms))})")
    rates = [(index, tx.rate) for index, tx in enumerate(transforms) if tx.rate is not None]
    if len(rates) != 1:
        return made
    ((place, rate),) = rates
    return replace(made, rate=lambda state: rate(state[place]))


def shown(value: object) -> str:
    """A value for a message: its text, or the beginning of a long one.

    >>> shown(None), shown("a" * 100)[:20]
    ('None', "a str, 'aaaaaaaaaaaa")
    """
    text = getattr(value, "__name__", "") or " ".join(repr(value).split())
    if len(text) <= 80:
        return text
    return f"a {type(value).__name__}, {text[:40]}..."


@checked
def apply_updates(params: T, updates: Updates, *, donate: bool = False) -> T:
    """``params + updates``, each sum in its parameter's dtype; where the update is None, the
    parameter itself.

    Autograd records only where the updates require a gradient, so a training loop over parameters
    that require one keeps no graph.

    Args:
        params: the tree of parameters.
        updates: a tree of the same form, with None where a leaf does not change; or None for no
            step.
        donate: write into the memory of ``params`` and return them.

    Returns:
        Parameters with the form, dtypes and devices of ``params``.

    Raises:
        TransformError: if the trees differ in form, or if ``donate`` is set and two parameters
        share memory.

    >>> apply_updates([torch.ones(2), None], [torch.ones(2), None])
    [tensor([2., 2.]), None]
    >>> params = [torch.ones(2)]
    >>> apply_updates(params, [torch.ones(2)], donate=True)[0] is params[0]
    True
    """
    at = places(updates)
    before = at.of(params, "params")
    if donate:
        refuse_shared(at, before)
    with torch.no_grad() if donate else recording(at.leaves):
        after = added(before, at.leaves, donate)
    return at.tree(after, base=params)


def added(params: Column, updates: Column, donate: bool) -> Column:
    """``params + updates``, each sum in its parameter's dtype."""

    def kernel(ps, us):
        if donate or all(u.dtype == ps[0].dtype for u in us):
            return F.add(ps, us, inplace=donate)
        return [(p + u).to(p.dtype) for p, u in zip(ps, us, strict=True)]

    return map_kinds(kernel, params, updates)


def weights_of(at: Places, params: Params, who: str) -> Column:
    """The parameters at the places of the gradients, for a transform that requires them."""
    if params is None:
        raise TransformError(f"{who} needs the parameters; call tx.update(grads, state, params)")
    return at.of(params, "params")


def refuse_shared(at: Places, params: list[Tensor]) -> None:
    """Memory of two parameters, or of two elements of one, would receive the updates of both."""
    memory = defaultdict[int, list[int]](list)
    for index, leaf in enumerate(params):
        if leaf.numel() and leaf.data_ptr():
            memory[leaf.untyped_storage().data_ptr()].append(index)
    for indices in memory.values():
        if not _overlap([params[index] for index in indices]):
            continue
        for pair in combinations_with_replacement(indices, 2):
            if _overlap([params[index] for index in set(pair)]):
                one, other = at.names(pair)
                raise TransformError(
                    f"donate=True, and {one!r} and {other!r} are in the same memory, which would "
                    "get both updates; copy one of them, as in params[i] = tree_map(torch.clone, "
                    "params[i]), or leave donate out"
                )


def _overlap(views: list[Tensor]) -> bool:
    """Whether views of one memory have a byte in common, or one has a byte twice."""
    if len(views) == 1 and views[0].is_contiguous():  # at once: most are
        return False
    is_dense = torch.ops.aten.is_non_overlapping_and_dense
    ordered = sorted(views, key=lambda view: (_begin(view), view.nbytes))
    if all(map(is_dense, views)):
        return any(_begin(a) + a.nbytes > _begin(b) for a, b in pairwise(ordered))
    taken = torch.zeros(views[0].untyped_storage().nbytes(), dtype=torch.bool, device="cpu")
    for view in views:
        if any(n > 1 and not step for step, n in zip(view.stride(), view.shape, strict=True)):
            return True
        steps = [step * view.itemsize for step in view.stride()]
        at = taken.as_strided((*view.shape, view.itemsize), (*steps, 1), _begin(view))
        at.fill_(True)
    return int(taken.sum()) < sum(view.nbytes for view in views)


def _begin(view: Tensor) -> int:
    return int(view.storage_offset()) * view.itemsize

"""What a transform is, how transforms chain, and how updates reach the parameters.

One rule beyond optax's: an update of ``None`` for the whole tree means "no step this time". A chain stops there and
keeps the states behind it, and ``apply_updates`` hands the parameters on as they are. Nothing here knows any single
transform, or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..errors import TransformError
from ..tree import Tree
from . import _foreach as F
from ._late import CHAINS, donating
from ._places import Places, by_kind, places, recording

State: TypeAlias = Any


class Transform(NamedTuple):
    """A pair of pure functions: ``init(params) -> state`` and ``update(grads, state, params) -> (updates, state)``.

    Yours is as good as ours:

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

    init: Callable[[Tree], State]
    update: Callable[..., tuple[Tree, State]]


def stateless(update: Callable[[Tree, Tree], Tree]) -> Transform:
    """A transform that remembers nothing, from ``(grads, params) -> updates``.

    >>> stateless(lambda grads, params: [-g for g in grads]).update([torch.ones(1)], ())
    ([tensor([-1.])], ())
    """
    return Transform(lambda params: (), lambda grads, state, params=None: (update(grads, params), state))


def identity() -> Transform:
    """Gradients as they are.

    >>> identity().update([torch.ones(1)], ())
    ([tensor([1.])], ())
    """
    return stateless(lambda grads, params: grads)


def chain(*transforms: Transform) -> Transform:
    """One transform after another; the state is the tuple of theirs.

    >>> from fpipe.transforms import scale, sgd
    >>> tx = chain(scale(2.0), sgd(0.5))
    >>> updates, state = tx.update([torch.ones(1)], tx.init([torch.ones(1)]), [torch.ones(1)])
    >>> updates
    [tensor([-1.])]
    """

    def init(params: Tree) -> State:
        return tuple(transform.init(params) for transform in transforms)

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        if len(state) != len(transforms):
            raise TransformError(
                f"a state of {len(state)} parts for a chain of {len(transforms)} transforms; "
                f"pass the state that this chain's init or update returned"
            )
        after = []
        for transform, part in zip(transforms, state, strict=True):
            if grads is not None:
                grads, part = transform.update(grads, part, params)
            after.append(part)
        return grads, tuple(after)

    CHAINS[update] = transforms
    donating(update, *(transform.update for transform in transforms))
    return Transform(init, update)


def apply_updates(params: Tree, updates: Tree, *, donate: bool = False) -> Tree:
    """``params + updates``, each in its parameter's dtype; where the update is None, the parameter itself.

    ``donate=True`` writes into the memory of ``params`` and returns them. Autograd is followed only where the updates
    carry a gradient, so a training loop over parameters that require one keeps no graph.

    >>> apply_updates([torch.ones(2), None], [torch.ones(2), None])
    [tensor([2., 2.]), None]
    >>> params = [torch.ones(2)]
    >>> apply_updates(params, [torch.ones(2)], donate=True)[0] is params[0]
    True
    """
    at = places(updates)
    before = at.of(params, "params")
    if donate:
        _refuse_shared(at, before)
    with torch.no_grad() if donate else recording(at.leaves):
        (after,) = by_kind(_sum_into if donate else _sum, before, at.leaves)
    return at.tree(after, base=params)


def _refuse_shared(at: Places, params: list[Tensor]) -> None:
    """Memory of two parameters would get the updates of both."""
    owner: dict[int, int] = {}
    for spot, leaf in enumerate(params):
        first = owner.setdefault(leaf.data_ptr(), spot)
        if first != spot and leaf.data_ptr():
            one, other = at.names([first, spot])
            raise TransformError(
                f"donate=True, and {one!r} and {other!r} are in the same memory, which would get both updates; "
                f"give each its own, as in params[i] = tree_map(torch.clone, params[i]), or leave donate out"
            )


def _sum(params: list[Tensor], updates: Sequence[Tensor]) -> list[list[Tensor]]:
    dtype = params[0].dtype if params else None
    if all(update.dtype == dtype for update in updates):
        return [F.add(params, list(updates))]
    return [[(p + u).to(p.dtype) for p, u in zip(params, updates, strict=True)]]


def _sum_into(params: list[Tensor], updates: Sequence[Tensor]) -> list[list[Tensor]]:
    return [F.add(params, list(updates), own=True)]

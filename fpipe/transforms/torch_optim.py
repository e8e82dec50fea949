# SPDX-License-Identifier: Apache-2.0
"""Any torch optimizer as a transform: it steps on copies of the parameters, and their difference is
the update.

This module must not know what an optimizer does, only that its state is a dict per parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import TransformError
from ..tree import Tree, is_floating, tree_map
from . import _foreach as F
from ._base import Params, State, Transform, leafwise
from ._optimizer import weights_of
from ._places import Column, Places, map_kinds


class TorchState(NamedTuple):
    """``memory``: for each leaf of the parameters the dict that the optimizer keeps for it."""

    memory: Tree


def from_torch(optimizer: type[torch.optim.Optimizer], **options: Any) -> Transform:
    """A transform from a torch optimizer class and its options.

    Every leaf is in one parameter group; use :func:`partition` for several. A step costs a copy of
    parameters and state. Its update is the difference of parameters, rounded, so adding it can
    change the last bit.

    Args:
        optimizer: a class that needs no closure and keeps its state by parameter, as all of torch's
            but LBFGS do.
        options: for its constructor.

    Returns:
        A ``Transform``.

    Raises:
        TransformError: if the class is no optimizer, or one that needs a closure, or has no such
        options.

    >>> tx = from_torch(torch.optim.SGD, lr=0.5)
    >>> params = [torch.ones(1), None]
    >>> tx.update(params, tx.init(params), params)[0]
    [tensor([-0.5000]), None]
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise TransformError(
            f"{optimizer!r} is not a class of torch optimizers; write "
            "from_torch(torch.optim.AdamW, lr=3e-4)"
        )
    if issubclass(optimizer, torch.optim.LBFGS):
        raise TransformError(
            "LBFGS calls the loss again within a step; from_torch takes optimizers without a "
            "closure"
        )

    try:
        given = inspect.signature(optimizer).bind([], **options)
    except TypeError as error:
        raise TransformError(
            f"from_torch({optimizer.__name__}, "
            f"{', '.join(f'{k}={v!r}' for k, v in options.items())}): {error}"
        ) from None
    given.apply_defaults()

    def init(params: Params) -> State:
        return TorchState(tree_map(lambda leaf: {} if is_floating(leaf) else None, params))

    def make(params: Sequence[Tensor]) -> torch.optim.Optimizer:
        try:
            return optimizer(params, **options)
        except (TypeError, ValueError) as error:
            raise TransformError(
                f"from_torch: torch refuses the options of {optimizer.__name__}: {error}"
            ) from error

    tx, rate = leafwise(init, partial(_step, make)), given.arguments.get("lr")
    return (
        replace(tx, rate=lambda state: float(rate))
        if isinstance(rate, (float, int, Tensor))
        else tx
    )


def _step(
    make: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
    at: Places,
    state: State,
    params: Params,
) -> tuple[Column, State]:
    if not at.leaves:
        return [], state
    before = [leaf.detach() for leaf in weights_of(at, params, "from_torch")]
    with torch.no_grad():
        after = map_kinds(F.copies, before)
    for leaf, gradient in zip(after, at.leaves, strict=True):
        leaf.grad = gradient.detach().to(leaf.dtype)
    instance = make(after)
    for leaf, memory in zip(after, at.of(state.memory, "the state"), strict=True):
        if memory:
            instance.state[leaf] = {
                key: v.clone() if isinstance(v, Tensor) else v for key, v in memory.items()
            }
    instance.step()
    memories = [dict(instance.state.get(leaf, {})) for leaf in after]
    with torch.no_grad():
        updates = map_kinds(
            lambda xs, ps: F.add(xs, ps, -1, inplace=True), [leaf.data for leaf in after], before
        )
    return updates, TorchState(at.tree(memories, base=state.memory))

# SPDX-License-Identifier: Apache-2.0
"""Any torch optimizer as a transform: it steps on copies of the parameters, and their difference is
the update.

This module must not know what an optimizer does, only that its state is a dict per parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import TransformError
from ..tree import Tree, is_floating, tree_map
from .leaves import Column, Places
from .optimizer import weights_of
from .transform import Params, State, Transform, leafwise


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

    tx, rate = leafwise(init, partial(_step, optimizer, options)), given.arguments.get("lr")
    if not isinstance(rate, (float, int, Tensor)):
        return tx
    return replace(tx, rate=lambda state: float(rate))


def _step(
    optimizer: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    at: Places,
    state: State,
    params: Params,
) -> tuple[Column, State]:
    if not at.leaves:
        return [], state
    before = [leaf.detach() for leaf in weights_of(at, params, "from_torch")]
    after = [leaf.clone() for leaf in before]
    for leaf, gradient in zip(after, at.leaves, strict=True):
        leaf.grad = gradient.detach().to(leaf.dtype)
    try:
        instance = optimizer(after, **options)
    except (TypeError, ValueError) as error:
        raise TransformError(
            f"from_torch: torch refuses the options of {optimizer.__name__}: {error}"
        ) from error
    for leaf, memory in zip(after, at.of(state.memory, "the state"), strict=True):
        if memory:
            instance.state[leaf] = {
                key: v.clone() if isinstance(v, Tensor) else v for key, v in memory.items()
            }
    instance.step()
    memories = [dict(instance.state.get(leaf, {})) for leaf in after]
    updates = [new.data - old for new, old in zip(after, before, strict=True)]
    return updates, TorchState(at.tree(memories, base=state.memory))

# SPDX-License-Identifier: Apache-2.0
"""Any torch optimizer as a transform: it steps on copies of the parameters, and their difference is
the update.

This module must not know what an optimizer does, only that its state is a dict per parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.optim import LBFGS, Optimizer

from ..errors import TransformError, checked
from ..tree import Tree, is_floating, tree_map
from .transform import Transform, leafwise, weights_of


class TorchState(NamedTuple):
    """``memory``: for each leaf of the parameters the dict that the optimizer keeps for it."""

    memory: Tree


@checked
def from_torch(optimizer: Callable[..., Optimizer], **options: object) -> Transform:
    """A transform from a torch optimizer class and its options.

    Every leaf is in one parameter group; use :func:`partition` for several. A step costs a copy of
    parameters and state. Its update is the difference of parameters, rounded, so adding it can
    change the last bit.

    Args:
        optimizer: a class that needs no closure and keeps its state by parameter, as all of torch's
            but LBFGS do.
        options: for its constructor.

    Raises:
        TransformError: if the class is no optimizer, or one that needs a closure, or refuses the
        options; the transform raises it where the optimizer refuses the parameters.

    >>> tx = from_torch(torch.optim.SGD, lr=0.5)
    >>> params = [torch.ones(1), None]
    >>> tx.update(params, tx.init(params), params)[0]
    [tensor([-0.5000]), None]
    """

    def instance(leaves):
        try:
            return optimizer(leaves, **options)
        except (TypeError, ValueError) as error:
            name = getattr(optimizer, "__name__", optimizer)
            given = ", ".join(f"{key}={value!r}" for key, value in options.items())
            raise TransformError(
                f"from_torch({name}, {given}): {error}; see the arguments of {name}"
            ) from error

    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        raise TransformError(
            f"{optimizer!r} is not a class of torch optimizers; write "
            "from_torch(torch.optim.AdamW, lr=3e-4)"
        )
    if issubclass(optimizer, LBFGS):
        raise TransformError(
            "LBFGS calls the loss again within a step; from_torch takes optimizers without a "
            "closure"
        )

    def init(params):
        return TorchState(tree_map(lambda leaf: {} if is_floating(leaf) else None, params))

    def step(at, state, params):
        if not at.leaves:
            return [], state
        before = [leaf.detach() for leaf in weights_of(at, params, "from_torch")]
        after = [leaf.clone() for leaf in before]
        made = instance(after)
        memories = at.of(state.memory, "the state")
        for leaf, gradient, memory in zip(after, at.leaves, memories, strict=True):
            leaf.grad = gradient.detach().to(leaf.dtype)
            if memory:
                made.state[leaf] = deepcopy(memory)
        made.step()
        memories = [dict(made.state.get(leaf, {})) for leaf in after]
        updates = [new.data - old for new, old in zip(after, before, strict=True)]
        return updates, TorchState(at.tree(memories, base=state.memory))

    rate = instance([torch.zeros(1, 1)]).defaults.get("lr")
    return replace(leafwise(init, step), rate=None if rate is None else lambda state: float(rate))

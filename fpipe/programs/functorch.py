# SPDX-License-Identifier: Apache-2.0
"""Whether a torch.func transform is active: all that fpipe uses of its private parts. Knows no stages or pipelines."""

from __future__ import annotations

import torch

from .. import tree
from ..tree import Tree

_IS_WRAPPED = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]


def wrapped(*tensors: torch.Tensor) -> bool:
    """Whether a torch.func transform works on any of these. Takes no time where none is active.

    >>> wrapped(torch.ones(1)), torch.vmap(lambda x: x * wrapped(x))(torch.ones(1)).item()
    (False, 1.0)
    """
    return torch._C._are_functorch_transforms_active() and any(map(_IS_WRAPPED, tensors))


def functional(arguments: Tree) -> bool:
    """Whether a torch.func transform works on a leaf of these.

    >>> functional({"x": [torch.ones(1), "text"]})
    False
    """
    return torch._C._are_functorch_transforms_active() and wrapped(*filter(tree.is_tensor, tree.leaves(arguments)))

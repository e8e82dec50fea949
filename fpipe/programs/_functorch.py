"""Whether torch.func is at work: all that fpipe asks of it in private. Knows no stage and no pipeline."""

from __future__ import annotations

from typing import Any

import torch

from .. import tree

_HELD = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]


def wrapped(*tensors: torch.Tensor) -> bool:
    """Whether any of these is in the hands of a torch.func transform. Takes no time where there is none.

    >>> wrapped(torch.ones(1)), torch.vmap(lambda x: x * wrapped(x))(torch.ones(1)).item()
    (False, 1.0)
    """
    return torch._C._are_functorch_transforms_active() and any(map(_HELD, tensors))


def functional(arguments: Any) -> bool:
    """Whether a torch.func transform is at work on a leaf of these.

    >>> functional({"x": [torch.ones(1), "text"]})
    False
    """
    return torch._C._are_functorch_transforms_active() and wrapped(*filter(tree.is_tensor, tree.leaves(arguments)))

# SPDX-License-Identifier: Apache-2.0
"""What torch keeps of tensors and of backwards beside their numbers, mostly under private names."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar

import torch

from .internals import transforming

_IS_WRAPPED = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]


def versions(leaves: Iterable[object]) -> list[int]:
    """How often each tensor was written to; 0 for leaves that do not count it.

    >>> x = torch.ones(2)
    >>> _ = x.add_(1)
    >>> versions([x, None])
    [1, 0]
    """
    return [
        leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else 0
        for leaf in leaves
    ]


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with numbers instead of lazy flags: conjugate, negative, or all zeros without
    memory.

    >>> x = torch.ones(1, requires_grad=True)
    >>> lazy = torch.autograd.grad(torch.sgn(x), x)[0]
    >>> lazy.add_(1)
    Traceback (most recent call last):
    RuntimeError: ZeroTensors are immutable. Please use the materialized zero tensor ...
    >>> resolved(lazy).add_(1)
    tensor([1.])
    """
    if tensor._is_zerotensor():
        return tensor.clone()
    return tensor.resolve_conj().resolve_neg()


def wrapped(*tensors: torch.Tensor) -> bool:
    """Whether a torch.func transform works on any of these. Takes no time where none is active.

    >>> wrapped(torch.ones(1)), torch.vmap(lambda x: x * wrapped(x))(torch.ones(1)).item()
    (False, 1.0)
    """
    return transforming() and any(map(_IS_WRAPPED, tensors))


# ---- graphs of autograd ----
#: Whether backwards keep the graphs that they go through, for another one of the same forward.
RETAINED = ContextVar("RETAINED", default=False)

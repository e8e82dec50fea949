"""Tensors that wrap others, such as ``DTensor``: what they are made of, described, taken apart and put together.

By torch's protocol for such classes, ``__tensor_flatten__`` and ``__tensor_unflatten__``; no class is known by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

#: The class, what is inside it by name (tensors described, the rest, such as a mesh, as it is), and what else it is.
#: All of it hashable.
Kind: TypeAlias = tuple[type, tuple[tuple[str, Any], ...], Any]


def kind_of(tensor: torch.Tensor, describe: Callable[[torch.Tensor], Any]) -> Kind | None:
    """What a wrapper is; ``None`` for an ordinary tensor.

    >>> kind_of(torch.ones(2), id) is None
    True
    """
    cls = type(tensor)
    if cls is torch.Tensor or cls is torch.nn.Parameter or not hasattr(cls, "__tensor_flatten__"):
        return None
    names, rest = tensor.detach().__tensor_flatten__()  # type: ignore[attr-defined]
    inner = ((name, getattr(tensor, name)) for name in names)
    return cls, tuple((name, describe(v) if isinstance(v, torch.Tensor) else v) for name, v in inner), rest


def rebuild(kind: Kind, shape: Any, stride: Any, make: Callable[[Any], Any]) -> torch.Tensor:
    """A wrapper of the kind around what ``make`` gives for the descriptions inside."""
    cls, inner, rest = kind
    made = {name: make(told) for name, told in inner}
    return cls.__tensor_unflatten__(made, rest, torch.Size(shape), tuple(stride))  # type: ignore[attr-defined]


def parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The ordinary tensors that a tensor is made of; itself, mostly.

    >>> [part.shape for part in parts(torch.ones(2))]
    [torch.Size([2])]
    """
    if not hasattr(type(tensor), "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):
            yield from parts(inner)

# SPDX-License-Identifier: Apache-2.0
"""Private parts of torch that programs read: schemas of operations, identities of storages, saved tensors of nodes.

Knows no stages or programs. Tracing, dispatch modes and torch.func are in ``fake``, ``purity`` and ``functorch``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.autograd.graph import Node

Op: TypeAlias = torch._ops.OpOverload


def operator_of(node: fx.Node) -> Op | None:
    """The torch operation that a node calls, if it is one."""
    return node.target if isinstance(node.target, Op) else None


def name_of(op: Op) -> str:
    """The name without namespace and overload.

    >>> name_of(torch.ops.aten.add.Tensor)
    'add'
    """
    return op._opname


def direct(op: Op) -> Callable[..., Any]:
    """The operation without checks of its overload."""
    return op._op


def argument_names(op: Op) -> list[str]:
    """The names of an operation's arguments."""
    return [argument.name for argument in op._schema.arguments]


def written_names(op: Op) -> list[str]:
    """The arguments that an operation writes into, by its schema.

    >>> written_names(torch.ops.aten.add_.Tensor)
    ['self']
    """
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def mutates(op: Op) -> bool:
    """Whether an operation writes into an argument, by its schema."""
    return op._schema.is_mutable


def returns_views(op: Op) -> bool:
    """Whether a result may share memory with an argument, by the schema."""
    return any(result.alias_info is not None for result in op._schema.returns)


def storage_id(tensor: torch.Tensor) -> int:
    """A number of a tensor's storage, unique as long as the storage is alive; fake tensors have storages, too."""
    return tensor.untyped_storage()._cdata


def versions(leaves: Iterable[Any]) -> list[int]:
    """How often each tensor was written to; 0 for leaves that do not count it.

    >>> x = torch.ones(2)
    >>> _ = x.add_(1)
    >>> versions([x, None])
    [1, 0]
    """
    return [leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else 0 for leaf in leaves]


@lru_cache(maxsize=4096)
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def saved_handles(node: Node) -> Iterator[Any]:
    """The handles of the tensors that a node saved."""
    for name in _saved_names(type(node)):
        saved = getattr(node, name)
        yield from saved if isinstance(saved, (tuple, list)) else (saved,)


def gradient_bytes(node: Node, ports: Sequence[int]) -> int:
    """Bytes of the gradients that arrive at a node."""
    inputs = [node._input_metadata[port] for port in ports]  # type: ignore[attr-defined]
    return sum(torch.Size(each.shape).numel() * each.dtype.itemsize for each in inputs)

# SPDX-License-Identifier: Apache-2.0
"""State of torch that programs read: schemas, storages, saved tensors of nodes, transforms.

Most of it has private names. Knows no stages or programs. Tracing and dispatch modes are in
``fake`` and ``purity``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import Node

Op: TypeAlias = torch._ops.OpOverload
Packet: TypeAlias = torch._ops.OpOverloadPacket

_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
_IS_WRAPPED = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]


class Targeted(Protocol):
    """A node of a graph, or an operation of a program."""

    @property
    def target(self) -> object:
        """What it calls."""
        ...


def operator_of(node: Targeted) -> Op | None:
    """The torch operation that a node calls, if it is one."""
    return node.target if isinstance(node.target, Op) else None


def direct(op: Op) -> Callable[..., Any]:
    """The operation without checks of its overload."""
    return op._op


def updates_statistics(op: Op, args: Sequence[Any]) -> bool:
    """Whether an operation is a batch norm that writes into running statistics, its arguments 3 and
    4.

    Its kernels write into them although their schemas declare them as plain inputs.
    """
    return op._opname in _NORMS and bool(args[5]) and args[3] is not None


def written(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation writes into.

    >>> written(torch.ops.aten.add_.Tensor, (7, 8), {})
    [7]
    """
    if updates_statistics(op, args):
        return [args[3], args[4]]
    declared = op._schema.arguments
    values = {**dict(zip((a.name for a in declared), args, strict=False)), **kwargs}
    return [
        values.get(a.name) for a in declared if a.alias_info is not None and a.alias_info.is_write
    ]


def mutates(op: Op) -> bool:
    """Whether an operation writes into an argument, by its schema."""
    return op._schema.is_mutable


def without_write(op: Op) -> Op | None:
    """The form of an operation that returns a new tensor instead of writing into its first
    argument, and no other.

    >>> without_write(torch.ops.aten.div_.Scalar)
    <OpOverload(op='aten.div', overload='Scalar')>
    """
    arguments, name = op._schema.arguments, op._opname
    writes = [
        place
        for place, each in enumerate(arguments)
        if each.alias_info is not None and each.alias_info.is_write
    ]
    packet = (
        getattr(torch.ops.aten, name[:-1], None)
        if op.namespace == "aten" and name.endswith("_")
        else None
    )
    found = getattr(packet, op._overloadname, None)
    if writes != [0] or not isinstance(found, Op) or mutates(found):
        return None
    same = [(a.name, str(a.type)) for a in found._schema.arguments] == [
        (a.name, str(a.type)) for a in arguments
    ]
    return (
        found if same else None
    )  # pow_.Scalar takes a tensor and a number, pow.Scalar a number and a tensor


def returns_views(op: Op) -> bool:
    """Whether a result may share memory with an argument, by the schema."""
    return any(result.alias_info is not None for result in op._schema.returns)


def storage_id(tensor: torch.Tensor) -> int:
    """A number of a tensor's storage, unique as long as the storage is alive; fake tensors have
    storages, too.
    """
    return tensor.untyped_storage()._cdata


def versions(leaves: Iterable[Any]) -> list[int]:
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
    return tensor.clone() if tensor._is_zerotensor() else tensor.resolve_conj().resolve_neg()


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


# ---- torch.func ----
def wrapped(*tensors: torch.Tensor) -> bool:
    """Whether a torch.func transform works on any of these. Takes no time where none is active.

    >>> wrapped(torch.ones(1)), torch.vmap(lambda x: x * wrapped(x))(torch.ones(1)).item()
    (False, 1.0)
    """
    return transforming() and any(map(_IS_WRAPPED, tensors))


def transforming() -> bool:
    """Whether a torch.func transform or a level of forward-mode autograd is active.

    >>> transforming(), torch.vmap(lambda x: x * transforming())(torch.ones(1)).item()
    (False, 1.0)
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_collective(target: object) -> bool:
    """Whether an operation is a functional collective, or the wait for one."""
    return getattr(target, "namespace", "") == "_c10d_functional"

# SPDX-License-Identifier: Apache-2.0
"""Refuses impure stage functions while they run: writes into captured tensors, and captured tensors that require a
gradient. Both are refused before they happen. Knows operations, no stages or graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .batch_norm import STATISTICS, updates_statistics
from .explain import captured_gradient_error, captured_write_error
from .fake import is_fake
from .internals import Op, argument_names, returns_views, storage_id, written_names

_FRESH = torch.ops.aten.lift_fresh.default  # torch.tensor(...): its schema says view, but nobody else has the memory


class _Observed(TorchDispatchMode):
    """Calls ``before(op, args, kwargs)`` and ``after(op, args, kwargs, result)`` around every operation."""

    supports_higher_order_operators = True

    def __init__(self, before: Callable[..., None], after: Callable[..., None]):
        super().__init__()
        self.before, self.after = before, after

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # torch.cond compiles its branches under the modes that are on
        return False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """A compiler may ignore this mode, as it ignores fake tensors."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, Op):  # torch.cond, for example
            return func(*args, **kwargs)
        self.before(func, args, kwargs)
        result = func(*args, **kwargs)
        self.after(func, args, kwargs, result)
        return result


@contextmanager
def pure_on_fakes(label: str) -> Iterator[None]:
    """While a function runs on fake tensors, refuse writes into real ones."""
    views: dict[int, torch.UntypedStorage] = {}  # of fake views of real tensors, by address; kept alive here

    def before(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for tensor in _written(op, args, kwargs):
            if _real(tensor) or (is_fake(tensor) and storage_id(tensor) in views):
                raise captured_write_error(label, tensor)
        if torch.is_grad_enabled() and op is not torch.ops.aten.detach.default:
            for tensor in filter(_real, args):
                if tensor.requires_grad:
                    raise captured_gradient_error(label, tensor)

    def after(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        aliases = op is not _FRESH and returns_views(op)
        if aliases and is_fake(result) and any(map(_real, args)):
            views[storage_id(result)] = result.untyped_storage()

    with _Observed(before, after):
        yield


@contextmanager
def pure_on_numbers(label: str, arguments: Iterable[torch.Tensor]) -> Iterator[None]:
    """While a function runs on real arguments, refuse writes into other tensors that it did not create."""
    local = set(map(_storage, arguments)) | {None}

    def before(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for tensor in _written(op, args, kwargs):
            if _storage(tensor) not in local:
                raise captured_write_error(label, tensor)

    def after(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        inputs = {_storage(a) for value in (*args, *kwargs.values()) for a in _listed(value)}
        local.update(set(map(_storage, _listed(result))) - inputs)

    with _Observed(before, after):
        yield


def _real(value: object) -> bool:
    """Whether a value is a tensor with data; of a tensor with inner tensors, these are checked instead."""
    return isinstance(value, torch.Tensor) and not is_fake(value) and not hasattr(type(value), "__tensor_flatten__")


def _storage(value: object) -> int | None:
    """The address of a plain tensor's storage; ``None`` for anything else."""
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return None
    return storage_id(value) if value.layout is torch.strided else None


def _written(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation changes."""
    values = {**dict(zip(argument_names(op), args, strict=False)), **kwargs}
    names = written_names(op) or (STATISTICS if updates_statistics(op, values) else ())
    return [v for name in names for v in _listed(values.get(name)) if isinstance(v, torch.Tensor)]


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]

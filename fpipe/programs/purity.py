# SPDX-License-Identifier: Apache-2.0
"""Refuses impure stage functions while they run: writes into captured tensors, captured tensors
that require a gradient, and seeds of random streams. Knows operations, no stages or graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .explain import captured_gradient_error, captured_write_error, seed_error
from .fake import is_fake
from .internals import Op, returns_views, storage_id, written

_FRESH = (
    torch.ops.aten.lift_fresh.default
)  # torch.tensor(...): its schema says view, but nobody else has the memory


class Around(TorchDispatchMode):
    """Runs every operation by ``run(op, args, kwargs)``."""

    supports_higher_order_operators = True

    def __init__(self, run: Callable[..., Any]):
        super().__init__()
        self.run = run

    @classmethod
    def _should_skip_dynamo(
        cls,
    ) -> bool:  # torch.cond compiles its branches under the modes that are on
        return False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """A compiler may ignore this mode, as it ignores fake tensors."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not isinstance(func, Op):  # torch.cond, for example
            return func(*args, **(kwargs or {}))
        return self.run(func, args, kwargs or {})


def pure_on_fakes(
    label: str, error: Callable[[str, torch.Tensor], Exception] = captured_gradient_error
) -> TorchDispatchMode:
    """While a function runs on fake tensors under this mode, refuse writes into real ones.

    A real one that requires a gradient is refused with ``error``.
    """
    views: dict[
        int, torch.UntypedStorage
    ] = {}  # of fake views of real tensors, by address; kept alive here

    def run(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        for tensor in _tensors(written(op, args, kwargs)):
            if _real(tensor) or (is_fake(tensor) and storage_id(tensor) in views):
                raise captured_write_error(label, tensor)
        real = list(filter(_real, args))
        if torch.is_grad_enabled() and op is not torch.ops.aten.detach.default:
            for tensor in real:
                if tensor.requires_grad:
                    raise error(label, tensor)
        result = op(*args, **kwargs)
        if real and op is not _FRESH and returns_views(op) and is_fake(result):
            views[storage_id(result)] = result.untyped_storage()
        return result

    return Around(run)


def pure_on_numbers(label: str, arguments: Iterable[torch.Tensor]) -> TorchDispatchMode:
    """While a function runs on real arguments under this mode, refuse writes into other tensors it
    did not create.
    """
    local = set(map(_storage, arguments)) | {None}

    def run(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        for tensor in _tensors(written(op, args, kwargs)):
            if _storage(tensor) not in local:
                raise captured_write_error(label, tensor)
        result = op(*args, **kwargs)
        inputs = set(map(_storage, _tensors((*args, *kwargs.values()))))
        local.update(set(map(_storage, _tensors([result]))) - inputs)
        return result

    return Around(run)


@contextmanager
def unseeded(label: str) -> Iterator[None]:
    """While a function runs on fake tensors, refuse that it seeds, sets or restores a random stream
    of torch.

    A program repeats its operations alone. A draw on fake tensors leaves the stream as it is; here
    each one moves it to another seed, so that a stream which was restored shows.
    """
    stream, device = torch.default_generator, _device_seed()
    state = stream.get_state()
    expected = stream.seed() >> 1  # random, so that no function sets the same

    def check() -> None:
        if stream.initial_seed() != expected or _device_seed() != device:
            raise seed_error(label)

    def run(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        nonlocal expected
        if torch.Tag.nondeterministic_seeded in op.tags and kwargs.get("generator") is None:
            check()
            expected += 1
            stream.manual_seed(expected)
        return op(*args, **kwargs)

    stream.manual_seed(expected)
    try:
        with Around(run):
            yield
        check()
    finally:
        stream.set_state(state)


def _device_seed() -> int | None:
    """The seed of the accelerator, where that is in use."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module: Any = None if device is None else torch.get_device_module(device)
    return module.initial_seed() if getattr(module, "is_initialized", lambda: False)() else None


def _real(value: object) -> bool:
    """Whether a value is a tensor with data; of a tensor with inner tensors, these are checked
    instead.
    """
    return (
        isinstance(value, torch.Tensor)
        and not is_fake(value)
        and not hasattr(type(value), "__tensor_flatten__")
    )


def _storage(tensor: torch.Tensor) -> int | None:
    """The address of a plain tensor's storage; ``None`` for another tensor."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return storage_id(tensor) if plain else None


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among values and in the lists among them."""
    listed = (value if isinstance(value, (list, tuple)) else [value] for value in values)
    return [each for items in listed for each in items if isinstance(each, torch.Tensor)]

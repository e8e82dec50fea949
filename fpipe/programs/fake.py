# SPDX-License-Identifier: Apache-2.0
"""Fake tensors, ``make_fx`` and functionalization: everything that fpipe uses of torch's private
tracing.

Works on torch 2.11 to 2.15 (``tests/programs/test_fake.py``). Knows abstract tensors and graphs, no
stages.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, TypeGuard

import torch
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.traceback import current_meta
from torch.utils._python_dispatch import _disable_current_modes

from ..tree import AbstractTree, Aval
from .symbols import Symbols

#: Operations whose C++ form does not take symbolic sizes although it has no other.
_IN_PYTHON = {torch.ops.aten.constant_pad_nd.default}
#: The kernel of operations that consist of others.
_COMPOSITE = "CompositeImplicitAutograd"
#: How operations of this package run on fake tensors. ``torch.library.register_fake`` reads the
#: files of all modules that are loaded, which takes 50 ms.
RULES: dict[object, Callable[..., Any]] = {}
#: Errors of operations on fake tensors whose result depends on data.
DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)
#: The error of an operation that has no implementation for fake tensors.
NO_FAKE = UnsupportedOperatorException


def mode(symbols: Symbols | None = None) -> FakeTensorMode:
    """A mode in which tensors have no data. Captured real tensors may enter it as constants."""
    if symbols is None:
        return _Fake(allow_non_fake_inputs=True)
    return _Symbolic(allow_non_fake_inputs=True, shape_env=symbols)


class _Fake(FakeTensorMode):
    """Takes ``cpu:0`` for ``cpu``, as tensors with data do: torch's own mode takes them for two
    devices.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(
            func, torch._ops.HigherOrderOperator
        ):  # their rules are registered for torch's own mode
            return func.python_key_table[FakeTensorMode](self, *args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in RULES:
            with self:
                return RULES[func](*args)
        device = kwargs.get("device") if kwargs else None
        if isinstance(device, torch.device) and device.type == "cpu" and device.index is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return super().dispatch(func, types, args, kwargs)


class _Symbolic(_Fake):
    """Uses torch's Python form of operations whose C++ form takes every size for a number."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _IN_PYTHON:
            with self:
                return decomposition_table[func](*args, **(kwargs or {}))
        return super().dispatch(func, types, args, kwargs)


@contextmanager
def entered(mode: FakeTensorMode) -> Iterator[None]:
    """Run under a mode, with torch's Python form of products where their C++ form does not take
    symbolic sizes.
    """
    _enter_first()
    python = isinstance(mode, _Symbolic) and _products_need_python()
    if python:
        _resolve_composites()
    with enable_python_dispatcher() if python else nullcontext(), mode:
        yield


def fake_tensors() -> AbstractContextManager[None]:
    """A context in which tensors have shapes, but no data; real tensors may be used as constants.

    >>> with fake_tensors():
    ...     type(torch.ones(2)).__name__
    'FakeTensor'
    """
    return entered(mode())


@lru_cache(maxsize=1)
def _enter_first() -> None:
    """Enter a mode, before any other, in a thread that does not end.

    Where torch is built for CUDA and finds no device, the first thread to enter a mode registers an
    object that ends with that thread. Torch 2.11 then calls it in the next mode, and the process
    dies.
    """
    if torch.version.cuda is None or torch.cuda.is_available():
        return
    entered = threading.Event()

    def enter() -> None:
        with FakeTensorMode():
            entered.set()
        threading.Event().wait()

    threading.Thread(target=enter, name="fpipe-fake", daemon=True).start()
    entered.wait()


@contextmanager
def alone() -> Iterator[None]:
    """Run outside of the trace that is going on: without its modes and annotations."""
    annotations = current_meta.pop("custom", None)
    try:
        with _disable_current_modes():
            yield
    finally:
        if annotations is not None:
            current_meta["custom"] = annotations


@lru_cache(maxsize=1)
def _products_need_python() -> bool:
    """Whether the C++ form of a product of matrices takes sizes for numbers, as before torch
    2.13.
    """
    symbols = Symbols()
    with FakeTensorMode(shape_env=symbols):
        x, w = torch.empty(2, symbols.new(5), 3), torch.empty(3, 3, requires_grad=True)
        torch.matmul(x, w)
    return symbols.fixed(1) is not None


@lru_cache(maxsize=1)
def _resolve_composites() -> None:
    """Let torch's Python dispatcher take composite operations on the device meta apart, as its C++
    dispatcher does.

    Torch registers Python rules for some of them, and its Python dispatcher then finds no
    derivative of theirs. What it finds without the rule is kept in its cache.
    """
    import torch._meta_registrations  # registers the rules

    meta, autograd = torch._C.DispatchKey.Meta, torch._C.DispatchKey.AutogradMeta
    for op in decomposition_table:
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        if (
            isinstance(op, torch._ops.OpOverload)
            and meta in op.py_kernels
            and has(op.name(), _COMPOSITE)
        ):
            rule = op.py_kernels.pop(meta)
            op._uncache_dispatch(autograd)
            op._get_dispatch(autograd)
            op.py_kernels[meta] = rule


def is_fake(value: object) -> TypeGuard[FakeTensor]:
    """Whether a value is a tensor without data."""
    return isinstance(value, FakeTensor)


@contextmanager
def quiet() -> Iterator[None]:
    """Disable torch's log of operations that fail on fake tensors: the exception has the same
    text.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def empty(aval: Aval) -> torch.Tensor:
    """A fake tensor of an aval; call inside ``mode()``."""
    tensor = aval.build(
        lambda a: torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device=a.device)
    )
    return tensor.requires_grad_(aval.grad and aval.differentiable)


def inputs(trees: Iterable[AbstractTree]) -> list[list[Any]]:
    """The flat leaves of abstract trees, with fake tensors; call inside ``mode()``."""
    return [abstract.map(empty) for abstract in trees]

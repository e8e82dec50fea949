# SPDX-License-Identifier: Apache-2.0
"""Symbolic sizes of fake tensors: everything that fpipe uses of torch's symbolic shapes.

Works on torch 2.11 to 2.15 (``tests/passes/test_families.py``). Knows numbers, expressions and
modes, no stages.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from traceback import FrameSummary, extract_stack
from typing import Any

import sympy
import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import Source
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from ...programs.internals import Args, Fake

#: How operations on numbers are written.
_PATTERNS: dict[object, str] = {
    operator.add: "({} + {})",
    operator.sub: "({} - {})",
    operator.mul: "({} * {})",
    operator.truediv: "({} / {})",
    operator.neg: "(-{})",
    operator.pow: "({} ** {})",
    torch.sym_float: "float({})",
    getattr(torch, "_sym_sqrt", None): "math.sqrt({})",
}
#: Operations whose C++ form does not take symbolic sizes although it has no other.
_IN_PYTHON = {torch.ops.aten.constant_pad_nd.default}
#: What is asked of a number where it becomes a text or a key.
_SEEN = ("__repr__", "__hash__")
#: The kernel of operations that consist of others.
_COMPOSITE = "CompositeImplicitAutograd"
#: An expression as Python.
_text = PythonPrinter().doprint
#: What the texts of expressions refer to.
NAMES: Mapping[str, Any] = {"math": math, "torch": torch}


@dataclass(frozen=True)
class _Input(Source):
    """Where a symbol comes from; torch asks for its name alone."""

    place: int

    @property
    def _name_template(self) -> str:
        return f"n{self.place}"


class Placed:
    """A number that depends on the sizes of the inputs, with its place among the formulas."""

    place: int

    @property
    def name(self) -> str:
        """Its name in the source of a program."""
        return f"n{self.place}"


class Size(Placed, int):
    """An integer that depends on the sizes of the inputs."""


class Real(Placed, float):
    """A float that depends on the sizes of the inputs."""


def sized(value: int | float, place: int) -> Size | Real:
    """A number with its place among the formulas.

    >>> sized(7, 2), sized(7, 2).name
    (7, 'n2')
    """
    number = (Size if isinstance(value, int) else Real)(value)
    number.place = place
    return number


class Symbols(ShapeEnv):
    """The symbols of one trace and the numbers that are computed from them, what was assumed of
    symbols, and where one was first taken for something else.

    The first ``numbers``, by their text, are the symbols themselves.
    """

    def __init__(self) -> None:
        super().__init__(duck_shape=False)
        self.symbols: list[sympy.Symbol] = []
        self.numbers: dict[str, Size | Real] = {}
        self.stacks: dict[sympy.Symbol, list[FrameSummary]] = {}

    def new(self, hint: int) -> int:
        """A number that stands for any size of 2 or more; ``hint`` decides where a condition needs
        a value.
        """
        source = _Input(len(self.symbols))
        symbol = self.create_symbol(hint, source, DimDynamic.DYNAMIC)
        assert isinstance(symbol, sympy.Symbol)
        self.symbols.append(symbol)
        self.number(str(symbol), hint)
        symbolic: Any = self.create_symintnode(symbol, hint=hint, source=source)
        return symbolic

    def number(self, text: str, hint: float) -> Size | Real:
        """A number of the trace by its text, with its place among the others."""
        if text not in self.numbers:
            self.numbers[text] = sized(hint, len(self.numbers))
        return self.numbers[text]

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        """Torch's, which decides a condition; remembers the stack where that fixes a symbol."""
        before = set(self.replacements)
        value = super().evaluate_expr(*args, **kwargs)
        for symbol in self.replacements.keys() - before:
            self.stacks[symbol] = list(extract_stack())
        return value

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the symbols in texts."""
        return tuple(map(str, self.symbols))

    def conditions(self) -> tuple[str, ...]:
        """The conditions under which the trace holds, as Python."""
        return tuple(dict.fromkeys(self._conditions()))

    def _conditions(self) -> Iterator[str]:
        for symbol in self.symbols:
            known = self.replacements.get(symbol)
            if known is not None:
                yield f"{symbol} == {_text(known)}"
            bounds = self.bound_sympy(symbol)
            for limit, relation in ((bounds.lower, ">="), (bounds.upper, "<=")):
                if isinstance(limit, sympy.Integer):
                    yield f"{symbol} {relation} {limit}"
        for guard in self.guards:
            yield _text(guard.expr)

    def fixed(self, count: int) -> list[FrameSummary] | None:
        """The stack where the trace took one of the first symbols for one number; ``None`` if it
        took none.
        """
        for symbol in self.symbols[:count]:
            if isinstance(self.replacements.get(symbol), sympy.Integer):
                return self.stacks.get(symbol, [])
        return None


@dataclass(frozen=True)
class Computed:
    """A symbolic float as the Python that computes it: another order of operations may round
    differently.
    """

    text: str
    hint: float


def is_symbolic(value: object) -> bool:
    """Whether a value is a symbolic number."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def text_of(value: Any) -> tuple[str, Any]:
    """A symbolic number as Python, and its value at the hints."""
    if isinstance(value, Computed):
        return value.text, value.hint
    if isinstance(value, torch.SymFloat):
        raise ValueError(
            f"a Python float is computed from sizes in a way that is not known ({value.node.expr})"
        )
    return _text(value.node.expr), value.node.hint


def computed(node: fx.Node) -> Any:
    """The symbolic number that a node computes."""
    value = node.meta["val"]
    pattern = _PATTERNS.get(node.target)
    if not isinstance(value, torch.SymFloat) or pattern is None or node.kwargs:
        return value
    parts = [_part(argument) for argument in node.args]
    if None in parts:
        return value
    return Computed(pattern.format(*parts), value.node.hint)


def _part(argument: Any) -> str | None:
    if isinstance(argument, fx.Node):
        argument = computed(argument)
    if isinstance(argument, (int, float)):
        return repr(argument)
    if isinstance(argument, torch.SymFloat):
        return None
    return f"({text_of(argument)[0]})"


# ---- modes ----
class SymbolicFake(Fake):
    """Uses torch's Python form of operations whose C++ form takes every size for a number."""

    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Args = (),
        kwargs: Any = None,
    ) -> object:
        """Torch's, or the Python form."""
        if func in _IN_PYTHON:
            with self:
                return decomposition_table[func](*args, **(kwargs or {}))
        return super().dispatch(func, types, args, kwargs)


def products_in_python() -> AbstractContextManager[object]:
    """Use torch's Python form of products of matrices where their C++ form does not take symbolic
    sizes.
    """
    if not _products_need_python():
        return nullcontext()
    _resolve_composites()
    return enable_python_dispatcher()


@contextmanager
def seen_as_numbers() -> Iterator[None]:
    """A symbolic number whose text or hash is asked for counts as taken for its number.

    Torch and fpipe get the text of the expression, and a size stays without a hash for einops,
    whose caches leave out what has none.
    """
    numbers = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}

    def seen(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def asked(value: Any) -> Any:
            frame = inspect.currentframe()
            assert frame is not None and frame.f_back is not None
            module = str(frame.f_back.f_globals.get("__name__"))
            if module.partition(".")[0] in ("torch", "sympy", "einops", "fpipe"):
                return method(value)
            return getattr(numbers[type(value)](value), method.__name__)()

        return asked

    methods = [(kind, name, getattr(kind, name)) for kind in numbers for name in _SEEN]
    for kind, name, method in methods:
        setattr(kind, name, seen(method))
    try:
        yield
    finally:
        for kind, name, method in methods:
            setattr(kind, name, method)


@lru_cache(maxsize=1)
def _products_need_python() -> bool:
    """Whether the C++ form of a product of matrices takes sizes for numbers, as before torch
    2.13.
    """
    symbols = Symbols()
    with Fake(shape_env=symbols):
        x = torch.empty(2, symbols.new(5), 3)
        w = torch.empty(3, 3, requires_grad=True)
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

    meta = torch._C.DispatchKey.Meta
    autograd = torch._C.DispatchKey.AutogradMeta
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

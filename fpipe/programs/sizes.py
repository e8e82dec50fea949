# SPDX-License-Identifier: Apache-2.0
"""Numbers of a trace that depend on the sizes of its inputs, and other values in their place.

In programs that were traced with symbolic sizes each such number is a ``Size`` (or ``Real``): the
number at the sizes of the trace, with its place among the trace's formulas. The programs of other
sizes are the same with other numbers. Knows abstract tensors, no operations or stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from ..tree import AbstractTree, Aval
from .symbols import NAMES, Computed, Symbols, is_symbolic, text_of

#: The values of all formulas.
Numbers: TypeAlias = tuple[Any, ...]


class Size(int):
    """An integer that depends on the sizes of the inputs."""

    place: int


class Real(float):
    """A float that depends on the sizes of the inputs."""

    place: int


def sized(value: int | float, place: int) -> Size | Real:
    """A number with its place among the formulas.

    >>> sized(7, 2), sized(7, 2).place
    (7, 2)
    """
    number = (Size if isinstance(value, int) else Real)(value)
    number.place = place
    return number


@dataclass(frozen=True)
class Formulas:
    """All numbers of a trace as functions of its symbols, and the conditions under which they hold.

    The first numbers are the symbols themselves.

    >>> formulas = Formulas(("s0",), ("s0", "2*s0"), ("s0 >= 2",))
    >>> formulas.at([5]), formulas.at([1])
    ((5, 10), None)
    """

    symbols: tuple[str, ...]
    texts: tuple[str, ...]
    conditions: tuple[str, ...]

    @cached_property
    def _function(self) -> Callable[..., Numbers | None]:
        conditions = " and ".join(f"({text})" for text in self.conditions) or "True"
        source = (
            f"lambda {', '.join(self.symbols)}: ({', '.join(self.texts)},) if {conditions} "
            "else None"
        )
        return eval(compile(source, "<fpipe sizes>", "eval"), dict(NAMES))

    def at(self, symbols: Sequence[int]) -> Numbers | None:
        """The numbers for values of the symbols; ``None`` where the trace does not hold for
        them.
        """
        return self._function(*symbols)


class Recorder:
    """Collects the numbers of a trace; without symbols, numbers stay as they are."""

    def __init__(self, symbols: Symbols | None = None) -> None:
        self.symbols = symbols
        self.places: dict[str, Size | Real] = {}
        if symbols is not None:
            self.places = {
                n: sized(hint, i)
                for i, (n, hint) in enumerate(zip(symbols.names, symbols.hints, strict=True))
            }

    def number(self, value: Any) -> Any:
        """A number of the trace: a symbolic one with its place, another as it is."""
        if not is_symbolic(value) and not isinstance(value, Computed):
            return value
        text, hint = text_of(value)
        if text not in self.places:
            try:
                return type(hint)(text)  # a constant after all
            except ValueError:
                self.places[text] = sized(hint, len(self.places))
        return self.places[text]

    def aval(self, aval: Aval) -> Aval:
        """An abstract tensor with the numbers of the trace."""
        if self.symbols is None:
            return aval
        number = self.number
        return aval._replace(
            shape=tuple(map(number, aval.shape)), stride=tuple(map(number, aval.stride))
        )

    def formulas(self) -> Formulas:
        """The formulas of all numbers; ValueError where they do not give the numbers of the
        trace.
        """
        assert self.symbols is not None
        formulas = Formulas(self.symbols.names, tuple(self.places), self.symbols.conditions())
        traced = tuple(self.places.values())
        found = formulas.at(self.symbols.hints)
        if found != traced:
            raise ValueError(
                f"the formulas {formulas.texts} give {found} where the trace has {traced}"
            )
        return formulas


def at(value: Any, numbers: Numbers) -> Any:
    """A value of programs with other numbers in place of its sizes; the same object where it has
    none.

    >>> at([sized(7, 0), 1, "a"], (8,))
    [8, 1, 'a']
    """
    if isinstance(value, (Size, Real)):
        return numbers[value.place]
    if isinstance(value, Aval):
        shape, stride = at(value.shape, numbers), at(value.stride, numbers)
        return (
            value
            if shape is value.shape and stride is value.stride
            else value._replace(shape=shape, stride=stride)
        )
    if isinstance(value, AbstractTree):
        return value.with_avals(lambda aval: at(aval, numbers))
    if isinstance(value, (tuple, list)):
        items = [at(item, numbers) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        make: Callable[[list[Any]], Any] = getattr(
            value, "_make", type(value)
        )  # a named tuple, or a plain one
        return make(items)
    if isinstance(value, dict):
        other = {key: at(item, numbers) for key, item in value.items()}
        return value if all(other[key] is item for key, item in value.items()) else other
    return value

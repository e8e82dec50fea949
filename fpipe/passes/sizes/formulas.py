# SPDX-License-Identifier: Apache-2.0
"""Numbers of a trace that depend on the sizes of its inputs, and other values in their place.

In programs that were traced with symbolic sizes each such number is ``Placed``: the number at the
sizes of the trace, with its place among the trace's formulas. The programs of other sizes are the
same with other numbers. Knows programs, no stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import fx

from ...programs.internals import Fake, Sizes
from ...programs.operations import Operation, Ref
from ...programs.program import Program, Programs
from ...programs.signature import Signature
from ...tree import Aval
from .replacing import replaced
from .symbols import NAMES, Computed, Placed, SymbolicFake, Symbols, computed, is_symbolic, text_of

#: The values of all formulas.
Numbers: TypeAlias = tuple[Any, ...]


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


@dataclass(frozen=True, eq=False)
class SymbolicSizes(Sizes):
    """The numbers of a trace with symbolic sizes."""

    symbols: Symbols

    def mode(self) -> Fake:
        """A mode whose tensors have symbolic sizes."""
        return SymbolicFake(shape_env=self.symbols)

    def inline(self, graph: fx.GraphModule) -> None:
        """Put symbolic numbers themselves in place of the nodes that compute them."""
        numbers = {n: computed(n) for n in graph.graph.nodes if is_symbolic(n.meta.get("val"))}

        def number(used: fx.Node) -> Any:
            return numbers.get(used, used)

        for node in graph.graph.nodes if numbers else ():
            if node not in numbers:
                node.args = fx.map_arg(node.args, number)
                node.kwargs = fx.map_arg(node.kwargs, number)
        for node in reversed(numbers):
            graph.graph.erase_node(node)

    def number(self, value: Any) -> Any:
        """A number of the trace: a symbolic one with its place, another as it is."""
        if not is_symbolic(value) and not isinstance(value, Computed):
            return value
        text, hint = text_of(value)
        try:
            return type(hint)(text)  # a constant after all
        except ValueError:
            return self.symbols.number(text, hint)

    def aval(self, aval: Aval) -> Aval:
        """An abstract tensor with the numbers of the trace."""
        shape = tuple(map(self.number, aval.shape))
        return aval._replace(shape=shape, stride=tuple(map(self.number, aval.stride)))

    def formulas(self) -> Formulas:
        """The formulas of all numbers; ValueError where they do not give the numbers of the
        trace.
        """
        names = self.symbols.names
        numbers = self.symbols.numbers
        formulas = Formulas(names, tuple(numbers), self.symbols.conditions())
        traced = tuple(numbers.values())
        values = formulas.at([int(number) for number in traced[: len(names)]])
        if values != traced:
            raise ValueError(
                f"the formulas {formulas.texts} give {values} where the trace has {traced}"
            )
        return formulas


# ---- other numbers ----
def at(value: Any, numbers: Numbers) -> Any:
    """A value with other numbers in place of its sizes; the same object where it has none.

    >>> from fpipe.passes.sizes.symbols import sized
    >>> at([sized(7, 0), 1, "a"], (8,))
    [8, 1, 'a']
    """
    return replaced(value, Placed, lambda number: numbers[number.place])


def programs_at(programs: Programs, numbers: Numbers, signature: Signature) -> Programs:
    """The programs of a symbolic trace for the sizes of another signature."""
    label = f"{programs.label} {signature}"
    known: dict[Operation, Operation] = {}

    def operation(one: Operation) -> Operation:
        if one not in known:
            known[one] = at(one, numbers)
        return known[one]

    def program(one: Program) -> Program:
        """The program for other sizes. It shares the code, which refers to sizes by name."""
        assert isinstance(one.run, FunctionType)
        given = one.run.__globals__
        changed = {name: numbers[v.place] for name, v in given.items() if isinstance(v, Placed)}
        run = FunctionType(one.run.__code__, {**given, **changed}, one.name)
        head = "".join(f"# {name} = {value!r}\n" for name, value in changed.items())
        return replace(
            one,
            code=head + one.code,
            run=run,
            stage=label,
            resized=operation if changed else None,
        )

    memory = dict(programs.memory)
    for name, held in programs.memory.items():
        if isinstance(held.nbytes, Placed):
            memory[name] = held._replace(nbytes=numbers[held.nbytes.place])
    return replace(
        programs,
        f=program(programs.f),
        b=program(programs.b),
        i=program(programs.i),
        w=program(programs.w),
        signature=signature,
        outputs=at(programs.outputs, numbers),
        grad_avals=at(programs.grad_avals, numbers),
        memory=memory,
        origin=(programs, program),
    )


#: Of operations on slices, which arguments are the first index and the end.
_SLICES: dict[object, slice] = {
    torch.ops.aten.slice.Tensor: slice(2, 4),
    torch.ops.aten.slice_scatter.default: slice(3, 5),
    torch.ops.aten.slice_backward.default: slice(3, 5),
}
_WHOLE = (0, 2**63 - 1)


def operations_of(programs: Programs) -> Counter[tuple[str, str]]:
    """The operations of F and B with their numbers, counted; without slices that take a whole axis,
    which a trace of one size leaves out.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for one in (*programs.f.operations, *programs.b.operations):
        limits = _SLICES.get(one.target)
        if limits is None or one.args[limits] != _WHOLE:
            numbers = replaced((one.args, one.kwargs), Ref, lambda name: Ref("_"))
            name = str(one.target).replace("_unsafe_view", "view")  # two names on torch 2.11
            counts[name, repr(numbers)] += 1
    return counts

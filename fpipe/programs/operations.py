# SPDX-License-Identifier: Apache-2.0
"""``Operation``: one operation of a program, as a record without tensors.

A traced graph has fake tensors in its nodes and refers to all of itself. Programs outlive the
trace, so its nodes become records: the operation, its arguments, and what it computes in abstract
form. Knows graphs, no stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx

from ..tree import Aval
from . import sizes
from .graphs import annotation
from .marks import MARK
from .sizes import Numbers, Recorder

#: What an operation computes: a tensor, several, or something else.
Value: TypeAlias = "Aval | tuple[Value, ...] | None"


class Ref(str):
    """The name of a value, as an argument of an operation.

    >>> Ref("x0")
    x0
    """

    __slots__ = ()
    __repr__ = str.__str__


@dataclass(frozen=True, eq=False, slots=True)
class Operation:
    """One operation: ``name = target(*args, **kwargs)``, in which each value is a ``Ref``.

    ``inputs`` are the names of the values it reads, each once, and ``reads`` those values; ``mark``
    is the user's name for the part it belongs to.
    """

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[str, ...]
    reads: tuple[Value, ...] = ()
    value: Value = None
    mark: str | None = None

    def at(self, numbers: Numbers) -> Operation:
        """The operation for other sizes; the same one where it does not depend on them."""
        fields = (self.args, self.kwargs, self.reads, self.value)
        args, kwargs, reads, value = others = tuple(sizes.at(each, numbers) for each in fields)
        if all(new is old for new, old in zip(others, fields, strict=True)):
            return self
        return replace(self, args=args, kwargs=kwargs, reads=reads, value=value)


def operations_of(nodes: Iterable[fx.Node], record: Recorder) -> dict[fx.Node, Operation]:
    """The records of the operations of a graph."""
    values: dict[fx.Node, Value] = {node: _abstract(node.meta.get("val"), record) for node in nodes}
    found: dict[fx.Node, Operation] = {}
    for node in values:
        if node.op == "call_function":
            assert callable(node.target)
            used, mark = node.all_input_nodes, annotation(node, MARK)
            args, kwargs = _argument(tuple(node.args), record), _argument(dict(node.kwargs), record)
            reads = tuple(values.get(each) for each in used)
            found[node] = Operation(
                node.name,
                node.target,
                args,
                kwargs,
                tuple(each.name for each in used),
                reads,
                values[node],
                mark if isinstance(mark, str) else None,
            )
    return found


def _argument(value: Any, record: Recorder) -> Any:
    """An argument of a node: names in place of nodes, and the numbers of the trace."""
    if isinstance(value, fx.Node):
        return Ref(value.name)
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(
            _argument(item, record) for item in value
        )
    if isinstance(value, dict):
        return {key: _argument(item, record) for key, item in value.items()}
    return record.number(value)


def _abstract(value: object, record: Recorder) -> Value:
    if isinstance(value, torch.Tensor):
        return record.aval(Aval.like(value)) if value.layout is torch.strided else None
    return (
        tuple(_abstract(item, record) for item in value)
        if isinstance(value, (list, tuple))
        else None
    )


def tensors(value: Value) -> Iterator[Aval]:
    """The tensors of what an operation computes."""
    if isinstance(value, Aval):
        yield value
    elif value is not None:
        for item in value:
            yield from tensors(item)


def users(operations: Iterable[Operation]) -> dict[str, list[Operation]]:
    """The operations that read each value."""
    found: dict[str, list[Operation]] = {}
    for operation in operations:
        for name in operation.inputs:
            found.setdefault(name, []).append(operation)
    return found


def fill(value: Any, values: Mapping[str, Any]) -> Any:
    """An argument with values in place of their names.

    >>> fill([Ref("x0"), 3], {"x0": 5})
    [5, 3]
    """
    if isinstance(value, Ref):
        return values[value]
    if isinstance(value, (list, tuple)) and not isinstance(value, Aval):
        return type(value)([fill(item, values) for item in value])
    if isinstance(value, dict):
        return {key: fill(item, values) for key, item in value.items()}
    return value

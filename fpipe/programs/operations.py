# SPDX-License-Identifier: Apache-2.0
"""Operations of a program, as records without tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from torch.fx.node import map_aggregate

from ..tree import Aval

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

    ``inputs`` are the names of the values it reads, each once, and ``reads`` those values. It is a
    record without tensors: programs outlive the traced graph.
    """

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[str, ...]
    reads: tuple[Value, ...] = ()
    value: Value = None


def users(operations: Iterable[Operation]) -> dict[str, list[Operation]]:
    """The operations that read each value."""
    readers: dict[str, list[Operation]] = {}
    for operation in operations:
        for name in operation.inputs:
            readers.setdefault(name, []).append(operation)
    return readers


def fill(value: Any, values: Mapping[str, Any]) -> Any:
    """An argument with values in place of their names.

    >>> fill([Ref("x0"), 3], {"x0": 5})
    [5, 3]
    """
    return map_aggregate(value, lambda part: values[part] if isinstance(part, Ref) else part)


class Held(NamedTuple):
    """The memory behind a named value: the first value on its storage, and the storage's size."""

    root: str
    nbytes: int
    given: bool = False  # the storage of an input


Role: TypeAlias = Literal["param", "x", "side", "state", "cotangent", "aux cotangent", "grad"]


class Input(NamedTuple):
    """What an input of a stage's programs is: which leaf in which role."""

    role: Role
    leaf: int

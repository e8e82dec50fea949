# SPDX-License-Identifier: Apache-2.0
"""Pytrees as JSON: containers by tags, leaves as names of tensors; and back, without running code
that a file names.

A node is a list with a tag. Classes of named tuples are found among the modules that are loaded,
other classes among those that are registered as pytree nodes. This module must not know stages;
``describe`` and ``build`` pass nodes of other kinds to their caller.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import optree
import torch

from .. import tree
from ..collectives.data import named_class, named_node_class, node_class
from ..errors import CheckpointError

#: JSON: a tag, and what follows from it.
Node: TypeAlias = list[Any]
#: Called for a value or a node and its path; NotImplemented: it is treated as any other.
Special: TypeAlias = Callable[[Any, str], Any]
NONE: Node = ["none"]
MOST_LEVELS = 100
_SEQUENCES = {"list": list, "tuple": tuple}
_MAPPINGS = {"dict": dict, "ordered": OrderedDict}


def under(path: str, name: object) -> str:
    """The path of an entry.

    >>> under("", 3), under("a", "w")
    ('3', 'a.w')
    """
    return f"{path}.{name}" if path else str(name)


def describe(value: Any, path: str, special: Special, *, fields: bool = True) -> Node:
    """The structure of a value. ``special`` decides about tensors, and may decide about anything
    else.

    ``fields``: paths have the names of the fields of named tuples, otherwise their numbers, as
    paths of pytrees.

    >>> describe({"a": (1, None)}, "", lambda value, path: NotImplemented)
    ['dict', [['a', ['tuple', [['value', 1], ['none']]]]]]
    """
    if path.count(".") > MOST_LEVELS:
        raise CheckpointError(
            f"{path[:60]}...: more than {MOST_LEVELS} levels, or a value that contains itself"
        )
    node = special(value, path)
    if node is not NotImplemented:
        return node
    if value is None:
        return NONE
    cls, each = (
        type(value),
        lambda item, name: describe(item, under(path, name), special, fields=fields),
    )
    for tag, kind in _SEQUENCES.items():
        if cls is kind:
            return [tag, [each(item, i) for i, item in enumerate(value)]]
    for tag, kind in _MAPPINGS.items():
        if cls is kind:
            return [tag, [[_key(key, path), each(item, key)] for key, item in value.items()]]
    if optree.is_namedtuple_class(cls) and named_class(cls.__module__, cls.__qualname__) is cls:
        rows = [
            [n, each(v, n if fields else i)]
            for i, (n, v) in enumerate(zip(cls._fields, value, strict=True))
        ]
        return ["named", cls.__module__, cls.__qualname__, rows]
    if node_class(cls) is not None:
        children, metadata, entries, _ = optree.tree_flatten_one_level(
            value, namespace=tree.NAMESPACE
        )
        rows = [[_key(n, path), each(v, n)] for n, v in zip(entries, children, strict=True)]
        constants = describe(
            metadata, f"{path}, a constant of {cls.__qualname__},", lambda *_: NotImplemented
        )
        return ["node", cls.__module__, cls.__qualname__, constants, rows]
    return _scalar(value, path)


def _key(key: Any, path: str) -> Any:
    if type(key) not in (str, int):
        raise CheckpointError(
            f"{path}: a dict with the key {key!r}; checkpoints hold dicts with text or integers "
            "as keys"
        )
    return key


def _scalar(value: Any, path: str) -> Node:
    if type(value) in (bool, int, str):
        return ["value", value]
    if type(value) is float:
        return ["float", value.hex()]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    raise CheckpointError(
        f"{path} is of type {type(value).__module__}.{type(value).__qualname__}, which no "
        "checkpoint holds; pass "
        "tensors, numbers, text, and lists, tuples, dicts, named tuples and registered pytree "
        "nodes of them"
    )


def build(node: Node, path: str, special: Special, level: int = 0) -> Any:
    """The value of a structure. ``special`` decides about leaves, and may decide about anything
    else.

    >>> build(["dict", [["a", ["tuple", [["float", "0x1.8p+0"], ["none"]]]]]], "", lambda node,
    ...     path: NotImplemented)
    {'a': (1.5, None)}
    """
    if level > MOST_LEVELS:
        raise ValueError(f"more than {MOST_LEVELS} levels")
    value = special(node, path)
    if value is not NotImplemented:
        return value

    def each(item, name):
        return build(item, under(path, name), special, level + 1)

    tag, *rest = node
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](each(item, i) for i, item in enumerate(rest[0]))
    if tag in _MAPPINGS:
        return _MAPPINGS[tag]((key, each(item, key)) for key, item in rest[0])
    if tag == "named":
        module, name, rows = rest
        return _named(module, name, {field: each(item, field) for field, item in rows}, path)
    if tag == "node":
        module, name, constants, rows = rest
        metadata = build(constants, path, lambda *_: NotImplemented, level + 1)
        return _node(module, name, metadata, [each(item, entry) for entry, item in rows], path)
    return _value(tag, rest)


def _named(module: str, name: str, values: dict[str, Any], path: str) -> Any:
    cls = named_class(module, name)
    if cls is None:
        raise CheckpointError(
            f"{path} is a named tuple {module}.{name}, and this process has not imported it; "
            "import its module before "
            "the checkpoint is loaded"
        )
    fields = getattr(cls, "_fields", ())
    if tuple(values) != fields:
        raise CheckpointError(
            f"{path}: {name} has the fields {list(fields)}, and the checkpoint has {list(values)}"
        )
    return tuple.__new__(cls, values.values())


def _node(module: str, name: str, metadata: Any, children: list[Any], path: str) -> Any:
    found = named_node_class(module, name)
    if found is None:
        raise CheckpointError(
            f"{path} is a {module}.{name}, which is not registered as a pytree node in this "
            "process; import its module "
            "before the checkpoint is loaded"
        )
    return found.unflatten_func(metadata, tuple(children))


def _value(tag: str, rest: Sequence[Any]) -> Any:
    if tag == "none":
        return None
    (value,) = rest
    if tag == "float":
        return float.fromhex(value)
    if tag == "dtype" and isinstance(getattr(torch, str(value), None), torch.dtype):
        return getattr(torch, value)
    if tag == "value" and type(value) in (bool, int, str):
        return value
    raise ValueError(f"there is no structure {tag!r}")

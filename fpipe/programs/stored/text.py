# SPDX-License-Identifier: Apache-2.0
"""Values of traces as JSON, and back, without code: what is read can name operations of torch and
nothing else.

A list stands for a value with a tag in front; texts, integers, truth values and None stand for
themselves. Knows values, no programs.
"""

from __future__ import annotations

import base64
import math
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from keyword import iskeyword
from typing import Any

import optree
import torch

from ...tree import AbstractTree, Aval, Static, Structure, flatten, unflatten
from ..graphs import keeping, norm
from ..internals import Op, resolved
from ..operations import Ref
from ..sizes import Real, Size, sized


class UnstorableError(Exception):
    """A value that has no text; its trace stays in memory alone."""


class ForgedError(Exception):
    """A text that no version of this module wrote."""


#: Functions that programs call beside operations of torch.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "norm": norm,
    "keeping": keeping,
    "resolved": resolved,
}
_NAMES = {id(fn): name for name, fn in _FUNCTIONS.items()}
#: Operations that reach for files.
_REFUSED = ("from_file", "save", "load")
_TORCH = (torch.dtype, torch.layout, torch.memory_format)


class _Leaf:
    """The place of a leaf in a structure."""


def name_of(text: object) -> str:
    """A name that may stand in a source; ForgedError for all others.

    >>> name_of("mm_1")
    'mm_1'
    """
    if (
        not isinstance(text, str)
        or not text.isidentifier()
        or iskeyword(text)
        or not text.isascii()
    ):
        raise ForgedError(f"{text!r} is no name")
    return text


def to_text(value: Any) -> Any:
    """A value as JSON data; UnstorableError if it is of no kind that traces contain.

    >>> to_text([1, (Ref("x0"), torch.float32)])
    ['l', 1, ['t', ['r', 'x0'], ['T', 'float32']]]
    >>> from_text(to_text((torch.ops.aten.mm.default, float("inf"))))
    (<OpOverload(op='aten.mm', overload='default')>, inf)
    """
    if value is None or type(value) in (bool, int, str):
        return value
    found = _WRITTEN.get(type(value))
    if found is not None:
        return found(value)
    if isinstance(value, _TORCH):
        return ["T", str(value).removeprefix("torch.")]
    if id(value) in _NAMES:
        return ["fn", _NAMES[id(value)]]
    raise UnstorableError(f"a {type(value).__name__} ({value!s:.60})")


def from_text(data: Any) -> Any:
    """The value of JSON data; ForgedError for what ``to_text`` does not write."""
    if not isinstance(data, list):
        if data is None or type(data) in (bool, int, str):
            return data
        raise ForgedError(f"a {type(data).__name__} without a tag")
    tag, *parts = data
    read = _READ.get(tag) if isinstance(tag, str) else None
    if read is None:
        raise ForgedError(f"there is no tag {tag!r}")
    return read(parts)


# ---- each kind ----
def _operation(op: Op) -> list[Any]:
    name, overload = op.name().partition(".")[::2]
    return ["op", *name.split("::"), overload or "default"]


def _operation_from(parts: list[Any]) -> Op:
    namespace, name, overload = map(name_of, parts)
    if any(word in name for word in _REFUSED):
        raise ForgedError(f"the operation {name} is not read from files")
    found = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    if not isinstance(found, Op):
        raise ForgedError(f"torch has no operation {namespace}.{name}.{overload}")
    return found


def _torch_from(parts: list[Any]) -> Any:
    found = getattr(torch, name_of(parts[0]), None)
    if not isinstance(found, _TORCH):
        raise ForgedError(f"torch.{parts[0]} is no dtype, layout or memory format")
    return found


def _aval(aval: Aval) -> list[Any]:
    if aval.kind is not None:
        raise UnstorableError("a tensor that contains tensors")
    return ["a", *map(to_text, (aval.shape, aval.stride, aval.dtype, aval.device, aval.grad))]


def _aval_from(parts: list[Any]) -> Aval:
    return Aval(*map(from_text, parts))


def _static(leaf: Static) -> list[Any]:
    return ["=", to_text(leaf.value)]


def _tree(value: AbstractTree) -> list[Any]:
    return ["A", *map(to_text, (value.spec, value.leaves, value.computed, value.repeats))]


def _structure(spec: Structure) -> list[Any]:
    tree = unflatten(spec, [_Leaf()] * spec.num_leaves)
    text = ["S", _nodes(tree)]
    if _structure_from(text[1:]) != spec:
        raise UnstorableError(f"the structure {spec}")
    return text


def _nodes(tree: Any) -> Any:
    """A tree of containers as data."""
    cls = type(tree)
    if cls is _Leaf:
        return 0
    if tree is None:
        return None
    if cls in (list, tuple):
        return [cls.__name__, *map(_nodes, tree)]
    if cls in (dict, OrderedDict):
        return [cls.__name__, *([to_text(key), _nodes(value)] for key, value in tree.items())]
    if optree.is_namedtuple_class(cls):
        return ["named", cls.__module__, cls.__qualname__, *map(_nodes, tree)]
    raise UnstorableError(f"a node of class {cls.__qualname__}")


def _structure_from(parts: list[Any]) -> Structure:
    return flatten(_nodes_from(parts[0]))[1]


def _nodes_from(data: Any) -> Any:
    if data == 0:
        return _Leaf()
    if data is None:
        return None
    kind, *parts = data
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(map(_nodes_from, parts))
    if kind in ("dict", "OrderedDict"):
        items = [(from_text(key), _nodes_from(value)) for key, value in parts]
        return dict(items) if kind == "dict" else OrderedDict(items)
    if kind != "named":
        raise ForgedError(f"there is no container {kind!r}")
    module, name, *values = parts
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = None if found is None else vars(found).get(part)
    if not isinstance(found, type) or not optree.is_namedtuple_class(found):
        raise ForgedError(f"{module}.{name} is no named tuple of a module that is loaded")
    return tuple.__new__(found, map(_nodes_from, values))


def _tensor(value: torch.Tensor) -> list[Any]:
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() > MOST:
        raise UnstorableError(f"a captured tensor of {flat.numel()} bytes")
    raw = base64.b64encode(bytes(flat.tolist())).decode("ascii")
    return ["x", to_text(value.dtype), to_text(tuple(value.shape)), to_text(value.device), raw]


def _tensor_from(parts: list[Any]) -> torch.Tensor:
    dtype, shape, device = map(from_text, parts[:3])
    raw = bytearray(base64.b64decode(parts[3], validate=True))
    if len(raw) > MOST or len(raw) != math.prod(shape) * dtype.itemsize:
        raise ForgedError(f"{len(raw)} bytes for a tensor {dtype}{list(shape)}")
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape).to(device)


#: Bytes of a captured tensor that is stored, at most.
MOST = 1 << 16
_WRITTEN: Mapping[type, Callable[[Any], list[Any]]] = {
    Ref: lambda ref: ["r", str(ref)],
    Size: lambda size: ["n", int(size), size.place],
    Real: lambda real: ["N", float(real).hex(), real.place],
    float: lambda number: ["f", number.hex()],
    complex: lambda number: ["c", number.real.hex(), number.imag.hex()],
    bytes: lambda raw: ["b", base64.b64encode(raw).decode("ascii")],
    list: lambda items: ["l", *map(to_text, items)],
    tuple: lambda items: ["t", *map(to_text, items)],
    torch.Size: lambda items: ["t", *map(to_text, items)],
    dict: lambda items: ["d", *([to_text(key), to_text(value)] for key, value in items.items())],
    slice: lambda cut: ["s", *map(to_text, (cut.start, cut.stop, cut.step))],
    torch.device: lambda device: ["D", str(device)],
    Op: _operation,
    Aval: _aval,
    Static: _static,
    AbstractTree: _tree,
    optree.PyTreeSpec: _structure,
    torch.Tensor: _tensor,
}
_READ: Mapping[str, Callable[[list[Any]], Any]] = {
    "r": lambda parts: Ref(name_of(parts[0])),
    "n": lambda parts: sized(int(parts[0]), int(parts[1])),
    "N": lambda parts: sized(float.fromhex(parts[0]), int(parts[1])),
    "f": lambda parts: float.fromhex(parts[0]),
    "c": lambda parts: complex(*map(float.fromhex, parts)),
    "b": lambda parts: base64.b64decode(parts[0], validate=True),
    "l": lambda parts: list(map(from_text, parts)),
    "t": lambda parts: tuple(map(from_text, parts)),
    "d": lambda parts: {from_text(key): from_text(value) for key, value in parts},
    "s": lambda parts: slice(*map(from_text, parts)),
    "D": lambda parts: torch.device(parts[0]),
    "T": _torch_from,
    "fn": lambda parts: _FUNCTIONS[parts[0]],
    "op": _operation_from,
    "a": _aval_from,
    "=": lambda parts: Static.of(from_text(parts[0])),
    "A": lambda parts: AbstractTree(*map(from_text, parts)),
    "S": _structure_from,
    "x": _tensor_from,
}

# SPDX-License-Identifier: Apache-2.0
"""Values as JSON and as bytes, without pickle: to decode them runs no code that they name.

A value becomes a node: a list of a tag and JSON. Manifests of checkpoints hold nodes
(``to_node``, ``from_node``), and ranks send each other nodes, with tensors in base64 (``encode``,
``decode``). Values are None, bool, int, float, complex, str, torch's dtype, device and Size, list,
tuple, dict, set, frozenset, named tuples, structures of pytrees, and classes that are registered as
pytree nodes. Classes are found among those that are loaded; nothing is imported. This module must
not know groups, stores and files.
"""

from __future__ import annotations

import json
import sys
from base64 import b64decode, b64encode
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from ..errors import GroupError
from ..tree import NAMESPACE, flatten, unflatten

#: Bytes of a value, and levels of nesting, at most.
MOST_BYTES = 1 << 30
MOST_LEVELS = 100
#: A tag, and what follows from it.
Node: TypeAlias = list[Any]
#: Nodes by name.
Nodes: TypeAlias = Mapping[str, Node]
#: Called for each value or node and its path; NotImplemented: it is treated as any other.
Special: TypeAlias = Callable[[Any, str], object]
#: torch's dtypes by name.
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype.

    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def under(path: str, name: object) -> str:
    """The path of an entry.

    >>> under("", 3), under("a", "w")
    ('3', 'a.w')
    """
    if path:
        return f"{path}.{name}"
    return str(name)


def plain(value: object, path: str) -> object:
    """No value and no node is special."""
    return NotImplemented


# ---- bytes ----
def encode(value: object) -> bytes:
    """A value as bytes, with its tensors; GroupError, which names the type, if it is not data.

    >>> decode(encode({"loss": 0.5, ("a", 1): [None, torch.float32]}))
    {'loss': 0.5, ('a', 1): [None, torch.float32]}
    >>> encode([object()])
    Traceback (most recent call last):
        ...
    fpipe.errors.GroupError: value.0 is of type builtins.object, which cannot be sent or saved; ...
    """
    text = json.dumps(to_node(value, "value", _with_text, wire=True), separators=(",", ":"))
    if len(text) > MOST_BYTES:
        raise GroupError(
            f"a value of {len(text)} bytes cannot be sent to other ranks as data, at most "
            f"{MOST_BYTES}; send large tensors with share or all_reduce"
        )
    return text.encode("ascii")


def _with_text(part: object, path: str) -> object:
    """The node of bytes and of a tensor."""
    if type(part) is bytes:
        return ["bytes", b64encode(part).decode()]
    if isinstance(part, Tensor) and is_dense(part):
        elements = b64encode(to_bytes(part)).decode()
        return ["tensor", dtype_name(part.dtype), list(part.shape), elements]
    return NotImplemented


def decode(raw: bytes) -> Any:
    """The value of bytes that ``encode`` wrote; GroupError for all others.

    >>> decode(b"12345678")
    Traceback (most recent call last):
        ...
    fpipe.errors.GroupError: bytes from another rank are not data (...); ...
    """
    try:
        if len(raw) > MOST_BYTES:
            raise ValueError(f"{len(raw)} bytes, at most {MOST_BYTES}")
        return from_node(json.loads(str(raw, "ascii")), "value", _from_text)
    except Exception as error:  # whatever a forged value causes
        raise GroupError(
            f"bytes from another rank are not data ({error}); all ranks must run the same version "
            "of fpipe, and nothing else may write to the store of the job"
        ) from error


def _from_text(node: Node, path: str) -> object:
    """The bytes or the tensor of a node of ``_with_text``."""
    if node[0] == "bytes":
        return b64decode(node[1], validate=True)
    if node[0] == "tensor":
        _, dtype, shape, elements = node
        return from_bytes(bytearray(b64decode(elements, validate=True)), DTYPES[dtype], shape)
    return NotImplemented


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but elements in memory."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
    )


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of the elements of a tensor, on its device.

    >>> flat_bytes(torch.tensor([1, 256], dtype=torch.int16))
    tensor([1, 0, 0, 1], dtype=torch.uint8)
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def to_bytes(tensor: Tensor) -> bytearray:
    """The elements of a tensor in memory of their own on the host.

    >>> bytes(to_bytes(torch.tensor([1, 256], dtype=torch.int16)))
    b'\\x01\\x00\\x00\\x01'
    """
    flat = flat_bytes(tensor)
    raw = bytearray(flat.numel())
    if raw:
        torch.frombuffer(raw, dtype=torch.uint8).copy_(flat)
    return raw


def from_bytes(raw: bytearray, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A tensor on the host over these bytes.

    >>> from_bytes(bytearray(b"\\x01\\x00\\x00\\x01"), torch.int16, (2,))
    tensor([  1, 256], dtype=torch.int16)
    """
    if min(shape, default=0) < 0 or prod(shape) * dtype.itemsize != len(raw):
        raise ValueError(f"{len(raw)} bytes for a tensor {dtype_name(dtype)}{list(shape)}")
    if not raw:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    flat = torch.frombuffer(raw, dtype=torch.uint8)
    return (flat != 0 if dtype is torch.bool else flat.view(dtype)).reshape(tuple(shape))


# ---- nodes ----
class _Scalar(NamedTuple):
    """Values without parts: their classes, the JSON of a value, and the value of that JSON."""

    classes: tuple[type, ...]
    to_json: Callable[[Any], Sequence[object]]
    from_json: Callable[..., object]


class _Leaf:
    """The place of a leaf in a structure."""


def _json_scalar(value: object) -> object:
    if type(value) not in (bool, int, str):
        raise ValueError(f"a value of type {type(value).__name__}")
    return value


_LEAF = _Leaf()
_SCALARS = {
    "none": _Scalar((type(None),), lambda _: (), lambda: None),
    "value": _Scalar((bool, int, str), lambda value: (value,), _json_scalar),
    "float": _Scalar((float,), lambda number: (number.hex(),), float.fromhex),
    "complex": _Scalar(
        (complex,),
        lambda z: (z.real.hex(), z.imag.hex()),
        lambda real, imag: complex(float.fromhex(real), float.fromhex(imag)),
    ),
    "dtype": _Scalar((torch.dtype,), lambda dtype: (dtype_name(dtype),), DTYPES.__getitem__),
    "device": _Scalar((torch.device,), lambda device: (str(device),), torch.device),
    "any leaf": _Scalar((_Leaf,), lambda _: (), lambda: _LEAF),
}
_SEQUENCES = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}
_MAPPINGS = {"dict": dict, "ordered": OrderedDict}
_TAGS = {
    **{cls: tag for tag, kind in _SCALARS.items() for cls in kind.classes},
    **{cls: tag for tag, cls in [*_SEQUENCES.items(), *_MAPPINGS.items()]},
}
#: What may make the entries of a defaultdict.
_FACTORIES = {
    "none": None,
    **{cls.__name__: cls for cls in (list, dict, set, tuple, int, float, str)},
}


def to_node(
    value: object,
    path: str,
    special: Special = plain,
    *,
    fields: bool = True,
    wire: bool = False,
) -> Node:
    """The node of a value; GroupError, which names path and type, for what is not data.

    Args:
        value: what to describe.
        path: what it is called in errors.
        special: decides about tensors, and may decide about anything else.
        fields: whether paths have the names of the fields of named tuples, or their numbers, as
            paths of pytrees.
        wire: whether keys of dicts may be any data, and ``special`` decides about constants too.

    >>> to_node({"a": (1, None)}, "")
    ['dict', [['a', ['tuple', [['value', 1], ['none']]]]]]
    """
    return _Writer(special, fields, wire).node(value, path)


class _Writer(NamedTuple):
    """The arguments of ``to_node``; level and path are those of the value in another one."""

    special: Special
    fields: bool
    wire: bool
    level: int = 0
    path: str = ""

    def node(self, value: Any, path: str) -> Node:
        if self.level > MOST_LEVELS:
            raise GroupError(
                f"{path[:60]}... has more than {MOST_LEVELS} levels, or contains itself; such a "
                "value cannot be sent or saved"
            )
        node = self.special(value, path)
        if isinstance(node, list):
            return node
        tag = _TAGS.get(type(value), "")
        if tag in _SCALARS:
            return [tag, *_SCALARS[tag].to_json(value)]
        inside = self._replace(level=self.level + 1, path=path)
        if tag in _SEQUENCES:
            parts = [inside.part(item, i) for i, item in enumerate(value)]
            if tag in ("set", "frozenset"):
                parts.sort(key=json.dumps)
            return [tag, parts]
        if tag in _MAPPINGS:
            return [tag, [inside.row(name, item) for name, item in value.items()]]
        return inside.instance(value)

    def part(self, item: object, name: object) -> Node:
        return self.node(item, under(self.path, name))

    def row(self, name: object, item: object) -> Node:
        """A key with the node of its value."""
        if type(name) in (str, int):
            return [name, self.part(item, name)]
        if not self.wire:
            raise GroupError(
                f"{self.path}: a dict with the key {name!r}; checkpoints hold dicts with text or "
                "integers as keys"
            )
        return [self.part(name, "key"), self.part(item, name)]

    def instance(self, value: Any) -> Node:
        """The node of an instance of a class that is no plain container."""
        cls = type(value)
        if cls is defaultdict and value.default_factory in _FACTORIES.values():
            factory = next(n for n, known in _FACTORIES.items() if known is value.default_factory)
            return ["default", factory, self.part(dict(value), "items")]
        if cls is optree.PyTreeSpec:
            return ["structure", self.part(unflatten(value, [_LEAF] * value.num_leaves), "tree")]
        name = cls.__module__, cls.__qualname__
        if _named_class(*name) is cls:
            fields = _fields(cls)
            parts = fields if self.fields else range(len(fields))
            nodes = map(self.part, value, parts)
            return [
                "named",
                *name,
                [[field, node] for field, node in zip(fields, nodes, strict=True)],
            ]
        if cls in _node_classes():
            parts, metadata, entries, _ = optree.tree_flatten_one_level(value, namespace=NAMESPACE)
            writer = self if self.wire else self._replace(special=plain)
            constants = writer.node(metadata, f"{self.path}, a constant of {cls.__qualname__},")
            rows = [self.row(n, part) for n, part in zip(entries, parts, strict=True)]
            return ["node", *name, constants, rows]
        raise GroupError(
            f"{self.path} is of type {'.'.join(name)}, which cannot be sent or saved; pass "
            "tensors, numbers, text, and containers of them (a class of yours must be a named "
            "tuple or a registered pytree node)"
        )


def from_node(node: Node, path: str, special: Special = plain, level: int = 0) -> Any:
    """The value of a node; ValueError and the like for what ``to_node`` does not write.

    >>> from_node(["dict", [["a", ["tuple", [["float", "0x1.8p+0"], ["none"]]]]]], "")
    {'a': (1.5, None)}
    """
    if level > MOST_LEVELS:
        raise ValueError(f"more than {MOST_LEVELS} levels")
    value = special(node, path)
    if value is not NotImplemented:
        return value

    def part(item: Node, name: object) -> Any:
        return from_node(item, under(path, name), special, level + 1)

    def pairs(rows: Iterable[Any]) -> list[tuple[Any, Any]]:
        keyed = ((part(k, "key") if isinstance(k, list) else k, item) for k, item in rows)
        return [(name, part(item, name)) for name, item in keyed]

    tag, *rest = node
    if tag in _SCALARS:
        return _SCALARS[tag].from_json(*rest)
    if tag in _SEQUENCES:
        return _SEQUENCES[tag]([part(item, i) for i, item in enumerate(rest[0])])
    if tag in _MAPPINGS:
        return _MAPPINGS[tag](pairs(rest[0]))
    if tag == "default":
        return defaultdict(_FACTORIES[rest[0]], part(rest[1], "items"))
    if tag == "structure":
        return flatten(part(rest[0], "tree"))[1]
    if tag == "named":
        module, name, rows = rest
        return _named(module, name, dict(pairs(rows)), path)
    if tag == "node":
        module, name, constants, rows = rest
        metadata = from_node(constants, path, special, level + 1)
        children = tuple(child for _, child in pairs(rows))
        entries = [
            entry
            for cls, entry in _node_classes().items()
            if (cls.__module__, cls.__qualname__) == (module, name)
        ]
        if not entries:
            raise ValueError(
                f"{path} is a {module}.{name}, which is not registered as a pytree node in this "
                "process; import its module first"
            )
        return entries[-1].unflatten_func(metadata, children)  # the last that was defined
    raise ValueError(f"there is no structure {tag!r}")


# ---- classes ----
def _fields(cls: Any) -> tuple[str, ...]:
    if optree.is_namedtuple_class(cls):
        return cls._fields
    return optree.structseq_fields(cls)


def _named_class(module: str, name: str) -> type | None:
    """A class of named tuples of a loaded module. Attributes are not asked for: that may run code
    of a module.
    """
    cls: Any = sys.modules.get(module)
    for part in name.split("."):
        cls = None if cls is None else vars(cls).get(part)
        if cls is not None and not isinstance(cls, type):
            return None
    named = optree.is_namedtuple_class(cls) or optree.is_structseq_class(cls)
    return cls if named else None


def _named(module: str, name: str, values: Mapping[str, object], path: str) -> object:
    cls: Any = _named_class(module, name)
    if cls is None:
        raise ValueError(
            f"{path} is a named tuple {module}.{name}, and this process has not imported it; "
            "import its module first"
        )
    if tuple(values) != tuple(_fields(cls)):
        raise ValueError(
            f"{path}: {name} has the fields {list(_fields(cls))}, and the data {list(values)}"
        )
    parts = tuple(values.values())
    if optree.is_structseq_class(cls):
        return cls(parts)
    return tuple.__new__(cls, parts)


def _node_classes() -> Mapping[type, Any]:
    """The classes that are registered as pytree nodes, and how they are put together."""
    return optree.register_pytree_node.get(namespace=NAMESPACE)  # type: ignore[attr-defined]

# SPDX-License-Identifier: Apache-2.0
"""Values as bytes for other ranks, without pickle: to decode them runs no code that they name.

Data are None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, torch's
dtype, device and Size, plain tensors, named tuples, the classes that this program has registered as
pytree nodes, and structures of pytrees. Classes are found among those that are loaded; nothing is
imported. A decoder checks every length before it allocates. This module must not know groups and
stores.
"""

from __future__ import annotations

import struct
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from itertools import chain
from math import prod
from typing import Any, NamedTuple, TypeAlias

import optree
import torch

from ..errors import GroupError
from ..tree import NAMESPACE, Structure, flatten, unflatten

#: Bytes of a value, and levels of nesting, at most.
MOST_BYTES, MOST_LEVELS = 1 << 30, 100
_LENGTH = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_FACTORIES = {cls.__name__: cls for cls in (list, dict, set, tuple, int, float, str)}
Parts: TypeAlias = tuple[Any, ...]


class _Leaf:
    """The place of a leaf in a structure."""


_LEAF = _Leaf()


def encode(value: object) -> bytes:
    """A value as bytes; GroupError, which names the type, if it is not data.

    >>> decode(encode({"loss": 0.5, ("a", 1): [None, torch.float32]}))
    {'loss': 0.5, ('a', 1): [None, torch.float32]}
    >>> encode(object())
    Traceback (most recent call last):
        ...
    fpipe.errors.GroupError: an object of type builtins.object cannot be sent to other ranks; ...
    """
    raw = b"".join(_encoded(value, 0))
    if len(raw) > MOST_BYTES:
        raise GroupError(
            f"a value of {len(raw)} bytes cannot be sent to other ranks as data, at most "
            f"{MOST_BYTES}; send large "
            "tensors with share or all_reduce"
        )
    return raw


def decode(raw: bytes) -> Any:
    """The value of bytes that ``encode`` wrote; GroupError for all others.

    >>> decode(b"?")
    Traceback (most recent call last):
        ...
    fpipe.errors.GroupError: bytes from another rank are not data (there is no tag b'?'); ...
    """
    try:
        if len(raw) > MOST_BYTES:
            raise ValueError(f"{len(raw)} bytes, at most {MOST_BYTES}")
        stream = BytesIO(raw)
        value = _decoded(stream, 0)
        if stream.tell() != len(raw):
            raise ValueError(f"{len(raw) - stream.tell()} bytes too many")
    except GroupError:
        raise
    except Exception as error:  # whatever a forged value causes
        raise GroupError(
            f"bytes from another rank are not data ({error}); all ranks must run the same version "
            "of fpipe, and "
            "nothing else may write to the store of the job"
        ) from error
    return value


# ---- to bytes ----
def _encoded(value: Any, level: int) -> Iterator[bytes]:
    if level > MOST_LEVELS:
        raise GroupError(
            f"a value has more than {MOST_LEVELS} levels, or contains itself; it cannot be sent "
            "as data"
        )
    cls = type(value)
    plain = _PLAIN.get(cls)
    if plain is not None:
        tag, to_bytes = plain
        yield tag
        raw = to_bytes(value)
        if tag not in _FIXED:
            yield _LENGTH.pack(len(raw))
        yield raw
        return
    if cls is tuple:
        parts = value
        yield b"t"
    else:
        tag, parts = _parts(value)
        yield tag
    yield _LENGTH.pack(len(parts))
    for part in parts:
        yield from _encoded(part, level + 1)


def _parts(value: Any) -> tuple[bytes, Parts]:
    cls = type(value)
    for tag, kind in _KINDS.items():
        if kind.fits(cls):
            parts = kind.parts(value)
            if parts is not None:
                return tag, parts
    raise GroupError(
        f"an object of type {cls.__module__}.{cls.__qualname__} cannot be sent to other ranks; "
        "send numbers, text, "
        "plain tensors, or containers of them (a class of yours must be a named tuple or a "
        "registered pytree node)"
    )


_PLAIN: dict[type, tuple[bytes, Callable[[Any], bytes]]] = {
    type(None): (b"N", lambda _: b""),
    bool: (b"B", lambda flag: b"\1" if flag else b"\0"),
    float: (b"f", _FLOAT.pack),
    int: (b"i", lambda n: n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True)),
    str: (b"s", partial(str.encode, errors="surrogatepass")),
    bytes: (b"b", bytes),
}
#: The tags of plain values whose length is not written, with it.
_FIXED = {b"N": 0, b"B": 1, b"f": 8}


# ---- from bytes ----
def _decoded(stream: BytesIO, level: int) -> Any:
    """The next value."""
    if level > MOST_LEVELS:
        raise ValueError(f"more than {MOST_LEVELS} levels")
    tag = stream.read(1)
    plain = _FROM_BYTES.get(tag)
    if tag != b"t" and plain is None and tag not in _KINDS:
        raise ValueError(f"there is no tag {tag!r}")
    count = _FIXED[tag] if tag in _FIXED else _LENGTH.unpack(stream.read(_LENGTH.size))[0]
    left = stream.getbuffer().nbytes - stream.tell()
    if count > left:
        raise ValueError(f"{count} more were announced, and {left} bytes are left")
    if plain is not None:
        return plain(stream.read(count))
    parts = tuple([_decoded(stream, level + 1) for _ in range(count)])
    return parts if tag == b"t" else _KINDS[tag].build(parts)


_FROM_BYTES: dict[bytes, Callable[[bytes], Any]] = {
    b"N": lambda _: None,
    b"B": lambda raw: {b"\1": True, b"\0": False}[raw],
    b"f": lambda raw: _FLOAT.unpack(raw)[0],
    b"i": partial(int.from_bytes, byteorder="little", signed=True),
    b"s": partial(str, encoding="utf-8", errors="surrogatepass"),
    b"b": bytes,
}


# ---- values with parts ----
class _Kind(NamedTuple):
    """Values with parts: of which classes, their parts (None for a value that is refused), and
    back.
    """

    fits: Callable[[type], bool]
    parts: Callable[[Any], Parts | None]
    build: Callable[[Parts], Any]


def _of(cls: type, parts: Callable[[Any], Parts | None], build: Callable[[Parts], Any]) -> _Kind:
    return _Kind(lambda other: other is cls, parts, build)


def _pairs(mapping: Any) -> Parts:
    return tuple(chain.from_iterable(mapping.items()))


def _mapping(parts: Parts) -> dict[Any, Any]:
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _tensor_parts(tensor: torch.Tensor) -> Parts | None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return None
    flat = (
        tensor.detach()
        .cpu()
        .resolve_conj()
        .resolve_neg()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
    )
    raw = bytearray(flat.numel())
    if raw:
        torch.frombuffer(raw, dtype=torch.uint8).copy_(flat)
    return str(tensor.dtype), tuple(tensor.shape), bytes(raw)


def _tensor(parts: Parts) -> torch.Tensor:
    name, shape, raw = parts
    dtype = _DTYPES[name]
    if min(shape, default=0) < 0 or prod(shape) * dtype.itemsize != len(raw):
        raise ValueError(f"{len(raw)} bytes for a tensor {name}{list(shape)}")
    if not raw:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return (flat != 0 if dtype is torch.bool else flat.view(dtype)).reshape(shape)


def _default_parts(value: defaultdict[Any, Any]) -> Parts | None:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    return (
        (name, *_pairs(value)) if factory is None or _FACTORIES.get(str(name)) is factory else None
    )


def _named_parts(value: Any) -> Parts | None:
    cls = type(value)
    return (
        (cls.__module__, cls.__qualname__, *value)
        if named_class(cls.__module__, cls.__qualname__) is cls
        else None
    )


def _is_named(cls: type) -> bool:
    return optree.is_namedtuple_class(cls) or optree.is_structseq_class(cls)


def named_class(module: str, name: str) -> type | None:
    """A class of named tuples of a loaded module. Attributes are not asked for: that may run code
    of a module.
    """
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = None if found is None else vars(found).get(part)
        if found is not None and not isinstance(found, type):
            return None
    return found if found is not None and _is_named(found) else None


def _build_named(parts: Parts) -> Any:
    module, name, *values = parts
    cls = named_class(module, name)
    if cls is None:
        raise ValueError(
            f"{module}.{name} is not a named tuple of a module that this process has imported"
        )
    if optree.is_structseq_class(cls):
        return cls(values)
    if len(values) != len(cls._fields):  # type: ignore[attr-defined]
        raise ValueError(f"{len(values)} fields for {name}")
    return tuple.__new__(cls, values)


def node_class(cls: type) -> Any:
    """How a class is flattened that is registered as a pytree node; None for another one."""
    return _registered().get(cls)


def named_node_class(module: str, name: str) -> Any:
    """The same by the name of the class: of the last one that was defined, as in a notebook."""
    found = [
        entry
        for cls, entry in _registered().items()
        if (cls.__module__, cls.__qualname__) == (module, name)
    ]
    return found[-1] if found else None


def _registered() -> dict[type, Any]:
    return optree.register_pytree_node.get(namespace=NAMESPACE)  # type: ignore[attr-defined]


def _node_parts(value: Any) -> Parts | None:
    entry = node_class(type(value))
    if entry is None:
        return None
    children, metadata, *_ = entry.flatten_func(value)
    return type(value).__module__, type(value).__qualname__, metadata, *children


def _build_node(parts: Parts) -> Any:
    module, name, metadata, *children = parts
    entry = named_node_class(module, name)
    if entry is None:
        raise ValueError(f"{module}.{name} is not registered as a pytree node in this process")
    return entry.unflatten_func(metadata, tuple(children))


def _structure(parts: Parts) -> Structure:
    (tree,) = parts
    return flatten(tree)[1]


_KINDS: dict[bytes, _Kind] = {
    b"l": _of(list, tuple, list),
    b"d": _of(dict, _pairs, _mapping),
    b"S": _of(set, tuple, set),
    b"Z": _of(frozenset, tuple, frozenset),
    b"c": _of(complex, lambda z: (z.real, z.imag), lambda parts: complex(*parts)),
    b"y": _of(torch.dtype, lambda dtype: (str(dtype),), lambda parts: _DTYPES[parts[0]]),
    b"v": _of(torch.device, lambda device: (str(device),), lambda parts: torch.device(*parts)),
    b"z": _of(torch.Size, tuple, torch.Size),
    b"x": _Kind(lambda cls: cls in (torch.Tensor, torch.nn.Parameter), _tensor_parts, _tensor),
    b"o": _of(OrderedDict, _pairs, lambda parts: OrderedDict(_mapping(parts))),
    b"D": _of(
        defaultdict,
        _default_parts,
        lambda parts: defaultdict(
            None if parts[0] is None else _FACTORIES[parts[0]], _mapping(parts[1:])
        ),
    ),
    b"q": _of(deque, lambda q: (q.maxlen, *q), lambda parts: deque(parts[1:], parts[0])),
    b"n": _Kind(_is_named, _named_parts, _build_named),
    b"P": _of(
        optree.PyTreeSpec, lambda spec: (unflatten(spec, [_LEAF] * spec.num_leaves),), _structure
    ),
    b"L": _of(_Leaf, lambda _: (), lambda _: _LEAF),
    b"r": _Kind(lambda cls: True, _node_parts, _build_node),
}

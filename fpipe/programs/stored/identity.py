# SPDX-License-Identifier: Apache-2.0
"""What identifies a function across processes: its code, what it refers to, and the versions of
what it uses.

Code of installed packages is identified by the package's version, other code by itself: its
instructions, its defaults, its closure, and the globals that it names, down to their code.
Parameters and large tensors count by shape, since a trace does not depend on their numbers. A
function that refers to something without such a description has no identity. Knows Python objects,
no programs.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch

from ..internals import Op, Packet
from .text import UnstorableError

#: Elements of a tensor whose numbers count, at most: Python may look at those of a small one.
SMALL = 1024
_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(...),
    type(NotImplemented),
    range,
    slice,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)
#: Attributes of objects that say nothing of what they compute.
_VOLATILE = frozenset(
    {"__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__", "__dict__"}
)


def identity(*values: Any) -> tuple[str, list[torch.Tensor]]:
    """A digest of functions and values, and the tensors that they hold, in an order that belongs to
    the digest.

    Raises:
        UnstorableError: a value has no identity.

    >>> identity(partial(max, 1)) == identity(partial(max, 1)), identity(partial(max,
    ...     1)) == identity(partial(max, 2))
    (True, False)
    """
    walk = _Walk()
    for value in values:
        _visit(walk, value)
    return walk.hash.hexdigest(), walk.tensors


@lru_cache(maxsize=1)
def environment() -> str:
    """What traces depend on beside functions: versions of Python and torch, this package, and the
    processor.
    """
    package = Path(__file__).parents[2]
    sources = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        sources.update(path.read_bytes())
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        f"{sys.version} {torch.__version__} {torch.version.git_version} {capability} "
        f"{sources.hexdigest()}"
    )


def flags() -> tuple[object, ...]:
    """The settings of the process that decide which operations a trace contains."""
    attention = torch.backends.cuda
    return (
        attention.flash_sdp_enabled(),
        attention.mem_efficient_sdp_enabled(),
        attention.math_sdp_enabled(),
        attention.cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.enabled,
        str(torch.get_default_device()),
    )


@dataclass(frozen=True, eq=False)
class _Walk:
    """What a digest is computed from: the objects visited so far, each once, and the tensors among
    them.
    """

    hash: Any = field(default_factory=hashlib.sha256)
    tensors: list[torch.Tensor] = field(default_factory=list)
    seen: dict[int, tuple[int, Any]] = field(
        default_factory=dict
    )  # by address, which names an object while it lives


def _write(walk: _Walk, *parts: object) -> None:
    """Add texts."""
    for part in parts:
        raw = str(part).encode("utf-8", "surrogatepass")
        walk.hash.update(b"%d:" % len(raw))
        walk.hash.update(raw)


def _visit(walk: _Walk, value: Any) -> None:
    """Add a value."""
    if isinstance(value, _PLAIN):
        _write(walk, type(value).__name__, repr(value))
        return
    before = len(walk.seen)
    number, _ = walk.seen.setdefault(id(value), (before, value))
    if number < before:
        _write(walk, "again", number)
        return
    for kinds, add in _KINDS:
        if isinstance(value, kinds):
            add(walk, value)
            return
    _instance(walk, value)


# ---- each kind ----
def _tensor(walk: _Walk, value: torch.Tensor) -> None:
    """Add a tensor: its numbers only if they are few."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        raise UnstorableError(f"a tensor of class {type(value).__name__}")
    _write(
        walk,
        "tensor",
        value.dtype,
        value.device,
        tuple(value.shape),
        value.stride(),
        value.requires_grad,
    )
    walk.tensors.append(value)
    if (
        value.numel() <= SMALL
        and value.device.type != "meta"
        and not isinstance(value, torch.nn.Parameter)
    ):
        _write(walk, value.detach().cpu().tolist())


def _items(walk: _Walk, value: Any) -> None:
    """Add a sequence."""
    _write(walk, type(value).__qualname__, len(value))
    for item in value:
        _visit(walk, item)


def _unordered(walk: _Walk, value: Any) -> None:
    """Add a set, whose order differs between processes."""
    _write(walk, type(value).__name__, *sorted(identity(item)[0] for item in value))


def _mapping(walk: _Walk, value: Mapping[Any, Any]) -> None:
    """Add a mapping, in its order."""
    _write(walk, type(value).__qualname__, len(value))
    for key, item in value.items():
        _visit(walk, key)
        _visit(walk, item)


def _function(walk: _Walk, value: FunctionType) -> None:
    """Add a function: by name if its package is installed, else with its code and the globals that
    it names.
    """
    installed = _installed(value.__module__)
    _write(
        walk, "function", value.__module__ if installed else "", value.__qualname__, installed or ""
    )
    _visit(walk, value.__defaults__)
    _visit(walk, value.__kwdefaults__)
    for cell in value.__closure__ or ():
        _visit(walk, cell.cell_contents if _filled(cell) else "an empty cell")
    if not installed:
        _code(walk, value.__code__, value.__globals__)
    if value.__dict__:
        _visit(walk, dict(value.__dict__))


def _code(walk: _Walk, value: CodeType, names: Mapping[str, Any]) -> None:
    """Add instructions with their constants, and the globals that they name."""
    _write(
        walk,
        "code",
        value.co_code.hex(),
        value.co_names,
        value.co_varnames,
        value.co_freevars,
        value.co_flags,
    )
    for constant in value.co_consts:
        if isinstance(constant, CodeType):
            _code(walk, constant, names)
        else:
            _visit(walk, constant)
    for name in value.co_names:
        if name in names:
            _write(walk, name)
            found = names[name]
            if isinstance(found, ModuleType):
                _module(walk, found, value.co_names)
            else:
                _visit(walk, found)


def _module(walk: _Walk, value: ModuleType, used: tuple[str, ...] = ()) -> None:
    """Add a module: by version if it is installed, else with those of its values that code
    names.
    """
    installed = _installed(value.__name__)
    _write(walk, "module", value.__name__, installed or "")
    for name in () if installed else used:
        if name in vars(value):
            found = vars(value)[name]
            _write(walk, name)
            if isinstance(found, ModuleType):
                _module(walk, found, used)
            else:
                _visit(walk, found)


def _class(walk: _Walk, value: type) -> None:
    """Add a class: by name if its package is installed, else with its methods."""
    installed = _installed(value.__module__)
    _write(
        walk, "class", value.__module__ if installed else "", value.__qualname__, installed or ""
    )
    if not installed:
        for base in value.__bases__:
            _visit(walk, base)
        for name, item in vars(value).items():
            if name not in _VOLATILE and (callable(item) or not name.endswith("_")):
                _write(walk, name)
                _visit(walk, item)


def _instance(walk: _Walk, value: Any) -> None:
    """Add an object: its class and its attributes."""
    cls = type(value)
    slots = [name for base in cls.__mro__ for name in _slots(base)]
    try:
        object.__reduce_ex__(value, 2)  # a class with a state that Python does not see has none
    except Exception as error:
        raise UnstorableError(
            f"an object of class {cls.__module__}.{cls.__qualname__} ({error})"
        ) from error
    _visit(walk, cls)
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    attributes |= vars(value) if hasattr(value, "__dict__") else {}
    for name, item in attributes.items():
        if name not in _VOLATILE and not name.endswith(
            "object_hash"
        ):  # hashes of texts differ between runs
            _write(walk, name)
            _visit(walk, item)


_KINDS: tuple[tuple[Any, Callable[[_Walk, Any], None]], ...] = (
    (torch.Tensor, _tensor),
    (Enum, lambda walk, value: _write(walk, "enum", type(value).__qualname__, value.name)),
    ((list, tuple, deque), _items),
    ((set, frozenset), _unordered),
    ((dict, OrderedDict, defaultdict, MappingProxyType), _mapping),
    (FunctionType, _function),
    (MethodType, lambda walk, value: _items(walk, (value.__func__, value.__self__))),
    (partial, lambda walk, value: _items(walk, (value.func, value.args, value.keywords))),
    ((staticmethod, classmethod), lambda walk, value: _visit(walk, value.__func__)),
    (property, lambda walk, value: _items(walk, (value.fget, value.fset))),
    (Op, lambda walk, value: _write(walk, "op", value)),
    (Packet, lambda walk, value: _write(walk, "ops", value)),
    (ModuleType, _module),
    (type, _class),
    (
        (
            BuiltinFunctionType,
            type(len),
            type(str.join),
            type(object.__init__),
            type(torch.Tensor.add),
        ),
        lambda walk, value: _write(
            walk, "builtin", getattr(value, "__module__", ""), value.__qualname__
        ),
    ),
    (CodeType, lambda walk, value: _code(walk, value, {})),
)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _slots(cls: type) -> tuple[str, ...]:
    found = vars(cls).get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    return tuple(name for name in names if name not in _VOLATILE)


@lru_cache(maxsize=4096)
def _installed(module: str | None) -> str | None:
    """The version of the package of a module, if it is installed or part of Python; ``None``: its
    code may change.
    """
    top = (module or "").partition(".")[0]
    if top in sys.builtin_module_names or (top in sys.stdlib_module_names and top != "__main__"):
        return "Python"
    if top == __name__.partition(".")[0]:
        return "see environment()"
    file = getattr(sys.modules.get(top), "__file__", None)
    if not top or file is None or not any(Path(file).is_relative_to(path) for path in _SITE):
        return None
    try:
        return metadata.version(top)
    except metadata.PackageNotFoundError:  # the package has another name than the module
        names = sorted(set(_distributions().get(top, ())))
        return " ".join(f"{name} {metadata.version(name)}" for name in names) or None


_SITE = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")} | {
    Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")
}


@lru_cache(maxsize=1)
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()

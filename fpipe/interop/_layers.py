# SPDX-License-Identifier: Apache-2.0
"""Equal layers of a model as blocks, which are traced once (``fpipe.block``).

Two layers are equal if they are of one class and all that they hold beside tensors is equal, down
to their submodules. A layer's number is left out as long as its forward does not use it. This
module must not know models or stages.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn
from torch.func import functional_call

from ..stage import BLOCKS, Block
from ._pure import REGISTERED, clone

_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
#: Names of attributes that number the layers of a model.
_NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number")


def as_blocks(module: nn.Module) -> nn.Module:
    """The module, with the items of its lists of modules as blocks; of a list inside another item,
    that item.
    """
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            for layer in child.children():
                as_block(layer)
        else:
            as_blocks(child)
    return module


def as_block(layer: nn.Module) -> None:
    """Make a module that holds parameters a block; one with a forward of its own stays as it is."""
    if "forward" not in vars(layer) and next(layer.parameters(), None) is not None:
        layer.forward = Layer(layer)


class Layer:
    """The forward of a layer. While a stage is traced it is a block shared with equal layers."""

    def __init__(self, layer: nn.Module):
        self.layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward: Callable[..., Any] = type(self.layer).forward
        shared = None if BLOCKS.get() is None else _shared(self.layer)
        if shared is None:
            return forward(self.layer, *args, **kwargs)
        tensors = dict(self.layer.named_parameters(remove_duplicate=False))
        tensors |= dict(self.layer.named_buffers(remove_duplicate=False))
        result = shared.block(tensors, args, kwargs)
        # Its first call finds out whether it uses its number, and then the result is that of
        # another layer.
        return forward(self.layer, *args, **kwargs) if shared.uses else result


class _Number:
    """The number of a layer, which notes that it is used for more than being handed on."""

    def __init__(self, value: int, shared: _Shared):
        self.value, self.shared = value, shared


def _used(name: str) -> Callable[..., Any]:
    def method(self: _Number, *others: Any) -> Any:
        self.shared.uses.append(name)
        return getattr(self.value, name)(*others)

    return method


_METHODS = """
__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __hash__ __bool__ __index__ __int__ __float__ __neg__
__abs__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __mod__ __rmod__ __floordiv__
__rfloordiv__ __truediv__ __rtruediv__ __pow__ __rpow__ __and__ __rand__ __or__ __ror__ __str__
__repr__ __format__
"""
for _name in _METHODS.split():
    setattr(_Number, _name, _used(_name))


class _Shared:
    """A layer without tensors, and the block that runs it for all layers equal to it."""

    def __init__(self, layer: nn.Module):
        self.uses: list[str] = []  # what its forward does with its number
        self.layer = clone(layer)
        vars(self.layer).pop("forward", None)
        for child in self.layer.modules():
            for name in _NUMBERS:
                if isinstance(value := vars(child).get(name), int):
                    vars(child)[name] = _Number(value, self)
        self.block = Block(self._run)

    def _run(
        self, tensors: Mapping[str, torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        given = dict(tensors)
        result = functional_call(self.layer, given, args, dict(kwargs), tie_weights=False)
        if any(given[name] is not value for name, value in tensors.items()):
            raise RuntimeError(
                "a layer replaces one of its tensors"
            )  # so that it runs without a block
        return result


_SHARED: WeakValueDictionary[Hashable, _Shared] = WeakValueDictionary()


#: The same by layer, which keeps them alive.
_OF_LAYER: WeakKeyDictionary[nn.Module, _Shared] = WeakKeyDictionary()


def _shared(layer: nn.Module) -> _Shared | None:
    """What a layer shares with its equals; ``None`` where it must run by itself."""
    if any(
        held for child in layer.modules() for name, held in vars(child).items() if "hooks" in name
    ):
        return None
    key = _key(layer)
    shared = _SHARED.get(key) or _Shared(layer)
    _SHARED[key] = _OF_LAYER[layer] = shared
    return None if shared.uses else shared


def _key(module: nn.Module) -> Hashable:
    """Equal for equal modules: all that they hold but their tensors."""
    held = (
        (name, value)
        for name, value in vars(module).items()
        if name not in ("forward", *REGISTERED)
    )
    tokens = frozenset(
        (name, "number" if name in _NUMBERS else _token(value)) for name, value in held
    )
    parameters = tuple(
        (name, parameter.requires_grad)
        for name, parameter in module.named_parameters(recurse=False)
    )
    buffers = tuple(name for name, _ in module.named_buffers(recurse=False))
    return (
        type(module),
        tokens,
        parameters,
        buffers,
        tuple((n, _key(child)) for n, child in module.named_children()),
    )


def _token(value: object) -> Hashable:
    """A value for comparisons; of what has no plain value, its identity."""
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, (list, tuple)):
        return (type(value), tuple(map(_token, value)))
    if isinstance(value, dict):
        items: Iterable[Any] = value.items()
        return (type(value), tuple((_token(key), _token(item)) for key, item in items))
    if isinstance(value, (set, frozenset)):
        return (type(value), frozenset(map(_token, value)))
    return id(value)

# SPDX-License-Identifier: Apache-2.0
"""Equal layers of a model as blocks, which are traced once (``fpipe.block``).

Two layers are equal if they are of one class and all that they hold beside tensors is equal, down
to their submodules. A layer's number is left out as long as its forward does not use it. This
module must not know models or stages.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from typing import NoReturn
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .. import tree
from ..programs import BLOCKS, Block
from ..tree import Tree
from .module_function import REGISTERED, clone, hooks_of, tensors_of

_PLAIN = (int, float, str, bytes, torch.dtype, torch.device)
#: Names of attributes that number the layers of a model.
_NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number")


def with_blocks(module: nn.Module) -> None:
    """Make the items of a module's lists of modules blocks; of lists in an item, the item alone."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            for layer in child.children():
                make_block(layer)
        else:
            with_blocks(child)


def make_block(layer: nn.Module) -> None:
    """Make a module that holds parameters a block, unless it has a forward of its own."""
    if "forward" not in vars(layer) and next(layer.parameters(), None) is not None:
        layer.forward = partial(_layer_forward, layer)


def _layer_forward(layer: nn.Module, *args: Tree, **kwargs: Tree) -> Tree:
    """Run a layer. While a stage is traced it is a block shared with equal layers."""
    shared = None if BLOCKS.get() is None else shared_by_equals(layer)
    if shared is not None and not shared.alone:
        try:
            return shared.block(tensors_of(layer), args, kwargs)
        except (TypeError, RuntimeError, IndexError, AttributeError):
            # it uses its number, or fails without a block too
            shared.alone = True
    return type(layer).forward(layer, *args, **kwargs)


class _Number:
    """In place of the number of a layer; any use but handing it on fails."""

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("the layer uses its number")

    __eq__ = __hash__ = __bool__ = __repr__ = _refuse


class SharedLayer:
    """A layer without tensors, and the block that runs it for all layers equal to it."""

    def __init__(self, layer: nn.Module):
        self.layer = clone(layer)
        vars(self.layer).pop("forward", None)
        for child in self.layer.modules():
            numbers = {n for n in _NUMBERS if isinstance(vars(child).get(n), int)}
            vars(child).update(dict.fromkeys(numbers, _Number()))
        #: Whether its layers must run by themselves.
        self.alone = any(any(hooks_of(child).values()) for child in layer.modules())
        self.block = Block(self._run)

    def _run(
        self,
        tensors: Mapping[str, Tensor],
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
    ) -> Tree:
        passed = dict(tensors)
        result = functional_call(self.layer, passed, args, kwargs, tie_weights=False)
        if any(passed[name] is not value for name, value in tensors.items()):
            # so that it runs without a block
            raise RuntimeError("a layer replaces one of its tensors")
        return result


_SHARED: WeakValueDictionary[Hashable, SharedLayer] = WeakValueDictionary()
#: The same by layer, which keeps them alive.
_OF_LAYER: WeakKeyDictionary[nn.Module, SharedLayer] = WeakKeyDictionary()


def shared_by_equals(layer: nn.Module) -> SharedLayer:
    """Return what a layer shares with its equals."""
    key = _key(layer)
    shared = _SHARED.get(key) or SharedLayer(layer)
    _SHARED[key] = _OF_LAYER[layer] = shared
    return shared


def _key(module: nn.Module) -> Hashable:
    """Return a key that equal modules share: all that they hold but their tensors."""
    unlike = ("forward", *REGISTERED, *_NUMBERS)
    held = {name: value for name, value in vars(module).items() if name not in unlike}
    leaves, structure = tree.flatten(held)
    numbers = tuple(name for name in _NUMBERS if name in vars(module))
    parameters = tuple((n, p.requires_grad) for n, p in module.named_parameters(recurse=False))
    buffers = tuple(name for name, _ in module.named_buffers(recurse=False))
    children = tuple((name, _key(child)) for name, child in module.named_children())
    values = tuple(map(_token, leaves))
    return type(module), structure, values, numbers, parameters, buffers, children


def _token(leaf: object) -> Hashable:
    """Return a leaf for comparisons; of what has no plain value, its identity."""
    if isinstance(leaf, (set, frozenset)):
        return frozenset(map(_token, leaf))
    if isinstance(leaf, _PLAIN):
        return (type(leaf), leaf)
    return id(leaf)

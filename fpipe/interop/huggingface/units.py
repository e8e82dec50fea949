# SPDX-License-Identifier: Apache-2.0
"""The modules of a model between which stages are cut: its layers, and what else its forward calls.

Layers are the items of lists of modules. The modules that contain such a list are the trunk: their
own code runs between layers, as do modules without parameters. Every other child of the trunk is,
like a layer, a unit, which one stage runs as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from torch import nn

from ...errors import StageError

#: The class of transformers that most layers have as a base.
_LAYER = "GradientCheckpointingLayer"
#: Of lists whose items have another class, those count that have this share of the parameters of
#: the largest.
_SHARE = 0.1


class Units(NamedTuple):
    """The dotted names of the units of a model, and of those that are layers."""

    names: tuple[str, ...]
    layers: frozenset[str]


def units_of(model: nn.Module) -> Units:
    """Return the units of a model of the transformers package.

    Raises:
        StageError: if the model is none, or has no list of layers.
    """
    if not hasattr(model, "config"):
        raise StageError(
            f"{type(model).__name__} is no causal model of the transformers package; "
            "fpipe.from_module cuts other modules"
        )
    lists = dict(_module_lists(model, ""))
    chosen = [name for name, items in lists.items() if any(map(_is_layer, items))]
    if not chosen:
        sizes = dict[str, int]()
        for name, items in lists.items():
            sizes[name] = sum(p.numel() for p in items.parameters())
        large = _SHARE * max(sizes.values(), default=0)
        chosen = [name for name, size in sizes.items() if size and size >= large]
    if not chosen:
        raise StageError(
            f"fpipe cannot split {type(model).__name__}: it has no list of layers; write its "
            "stages as functions"
        )
    opened = set[str]()
    for name in chosen:
        opened.update(name.rsplit(".", up)[0] for up in range(name.count(".") + 1))
    names = tuple(dict(_units(model, "", opened)).values())
    return Units(names, frozenset(name for name in names if name.rpartition(".")[0] in chosen))


def _units(
    module: nn.Module, prefix: str, opened: Collection[str]
) -> Iterator[tuple[nn.Module, str]]:
    """Return the outermost modules that are called as a whole: neither opened ones nor containers.

    Those without parameters count where they are random, since only one stage may draw.
    """
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if path in opened or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _units(child, f"{path}.", opened)
        elif any(True for _ in child.parameters()) or "dropout" in type(child).__name__.lower():
            yield child, path


def _is_layer(module: nn.Module) -> bool:
    return any(cls.__name__ == _LAYER for cls in type(module).__mro__)


def _module_lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.ModuleList]]:
    """Return the lists of modules that are in no layer, by name; of nested lists, the inner ones
    only.
    """
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if _is_layer(child):
            inside = []
        else:
            inside = list(_module_lists(child, f"{path}."))
        has_layers = isinstance(child, nn.ModuleList) and any(map(_is_layer, child))
        if isinstance(child, nn.ModuleList) and len(child) and (has_layers or not inside):
            yield path, child
        else:
            yield from inside


def outside(
    module: nn.Module, units: Collection[nn.Module], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Return a module and those in it that are not in one of the units alone, with their names and
    a dot.

    >>> model = nn.Sequential(nn.ReLU(), nn.Linear(1, 1))
    >>> [name for name, _ in outside(model, [model[1]])]
    ['', '0.']
    """
    yield prefix, module
    for name, child in module.named_children():
        if child not in units:
            yield from outside(child, units, f"{prefix}{name}.")

# SPDX-License-Identifier: Apache-2.0
"""The modules of a model between which stages are cut: its layers, and what else its forward calls.

Layers are the items of lists of modules. The modules that contain such a list are the trunk: their
own code runs between layers, as do modules without parameters. Every other child of the trunk is,
like a layer, a unit, which one stage runs as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import nn

from ...errors import StageError

#: The class of transformers that most layers have as a base.
_LAYER = "GradientCheckpointingLayer"


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
    layers = _outermost(
        model, lambda _, child: any(cls.__name__ == _LAYER for cls in type(child).__mro__)
    )
    lists = _outermost(
        model, lambda _, child: isinstance(child, nn.ModuleList) and _has_parameters(child)
    )
    chosen = {path.rpartition(".")[0] for path, _ in layers} or {path for path, _ in lists}
    if not chosen:
        raise StageError(
            f"fpipe cannot split {type(model).__name__}: it has no list of layers; write its "
            "stages as functions"
        )
    opened = {name.rsplit(".", up)[0] for name in chosen for up in range(name.count(".") + 1)}

    def is_unit(path: str, child: nn.Module) -> bool:
        """Return whether a module is called as a whole: it is neither opened nor a container.

        Those without parameters count where they are random, since only one stage may draw.
        """
        if path in opened or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            return False
        return _has_parameters(child) or "dropout" in type(child).__name__.lower()

    names = tuple({child: path for path, child in _outermost(model, is_unit)}.values())
    return Units(names, frozenset(name for name in names if name.rpartition(".")[0] in chosen))


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _outermost(
    module: nn.Module, is_wanted: Callable[[str, nn.Module], bool], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Return the modules in a module that are wanted, by name, but none that is in another one.

    >>> model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(1, 1)))
    >>> [path for path, _ in _outermost(model, lambda _, child: isinstance(child, nn.Linear))]
    ['1.0']
    """
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if is_wanted(path, child):
            yield path, child
        else:
            yield from _outermost(child, is_wanted, f"{path}.")

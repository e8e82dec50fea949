"""Pytrees at the edge: flat tuples inside, the user's containers outside.

optree does the walking. ``None`` is an empty node everywhere, so a missing stage or a frozen leaf needs no special
case. Classes of the user's own are nodes where they are registered under the name space "fpipe", as by
``@optree.dataclasses.dataclass(namespace="fpipe")``. This module knows nothing of stages or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeAlias

import optree
import torch

from .wrapping import kind_of

Tree: TypeAlias = Any
Spec: TypeAlias = optree.PyTreeSpec

#: Where users register their classes: optree asks for a name, and looks among the nameless ones too.
NAMESPACE = "fpipe"

flatten: Callable[[Tree], tuple[list[Any], Spec]] = partial(optree.tree_flatten, namespace=NAMESPACE)  # type: ignore[assignment]
unflatten: Callable[[Spec, Iterable[Any]], Tree] = optree.tree_unflatten  # type: ignore[assignment]
leaves: Callable[[Tree], list[Any]] = partial(optree.tree_leaves, namespace=NAMESPACE)  # type: ignore[assignment]
tree_map: Callable[..., Tree] = partial(optree.tree_map, namespace=NAMESPACE)


def together(specs: Sequence[Spec]) -> Spec:
    """The structure of a tuple of trees.

    >>> unflatten(together([flatten([1])[1], flatten(2)[1]]), [3, 4])
    ([3], 4)
    """
    return optree.treespec_tuple(specs, namespace=NAMESPACE)


def names(tree: Tree) -> list[str]:
    """The dotted path of every leaf.

    >>> names({"norm": {"w": 1}, "bias": [2, 3]})
    ['bias.0', 'bias.1', 'norm.w']
    """
    return [".".join(map(str, path)) for path in optree.tree_paths(tree, namespace=NAMESPACE)]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a dotted path fits one of the shell-style patterns; a pattern that names a subtree takes all of it.

    >>> matches("0.norm.w", ["0.*"]), matches("3.norm.w", ["3.norm"]), matches("3.wte", ["0.*"])
    (True, True, False)
    """
    return any(fnmatchcase(name, p) or name.startswith(p + ".") or fnmatchcase(name, p + ".*") for p in patterns)


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf is a tensor (and so may be split, sent or differentiated)."""
    return isinstance(leaf, torch.Tensor)


def is_floating(leaf: Any) -> bool:
    """Whether a leaf can carry a gradient: floating and complex tensors."""
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def aval(leaf: Any) -> Any:
    """What a trace may depend on: shape, strides, dtype and device of a tensor, the type and value of anything else."""
    if isinstance(leaf, torch.Tensor):
        plain = (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
        kind = None if type(leaf) is torch.Tensor else kind_of(leaf, aval)
        return plain if kind is None else (*plain, kind)
    return static(leaf)


def static(leaf: Any) -> tuple[Any, ...]:
    """A leaf that is no tensor, as (type, value, ...) that are equal only where programs may be shared.

    >>> static(1) == static(True), static(0.0) == static(-0.0)
    (False, False)
    """
    return (type(leaf), leaf, repr(leaf)) if isinstance(leaf, (float, complex)) else (type(leaf), leaf)


def describe(leaves: Sequence[Any]) -> str:
    """Leaves as a reader wants them in a message.

    >>> describe([torch.zeros(2, 3), 5])
    '(float32[2, 3], 5)'
    """
    inside = (
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    )
    return "(" + ", ".join(inside) + ")"

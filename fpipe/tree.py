"""Pytrees at the edge: flat tuples inside, the user's containers outside.

optree does the walking. ``None`` is an empty node everywhere, so a missing stage or a frozen leaf needs no special
case. Classes of the user's own are nodes where they are registered under the name space "fpipe", as by
``@optree.dataclasses.dataclass(namespace="fpipe")``. This module knows nothing of stages or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import optree
import torch

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


# ---- tensors that wrap others --------------------------------------------------------------------------------------

#: The class, what is inside it by name (tensors described, the rest, such as a mesh, as it is), and what else it is.
#: All of it hashable.
Kind: TypeAlias = tuple[type, tuple[tuple[str, Any], ...], Any]


def kind_of(tensor: torch.Tensor, describe: Callable[[torch.Tensor], Any]) -> Kind | None:
    """What a wrapper is; ``None`` for an ordinary tensor.

    >>> kind_of(torch.ones(2), id) is None
    True
    """
    cls = type(tensor)
    if cls is torch.Tensor or cls is torch.nn.Parameter or not hasattr(cls, "__tensor_flatten__"):
        return None
    names, rest = tensor.detach().__tensor_flatten__()  # type: ignore[attr-defined]
    inner = ((name, getattr(tensor, name)) for name in names)
    return cls, tuple((name, describe(v) if isinstance(v, torch.Tensor) else v) for name, v in inner), rest


def rebuild(kind: Kind, shape: Any, stride: Any, make: Callable[[Any], Any]) -> torch.Tensor:
    """A wrapper of the kind around what ``make`` gives for the descriptions inside."""
    cls, inner, rest = kind
    made = {name: make(told) for name, told in inner}
    return cls.__tensor_unflatten__(made, rest, torch.Size(shape), tuple(stride))  # type: ignore[attr-defined]


def parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The ordinary tensors that a tensor is made of; itself, mostly.

    >>> [part.shape for part in parts(torch.ones(2))]
    [torch.Size([2])]
    """
    if not hasattr(type(tensor), "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):
            yield from parts(inner)


# ---- abstract leaves -----------------------------------------------------------------------------------------------


class Aval(NamedTuple):
    """Shape, strides, dtype and device of a tensor, whether a gradient is wanted for it, and what it wraps, if any."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grad: bool = False
    kind: Kind | None = None

    @classmethod
    def like(cls, tensor: torch.Tensor, grad: bool = False) -> Aval:
        """The aval of a tensor."""
        kind = None if type(tensor) is torch.Tensor else kind_of(tensor, cls.like)
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, grad, kind)

    def build(self, plain: Callable[[Aval], torch.Tensor]) -> torch.Tensor:
        """A tensor of this description, around what ``plain`` makes for descriptions of ordinary ones."""
        if self.kind is None:
            return plain(self)
        inside = lambda inner: inner.build(plain) if isinstance(inner, Aval) else inner
        return rebuild(self.kind, self.shape, self.stride, inside)

    @property
    def nbytes(self) -> int:
        """Bytes of the smallest storage that holds it."""
        if self.kind is not None:
            return sum(inner.nbytes for _, inner in self.kind[1] if isinstance(inner, Aval))
        if 0 in self.shape:
            return 0
        return self.dtype.itemsize * (1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True)))

    def __str__(self) -> str:
        outer = "" if self.kind is None else f"{self.kind[0].__name__} "
        return f"{outer}{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

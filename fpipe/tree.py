# SPDX-License-Identifier: Apache-2.0
"""Pytrees and their abstract form: structure, shapes, strides and dtypes without data.

optree flattens and unflattens. ``None`` is an empty node, so a missing stage or a frozen leaf needs
no special case. A user registers classes as nodes under the namespace "fpipe", as
``@optree.dataclasses.dataclass(namespace="fpipe")`` does. A :class:`Spec` describes a tensor of a
message. This module knows nothing of stages or ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import optree
import torch
from torch import Tensor

#: A pytree: a tensor, or a list, tuple, dictionary or registered class of pytrees.
Tree: TypeAlias = Any
Structure: TypeAlias = optree.PyTreeSpec

#: Where users register their classes; optree also looks in the global namespace.
NAMESPACE = "fpipe"

flatten: Callable[[Tree], tuple[list[Any], Structure]] = partial(
    optree.tree_flatten, namespace=NAMESPACE
)  # type: ignore[assignment]
unflatten: Callable[[Structure, Iterable[Any]], Tree] = optree.tree_unflatten  # type: ignore[assignment]
leaves: Callable[[Tree], list[Any]] = partial(optree.tree_leaves, namespace=NAMESPACE)  # type: ignore[assignment]
tree_map: Callable[..., Tree] = partial(optree.tree_map, namespace=NAMESPACE)


def tuple_structure(structures: Sequence[Structure]) -> Structure:
    """The structure of a tuple of trees.

    >>> unflatten(tuple_structure([flatten([1])[1], flatten(2)[1]]), [3, 4])
    ([3], 4)
    """
    return optree.treespec_tuple(structures, namespace=NAMESPACE)


def names(tree: Tree) -> list[str]:
    """The dotted path of every leaf.

    >>> names({"norm": {"w": 1}, "bias": [2, 3]})
    ['bias.0', 'bias.1', 'norm.w']
    """
    return [".".join(map(str, path)) for path in optree.tree_paths(tree, namespace=NAMESPACE)]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a dotted path matches one of the shell patterns. A pattern that matches a subtree
    matches every path in it.

    >>> matches("0.norm.w", ["0.*"]), matches("3.norm.w", ["3.norm"]), matches("3.wte", ["0.*"])
    (True, True, False)
    """
    return any(
        fnmatchcase(name, pattern)
        or name.startswith(pattern + ".")
        or fnmatchcase(name, pattern + ".*")
        for pattern in patterns
    )


def unmatched(patterns: Iterable[str], names: Sequence[str], missing: Sequence[str] = ()) -> str:
    """A message about the first pattern that matches no name; "" if every pattern matches.

    ``missing`` are paths whose leaves are unknown, such as stages of other processes. A pattern
    that may match a leaf below one of them is accepted.

    >>> unmatched(["*.ww", "0.*"], ["0.w", "0.b"])
    "'*.ww' matches no leaf; near names: 0.w"
    >>> unmatched(["*.ww"], ["0.w"], missing=["1"]), unmatched(["0.w*"], ["0.w"])
    ('', '')
    """
    for pattern in patterns:
        if any(matches(name, [pattern]) for name in names):
            continue
        if any(_may_match_below(pattern, path) for path in missing):
            continue
        near = get_close_matches(pattern, names, 3, 0.3) or names[:3]
        return f"{pattern!r} matches no leaf; near names: {', '.join(near)}"
    return ""


def _may_match_below(pattern: str, path: str) -> bool:
    """Whether a pattern matches a path, or may match a path below it."""
    literal = re.split(r"[*?\[]", pattern)[0]  # what stands before the first wildcard
    below = f"{path}." if path else ""
    return (
        matches(path, [pattern])
        or literal.startswith(below)
        or (literal != pattern and below.startswith(literal))
    )


def is_tensor(leaf: object) -> TypeGuard[Tensor]:
    """Whether a leaf is a tensor, which may be split, sent and differentiated."""
    return isinstance(leaf, Tensor)


def is_floating(leaf: Any) -> bool:
    """Whether a leaf can carry a gradient: a floating or complex tensor."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def is_float8(leaf: Tensor) -> bool:
    """Whether a tensor is of floats of one byte or less, which torch cannot add."""
    return leaf.is_floating_point() and leaf.dtype.itemsize < 2


def sum_dtype(dtype: torch.dtype, accumulate: torch.dtype | None) -> torch.dtype:
    """The dtype of a sum of gradients of ``dtype``; ``accumulate`` is the option of that name.

    >>> sum_dtype(torch.bfloat16, torch.float32), sum_dtype(torch.complex64, torch.float64)
    (torch.float32, torch.complex128)
    """
    if accumulate is None or not (dtype.is_floating_point or dtype.is_complex):
        return dtype
    return torch.promote_types(dtype, accumulate) if dtype.is_complex else accumulate


def describe(leaves: Sequence[Any]) -> str:
    """The dtypes and shapes of tensors, and the values of other leaves, for an error message.

    >>> describe([torch.zeros(2, 3), 5])
    '(float32[2, 3], 5)'
    """
    parts = (brief(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
    return f"({', '.join(parts)})"


def brief(tensor: Tensor | Aval | Spec) -> str:
    """The dtype and shape of a tensor."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# ---- tensor subclasses that contain tensors ----
#: The kind of a tensor with inner tensors: its class, its members by name, and the context of
#: ``__tensor_flatten__``. A member that is a tensor is described by an ``Aval``; others, such as a
#: mesh, are kept as they are. All of it is hashable.
SubclassKind: TypeAlias = tuple[type, tuple[tuple[str, Any], ...], Any]


def kind_of(tensor: Tensor) -> SubclassKind | None:
    """The kind of a tensor with inner tensors; ``None`` for an ordinary tensor.

    >>> kind_of(torch.ones(2)) is None
    True
    """
    cls = type(tensor)
    if cls is Tensor or cls is torch.nn.Parameter or not hasattr(cls, "__tensor_flatten__"):
        return None
    names, context = tensor.detach().__tensor_flatten__()  # type: ignore[attr-defined]
    values = ((name, getattr(tensor, name)) for name in names)
    members = tuple(
        (name, Aval.like(value) if isinstance(value, Tensor) else value) for name, value in values
    )
    return cls, members, context


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the ordinary tensors inside a tensor; an ordinary tensor yields itself.

    >>> [part.shape for part in parts(torch.ones(2))]
    [torch.Size([2])]
    """
    if not hasattr(type(tensor), "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        inner = getattr(tensor, name)
        if isinstance(inner, Tensor):
            yield from parts(inner)


def address(tensor: Tensor) -> int:
    """The address at which the storage of a tensor begins; 0 if the tensor has no memory.

    A tensor and its views have the same address.

    >>> x = torch.ones(4)
    >>> address(x) == address(x[2:]), address(x) == address(x.clone())
    (True, False)
    """
    inner = tensor if type(tensor) is Tensor else next(parts(tensor), tensor)
    return inner.untyped_storage().data_ptr() if inner.layout is torch.strided else 0


# ---- abstract leaves and trees ----
class Aval(NamedTuple):
    """An abstract tensor. ``grad``: whether a gradient is wanted. ``kind``: that of a tensor with
    inner tensors.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grad: bool = False
    kind: SubclassKind | None = None

    @classmethod
    def like(cls, tensor: Tensor, grad: bool = False) -> Aval:
        """The abstract tensor of a tensor."""
        kind = None if type(tensor) is Tensor else kind_of(tensor)
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, grad, kind)

    @property
    def differentiable(self) -> bool:
        """Whether the dtype can carry a gradient."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def build(self, plain: Callable[[Aval], Tensor]) -> Tensor:
        """Build a tensor of this description. ``plain`` builds an ordinary tensor from its Aval."""
        if self.kind is None:
            return plain(self)
        cls, members, context = self.kind
        inner = {
            name: member.build(plain) if isinstance(member, Aval) else member
            for name, member in members
        }
        return cls.__tensor_unflatten__(inner, context, torch.Size(self.shape), self.stride)  # type: ignore[attr-defined]

    def arrived(self) -> Aval:
        """The same tensor with the strides that it has after it was sent to another rank."""
        return self._replace(stride=arriving(self.shape, self.stride))

    @property
    def nbytes(self) -> int:
        """The bytes of the smallest storage that holds the tensor."""
        if self.kind is not None:
            return sum(inner.nbytes for _, inner in self.kind[1] if isinstance(inner, Aval))
        if 0 in self.shape:
            return 0
        axes = zip(self.shape, self.stride, strict=True)
        last_element = sum((size - 1) * step for size, step in axes)
        return self.dtype.itemsize * (last_element + 1)

    def __str__(self) -> str:
        return ("" if self.kind is None else f"{self.kind[0].__name__} ") + brief(self)


class Static(NamedTuple):
    """A leaf that is not a tensor. Two are equal only where they may share a trace.

    >>> Static.of(1) == Static.of(True), Static.of(0.0) == Static.of(-0.0)
    (False, False)
    """

    type: type
    value: Any
    text: str = ""  # distinguishes 0.0 from -0.0

    @classmethod
    def of(cls, value: Any) -> Static:
        """The abstract form of a leaf."""
        return cls(type(value), value, repr(value) if isinstance(value, (float, complex)) else "")

    def __str__(self) -> str:
        return f"{self.value!r:.60}"


AbstractLeaf: TypeAlias = Aval | Static


def abstract(leaf: Any, grad: bool = False) -> AbstractLeaf:
    """What a trace may depend on: the ``Aval`` of a tensor, type and value of another leaf.

    ``grad``: whether a gradient is wanted, if the dtype can carry one.
    """
    if isinstance(leaf, Tensor):
        return Aval.like(leaf, grad and is_floating(leaf))
    return Static.of(leaf)


def cache_keys(leaves: Iterable[Any]) -> list[Any]:
    """Keys of leaves: two are equal if ``abstract`` of the leaves is equal.

    Every call computes them, so they cost less than ``abstract``.
    """
    return [
        (
            leaf.shape,
            leaf.stride(),
            leaf.dtype,
            leaf.device,
            None if type(leaf) is Tensor else kind_of(leaf),
        )
        if isinstance(leaf, Tensor)
        else Static.of(leaf)
        for leaf in leaves
    ]


@dataclass(frozen=True)
class AbstractTree:
    """The structure of a pytree with its abstract leaves.

    ``computed``: a stage computes the tree, and the caller does not pass it. ``repeats`` has a pair
    for each leaf that is the same tensor as an earlier leaf: its index, and the earlier index.

    >>> str(AbstractTree.of({"x": torch.ones(2), "n": 3}))
    '3, float32[2]'
    """

    structure: Structure
    leaves: tuple[AbstractLeaf, ...]
    computed: bool = False
    repeats: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, value: Tree, grad: bool = False) -> AbstractTree:
        """The abstract tree of a pytree. ``grad``: whether floating leaves want gradients."""
        flat, structure = flatten(value)
        return cls.flat(structure, flat, grad)

    @classmethod
    def flat(
        cls, structure: Structure, leaves: Sequence[Any], grads: Sequence[bool] | bool = False
    ) -> AbstractTree:
        """The abstract tree of a structure and leaves. ``grads`` may have a value for each leaf."""
        flags = [grads] * len(leaves) if isinstance(grads, bool) else grads
        return cls(structure, tuple(map(abstract, leaves, flags)))

    @cached_property
    def avals(self) -> dict[int, Aval]:
        """The abstract tensors by the index of the leaf."""
        return {i: leaf for i, leaf in enumerate(self.leaves) if isinstance(leaf, Aval)}

    @cached_property
    def tensors(self) -> tuple[Aval | None, ...]:
        """The abstract tensor of each leaf; ``None`` for leaves that are not tensors."""
        return tuple(leaf if isinstance(leaf, Aval) else None for leaf in self.leaves)

    @cached_property
    def wanted(self) -> tuple[int, ...]:
        """The indices of the leaves whose gradient is wanted."""
        return tuple(i for i, aval in self.avals.items() if aval.grad)

    def map(self, fn: Callable[[Aval], Any]) -> list[Any]:
        """The leaves: ``fn`` of each abstract tensor, and the values of other leaves."""
        return [fn(leaf) if isinstance(leaf, Aval) else leaf.value for leaf in self.leaves]

    def fill(self, tensors: Iterable[Any]) -> Tree:
        """The pytree with these tensors in order, and the values of other leaves."""
        following = iter(tensors)
        return unflatten(self.structure, self.map(lambda _: next(following)))

    def with_avals(self, fn: Callable[[Aval], Aval]) -> AbstractTree:
        """The same tree with ``fn`` of each abstract tensor."""
        leaves = tuple(fn(leaf) if isinstance(leaf, Aval) else leaf for leaf in self.leaves)
        return replace(self, leaves=leaves)

    def as_input(self) -> AbstractTree:
        """The same tree as the input of the next stage. Repeated leaves want no gradient: it is
        that of the earlier leaf.
        """
        repeated = {leaf: self.avals[leaf]._replace(grad=False) for leaf, _ in self.repeats}
        leaves = tuple(repeated.get(i, leaf) for i, leaf in enumerate(self.leaves))
        return replace(self, leaves=leaves, computed=True)

    def on(self, device: torch.device) -> AbstractTree:
        """The same tree with its tensors on a device."""
        if all(aval.device == device for aval in self.avals.values()):
            return self
        return self.with_avals(lambda aval: aval._replace(device=device))

    def __str__(self) -> str:
        """The first leaves, and the number of the others."""
        count = len(self.leaves)
        if count <= 7:
            return ", ".join(map(str, self.leaves))
        return ", ".join([*map(str, self.leaves[:6]), f"and {count - 6} more"])


# ---- one tensor as it is stored and sent ----
class Spec(NamedTuple):
    """A tensor of a message, as sender and receiver agree on it before it is sent.

    >>> Spec.of(torch.zeros(2, 3).T)
    Spec(shape=(3, 2), stride=(1, 3), dtype=torch.float32)
    >>> Spec.of(torch.zeros(4, 4)[:, :2]).stride  # gaps are not sent: it arrives contiguous
    (2, 1)
    >>> Spec.of(torch.zeros(1, 3).expand(5, 3)).stride  # nor are repeated rows: one row is sent
    (0, 1)
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        """The Spec with which a tensor arrives at its receiver; the tensor may be a fake one."""
        shape = tuple(tensor.shape)
        return cls(shape, arriving(shape, tuple(tensor.stride())), tensor.dtype)

    @property
    def stored(self) -> int:
        """The number of elements stored and sent: expanded axes count once."""
        return prod(
            size if step or not size else 1
            for size, step in zip(self.shape, self.stride, strict=True)
        )

    @property
    def bytes(self) -> int:
        """The number of bytes sent."""
        return self.stored * self.dtype.itemsize

    def __str__(self) -> str:
        return brief(self)


def arriving(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The strides with which a tensor arrives at its receiver.

    A tensor whose memory has no gaps keeps its strides. Any other tensor arrives contiguous.
    Strides of 0 are kept: only what is stored is sent. Axes of one element, and tensors without
    elements, get the strides of a contiguous tensor.

    >>> arriving((2, 3), (1, 2)), arriving((2, 3), (8, 2)), arriving((4, 3), (0, 1))
    ((1, 2), (3, 1), (0, 1))
    """
    if 0 in shape:
        return contiguous(shape)
    repeats = [step == 0 and size > 1 for size, step in zip(shape, stride, strict=True)]
    stored = [1 if repeat else size for size, repeat in zip(shape, repeats, strict=True)]
    packed = contiguous(stored)
    axes = [(step, size) for step, size in zip(stride, stored, strict=True) if size > 1]
    expected = 1
    for step, size in sorted(axes):
        if step != expected:  # a gap
            stride = packed
            break
        expected *= size
    steps = [
        step if size > 1 else packed_step
        for size, step, packed_step in zip(stored, stride, packed, strict=True)
    ]
    return tuple(0 if repeat else step for step, repeat in zip(steps, repeats, strict=True))


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))

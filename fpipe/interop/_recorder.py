# SPDX-License-Identifier: Apache-2.0
"""Runs a model's forward and labels each tensor by its origin: which values each of its units
depends on.

Operations between units give their results the labels of their inputs, by the memory that tensors
share; a unit's result gets labels of its own. This module must not know stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from .. import tree
from .module_function import as_node

_PLAIN = (bool, int, float, str)
#: Operations whose results depend on the sizes of their inputs alone.
_SIZES = {
    getattr(torch.ops.aten, name)
    for name in (
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
    )
}


class Value(NamedTuple):
    """A tensor that a unit returned: the number of its call, and of the leaf.

    Call -1: an input of the model. Call -2: random numbers that the code between units draws.
    """

    call: int
    leaf: int


RANDOM = -2

#: Where a tensor comes from: values, and names of parameters that the code between units uses.
Labels: TypeAlias = frozenset[Value | str]
NONE: Labels = frozenset()


class Visit(NamedTuple):
    """One call of a unit: what it depends on, and what it returned and wrote into dicts that it was
    passed.
    """

    unit: str
    uses: Labels
    structure: tree.Structure
    leaves: tuple[Any, ...]  # values, or plain constants


class Recording(NamedTuple):
    """One forward: the calls of its units in order, the labels of its result, and all values."""

    visits: list[Visit]
    uses: Labels
    tensors: dict[Value, torch.Tensor]
    result: tuple[torch.Tensor, ...]
    inputs: Mapping[str, torch.Tensor]
    side: Mapping[str, torch.Tensor]
    parameters: frozenset[str]  # those that the code between units reads


def record(
    whole: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    units: Mapping[nn.Module, str],
    inputs: Mapping[str, torch.Tensor],
    side: Mapping[str, torch.Tensor],
    keywords: Mapping[str, Any],
    finish: Callable[[Any], tuple[torch.Tensor, ...]],
) -> Recording:
    """Run a model's forward.

    Args:
        whole: a clone of the model, which is changed.
        tensors: its parameters and buffers.
        units: its units, with their names.
        inputs: arguments that the first stage alone gets.
        side: arguments that all stages get.
        keywords: further arguments.
        finish: returns, from the model's output, first the tensor that the last stage returns.
    """
    notes = _Notes([], {}, {}, {}, set())
    for child, name in units.items():
        child.forward = partial(_visit, notes, name, child.forward)
    parameters = dict(whole.named_parameters(remove_duplicate=False))
    for name, tensor in tensors.items():
        if name in parameters:
            _add(notes, tensor, frozenset([name]))
    for leaf, tensor in enumerate(inputs.values()):
        _hold(notes, tensor, Value(-1, leaf))
    with torch.no_grad(), _Labels(notes):
        arguments = {**inputs, **side, **keywords}
        result = finish(functional_call(whole, dict(tensors), (), arguments, tie_weights=False))
        read = frozenset(label for label in notes.read if isinstance(label, str))
        return Recording(
            notes.visits, _among(notes, result[0]), notes.tensors, result, inputs, side, read
        )


class _Notes(NamedTuple):
    """What is known so far. The keys, storages, stay alive: no other one gets their address."""

    visits: list[Visit]
    tensors: dict[Value, torch.Tensor]
    labels: dict[torch.UntypedStorage, Labels]
    exact: dict[tuple[Any, ...], Value]
    read: set[Value | str]


#: Whether a unit runs.
_INSIDE: ContextVar[bool] = ContextVar("_INSIDE", default=False)


@contextmanager
def _inside() -> Iterator[None]:
    token = _INSIDE.set(True)
    try:
        yield
    finally:
        _INSIDE.reset(token)


class _Labels(TorchDispatchMode):
    """Labels the results of operations outside units with the labels of their inputs."""

    def __init__(self, notes: _Notes):
        super().__init__()
        self.notes, self.draws = notes, count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _in_place(func) and any(isinstance(label, str) for label in _among(self.notes, args[0])):
            raise RuntimeError(f"it writes into a parameter ({func})")
        out = func(*args, **(kwargs or {}))
        if not _INSIDE.get() and func.overloadpacket not in _SIZES:
            random = (
                {Value(RANDOM, next(self.draws))}
                if torch.Tag.nondeterministic_seeded in func.tags
                else NONE
            )
            _pass_on(self.notes, (args, kwargs), out, random)
        return out


def _pass_on(notes: _Notes, inputs: Any, out: Any, more: Labels | set[Value]) -> None:
    """The results of an operation get the labels of its inputs."""
    labels = _among(notes, inputs) | more
    notes.read.update(labels)
    for leaf in tree.leaves(out) if labels else ():
        if _is_dense(leaf):
            _add(notes, leaf, labels)


def _in_place(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return name[-1] == "_" != name[-2]


def _among(notes: _Notes, values: Any) -> Labels:
    """The labels of all tensors in a tree."""
    found = (
        notes.labels.get(leaf.untyped_storage(), NONE)
        for leaf in tree.leaves(values)
        if _is_dense(leaf)
    )
    return NONE.union(*found)


def _add(notes: _Notes, tensor: torch.Tensor, labels: Labels) -> None:
    """Add labels to a tensor, and to all that share its memory."""
    storage = tensor.untyped_storage()
    notes.labels[storage] = notes.labels.get(storage, NONE) | labels


def _hold(notes: _Notes, tensor: torch.Tensor, value: Value) -> None:
    """A tensor is a value."""
    _add(notes, tensor, frozenset([value]))
    notes.exact[_place(tensor)] = value
    notes.tensors[value] = tensor.clone()


def _visit(notes: _Notes, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of a unit."""
    if _INSIDE.get():
        return forward(*args, **kwargs)
    uses, dicts = _among(notes, (args, kwargs)), dicts_in(args, kwargs)
    before = {key: dict(value) for key, value in dicts.items()}
    with _inside():
        leaves, structure = returned(forward(*args, **kwargs), dicts, before)
        found = [_leaf(notes, leaf, index) for index, leaf in enumerate(leaves)]
    notes.visits.append(Visit(name, uses, structure, tuple(label for label, _ in found)))
    return restored(structure, [leaf for _, leaf in found], dicts)


def _leaf(notes: _Notes, leaf: Any, index: int) -> tuple[Any, Any]:
    """What is noted of a leaf that a unit returned, and the leaf, in memory of its own."""
    if not _is_dense(leaf):
        return (leaf if isinstance(leaf, _PLAIN) else None), leaf
    if _place(leaf) in notes.exact:
        return notes.exact[_place(leaf)], leaf
    if leaf.untyped_storage() in notes.labels:
        leaf = leaf.clone()
    value = Value(len(notes.visits), index)
    _hold(notes, leaf, value)
    return value, leaf


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


# ---- what a call returns: its output, and what it writes into dicts that it was passed ----
def dicts_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, dict[Any, Any]]:
    """The dicts among the arguments of a call.

    >>> dicts_in([1, {}], {"more": {2: 3}})
    {'1': {}, 'more': {2: 3}}
    """
    named = chain(((str(index), value) for index, value in enumerate(args)), kwargs.items())
    return {name: value for name, value in named if type(value) is dict}


def returned(
    out: Any, dicts: Mapping[str, Mapping[Any, Any]], before: Mapping[str, Mapping[Any, Any]]
) -> tuple[list[Any], tree.Structure]:
    """The leaves and the structure of an output and of the entries of dicts that were not there
    ``before``.
    """
    for item in out if isinstance(out, (tuple, list)) else [out]:
        if isinstance(item, dict) and type(item) is not dict:
            as_node(type(item))
    written = {
        name: {k: v for k, v in d.items() if before[name].get(k, d) is not v}
        for name, d in dicts.items()
    }
    return tree.flatten((out, {name: entries for name, entries in written.items() if entries}))


def restored(
    structure: tree.Structure, leaves: Sequence[Any], dicts: Mapping[str, dict[Any, Any]]
) -> Any:
    """The output of a call from its leaves; the entries that it writes are written."""
    out, written = tree.unflatten(structure, leaves)
    for name, entries in written.items():
        dicts[name].update(entries)
    return out


def writes(visit: Visit) -> bool:
    """Whether a call writes into dicts that it is passed."""
    return bool(tree.unflatten(visit.structure, visit.leaves)[1])

# SPDX-License-Identifier: Apache-2.0
"""Runs a model's forward and labels each tensor by its origin: on which values each unit depends.

Operations between units give their results the labels of their inputs, by the memory that tensors
share; a unit's result gets labels of its own. This module must not know stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from ... import tree
from ...tree import Tree
from ..module_function import as_node

#: Operations whose results depend on the sizes of their inputs alone.
_SIZES = {
    getattr(torch.ops.aten, form.format(name))
    for form in ("{}_like", "new_{}")
    for name in ("zeros", "ones", "empty", "full")
}


class Value(NamedTuple):
    """A tensor that a unit returned: the number of its call, and of the leaf."""

    call: int
    leaf: int


#: In place of the number of a call: inputs of the model, and draws of the code between units.
INPUT, RANDOM = -1, -2
#: Where a tensor comes from: values, and names of parameters that the code between units uses.
Labels: TypeAlias = frozenset[Value | str]
NONE: Labels = frozenset()


class Visit(NamedTuple):
    """One call of a unit, with what it depends on.

    ``leaves`` are what it returned and wrote into dicts that it was passed: values, or constants.
    """

    unit: str
    uses: Labels
    structure: tree.Structure
    leaves: tuple[Tree, ...]

    @property
    def values(self) -> list[Value]:
        """The leaves that are values."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Value)]

    @property
    def writes(self) -> bool:
        """Whether the call wrote into dicts that it was passed."""
        return bool(tree.unflatten(self.structure, self.leaves)[1])


class Recording(NamedTuple):
    """One forward: the calls of its units in order, the labels of its result, and all values."""

    visits: list[Visit]
    uses: Labels
    tensors: dict[Value, Tensor]
    result: tuple[Tensor, ...]
    inputs: Mapping[str, Tensor]
    side: Mapping[str, Tensor]
    parameters: frozenset[str]  #: those that the code between units reads


class _Notes(NamedTuple):
    """What was seen so far. The keys, storages, stay alive: no other one gets their address."""

    visits: list[Visit]
    tensors: dict[Value, Tensor]
    labels: dict[torch.UntypedStorage, Labels]
    read: set[Value | str]

    def among(self, values: Tree) -> Labels:
        """Return the labels of all tensors in a tree."""
        leaves = filter(_is_dense, tree.leaves(values))
        return NONE.union(*(self.labels.get(leaf.untyped_storage(), NONE) for leaf in leaves))


#: Whether a unit runs.
_INSIDE: ContextVar[bool] = ContextVar("_INSIDE", default=False)


def record(
    whole: nn.Module,
    tensors: Mapping[str, Tensor],
    units: Mapping[nn.Module, str],
    inputs: Mapping[str, Tensor],
    side: Mapping[str, Tensor],
    keywords: Mapping[str, object],
    finish: Callable[[Any], tuple[Tensor, ...]],
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
    notes = _Notes([], {}, {}, set())
    for child, name in units.items():
        child.forward = partial(_visit, notes, name, child.forward)
    parameters = dict(whole.named_parameters(remove_duplicate=False))
    for name in parameters:
        _add(notes, tensors[name], frozenset([name]))
    for leaf, tensor in enumerate(inputs.values()):
        _keep(notes, tensor, Value(INPUT, leaf))
    with torch.no_grad(), _Labels(notes):
        arguments = {**inputs, **side, **keywords}
        result = finish(functional_call(whole, dict(tensors), (), arguments, tie_weights=False))
    read = frozenset(label for label in notes.read if isinstance(label, str))
    uses = notes.among(result[0])
    return Recording(notes.visits, uses, notes.tensors, result, inputs, side, read)


class _Labels(TorchDispatchMode):
    """Labels the results of operations outside units with the labels of their inputs."""

    def __init__(self, notes: _Notes):
        super().__init__()
        self.notes, self.draws = notes, count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tree:
        name, notes = func.overloadpacket.__name__, self.notes
        in_place = name[-1] == "_" != name[-2]
        if in_place and any(isinstance(label, str) for label in notes.among(args[0])):
            raise RuntimeError(f"it writes into a parameter ({func})")
        out = func(*args, **(kwargs or {}))
        if not _INSIDE.get() and func.overloadpacket not in _SIZES:
            labels = notes.among((args, kwargs))
            if torch.Tag.nondeterministic_seeded in func.tags:
                labels |= {Value(RANDOM, next(self.draws))}
            notes.read.update(labels)
            for leaf in filter(_is_dense, tree.leaves(out)):
                _add(notes, leaf, labels)
        return out


def _is_dense(leaf: Tree) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided


def _add(notes: _Notes, tensor: Tensor, labels: Labels) -> None:
    """Add labels to a tensor, and to all that share its memory."""
    storage = tensor.untyped_storage()
    if labels:
        notes.labels[storage] = notes.labels.get(storage, NONE) | labels


def _keep(notes: _Notes, tensor: Tensor, value: Value) -> None:
    """Note that a tensor is a value."""
    _add(notes, tensor, frozenset([value]))
    notes.tensors[value] = tensor.clone()


def _visit(
    notes: _Notes, name: str, forward: Callable[..., Tree], *args: Tree, **kwargs: Tree
) -> Tree:
    """Run a call of a unit, and give the tensors that it returns memory of their own."""
    if _INSIDE.get():
        return forward(*args, **kwargs)
    uses, dicts = notes.among((args, kwargs)), dicts_in(args, kwargs)
    token, number = _INSIDE.set(True), len(notes.visits)
    try:
        _, leaves, structure = called(forward, args, kwargs)
        noted = list[Tree]()
        for index, leaf in enumerate(leaves):
            if _is_dense(leaf):
                if leaf.untyped_storage() in notes.labels:
                    leaves[index] = leaf = leaf.clone()
                noted.append(Value(number, index))
                _keep(notes, leaf, noted[-1])
            else:
                noted.append(leaf if isinstance(leaf, (bool, int, float, str)) else None)
    finally:
        _INSIDE.reset(token)
    notes.visits.append(Visit(name, uses, structure, tuple(noted)))
    return restored(structure, leaves, dicts)


# ---- what a call returns: its output, and what it writes into dicts that it was passed ----
def dicts_in(args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> dict[str, dict]:
    """Return the dicts among the arguments of a call.

    >>> dicts_in([1, {}], {"more": {2: 3}})
    {'1': {}, 'more': {2: 3}}
    """
    named = chain(((str(index), value) for index, value in enumerate(args)), kwargs.items())
    return {name: value for name, value in named if type(value) is dict}


def called(
    forward: Callable[..., Tree], args: Sequence[Tree], kwargs: Mapping[str, Tree]
) -> tuple[Tree, list[Tree], tree.Structure]:
    """Run a call.

    Returns:
        Its output; the leaves and the structure of the output and of the new entries of dicts.
    """
    dicts = dicts_in(args, kwargs)
    before = {name: dict(entries) for name, entries in dicts.items()}
    out = forward(*args, **kwargs)
    for item in out if isinstance(out, (tuple, list)) else [out]:
        if isinstance(item, dict) and type(item) is not dict:
            as_node(type(item))
    written = dict[str, dict]()
    for name, entries in dicts.items():
        new = {k: v for k, v in entries.items() if before[name].get(k, entries) is not v}
        if new:
            written[name] = new
    return out, *tree.flatten((out, written))


def restored(structure: tree.Structure, leaves: Sequence[Tree], dicts: Mapping[str, dict]) -> Tree:
    """Return the output of a call from its leaves; the entries that it writes are written."""
    out, written = tree.unflatten(structure, leaves)
    for name, entries in written.items():
        dicts[name].update(entries)
    return out

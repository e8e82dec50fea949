# SPDX-License-Identifier: Apache-2.0
"""Runs a model's forward and labels each tensor by its origin: on which values each unit depends.

Operations between units give their results the labels of their inputs, by the memory that tensors
share; a unit's result gets labels of its own. This module must not know stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from ... import tree
from ...tree import Tree
from .calls import Call, is_between_units, observed_by, result_of, returned

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
INPUT = -1
RANDOM = -2
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
        _, written = tree.unflatten(self.structure, self.leaves)
        return bool(written)


class Recording(NamedTuple):
    """One forward: the calls of its units in order, the labels of its result, and all values."""

    visits: list[Visit]
    uses: Labels
    tensors: dict[Value, Tensor]
    result: Tensor
    inputs: Mapping[str, Tensor]
    side: Mapping[str, Tensor]
    parameters: frozenset[str]  #: those that the code between units reads


def record(
    whole: nn.Module,
    tensors: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    side: Mapping[str, Tensor],
    keywords: Mapping[str, object],
) -> Recording:
    """Run a model's forward.

    Args:
        whole: a clone of the model, whose units are observed.
        tensors: its parameters and buffers.
        inputs: arguments that the first stage alone gets.
        side: arguments that all stages get.
        keywords: further arguments.
    """
    notes = _Notes()
    for name, _ in whole.named_parameters(remove_duplicate=False):
        notes.add(tensors[name], frozenset([name]))
    for leaf, tensor in enumerate(inputs.values()):
        notes.keep(tensor, Value(INPUT, leaf))
    arguments = {**inputs, **side, **keywords}
    with torch.no_grad(), notes, observed_by(notes.visit):
        out = functional_call(whole, dict(tensors), (), arguments, tie_weights=False)
        result = result_of(out)
    return Recording(
        notes.visits,
        notes.among(result),
        notes.tensors,
        result,
        inputs,
        side,
        frozenset(notes.read),
    )


class _Notes(TorchDispatchMode):
    """What was seen so far; results of operations between units get the labels of their inputs.

    The keys of ``labels``, storages, stay alive: no other one gets their address.
    """

    def __init__(self):
        super().__init__()
        self.visits = list[Visit]()
        self.draws = count()
        self.read = set[str]()
        self.tensors = dict[Value, Tensor]()
        self.labels = dict[torch.UntypedStorage, Labels]()

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: Sequence[Tree] = (),
        kwargs: Mapping[str, Tree] | None = None,
    ) -> Tree:
        name = func.overloadpacket.__name__
        in_place = name[-1] == "_" != name[-2]
        if in_place and any(isinstance(label, str) for label in self.among(args[0])):
            raise RuntimeError(f"it writes into a parameter ({func})")
        out = func(*args, **(kwargs or {}))
        if is_between_units() and func.overloadpacket not in _SIZES:
            labels = self.among((args, kwargs))
            self.read.update(label for label in labels if isinstance(label, str))
            if torch.Tag.nondeterministic_seeded in func.tags:
                labels |= {Value(RANDOM, next(self.draws))}
            for leaf in filter(_is_dense, tree.leaves(out)):
                self.add(leaf, labels)
        return out

    def among(self, values: Tree) -> Labels:
        """Return the labels of all tensors in a tree."""
        leaves = filter(_is_dense, tree.leaves(values))
        return NONE.union(*(self.labels.get(leaf.untyped_storage(), NONE) for leaf in leaves))

    def add(self, tensor: Tensor, labels: Labels) -> None:
        """Add labels to a tensor, and to all that share its memory."""
        storage = tensor.untyped_storage()
        if labels:
            self.labels[storage] = self.labels.get(storage, NONE) | labels

    def keep(self, tensor: Tensor, value: Value) -> None:
        """Note that a tensor is a value."""
        self.add(tensor, frozenset([value]))
        self.tensors[value] = tensor.clone()

    def visit(self, call: Call) -> Tree:
        """Note a call of a unit, and give the tensors that it returns memory of their own."""
        uses = self.among((call.args, call.kwargs))
        number = len(self.visits)
        leaves, structure = call.run()
        noted = list[Tree]()
        for index, leaf in enumerate(leaves):
            if _is_dense(leaf):
                if leaf.untyped_storage() in self.labels:
                    leaf = leaves[index] = leaf.clone()
                value = Value(number, index)
                self.keep(leaf, value)
                noted.append(value)
            elif isinstance(leaf, int | float | str):
                noted.append(leaf)
            else:
                noted.append(None)
        self.visits.append(Visit(call.unit, uses, structure, tuple(noted)))
        return returned(call, structure, leaves)


def _is_dense(leaf: Tree) -> TypeGuard[Tensor]:
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided

# SPDX-License-Identifier: Apache-2.0
"""Runs a model's forward and labels each tensor by its origin: on which values each unit depends.

Operations between units give their results the labels of their inputs, by the memory that tensors
share; a unit's result gets labels of its own. A function observes the calls of units, here and in
stages. This module must not know stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from ... import tree
from ...errors import StageError
from ...programs import setting
from ...tree import Tree

Forward: TypeAlias = Callable[..., Tree]
#: Parameters, buffers or arguments by name.
Tensors: TypeAlias = Mapping[str, Tensor]


class Call(NamedTuple):
    """A call of a unit."""

    unit: str
    forward: Forward
    args: tuple[Tree, ...]
    kwargs: dict[str, Tree]


#: A function of a call that returns its output.
Observer: TypeAlias = Callable[[Call], Tree]

#: What observes the calls of units that are not inside of another unit.
OBSERVER: ContextVar[Observer | None] = ContextVar("OBSERVER", default=None)


def observe(module: nn.Module, unit: str) -> None:
    """Let an observer see the calls of a module."""
    module.forward = partial(_observed_call, unit, module.forward)


def _observed_call(unit: str, forward: Forward, *args: Tree, **kwargs: Tree) -> Tree:
    observer = OBSERVER.get()
    if observer is None:
        return forward(*args, **kwargs)
    with setting(OBSERVER, None):
        return observer(Call(unit, forward, args, kwargs))


def result_of(out: Tree) -> Tensor:
    """Return the tensor that the last stage returns: logits, or the last hidden state."""
    named = (getattr(out, name, None) for name in ("logits", "last_hidden_state"))
    for leaf in (*named, out):
        if isinstance(leaf, Tensor):
            return leaf
    raise StageError(f"its forward returns {type(out).__name__}, which holds no logits")


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
#: The values that a tensor depends on.
Labels: TypeAlias = frozenset[Value]
NONE: Labels = frozenset()


class Visit(NamedTuple):
    """One call of a unit, with the values that it depends on and those that it returns."""

    unit: str
    uses: Labels
    structure: tree.Structure
    values: tuple[Value, ...]


class Recording(TorchDispatchMode):
    """One forward; while it runs, results of operations between units get the labels of their
    inputs.

    The keys of ``labels``, storages, stay alive: no other one gets their address.

    Args:
        parameters: of the model, by name.
        inputs: arguments that the first stage alone gets.
        side: arguments that all stages get.
    """

    def __init__(
        self,
        parameters: Tensors,
        inputs: Tensors,
        side: Tensors,
    ):
        super().__init__()
        self.inputs = inputs
        self.side = side
        self.visits = list[Visit]()
        self.tensors = dict[Value, Tensor]()
        self.labels = dict[torch.UntypedStorage, Labels]()
        self.draws = count()
        #: Names of the parameters that the code between units reads.
        self.read = set[str]()
        self.names = {p.untyped_storage(): name for name, p in parameters.items()}
        for leaf, tensor in enumerate(inputs.values()):
            self._keep(tensor, Value(INPUT, leaf))

    def run(
        self,
        whole: nn.Module,
        tensors: Tensors,
        keywords: Mapping[str, object],
    ) -> Recording:
        """Run a clone of the model, whose units are observed, with these parameters and buffers."""
        arguments = {**self.inputs, **self.side, **keywords}
        with torch.no_grad(), self, setting(OBSERVER, self._visit):
            out = functional_call(whole, dict(tensors), (), arguments, tie_weights=False)
        self.result = result_of(out)
        self.uses = self._among(self.result)
        return self

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: Sequence[Tree] = (),
        kwargs: Mapping[str, Tree] | None = None,
    ) -> Tree:
        out = func(*args, **(kwargs or {}))
        between_units = OBSERVER.get() is not None
        if between_units and func.overloadpacket not in _SIZES:
            labels = self._among((args, kwargs))
            if torch.Tag.nondeterministic_seeded in func.tags:
                labels |= {Value(RANDOM, next(self.draws))}
            self.read |= {self.names[s] for s in _storages((args, kwargs)) if s in self.names}
            for storage in _storages(out):
                self.labels[storage] = self.labels.get(storage, NONE) | labels
        return out

    def _among(self, values: Tree) -> Labels:
        """Return the labels of all tensors in a tree."""
        return NONE.union(*(self.labels.get(storage, NONE) for storage in _storages(values)))

    def _keep(self, tensor: Tensor, value: Value) -> None:
        """Note that a tensor is a value."""
        self.labels[tensor.untyped_storage()] = frozenset([value])
        self.tensors[value] = tensor

    def _visit(self, call: Call) -> Tree:
        """Note a call of a unit, and give the tensors that it returns memory of their own."""
        uses = self._among((call.args, call.kwargs))
        leaves, structure = tree.flatten(call.forward(*call.args, **call.kwargs))
        copies = dict[Value, Tensor]()
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                raise TypeError(f"{call.unit} returns {type(leaf).__name__}")
            value = Value(len(self.visits), index)
            copies[value] = leaf.clone()
            self._keep(copies[value], value)
        self.visits.append(Visit(call.unit, uses, structure, tuple(copies)))
        return tree.unflatten(structure, list(copies.values()))


def _storages(values: Tree) -> list[torch.UntypedStorage]:
    """Return the memory of the tensors in a tree."""
    return [
        leaf.untyped_storage()
        for leaf in tree.leaves(values)
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided
    ]

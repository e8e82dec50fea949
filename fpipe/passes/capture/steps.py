# SPDX-License-Identifier: Apache-2.0
"""``pipe.captured()``: a step is recorded as one graph of kernels, and later steps start the graph.

A graph reads fixed memory. Arguments that stay where they are, as parameters of an optimizer that
writes in place do, are read where they are; others are copied before each step. Results are copied
out, since the next step overwrites them. The first step of a signature runs as without a graph, the
second is recorded. Knows calls; no plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ... import tree
from ...collectives.group import Group
from ...engine.arguments import Call
from ...engine.calls import value_and_grad
from ...engine.plan_cache import Cache
from ...errors import StageError
from ...stage import Stage
from ...tree import Tree
from . import graphs

#: A step without a graph, as a function of the tensors among its arguments.
TensorStep: TypeAlias = Callable[[Sequence[Tensor]], Tree]

#: The classes of tensors whose memory is one piece.
PLAIN = (Tensor, torch.nn.Parameter)
#: Held for a step: graphs of one device read memory that each step writes, and threads start them.
_LOCK = RLock()
#: How many signatures have a graph, each with memory of its own.
KEPT = 4
#: After so many recordings of one signature every argument is copied.
TIMES = 2


def check(group: Group, copies: bool) -> None:
    """Raise StageError where the steps of a pipeline over a group cannot be recorded."""
    devices = {group.device(rank) for rank in group.here}
    local = len(group.here) == group.size and len(devices) == 1 and not copies
    if not local or graphs.recorder(*devices) is None:
        raise StageError(
            "captured() records graphs of kernels on one accelerator: all ranks must be in this "
            "process on it, as "
            f'fpipe.local(devices=["cuda:0"] * 4) has them, without dp=; the group is {group!r}. '
            "Leave it out; "
            'compile="cudagraphs" records single programs, in any group'
        )


@dataclass(frozen=True, eq=False)
class Graph:
    """The steps of one signature: nothing yet, or a recorded step.

    ``places`` are the addresses of the arguments of the step before. ``fixed`` has, for each of
    them, the copy that the graph reads, or None where it reads the argument where it is.
    """

    record: graphs.Record
    device: torch.device
    places: tuple[int, ...] = ()
    fixed: tuple[Tensor | None, ...] = ()
    recorded: graphs.Recorded[Tree] | None = None
    times: int = 0

    def seen(self, tensors: Sequence[Tensor]) -> Graph:
        """The state after a first step, which runs without a graph."""
        return replace(self, places=_places(tensors), fixed=(None,) * len(tensors))

    def after(self, tensors: Sequence[Tensor], step: TensorStep) -> tuple[Graph, Tree]:
        """The next state, and the result of the step on these tensors by the graph, which is
        recorded if need be.
        """
        places = _places(tensors)
        moved = [now != before for now, before in zip(places, self.places, strict=True)]
        unread = any(m and fixed is None for m, fixed in zip(moved, self.fixed, strict=True))
        graph = self
        if self.recorded is None or unread:
            graph = self._recorded(tensors, moved, step)
        assert graph.recorded is not None
        graph._copy(tensors)
        graph.recorded.replay()
        return replace(graph, places=places), _copied(graph.recorded.results)

    def _recorded(
        self,
        tensors: Sequence[Tensor],
        moved: Sequence[bool],
        step: TensorStep,
    ) -> Graph:
        """With a graph that reads copies of the arguments that moved."""
        fixed: list[Tensor | None] = []
        for tensor, before, m in zip(tensors, self.fixed, moved, strict=True):
            needed = m or self.times >= TIMES or tensor.device != self.device
            if before is None and needed:
                before = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device
                )
            fixed.append(before)
        graph = replace(self, fixed=tuple(fixed), recorded=None, times=self.times + 1)
        graph._copy(tensors)
        pairs = zip(tensors, fixed, strict=True)
        read = [tensor if copy is None else copy for tensor, copy in pairs]
        step(read)  # what a first step prepares cannot be recorded
        return replace(graph, recorded=self.record(lambda: step(read)))

    def _copy(self, tensors: Sequence[Tensor]) -> None:
        """Write the arguments that moved to where the graph reads them."""
        for fixed, tensor in zip(self.fixed, tensors, strict=True):
            if fixed is not None:
                fixed.copy_(tensor.detach(), non_blocking=True)


#: The graphs of a pipeline by signature, or the reason why a signature has none.
Graphs: TypeAlias = dict[Hashable, Graph | str]


def _give_up(graphs_by_key: Graphs, key: Hashable, reason: str) -> None:
    """Run steps of this signature without a graph from now on, and warn."""
    graphs_by_key[key] = reason
    warnings.warn(f"captured: steps run without a graph, since {reason}", stacklevel=4)


def _places(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple([tensor.data_ptr() for tensor in tensors])


def _copied(results: Tree) -> Tree:
    """Results apart from the memory of the graph. One tensor that is returned twice stays one."""
    copies: dict[int, Tensor] = {}

    def copy(leaf: object) -> Tree:
        if tree.is_tensor(leaf):
            return copies.setdefault(id(leaf), leaf.clone())
        return leaf

    return tree.tree_map(copy, results)


def unrecordable(call: Call, cache: Cache, tensors: Sequence[Tensor]) -> str:
    """The reason why steps like this call, with these tensors, cannot be recorded, or nothing."""
    for tensor in tensors:
        if type(tensor) not in PLAIN:
            return f"an argument is a {type(tensor).__name__}, whose memory is not one piece"
    if call.each is not None:
        return "each= is a function of Python that every step calls"
    for stage in (*call.config.functions, call.config.loss):
        if isinstance(stage, Stage) and stage.engine == "eager":
            return f'{stage.label} has engine="eager", whose Python runs in every step'
    for plan in cache.plans_for(call).prepared.plans.values():
        for ins in plan.instructions:
            if ins.program is not None and ins.program.random:
                return f"{ins.program.stage or 'a stage'} draws random numbers"
    return ""


def captured(
    call: Call,
    cache: Cache,
    prepare: Callable[..., Call],
    arguments: tuple[Any, ...],
    value: bool,
) -> Any:
    """``calls.value_and_grad`` by the graph of its signature; ``prepare`` makes a call of the
    arguments.
    """
    scale = call.loss_scale
    key = call.signature(), value, None if tree.is_tensor(scale) else scale
    with _LOCK:
        graph = cache.graphs.get(key)
        if graph is None and len(cache.graphs) < KEPT:
            device = call.config.device
            record = graphs.recorder(device)
            assert record is not None, "a pipeline is checked when it is built"
            graph = Graph(record, device)
        if not isinstance(graph, Graph):
            return value_and_grad(call, cache, value)
        leaves, structure = tree.flatten((arguments, scale))
        at = [index for index, leaf in enumerate(leaves) if tree.is_tensor(leaf)]
        tensors = [leaves[index] for index in at]
        if not graph.places:
            result = value_and_grad(call, cache, value)
            cache.graphs[key] = graph.seen(tensors)
            why_not = unrecordable(call, cache, tensors)
            if why_not:
                _give_up(cache.graphs, key, why_not)
            return result

        def step(tensors: Sequence[Tensor]) -> Tree:
            moved = dict(zip(at, tensors, strict=True))
            given = [moved.get(index, leaf) for index, leaf in enumerate(leaves)]
            arguments, scale = tree.unflatten(structure, given)
            return value_and_grad(prepare(*arguments, loss_scale=scale), cache, value)

        try:
            cache.graphs[key], result = graph.after(tensors, step)
            return result
        except Exception as error:
            _give_up(cache.graphs, key, str(error).partition("\n")[0])
        return value_and_grad(call, cache, value)

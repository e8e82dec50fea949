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
from typing import Any, NamedTuple, TypeAlias

import torch

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
TensorStep: TypeAlias = Callable[[Sequence[torch.Tensor]], Tree]

#: The classes of tensors whose memory is one piece.
PLAIN = (torch.Tensor, torch.nn.Parameter)
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
    fixed: tuple[torch.Tensor | None, ...] = ()
    recorded: graphs.Recorded[Tree] | None = None
    times: int = 0

    def seen(self, tensors: Sequence[torch.Tensor]) -> Graph:
        """The state after a first step, which runs without a graph."""
        return replace(self, places=_places(tensors), fixed=(None,) * len(tensors))

    def after(self, tensors: Sequence[torch.Tensor], step: TensorStep) -> tuple[Graph, Tree]:
        """The next state, and the result of the step on these tensors by the graph, which is
        recorded if need be.
        """
        places = _places(tensors)
        moved = [here != before for here, before in zip(places, self.places, strict=True)]
        unread = any(m and fixed is None for m, fixed in zip(moved, self.fixed, strict=True))
        graph = (
            self
            if self.recorded is not None and not unread
            else self._recorded(tensors, moved, step)
        )
        assert graph.recorded is not None
        graph._copy(tensors)
        graph.recorded.replay()
        return replace(graph, places=places), _copied(graph.recorded.results)

    def _recorded(
        self, tensors: Sequence[torch.Tensor], moved: Sequence[bool], step: TensorStep
    ) -> Graph:
        """With a graph that reads copies of the arguments that moved."""
        every = self.times >= TIMES
        fixed = tuple(
            [
                before
                if before is not None or not (every or m or tensor.device != self.device)
                else torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device
                )
                for tensor, before, m in zip(tensors, self.fixed, moved, strict=True)
            ]
        )
        graph = replace(self, fixed=fixed, recorded=None, times=self.times + 1)
        graph._copy(tensors)
        read = [
            tensor if copy is None else copy for tensor, copy in zip(tensors, fixed, strict=True)
        ]
        step(read)  # what a first step prepares cannot be recorded
        return replace(graph, recorded=self.record(lambda: step(read)))

    def _copy(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write the arguments that moved to where the graph reads them."""
        for fixed, tensor in zip(self.fixed, tensors, strict=True):
            if fixed is not None:
                fixed.copy_(tensor.detach(), non_blocking=True)


#: The graphs of a pipeline by signature, or the reason why a signature has none.
Graphs: TypeAlias = dict[Hashable, Graph | str]


class Step(NamedTuple):
    """A step as functions: ``plain()`` runs it without a graph, ``on(*args)`` on other arguments of
    the same signature.

    ``why_not()`` is called after the first one: the reason why its signature cannot be recorded, or
    nothing.
    """

    plain: Callable[[], Tree]
    on: Callable[..., Tree]
    why_not: Callable[[], str]

    def run(
        self, known: Graphs, key: Hashable, device: torch.device, args: tuple[Tree, ...]
    ) -> Tree:
        """The step by the graph of its signature."""
        with _LOCK:
            graph = _find(known, key, device)
            return self.plain() if graph is None else self._run(known, key, graph, args)

    def _run(self, known: Graphs, key: Hashable, graph: Graph, args: tuple[Tree, ...]) -> Tree:
        leaves, structure = tree.flatten(args)
        at = [index for index, leaf in enumerate(leaves) if tree.is_tensor(leaf)]
        tensors = [leaves[index] for index in at]
        if not graph.places:
            result = self.plain()
            why_not = _odd(tensors) or self.why_not()
            if why_not:
                _give_up(known, key, why_not)
            else:
                known[key] = graph.seen(tensors)
            return result

        def on(tensors: Sequence[torch.Tensor]) -> Tree:
            given = dict(zip(at, tensors, strict=True))
            return self.on(
                *tree.unflatten(structure, [given.get(i, leaf) for i, leaf in enumerate(leaves)])
            )

        try:
            known[key], result = graph.after(tensors, on)
            return result
        except Exception as error:
            _give_up(known, key, str(error).partition("\n")[0])
        return self.plain()


def _find(known: Graphs, key: Hashable, device: torch.device) -> Graph | None:
    graph = known.get(key)
    if graph is None and len(known) < KEPT:
        record = graphs.recorder(device)
        assert record is not None, "a pipeline is checked when it is built"
        return Graph(record, device)
    return None if isinstance(graph, str) else graph


def _give_up(known: Graphs, key: Hashable, reason: str) -> None:
    """Run steps of this signature without a graph from now on, and warn."""
    known[key] = reason
    warnings.warn(f"captured: steps run without a graph, since {reason}", stacklevel=6)


def _places(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple([tensor.data_ptr() for tensor in tensors])


def _odd(tensors: Sequence[torch.Tensor]) -> str:
    """The reason why arguments cannot be read from fixed memory, or nothing."""
    odd = next((tensor for tensor in tensors if type(tensor) not in PLAIN), None)
    return (
        ""
        if odd is None
        else f"an argument is a {type(odd).__name__}, whose memory is not one piece"
    )


def _copied(results: Tree) -> Tree:
    """Results apart from the memory of the graph. One tensor that is returned twice stays one."""
    copies: dict[int, torch.Tensor] = {}

    def copy(leaf: object) -> Tree:
        return copies.setdefault(id(leaf), leaf.clone()) if tree.is_tensor(leaf) else leaf

    leaves, structure = tree.flatten(results)
    return tree.unflatten(structure, list(map(copy, leaves)))


def unrecordable(call: Call, cache: Cache) -> str:
    """The reason why steps like this call cannot be recorded, or nothing."""
    if call.each is not None:
        return "each= is a function of Python that every step calls"
    every = (*call.config.functions, call.config.loss)
    eager = next(
        (stage for stage in every if isinstance(stage, Stage) and stage.engine == "eager"), None
    )
    if eager is not None:
        return f'{eager.label} has engine="eager", whose Python runs in every step'
    plans = cache.plans_for(call).prepared.plans.values()
    programs = (ins.program for plan in plans for ins in plan.instructions)
    random = next((program for program in programs if program is not None and program.random), None)
    return "" if random is None else f"{random.stage or 'a stage'} draws random numbers"


def captured(
    call: Call, cache: Cache, prepare: Callable[..., Call], arguments: tuple[Any, ...], value: bool
) -> Any:
    """``calls.value_and_grad`` by the graph of its signature; ``prepare`` makes a call of the
    arguments.
    """
    scale = arguments[-1]
    step = Step(
        plain=lambda: value_and_grad(call, cache, value),
        on=lambda *moved: value_and_grad(prepare(*moved), cache, value),
        why_not=lambda: unrecordable(call, cache),
    )
    key = call.signature(), value, None if tree.is_tensor(scale) else scale
    return step.run(cache.graphs, key, call.config.device, arguments)

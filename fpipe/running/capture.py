# SPDX-License-Identifier: Apache-2.0
"""``capture=True``: a step is recorded as one graph of kernels, and later steps start the graph.

A graph reads fixed memory. Arguments that stay where they are, as parameters of an optimizer that writes in place do,
are read where they are; others are copied before each step. Results are copied out, since the next step overwrites
them. The first step of a signature runs as without a graph, the second is recorded. Knows calls; no plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any, TypeAlias

import torch

from .. import tree
from ..collectives.group import Group
from ..devices import graphs
from ..errors import StageError

#: A step without a graph, as a function of the arguments of its call.
Step: TypeAlias = Callable[..., Any]

#: The classes of tensors whose memory is one piece.
PLAIN = (torch.Tensor, torch.nn.Parameter)
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
            f"capture=True records a step as one graph of kernels: all ranks must be in this process on one GPU, as "
            f'fpipe.local(devices=["cuda:0"] * 4) has them, without dp=; the group is {group!r}. Leave it out; '
            'compile="cudagraphs" records single programs, in any group'
        )


class Graph:
    """The steps of one signature."""

    def __init__(self, device: torch.device, record: graphs.Record):
        self.device, self.record, self.times = device, record, 0
        self.places: list[int] = []  # of the arguments of the step before
        self.fixed: list[torch.Tensor | None] = []  # the copy that the graph reads, where an argument moved
        self.recorded: graphs.Recorded[Any] | None = None

    def run(self, tensors: Sequence[torch.Tensor], step: Callable[[Sequence[torch.Tensor]], Any]) -> Any:
        """The step on these tensors, by the graph from the second time on."""
        places = [tensor.data_ptr() for tensor in tensors]
        before, self.places = self.places, places
        if not before:
            self.fixed = [None] * len(tensors)
            return step(tensors)
        moved = [here != there for here, there in zip(places, before, strict=True)]
        if self.recorded is None or any(m and fixed is None for m, fixed in zip(moved, self.fixed, strict=True)):
            self._record(tensors, moved, step)
        else:
            self._copy(tensors)
        assert self.recorded is not None
        self.recorded.replay()
        return _copied(self.recorded.results)

    def _record(
        self, tensors: Sequence[torch.Tensor], moved: Sequence[bool], step: Callable[[Sequence[torch.Tensor]], Any]
    ) -> None:
        self.recorded, self.times = None, self.times + 1  # its memory is free for the next
        for index, tensor in enumerate(tensors):
            if moved[index] or tensor.device != self.device or self.times > TIMES:
                self.fixed[index] = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device
                )
        self._copy(tensors)
        read = [tensor if fixed is None else fixed for tensor, fixed in zip(tensors, self.fixed, strict=True)]
        step(read)  # what a first step prepares cannot be recorded
        self.recorded = self.record(lambda: step(read))

    def _copy(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write the arguments that moved to where the graph reads them."""
        for fixed, tensor in zip(self.fixed, tensors, strict=True):
            if fixed is not None:
                fixed.copy_(tensor.detach(), non_blocking=True)


class Graphs:
    """The graphs of a pipeline by signature, or the reason why a signature has none."""

    def __init__(self) -> None:
        self.known: dict[Any, Graph | str] = {}
        self.lock = RLock()

    def run(self, key: Any, device: torch.device, args: Any, step: Step, why_not: Callable[[], str]) -> Any:
        """A step, ``step(*args)``, by the graph of its signature. ``why_not`` is called after the first one."""
        with self.lock:
            graph = self._find(key, device)
            if graph is None:
                return step(*args)
            leaves, structure = tree.flatten(args)
            at = [index for index, leaf in enumerate(leaves) if tree.is_tensor(leaf)]

            def on(tensors: Sequence[torch.Tensor]) -> Any:
                given = dict(zip(at, tensors, strict=True))
                return step(*tree.unflatten(structure, [given.get(i, leaf) for i, leaf in enumerate(leaves)]))

            if not graph.places:
                result = step(*args) if (odd := _odd(leaves)) else graph.run([leaves[index] for index in at], on)
                self._give_up(key, odd or why_not())
                return result
            try:
                return graph.run([leaves[index] for index in at], on)
            except Exception as error:
                self._give_up(key, str(error).partition("\n")[0])
            return step(*args)

    def _find(self, key: Any, device: torch.device) -> Graph | None:
        graph = self.known.get(key)
        if graph is None and len(self.known) < KEPT:
            record = graphs.recorder(device)
            assert record is not None, "a pipeline is checked when it is built"
            graph = self.known[key] = Graph(device, record)
        return None if isinstance(graph, str) else graph

    def _give_up(self, key: Any, reason: str) -> None:
        """Run steps of this signature without a graph from now on, and warn, where there is a reason."""
        if reason:
            self.known[key] = reason
            warnings.warn(f"capture=True: steps run without a graph, since {reason}", stacklevel=4)


def _odd(leaves: Sequence[Any]) -> str:
    """The reason why arguments cannot be read from fixed memory, or nothing."""
    odd = next((leaf for leaf in leaves if tree.is_tensor(leaf) and type(leaf) not in PLAIN), None)
    return "" if odd is None else f"an argument is a {type(odd).__name__}, whose memory is not one piece"


def _copied(results: Any) -> Any:
    """Results apart from the memory of the graph. One tensor that is returned twice stays one."""
    copies: dict[int, torch.Tensor] = {}

    def copy(leaf: Any) -> Any:
        return copies.setdefault(id(leaf), leaf.clone()) if tree.is_tensor(leaf) else leaf

    leaves, structure = tree.flatten(results)
    return tree.unflatten(structure, list(map(copy, leaves)))

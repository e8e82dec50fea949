# SPDX-License-Identifier: Apache-2.0
"""What is read from the registers beside the loss and the gradients of parameters: outputs, second
values of the loss, gradients of the input, states. Knows plans and registers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..actions.action import unfused
from ..actions.product import load_pass
from ..lowering.keys import Value
from ..tree import Tree
from .microbatches import joined
from .results import Results


class RunResults(Results):
    """All results of a run; ``Results`` has those that every call reads."""

    # ---- memory ----
    @cached_property
    def _callers(self) -> set[int]:
        """The memory of the caller's tensors, which results may be; parameters and captured tensors
        are copied in F.
        """
        given = chain(self.call.batch_leaves, *self.cotangents)
        return {tree.address(leaf) for leaf in given if tree.is_tensor(leaf)} - {0}

    @cached_property
    def _returned(self) -> set[int]:
        """The memory of results that were read before."""
        return set()

    def apart(self, values: Iterable[Any], returned: set[int] | None = None) -> list[Any]:
        """Results, copied where a write into one would change an argument or another result."""
        if returned is None:
            returned = self._returned
        out = []
        for value in values:
            at = tree.address(value) if tree.is_tensor(value) else 0
            shared = at in self._callers or at in returned
            out.append(value.clone(memory_format=torch.contiguous_format) if shared else value)
            returned |= {at} - {0}
        return out

    # ---- second values of the loss ----
    def aux(self) -> list[Tree]:
        """The loss's second values, in microbatch order, on every rank."""
        return list(map(self._aux, range(self.units)))

    def _aux(self, mb: int) -> Tree:
        loss = self.prepared.loss[self.request.kind_of[mb]]
        rank = self.path(mb)[-1]
        assert loss is not None
        source = self.layout.graph(
            mb
        ).source  # a leaf may be an input that the loss returned as it was
        values = self._get(
            rank, ((source(loss, self.stages, name), mb) for name in loss.ys if name is not None)
        )
        return loss.outputs.y.fill(
            self.apart(self.share(values, loss.outputs.y.avals.values(), rank))
        )[1]

    # ---- outputs ----
    def outputs(self) -> Tree:
        """The last stage's outputs in the form of the batch, as ``outputs=`` says; all of them on
        each rank with a replica.
        """
        here, shared = self._place_of(self.stages - 1)
        everywhere = self.config.outputs == "everywhere"
        if not here and not shared and self.config.outputs == "last":
            return None
        rows = [
            self._output(mb, shared or everywhere, here or everywhere) for mb in range(self.units)
        ]
        if not here and self.config.outputs == "last":
            return None
        return joined(rows, self.call.x.slices, self.call.x.uniform)

    def _place_of(self, stage: int) -> tuple[bool, bool]:
        """Whether a stage is here, and whether its replicas on several processes have a part of its
        results each.
        """
        replicated = len(self.config.placement.ranks_of(stage)) > 1 and not self.config.local
        return stage in self.config.here, replicated

    def _output(self, mb: int, shared: bool, wanted: bool) -> Tree:
        y = self.prepared.output(mb)
        rank = self.path(mb)[-1]
        values: Sequence[Tensor] | None = self._get(
            rank, ((source, mb) for source in self.layout.graph(mb).outputs())
        )
        if shared:
            values = self.share(values, y.avals.values(), rank)
        if values is None or not wanted:
            values = [
                torch.zeros(a.shape, dtype=a.dtype, device=self.config.device)
                for a in y.avals.values()
            ]
        return y.fill(values if self.joins else self.apart(values))

    # ---- the gradient of the input ----
    def input_grads(self) -> Tree:
        """The gradient of x in the form of the batch, on the ranks of the first stage; None
        elsewhere.
        """
        here, shared = self._place_of(0)
        if not here and not shared:
            return None
        x = self.call.x
        out = []
        for mb in range(self.units):
            rank = self.path(mb)[0]
            described = self.request.kinds[self.request.kind_of[mb]].x
            graph = self.layout.graph(mb)
            leaves: list[Tensor | None] = [None] * len(described.leaves)
            for index in described.wanted:
                source = graph.cotangent(-1, index)
                grads: Sequence[Tensor] | None = (
                    None if source is None else self._get(rank, [(source, mb)])
                )
                if shared and source is not None:
                    grads = self.share(grads, [described.avals[index]], rank)
                if here:
                    dx = self._of_all_copies(
                        grads[0] if grads else torch.zeros_like(x.rows[mb][index])
                    )
                    leaves[index] = dx if self.joins else self.apart([dx])[0]
            out.append(tree.unflatten(described.structure, leaves))
        if not here:
            return None
        if x.slices > 1:
            out = load_pass("slicing").gradients(out, x)
        return joined(out, 1, x.uniform)

    # ---- state ----
    def states(self) -> list[Tree]:
        """The state of each stage after its last microbatch; None for stages without one or on
        other processes.

        Each replica of a stage carries a state; that of the first replica is sent to the others.
        """
        ranks_of = self.config.placement.ranks_of
        return [
            self._state(stage, ranks_of(stage)) if function.state else None
            for stage, function in enumerate(self.config.functions)
        ]

    def _state(self, stage: int, ranks: Sequence[int]) -> Tree:
        rank = ranks[0]
        (here, replicated) = self._place_of(stage)
        if not here and not replicated:
            return None
        last = [
            a.microbatch
            for a in unfused(self.request.schedule[rank])
            if a.stage == stage and a.op == "F"
        ][-1:]
        kind = self.request.kind_of[last[0]] if last else 0
        state = self.prepared.interfaces[kind][stage].state
        values: Sequence[Tensor] | None = None
        if rank in self.group.here:
            if last:
                names = self.prepared.jobs[rank].program_sets[kind].programs[stage].new_state
            else:
                names = ()
            values = (
                self._get(rank, [(Value(stage, n), last[0]) for n in names])
                or self.call.state_leaves[stage][0]
            )
        assert state is not None
        if replicated:
            values = self.share(values, state.avals.values(), rank)
        assert values is not None
        if here:
            return state.fill(self.apart(values))
        return None

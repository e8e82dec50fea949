# SPDX-License-Identifier: Apache-2.0
"""Plans of some ranks of a pipeline, made in one process for a job in which every rank is a process
of its own.

The stages of all ranks are traced here, so nothing is exchanged, and the ranks that are asked for
are lowered with messages between processes. Copies of the pipeline are other processes too. Knows
no values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import tree
from ...actions.product import feature
from ...collectives.local import LocalGroup
from ...engine.arguments import Call
from ...engine.copies import Copies
from ...engine.pipeline import Pipeline
from ...engine.prepare import lowering_inputs, traced_in_turn
from ...lowering.builder import lower
from ...lowering.instructions import Recv, Send
from ...lowering.plan import Plan
from ...programs.cache import Spent, measured, timed
from ...tree import Tree


class _Apart(LocalGroup):
    """Ranks without data whose messages would take time. Of copies of a pipeline, the first is
    here.
    """

    def __init__(self, size: int, *, copies: bool = False):
        super().__init__((torch.device("meta"),) * size)
        self.at_once = False
        if copies:
            self.here = (0,)


@dataclass(frozen=True)
class Rehearsed:
    """The plan of a rank, and the bytes of the parameters that it holds between steps."""

    plan: Plan
    parameters: int

    @property
    def received(self) -> tuple[int, int]:
        """Messages from other ranks, and their bytes."""
        return _messages(self.plan, Recv)

    @property
    def sent(self) -> tuple[int, int]:
        """Messages to other ranks, and their bytes."""
        return _messages(self.plan, Send)


def rehearse(
    pipe: Pipeline[Any, Any],
    ranks: Sequence[int],
    params: Sequence[Tree],
    x: Tree,
    *targets: Tree,
    copies: int = 1,
    zero: int = 0,
    note: Callable[[str], None] = lambda text: None,
) -> tuple[dict[int, Rehearsed], Spent]:
    """The plans that ranks would have if each were a process, with ``copies`` of the pipeline.
    Nothing runs.

    Args:
        pipe: a pipeline whose ranks are all in this process.
        ranks: those whose plans are wanted.
        params, x, targets: of a call; tensors on the device meta will do.
        copies: how many copies of the pipeline there are; x and targets are those of one.
        zero: what they share, as in ``fpipe.pipeline``.
        note: called with what is done next.

    Returns:
        The plans by rank, and the seconds of tracing and lowering.
    """
    config, shares = replace(pipe.config, group=_Apart(pipe.config.group.size)), None
    if copies > 1:
        config = replace(config, copies=Copies(_Apart(copies, copies=True), zero))
        assert config.copies is not None
        shares = feature("copies.sharding").Shares(config.copies)
        if zero:
            params = [shares.cut(stage, each, config.frozen) for stage, each in enumerate(params)]
    request = Call.of(config, "grad", params, x, targets, {}).request(shares)
    with measured() as spent:
        traced = traced_in_turn(config, request, note)
        plans: dict[int, Plan] = {}
        with timed("lowering"):
            for rank, source in lowering_inputs(config, request, traced, ranks, apart=True).items():
                note(f"the plan of rank {rank}")
                plans[rank] = lower(source, rank)
    stages_of = request.schedule.placement.stages_of
    held = {rank: sum(_bytes(params[stage]) for stage in stages_of(rank)) for rank in ranks}
    return {rank: Rehearsed(plan, held[rank]) for rank, plan in plans.items()}, sum(spent, Spent())


def _messages(plan: Plan, kind: type[Recv] | type[Send]) -> tuple[int, int]:
    ops = [ins.op for ins in plan.instructions if type(ins.op) is kind]
    return len(ops), sum(spec.bytes for op in ops for spec in op.specs)


def _bytes(params: Tree) -> int:
    return sum(leaf.nbytes for leaf in tree.leaves(params) if isinstance(leaf, torch.Tensor))

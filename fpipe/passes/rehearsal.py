# SPDX-License-Identifier: Apache-2.0
"""Plans of some ranks of a pipeline, made in one process for a job in which every rank is a process
of its own: ``Pipeline.rehearse``.

The stages of all ranks are traced here, so nothing is exchanged, and the ranks that are asked for
are lowered with messages between processes. Copies of the pipeline are other processes too. Knows
no values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import tree
from ..collectives.local import LocalGroup
from ..engine.arguments import Call
from ..engine.copies import Copies
from ..engine.pipeline import Pipeline
from ..engine.prepare import lowering_jobs, trace_stages
from ..lowering.builder import lower
from ..lowering.instructions import Recv, Send
from ..lowering.plan import Plan
from ..programs.cache import Spent, measured, timed
from ..tree import Tree
from .copies.sharding import Shares


@dataclass(frozen=True)
class Rehearsed:
    """The plan of a rank, and the bytes of the parameters that it holds between steps."""

    plan: Plan
    parameters: int

    @property
    def sent(self) -> tuple[int, int]:
        """Messages to other ranks, and their bytes."""
        return self._messages(Send)

    @property
    def received(self) -> tuple[int, int]:
        """Messages from other ranks, and their bytes."""
        return self._messages(Recv)

    def _messages(self, kind: type[Recv] | type[Send]) -> tuple[int, int]:
        messages = [ins.op for ins in self.plan.instructions if type(ins.op) is kind]
        return len(messages), sum(spec.bytes for op in messages for spec in op.specs)


def rehearse(
    pipe: Pipeline[Any, Any],
    ranks: Sequence[int],
    params: Sequence[Tree],
    x: Tree,
    *targets: Tree,
    copies: int,
    zero: int,
    note: Callable[[str], None],
) -> tuple[dict[int, Rehearsed], Spent]:
    """See ``Pipeline.rehearse``."""
    config = replace(pipe.config, group=_group_without_data(pipe.config.group.size))
    shares = None
    if copies > 1:
        group = _group_without_data(copies)
        group.here = (0,)  # of the copies, the first one
        of_copies = Copies(group, zero)
        config = replace(config, copies=of_copies)
        shares = Shares(of_copies)
        if zero:
            params = [shares.cut(stage, part, config.frozen) for stage, part in enumerate(params)]
    request = Call.of(config, "grad", params, x, targets, {}).request(shares)
    plans: dict[int, Plan] = {}
    with measured() as spent:
        kinds = trace_stages(config, request, note)
        with timed("lowering"):
            jobs = lowering_jobs(config, request, kinds, ranks, distributed=True)
            for rank, job in jobs.items():
                note(f"the plan of rank {rank}")
                plans[rank] = lower(job, rank)
    stages_of = request.schedule.placement.stages_of
    rehearsed = {}
    for rank, plan in plans.items():
        leaves = tree.leaves([params[stage] for stage in stages_of(rank)])
        nbytes = sum(leaf.nbytes for leaf in filter(tree.is_tensor, leaves))
        rehearsed[rank] = Rehearsed(plan, nbytes)
    return rehearsed, sum(spent, Spent())


def _group_without_data(size: int) -> LocalGroup:
    """Ranks on the device meta whose messages take time."""
    group = LocalGroup((torch.device("meta"),) * size)
    group.at_once = False
    return group

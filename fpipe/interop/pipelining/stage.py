# SPDX-License-Identifier: Apache-2.0
"""``PipelineStage``: a module as one stage of a pipeline, with the constructor of torch's class.

It holds the module and its place. Nothing is sent when one is built. Must not know schedules.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ... import adopt
from ...collectives import Group
from ...errors import UnsupportedError
from ...tree import Tree

#: The groups of fpipe over process groups: the processes connect once.
_GROUPS: dict[dist.ProcessGroup, Group] = {}


def group_of(pg: dist.ProcessGroup | None, device: torch.device) -> Group:
    """Return the group of fpipe over a process group, by default that of all processes."""
    source = dist.group.WORLD if pg is None else pg
    assert source is not None, "torch.distributed is initialized"
    if source not in _GROUPS:
        _GROUPS[source] = adopt(source, device)
    return _GROUPS[source]


class PipelineStage:
    """A module as stage ``stage_index`` of ``num_stages``.

    Shapes and dtypes of inputs and outputs are found by the first step, so ``input_args``,
    ``output_args`` and the like are not needed.

    Args:
        submodule: the module; it may be on "meta" until the first step.
        stage_index: the number of this stage, from 0.
        num_stages: how many stages there are in all.
        device: of this process.
        input_args, output_args, output_grads, input_grads, get_mesh: accepted, and not needed.
        group: the process group of the pipeline, by default that of all processes.
        dw_builder: not supported: fpipe computes weight gradients itself.

    Raises:
        ValueError: if ``stage_index`` is out of range.
        RuntimeError: if there are more processes than stages.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        input_args: object = None,
        output_args: object = None,
        output_grads: object = None,
        input_grads: object = None,
        group: dist.ProcessGroup | None = None,
        dw_builder: object = None,
        get_mesh: object = None,
    ):
        if not 0 <= stage_index < num_stages:
            raise ValueError(f"Stage index {stage_index} is out of range of {num_stages}")
        if dw_builder is not None:
            raise UnsupportedError(
                "dw_builder= is not supported: weight gradients are parts of the trace of a stage"
            )
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = torch.device(device)
        self.group = group
        self.group_rank = dist.get_rank(group)
        self.group_size = dist.get_world_size(group)
        if self.group_size > num_stages:
            raise RuntimeError(
                f"Pipeline group size {self.group_size} cannot be larger than number of stages "
                f"{num_stages}"
            )
        #: Of the last stage, the outputs of the microbatches until the next step, or until they
        #: are cleared.
        self.output_chunks = list[Tree]()
        self.clear_runtime_states = self.output_chunks.clear
        self.fwd_cache = dict[int, Tree]()  # empty: plans keep what a step needs
        #: The rank of each stage, once a schedule has it.
        self.stage_index_to_group_rank = {
            stage: stage % self.group_size for stage in range(num_stages)
        }

    @property
    def is_first(self) -> bool:
        """Whether it is the first stage."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether it is the last stage."""
        return self.stage_index == self.num_stages - 1

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the gradients of the module by a number. Schedules do not call it: they scale
        losses.
        """
        for parameter in self.submod.parameters() if grad_scale_factor != 1 else ():
            if parameter.grad is not None:
                parameter.grad.div_(grad_scale_factor)

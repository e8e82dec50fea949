# SPDX-License-Identifier: Apache-2.0
"""The input of lowering: a schedule, and the programs of each kind of microbatch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..programs.program import Programs
from ..schedule import Schedule
from ..tree import Aval
from .keys import Key, Source, Value
from .plan import Feature
from .value_graph import ValueGraph


@dataclass(frozen=True)
class ProgramSet:
    """The programs of one kind of microbatch, by stage of a rank, and the value graph."""

    graph: ValueGraph
    programs: Mapping[int, Programs]
    loss: Programs | None


class Scalar(NamedTuple):
    """A loss or an auxiliary loss of one microbatch. The loss is one stage past the last."""

    stage: int
    mb: int
    source: Source
    aval: Aval

    @property
    def key(self) -> Key:
        """Its key."""
        return (self.source, self.mb)


@dataclass(frozen=True)
class Job:
    """A schedule, the programs of its actions, and how they are lowered.

    ``program_sets[kind_of[m]]`` describes microbatch ``m``. Without ``training`` the schedule has
    forwards alone.
    """

    schedule: Schedule
    program_sets: tuple[ProgramSet, ...]
    kind_of: tuple[int, ...]
    training: bool = True
    accumulate: torch.dtype | None = None  # in which gradients are accumulated, if it is another
    wants_dx: bool = False  # whether the caller wants the gradient of x
    phased: bool = False  # all forwards come first, and all their messages before the backwards
    wired: bool = False  # some ranks are in other processes
    staged: bool = False  # messages lie on the host
    strict: bool = False  # a send blocks until it is received
    features: tuple[Feature, ...] = ()

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.schedule.stages

    def kind(self, mb: int) -> ProgramSet:
        """The programs of a microbatch."""
        return self.program_sets[self.kind_of[mb]]

    def slice_programs(self) -> dict[int, list[Programs]]:
        """For each stage of the rank, its programs for the slices of the first microbatch."""
        kinds = [self.kind(mb) for mb in range(self.schedule.slices)]
        return {stage: [kind.programs[stage] for kind in kinds] for stage in kinds[0].programs}

    def scalars(self) -> dict[int, list[Scalar]]:
        """The losses and auxiliary losses by the rank that computes them. Keys of auxiliary losses
        are right only for a rank whose programs ``program_sets`` has.
        """
        by_rank = defaultdict[int, list[Scalar]](list)
        for mb in range(self.schedule.units):
            kind = self.kind(mb)
            path = self.schedule.placement.path(mb)
            if kind.loss is not None:
                name = kind.loss.ys[0]
                aval = kind.loss.outputs.y.tensors[0]
                assert name is not None and aval is not None
                source = kind.graph.source(kind.loss, self.stages, name)
                by_rank[path[-1]].append(Scalar(self.stages, mb, source, aval))
            for stage, interface in enumerate(kind.graph.interfaces):
                if interface.aux is not None:
                    local = kind.programs.get(stage)
                    name = local.aux if local else None
                    source = Value(stage, name or "")
                    by_rank[path[stage]].append(Scalar(stage, mb, source, interface.aux))
        return by_rank

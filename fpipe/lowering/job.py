# SPDX-License-Identifier: Apache-2.0
"""What lowering is given: a schedule, with programs for each kind of microbatch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    """The programs of one kind of microbatch: those of the stages of a rank, the loss's, and the
    value graph.
    """

    graph: ValueGraph
    programs: Mapping[int, Programs]
    loss: Programs | None = None


class Scalar(NamedTuple):
    """A loss, of the stage past the last, or an auxiliary loss: one number of a microbatch."""

    stage: int
    mb: int
    source: Source
    aval: Aval

    @property
    def key(self) -> Key:
        """Its key."""
        return (self.source, self.mb)


@dataclass(frozen=True)
class LoweringInput:
    """The input of lowering: a schedule with programs for it.

    ``kinds[kind_of[m]]`` describes microbatch ``m``. ``training`` requests gradients; without it
    the schedule holds forwards alone. ``wide`` accumulates in another dtype.
    """

    schedule: Schedule
    kinds: tuple[ProgramSet, ...]
    kind_of: tuple[int, ...]
    training: bool = True
    wide: torch.dtype | None = None
    wants_dx: bool = False
    phased: bool = False  # all forwards first, with nothing under way between the phases
    wired: bool = False  # some ranks are in other processes
    # a send blocks until it is received, and receives are posted exactly where the plan has them
    strict: bool = False
    ahead: int = 2
    features: tuple[Feature, ...] = ()

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.schedule.stages

    def kind(self, mb: int) -> ProgramSet:
        """The programs of a microbatch."""
        return self.kinds[self.kind_of[mb]]

    @property
    def interleaved(self) -> bool:
        """Whether the parts of an action may run in turn, piece by piece."""
        return not self.strict and any(feature.interleaves for feature in self.features)

    def of_a_microbatch(self) -> dict[int, list[Programs]]:
        """The programs of each stage here for the slices of the first microbatch."""
        kinds = [self.kind(mb) for mb in range(self.schedule.slices)]
        return {stage: [kind.programs[stage] for kind in kinds] for stage in kinds[0].programs}

    def scalars(self, rank: int) -> list[Scalar]:
        """The losses and auxiliary losses that a rank computes; the keys hold if the rank's
        programs are known.
        """
        return [
            s for mb in range(self.schedule.units) for home, s in self._scalars(mb) if home == rank
        ]

    def scalar_ranks(self) -> list[int]:
        """The ranks that compute losses or auxiliary losses."""
        return sorted({home for mb in range(self.schedule.units) for home, _ in self._scalars(mb)})

    def _scalars(self, mb: int) -> Iterator[tuple[int, Scalar]]:
        kind = self.kind(mb)
        path = self.schedule.placement.path(mb)
        if kind.loss is not None:
            name = kind.loss.ys[0]
            aval = kind.loss.outputs.y.tensors[0]
            assert name is not None and aval is not None
            yield (
                path[-1],
                Scalar(self.stages, mb, kind.graph.source(kind.loss, self.stages, name), aval),
            )
        for stage, interface in enumerate(kind.graph.interfaces):
            if interface.aux is not None:
                local = kind.programs.get(stage)
                name = local.aux if local is not None else None
                yield path[stage], Scalar(stage, mb, Value(stage, name or ""), interface.aux)

# SPDX-License-Identifier: Apache-2.0
"""``Plan``: what one rank runs, as a flat tuple of instructions over numbered slots.

Everything is explicit here: which program on which slots, what is sent to whom, what is received
when, what is freed at its last use, what is added to which gradient. A plan can be printed and its
peak memory read before anything runs. This module knows programs and ranks, and neither tensors nor
backends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from ..actions.action import Action, Row
from ..actions.product import product
from ..programs.program import Program
from ..programs.stage_programs import Programs
from ..schedule import Schedule
from ..tree import Aval, Spec
from .keys import Key, Source, Value
from .memory import curve
from .sharding import Copies, Layout, Share
from .step import Kind, Step, Use
from .value_graph import ValueGraph
from .weaving.weave import Overlap, Weave


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of a plan.

    F B I W   run ``program`` on the slots ``reads``, results into ``writes`` (-1: not wanted)
    RECV      post the receive of message ``number`` of ``peer``     WAIT   wait for it, into
    ``writes`` SEND      send ``reads`` to rank ``peer``                        ZERO   zeros of
    ``specs`` into ``writes`` ADD       add ``reads`` to the gradients ``writes``, by ``how``  SUM
    ``reads``, in order, summed into ``writes`` SETTLE    release ``number`` sends to rank ``peer``:
    a message of that rank shows that it has received them REDUCE    start to reduce the gradients
    ``reads`` of a stage over the copies of the pipeline (see ``share``) UNSHARD   start to gather a
    stage's sharded parameters           RESHARD   free them EACH      pass a microbatch's outputs,
    and what the loss returned, ``reads``, to the caller's function LOSS      send the loss, whose
    parts ``reads`` are all computed, to the other ranks

    ``frees`` are the slots that are empty afterwards.
    """

    kind: Kind
    action: Action | None = None
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()
    program: Program | None = None
    peer: int = -1
    number: int = -1
    specs: tuple[Spec, ...] = ()
    how: tuple[str, ...] = ()
    share: Share | None = None
    owner: Programs | None = field(
        default=None, compare=False, repr=False
    )  # to which the program belongs
    stage: int = -1  # of the program: one past that of the action for the loss

    def __str__(self) -> str:
        what = {
            "RECV": f"from {self.peer} #{self.number}",
            "WAIT": f"from {self.peer} #{self.number}",
            "SEND": f"to {self.peer}",
            "SETTLE": f"{self.number} to {self.peer}",
        }
        words = [self.kind if self.action is None or len(self.kind) > 1 else str(self.action)]
        words += [self.program.label] if self.program is not None and self.program.label else []
        if self.share is not None:
            part = (
                ""
                if self.kind != "WAIT"
                else "gradients of "
                if self.share.gradients
                else "parameters of "
            )
            words += [f"{part}stage {self.share.stage}"]
        elif self.kind in what:
            words += [what[self.kind]]
        words += [f"{list(self.reads)}"] if self.reads else []
        words += [f"-> {list(self.writes)}"] if self.writes else []
        words += [f"free {list(self.frees)}"] if self.frees else []
        return " ".join(words)


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
    the schedule holds forwards alone. ``tied`` groups gradient leaves ``(stage, index)`` that are
    one parameter; ``grad_specs`` describes the gradients that are sent, of replicated stages and
    ties. ``wide`` accumulates in another dtype.
    """

    schedule: Schedule
    kinds: tuple[ProgramSet, ...]
    kind_of: tuple[int, ...]
    training: bool = True
    tied: tuple[tuple[tuple[int, int], ...], ...] = ()
    grad_specs: Mapping[tuple[int, int], Spec] = field(default_factory=dict)
    wide: torch.dtype | None = None
    wants_dx: bool = False
    phased: bool = False  # all forwards first, with nothing under way between the phases
    wired: bool = False  # some ranks are in other processes
    # a send blocks until it is received, and receives are posted exactly where the plan has them
    strict: bool = False
    ahead: int = 2
    overlap: Overlap = field(default_factory=Overlap)
    # outputs, and what the loss returns, are passed to the caller's function once computed
    each: bool = False
    copies: Copies | None = None  # of the whole pipeline, on other data
    layouts: Mapping[int, Layout] = field(default_factory=dict)  # by stage, where there are copies
    early_loss: bool = False  # a rank that computes the whole loss sends it as soon as it can

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.schedule.stages

    def kind(self, mb: int) -> ProgramSet:
        """The programs of a microbatch."""
        return self.kinds[self.kind_of[mb]]

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
        kind, path = self.kind(mb), self.schedule.placement.path(mb)
        if kind.loss is not None:
            name, aval = kind.loss.ys[0], kind.loss.outputs.y.tensors[0]
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


@dataclass(frozen=True)
class Plan:
    """What one rank runs.

    ``feeds`` maps values to the slots that hold them before the start, ``results`` to those that
    hold them at the end. ``split`` is the first instruction after the last forward (for ``vjp``).
    ``peak`` is the most bytes held at once, parameters and the caller's batch aside. With
    ``engine="eager"`` it is an estimate, and a lower bound for stages that look at their data: what
    autograd allocates inside a program is then not known.
    """

    rank: int
    instructions: tuple[Instruction, ...]
    slots: int
    feeds: Mapping[Key, int]
    results: Mapping[Key, int]
    split: int
    weaves: Mapping[str, Weave] = field(default_factory=dict)  # by fused action
    row: Row = ()  # the actions of the rank, those included that need no instruction
    steps: tuple[Step, ...] = field(default=(), compare=False, repr=False)
    uses: tuple[Use, ...] = field(default=(), compare=False, repr=False)  # by step
    wired: bool = False  # some ranks are in other processes

    @cached_property
    def curve(self) -> tuple[int, ...]:
        """The most bytes held during each step."""
        return curve(self.steps, self.uses, self.wired)

    @property
    def peak(self) -> int:
        """The most bytes held at once."""
        return max(self.curve, default=0)

    def carried(self) -> tuple[int, ...]:
        """The slots that are filled before ``split`` and read after it."""
        read: dict[int, None] = {}
        written: set[int] = set()
        for ins in self.instructions[self.split :]:
            read |= dict.fromkeys(slot for slot in ins.reads if slot not in written)
            written.update(ins.writes)
        return tuple(read)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return product("pictures").titled(str(self))

    def __str__(self) -> str:
        head = (
            f"rank {self.rank}: {len(self.instructions)} instructions, {self.slots} slots, "
            f"peak {self.peak:,} bytes"
        )
        lines = [head, *(f"  {i:4d}  {ins}" for i, ins in enumerate(self.instructions))]
        for weave in {id(w): w for w in self.weaves.values()}.values():
            others = sum(w is weave for w in self.weaves.values()) - 1
            lines += [
                "",
                str(weave),
                *([f"  and {others} more fused actions like it"] if others else []),
            ]
        return "\n".join(lines)

# SPDX-License-Identifier: Apache-2.0
"""An instruction: what each kind of it states, the registers that it runs on, and where it runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch

from ..actions.action import Action
from ..collectives.group import Group, Work
from ..programs.program import Program, Programs
from ..tree import Spec
from .keys import Key
from .memory import MemoryAccount


@dataclass(slots=True, eq=False)
class Registers:
    """What changes while one rank runs its plan."""

    slots: list[Any]
    seed: int | None = None  # of random draws; None: draws come from the device's stream as it is
    #: by (sender, number), until awaited
    receives: dict[tuple[int, int], Work] = field(default_factory=dict)
    #: of all copies, until awaited
    collectives: dict[Hashable, Sequence[Work]] = field(default_factory=dict)
    #: random states between segments
    streams: dict[tuple[int, str, str], torch.Tensor] = field(default_factory=dict)
    each: Callable[[int, list[Any]], object] | None = None  # gets the outputs of a microbatch
    send_loss: Callable[[], torch.Tensor] | None = None  # called once the loss is computed
    loss: torch.Tensor | None = None  # what it returned

    def copy(self) -> Registers:
        """The same values; a run changes only the copy."""
        return replace(
            self,
            slots=list(self.slots),
            receives=dict(self.receives),
            collectives=dict(self.collectives),
            streams=dict(self.streams),
        )


#: Returns None, or a work to wait for and the slots that its result is written to.
StepFn: TypeAlias = Callable[[Registers], Any]


RunFn: TypeAlias = Callable[[list[Any]], Sequence[Any]]


#: Checks a program's inputs and outputs, given the random state before it where it draws.
Check: TypeAlias = Callable[
    ["Instruction", Sequence[Any], Sequence[Any], torch.Tensor | None], None
]


class Instruction(NamedTuple):
    """An operation with what it reads, writes and frees: keys of values at first, slots in a plan.

    ``frees`` are the slots that are empty afterwards. A value that is written to slot -1 is not
    kept.
    """

    op: Op
    action: Action | None = None
    reads: tuple[Any, ...] = ()
    writes: tuple[Any, ...] = ()
    frees: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """The name of the kind, such as "SEND"; that of a program is its letter."""
        return self.op.kind

    @property
    def program(self) -> Program | None:
        """The program that it runs, if it runs one."""
        return getattr(self.op, "program", None)

    def __str__(self) -> str:
        short = self.action is not None and len(self.kind) == 1
        words = [str(self.action) if short else self.kind, str(self.op)]
        words += [f"{list(self.reads)}"] if self.reads else []
        words += [f"-> {list(self.writes)}"] if self.writes else []
        words += [f"free {list(self.frees)}"] if self.frees else []
        return " ".join(filter(None, words))


@dataclass(frozen=True)
class Machine:
    """Where the instructions of a plan run, and how."""

    rank: int
    group: Group
    device: torch.device
    wide: torch.dtype | None = None  # in which gradients are accumulated
    check: Check | None = None  # of each result
    first: int = 0  # the number of the first microbatch among those of all copies


class Sizes(Protocol):
    """Programs and specs for other sizes."""

    def program(
        self, action: Action | None, stage: int, program: Program
    ) -> tuple[Program, Programs] | None:
        """What runs in place of a program."""
        ...

    def specs(self, keys: Sequence[Key], specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
        """The specs of values."""
        ...


class Op:
    """What an instruction does. The methods here are those of a kind that holds no memory."""

    __slots__ = ()
    kind: ClassVar[str]
    #: Whether it reads the values of the keys that it writes.
    updates: ClassVar[bool] = False
    #: Whether its results take the place of earlier values of the same keys.
    renews: ClassVar[bool] = False

    def __str__(self) -> str:
        """What is printed after the kind."""
        return ""

    def hold(self, ins: Instruction, ends: Sequence[int], account: MemoryAccount) -> int:
        """Enter what it holds into the account; returns the bytes while it runs.

        ``ins`` is over keys. ``ends`` are the places of the reads that end.
        """
        return account.live

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        """The instruction as a function of the registers."""
        raise NotImplementedError

    def resized(self, ins: Instruction, sizes: Sizes) -> Op | None:
        """The same for other sizes; None: there is none."""
        return self

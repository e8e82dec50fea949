# SPDX-License-Identifier: Apache-2.0
"""An instruction, its operation, the registers that it changes, and the machine that runs it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch

from ..actions.action import Action
from ..collectives.group import Group, Work
from ..programs.program import Program
from .memory import MemoryAccount


@dataclass(slots=True, eq=False)
class Registers:
    """The values that change while a rank runs its plan."""

    slots: list[Any]
    seed: int | None  # of random draws; None: they continue the device's stream
    #: Until awaited.
    receives: dict[Hashable, Work] = field(default_factory=dict)
    #: Collectives of all copies, until awaited.
    collectives: dict[Hashable, Sequence[Work]] = field(default_factory=dict)
    #: Random states between segments of programs.
    streams: dict[tuple[int, str, str], torch.Tensor] = field(default_factory=dict)
    each: Callable[[int, list[Any]], object] | None = None  # gets the outputs of a microbatch

    def copy(self) -> Registers:
        """A copy, which a run may change."""
        return replace(
            self,
            slots=list(self.slots),
            receives=dict(self.receives),
            collectives=dict(self.collectives),
            streams=dict(self.streams),
        )


#: An instruction as a function. It returns None, or a work to wait for and the slots of its result.
StepFn: TypeAlias = Callable[[Registers], Any]
RunFn: TypeAlias = Callable[[list[Any]], Sequence[Any]]
#: Checks the inputs and outputs of a program, given the random state before it if it draws.
Check: TypeAlias = Callable[
    ["Instruction", Sequence[Any], Sequence[Any], torch.Tensor | None], None
]


class Instruction(NamedTuple):
    """An operation, and what it reads, writes and frees: keys at first, slots in a plan.

    ``frees`` are the slots that are empty afterwards. A value written to slot -1 is not kept.
    """

    op: Opcode
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
        words = [str(self.action) if self.program else self.kind, str(self.op)]
        if self.reads:
            words.append(f"{list(self.reads)}")
        if self.writes:
            words.append(f"-> {list(self.writes)}")
        if self.frees:
            words.append(f"free {list(self.frees)}")
        return " ".join(filter(None, words))


@dataclass(frozen=True)
class Machine:
    """Where the instructions of a plan run, and how."""

    rank: int
    group: Group
    device: torch.device
    accumulate: torch.dtype | None  # in which gradients are accumulated
    check: Check | None  # of each result
    first: int  # the number of the first microbatch among those of all copies


class Opcode:
    """What an instruction does. By default it holds no memory."""

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
        """Record in the account what it holds; returns the bytes that are held while it runs.

        ``ins`` is over keys. ``ends`` are the indices of the reads that end.
        """
        return account.live

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        """The instruction as a function, which also sets the slots in ``frees`` to None."""
        raise NotImplementedError

# SPDX-License-Identifier: Apache-2.0
"""``Plan``: what one rank runs, as a flat tuple of instructions over numbered slots.

A plan states which program runs on which slots, what is sent to whom, when messages are received,
what is freed at its last use, and what is added to which gradient. It can be printed, and its peak
memory read, before anything runs. This module knows programs and ranks, no tensors or backends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from ..actions.action import Action, AnyAction, Row
from ..actions.product import load_product
from .instruction import Instruction
from .keys import Key
from .memory import MemoryAccount

KEY = """\
  0F1: F of stage 0 on microbatch 1
  an F, B or I twice: once of the loss
  [2, 3]: slots read; each holds a tensor
  -> [4]: slots written
  free [2]: slots empty afterwards
  RECV, WAIT: a receive begins, ends
  SEND: a send begins
  #0: the first message from that rank
  ADD: gradients into their sum
  peak: the most bytes held at once
"""  #: of a notebook's cell


class Use(NamedTuple):
    """Which values an instruction over keys reads for the last time, and which writes are read."""

    last_reads: tuple[int, ...]  # indices in ``reads``
    kept_writes: tuple[bool, ...]  # for each write, whether it is read later


class Feature:
    """What an option adds to the plan of a rank. A subclass overrides what it changes.

    ``start`` returns the feature for one rank, by default a copy that has its ``builder``. The
    builder then calls its methods.
    """

    #: Whether it may interleave the programs of an action.
    interleaves: ClassVar[bool] = False
    builder: Any

    def start(self, builder: Any) -> Feature:
        """The feature for the rank of a builder."""
        started = copy(self)
        vars(started)["builder"] = builder  # a feature may be frozen
        return started

    def parameter(self, stage: int, leaf: int) -> Key | None:
        """The key under which programs read a parameter; None: that of the caller's value."""
        return None

    def before(self, action: AnyAction | None) -> None:
        """Called before each action of the row, and at the end of each phase with None."""

    def act(self, action: AnyAction, position: int) -> bool:
        """Emit an action in place of the builder; False: the builder emits it."""
        return False

    def after(self, action: Action) -> None:
        """Called once the programs of an action have run."""

    def add(self, action: Action) -> bool:
        """Add the gradients of an action in place of the builder; False: the builder adds them."""
        return False

    def finish(self) -> None:
        """Called at the end of the row."""

    def results(self, keys: Iterable[Key]) -> Iterable[Key]:
        """The keys of results, given those without this feature."""
        return keys

    def complete(self, plan: Plan) -> Plan:
        """The plan with what the feature records in it."""
        return plan


@dataclass(frozen=True)
class Plan:
    """What one rank runs.

    ``feeds`` maps values to the slots that hold them before the start, ``results`` to those that
    hold them at the end. ``split`` is the first instruction after the last forward (for ``vjp``).
    ``peak`` is the most bytes held at once, without parameters and the caller's batch. With
    ``engine="eager"`` it is an estimate and, for stages that look at their data, a lower bound:
    what autograd allocates in them is not known.
    """

    rank: int
    instructions: tuple[Instruction, ...]
    slots: int
    feeds: Mapping[Key, int]
    results: Mapping[Key, int]
    split: int
    row: Row  # the actions of the rank, also those that need no instruction
    #: The instructions over keys, and the use of each.
    keyed: tuple[Instruction, ...] = field(compare=False, repr=False)
    uses: tuple[Use, ...] = field(compare=False, repr=False)
    wired: bool  # messages hold memory
    weaves: Mapping[str, Any] = field(default_factory=dict)  # by fused action

    @cached_property
    def curve(self) -> tuple[int, ...]:
        """The most bytes held during each instruction."""
        account = MemoryAccount(self.wired)
        held = []
        for ins, (ends, needed) in zip(self.keyed, self.uses, strict=True):
            during = ins.op.hold(ins, ends, account)
            for key, later in zip(ins.writes, needed, strict=True):
                if not later:
                    account.end(key)
            for index in ends:
                account.end(ins.reads[index])
            held.append(max(during, account.live))
        return tuple(held)

    @property
    def peak(self) -> int:
        """The most bytes held at once."""
        return max(self.curve, default=0)

    #: A subclass may set it: a function of the executable and the registers that yields the steps
    #: in the order in which they run.
    steps_in_order: ClassVar[Any] = None

    def kept_for_backward(self) -> tuple[int, ...]:
        """The slots that are filled before ``split`` and read after it."""
        read: dict[int, None] = {}
        written: set[int] = set()
        for ins in self.instructions[self.split :]:
            read |= dict.fromkeys(slot for slot in ins.reads if slot not in written)
            written.update(ins.writes)
        return tuple(read)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        pictures = load_product("pictures")
        return pictures.folded(self._text(pictures.size_text(self.peak), KEY))

    def __str__(self) -> str:
        return self._text(f"{self.peak:,} bytes")

    def _text(self, peak: str, *key: str) -> str:
        count = len(self.instructions)
        head = f"rank {self.rank}: {count} instructions, peak {peak}"
        lines = [head, *key, *(f"  {i:4d}  {ins}" for i, ins in enumerate(self.instructions))]
        for weave in {id(w): w for w in self.weaves.values()}.values():
            others = sum(w is weave for w in self.weaves.values()) - 1
            lines += ["", str(weave)]
            if others:
                lines.append(f"  and {others} more fused actions like it")
        return "\n".join(lines)

# SPDX-License-Identifier: Apache-2.0
"""Messages to ranks in other processes: when sends are settled, and one common order.

A send is settled, and its tensors are released, once a message of the receiver shows that it has
arrived. On a ``strict`` group a send blocks until it is received; there, receives are posted
exactly where one common order of all ranks has the message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..actions.action import plain
from ..actions.costs import Costs
from ..actions.simulation import simulate_rows
from .instruction import Instruction, Machine, Op, Registers, StepFn
from .job import LoweringInput
from .keys import Key
from .memory import MemoryAccount
from .messages import Messages, places
from .value_graph import Out

#: Where all ranks follow one order: the sends to one rank that may be under way.
_UNDER_WAY = 2


class WiredMessages(Messages):
    """Emits SETTLE steps too, and RECV steps in one order of all ranks where that is needed."""

    def __init__(self, job: LoweringInput, rank: int, out: list[Instruction], here: set[Key]):
        super().__init__(job, rank, out, here)
        self.under_way: dict[int, deque[int]] = {}
        self._places: dict[int, dict[tuple[int, int], int]] = {}
        self.place = 0
        # Forwards alone receive nothing that shows which sends have arrived: there, too, ranks
        # follow one order.
        self.ordered = job.strict or (job.wired and not job.training)
        if self.ordered:
            self._follow()

    def before(self, place: int) -> None:
        """Where one order is followed, post what others send before the action starts."""
        self.place = place
        if self.ordered:
            self._post_until((self._times[place][0], self.placement.ranks))

    def sending(self) -> None:
        """Where one order is followed, post what others send before."""
        if self.ordered:
            self._post_until((self._times[self.place][1], self.rank))

    def next_phase(self) -> None:
        """Wait for every message of the forward phase, which shows that all sends have arrived."""
        super().next_phase()
        self.under_way.clear()

    def _follow(self) -> None:
        """Compute one order of the messages of all ranks.

        It is the simulator's at unit cost: a message is at the end of the action that sends it,
        messages of one moment are ordered by sender. Every rank posts and sends in this order, so
        its first event that is not over can always happen: there is no deadlock.
        """
        schedule = self.job.schedule
        rows = tuple(tuple(plain(row)) for row in schedule)
        line = simulate_rows(
            rows, schedule.placement, schedule.units, Costs(), slices=schedule.slices
        )
        self._by_rank = {channel.src: channel for channel in self.channels}
        ends = {src: {s.position: s.end for s in line.of_rank(src)} for src in self._by_rank}
        events = (
            (ends[c.src][place], c.src, n)
            for c in self.channels
            for n, place in enumerate(c.places)
        )
        self._events = deque(sorted(events))
        self._times = {span.position: (span.start, span.end) for span in line.of_rank(self.rank)}

    def _post_until(self, moment: tuple[float, int]) -> None:
        while self._events and self._events[0][:2] < moment:
            _, src, number = self._events.popleft()
            self._post(self._by_rank[src], number + 1)

    # ---- sends ----
    def sent(self, rank: int, fact: str, mb: int, outs: Sequence[Out]) -> None:
        """Enter a send among those under way to a rank."""
        if not self.job.wired:
            return
        needed = max(self._reads_at(rank, s, fact, mb) for out in outs for s in out.readers)
        waiting = self.under_way.setdefault(rank, deque())
        waiting.append(needed)
        if self.ordered and len(waiting) > _UNDER_WAY:
            # In the common order the older message comes before this one, so its receiver
            # posts its receive without needing anything that this rank sends later.
            waiting.popleft()
            self.out.append(Instruction(Settle(rank, 1)))

    def _reads_at(self, rank: int, stage: int, fact: str, mb: int) -> int:
        """The place in a rank's row where a stage has read all its values of a microbatch; -1 if it
        has none.
        """
        read = self._places.get(rank)
        if read is None:
            read = self._places[rank] = {}
            for action, _, place in places(self.job, rank):
                if action.op != "W":  # the backward, where there is one, comes last
                    read[action.stage, action.microbatch] = place
        return read.get((min(max(stage, 0), self.job.stages - 1), mb), -1)

    def arrived(self, peer: int, place: int) -> None:
        """A message from a place in a peer's row shows that whatever is read before that place has
        arrived there.
        """
        waiting = self.under_way.get(peer)
        count = 0
        while waiting and waiting[0] <= place:
            waiting.popleft()
            count += 1
        if count:
            self.out.append(Instruction(Settle(peer, count)))


@dataclass(frozen=True, slots=True)
class Settle(Op):
    """Release sends to a rank: a message of that rank shows that it has received them."""

    peer: int
    count: int
    kind = "SETTLE"

    def __str__(self) -> str:
        return f"{self.count} to {self.peer}"

    def hold(self, ins: Instruction, ends: Sequence[int], account: MemoryAccount) -> int:
        account.settle(self.peer, self.count)
        return account.live

    def bind(self, ins: Instruction, machine: Machine) -> StepFn:
        settle = machine.group.settle
        peer = self.peer
        count = self.count

        def step(r: Registers) -> None:
            settle(peer, count)

        return step

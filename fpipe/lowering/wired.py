# SPDX-License-Identifier: Apache-2.0
"""Messages to ranks in other processes: when sends are settled, and the common order of ranks.

A send is settled once a message of the receiver shows that it has arrived: its tensors are then
released. On a ``strict`` group a send blocks until it is received. All ranks then follow one order
of all messages, and receives are posted exactly where that order has them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..actions.action import unfused
from .instruction import Instruction, Machine, Opcode, Registers, StepFn
from .job import Job
from .memory import MemoryAccount
from .messages import Channel, Messages, places, post
from .value_graph import Out

#: How many sends to one rank may be unsettled in the common order.
_UNSETTLED = 2


class WiredMessages(Messages):
    """Yields the instruction SETTLE, too, and follows the common order of ranks if it must."""

    def __init__(self, job: Job, rank: int):
        super().__init__(job, rank)
        #: So many places before that of a message its sender may have left actions out.
        self.lag = 0
        #: By receiving rank, of each send that is not settled: the place in the receiver's row
        #: where it has read the message.
        self.unsettled: dict[int, deque[int]] = {}
        self._read_places: dict[int, Mapping[tuple[int, int], int]] = {}
        # Where all actions are forwards, no message shows which sends have arrived.
        self.ordered = job.strict or (job.wired and not job.training)
        if self.ordered:
            self._place = 0
            self._follow()

    # ---- the common order ----
    def before(self, place: int) -> Iterable[Instruction]:
        """In the common order, post what others send before the action starts."""
        if not self.ordered:
            return ()
        self._place = place
        start, _ = self._times[place]
        return self._post_until((start, self.placement.ranks))

    def sending(self) -> Iterable[Instruction]:
        """In the common order, post what others send before the action sends."""
        if not self.ordered:
            return ()
        _, end = self._times[self._place]
        return self._post_until((end, self.rank))

    def _follow(self) -> None:
        """Compute the common order of messages.

        It is the simulator's at unit cost. A message is sent at the end of its action, and messages
        of one moment are ordered by sender. All ranks post and send in this order, so the first
        message that is not over can always be exchanged: there is no deadlock.
        """
        schedule = self.job.schedule
        rows = tuple(tuple(unfused(row)) for row in schedule)
        line = replace(schedule, rows=rows).simulate()
        self._times = {span.position: (span.start, span.end) for span in line.of_rank(self.rank)}
        events: list[tuple[float, int, int, Channel]] = []
        for channel in self.channels:
            src = channel.src
            ends = {span.position: span.end for span in line.of_rank(src)}
            for number, message in enumerate(channel.messages):
                events.append((ends[message.place], src, number, channel))
        self._events = deque(sorted(events, key=lambda event: event[:3]))

    def _post_until(self, moment: tuple[float, int]) -> Iterator[Instruction]:
        """Post the messages that the common order has before a moment, a time and a sender."""
        while self._events and self._events[0][:2] < moment:
            _, _, number, channel = self._events.popleft()
            yield from post(channel, number + 1)

    # ---- sends ----
    def sent(self, rank: int, fact: str, mb: int, outs: Sequence[Out]) -> Iterator[Instruction]:
        """Record a send as unsettled; in the common order, settle an older one."""
        if not self.job.wired:
            return
        read = max(self._read_place(rank, stage, mb) for out in outs for stage in out.readers)
        unsettled = self.unsettled.setdefault(rank, deque())
        unsettled.append(read)
        if self.ordered and len(unsettled) > _UNSETTLED:
            # The older message comes before this one in the common order, so its receiver posts
            # its receive without needing anything that this rank sends later.
            unsettled.popleft()
            yield Instruction(Settle(rank, 1))

    def _read_place(self, rank: int, stage: int, mb: int) -> int:
        """The place in a rank's row after which a stage reads nothing more of a microbatch; -1: it
        reads nothing.
        """
        if rank not in self._read_places:
            # A later action of the same stage and microbatch, the backward, takes the place of F.
            self._read_places[rank] = {
                (action.stage, action.microbatch): place
                for action, _, place in places(self.job, rank)
                if action.op != "W"
            }
        stage = min(max(stage, 0), self.job.stages - 1)
        return self._read_places[rank].get((stage, mb), -1)

    def arrived(self, peer: int, place: int) -> Iterator[Instruction]:
        """Settle the sends that a peer has read before a place in its row, from which it sent a
        message.
        """
        unsettled = self.unsettled.get(peer)
        count = 0
        while unsettled and unsettled[0] <= place - self.lag:
            unsettled.popleft()
            count += 1
        if count:
            yield Instruction(Settle(peer, count))

    def next_phase(self) -> Iterator[Instruction]:
        """Wait for every message of the forward phase, which shows that all sends have arrived."""
        yield from super().next_phase()
        self.unsettled.clear()


@dataclass(frozen=True, slots=True)
class Settle(Opcode):
    """SETTLE: release the oldest sends to a rank, which has received them."""

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

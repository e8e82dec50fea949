# SPDX-License-Identifier: Apache-2.0
"""Messages of one rank: what it receives from which rank in which order, what it sends, and when
sends are settled.

The order of a channel is that in which the sender's row computes its messages. The receiver reads
that row, so sender and receiver know the order without exchanging it. Receives are posted a few
messages ahead. On a ``strict`` group a send blocks until it is received; there, receives are posted
exactly where one common order of all ranks has the message. This module must not know the contents
of programs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ..actions.action import Action, plain
from ..actions.action_kinds import KINDS
from ..actions.costs import Costs
from ..actions.simulation import simulate_rows
from ..tree import Spec
from .instructions import Instruction, Recv, Send, Settle, Wait
from .keys import Key
from .plan import LoweringInput
from .value_graph import Out

#: op -> the facts that it provides to other ranks.
_SENT = {op: tuple(fact for fact in kind.provides if fact != "W") for op, kind in KINDS.items()}
#: Where all ranks follow one order: the sends to one rank that may be under way.
_UNDER_WAY = 2


class Channel:
    """Messages from one rank in their order: keys, specs, the action that sends each and its
    place.
    """

    def __init__(self, src: int):
        self.src = src
        self.messages: list[tuple[tuple[Key, ...], tuple[Spec, ...]]] = []
        self.places: list[int] = []  # in the sender's row
        self.actions: list[Action] = []
        self.posted = self.received = 0
        self.fence = -1  # messages of the first phase; -1: no phases

    @property
    def end(self) -> int:
        """How many may be posted in this phase."""
        return self.fence if self.fence >= 0 else len(self.messages)


class Messages:
    """Emits RECV, WAIT, SEND and SETTLE steps into ``out``; ``here`` are the values that the rank
    has.
    """

    def __init__(self, job: LoweringInput, rank: int, out: list[Instruction], here: set[Key]):
        self.job, self.rank, self.out, self.here = job, rank, out, here
        self.placement = job.schedule.placement
        self.coming: dict[Key, tuple[Channel, int]] = {}
        self.under_way: dict[int, deque[int]] = {}
        self._routes: dict[tuple[int, str, int, int], list[tuple[int, list[Out]]]] = {}
        self._places: dict[int, dict[tuple[int, int], int]] = {}
        self.channels = list(self._incoming())
        self.place = 0
        # Forwards alone receive nothing that shows which sends have arrived: there, too, ranks
        # follow one order.
        self.ordered = job.strict or (job.wired and not job.training)
        if self.ordered:
            self._follow()

    # ---- routes ----
    def outgoing(self, stage: int, fact: str, mb: int) -> list[tuple[int, list[Out]]]:
        """The values that a fact of a stage sends, by receiving rank."""
        memo = (stage, fact, self.job.kind_of[mb], self.placement.path_index(mb))
        routes = self._routes.get(memo)
        if routes is None:
            path = self.placement.path(mb)
            by_rank: dict[int, list[Out]] = {}
            last = len(path) - 1
            home = path[min(stage, last)]
            for out in self.job.kind(mb).graph.users[fact, stage]:
                for rank in dict.fromkeys(path[min(max(s, 0), last)] for s in out.readers):
                    if rank != home:
                        by_rank.setdefault(rank, []).append(out)
            routes = self._routes[memo] = list(by_rank.items())
        return routes

    def _incoming(self) -> Iterator[Channel]:
        """The messages that other ranks send here, from their rows."""
        job, sources = self.job, set()
        kinds = {(job.kind_of[mb], self.placement.path(mb)): mb for mb in range(job.schedule.units)}
        for (_, path), mb in kinds.items():
            for stage in range(job.stages + 1):
                for fact in ("F" if stage < job.stages else "") + ("I" if job.training else ""):
                    if any(rank == self.rank for rank, _ in self.outgoing(stage, fact, mb)):
                        sources.add(path[min(stage, job.stages - 1)])
        for src in sorted(sources - {self.rank}):
            channel = Channel(src)
            for action, place, _ in _places(job, src):
                if job.phased and action.op != "F" and channel.fence < 0:
                    channel.fence = len(channel.messages)
                for fact in _SENT[action.op]:
                    if fact == "I" and action.stage == job.stages - 1:
                        self._expect(channel, place, action, action.stage + 1, "I")
                    self._expect(channel, place, action, action.stage, fact)
            yield channel

    def _expect(self, channel: Channel, place: int, action: Action, stage: int, fact: str) -> None:
        for rank, outs in self.outgoing(stage, fact, action.microbatch):
            if rank == self.rank:
                keys = tuple([(o.source, action.microbatch) for o in outs])
                for key in keys:
                    self.coming[key] = (channel, len(channel.messages))
                channel.messages.append((keys, tuple([out.spec for out in outs])))
                channel.places.append(place)
                channel.actions.append(action)

    # ---- steps ----
    def begin(self) -> None:
        """Post the first receives of a phase."""
        if not self.job.strict:
            for channel in self.channels:
                self._post(channel, channel.received + self.job.ahead)

    def before(self, place: int) -> None:
        """Where one order is followed, post what others send before the action at ``place`` of this
        row starts.
        """
        self.place = place
        if self.ordered:
            self._post_until((self._times[place][0], self.placement.ranks))

    def _post_until(self, moment: tuple[float, int]) -> None:
        while self._events and self._events[0][:2] < moment:
            _, src, number = self._events.popleft()
            self._post(self._by_rank[src], number + 1)

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

    def drain(self) -> None:
        """Wait for every message of the phase."""
        for channel in self.channels:
            while channel.received < channel.end:
                self.fetch(channel.messages[channel.received][0][0])

    def next_phase(self) -> None:
        """Wait for every message of the forward phase; later receives belong to the backward
        phase.
        """
        self.drain()
        self.under_way.clear()
        for channel in self.channels:
            channel.fence = -1

    def _post(self, channel: Channel, upto: int) -> None:
        while channel.posted < min(upto, channel.end):
            keys, specs = channel.messages[channel.posted]
            self.out.append(Instruction(Recv(channel.src, channel.posted, specs, keys)))
            channel.posted += 1

    def fetch(self, key: Key) -> None:
        """Wait for the message that holds a value, and for those before it."""
        if key not in self.coming:
            return
        channel, number = self.coming[key]
        while channel.received <= number:
            self._post(channel, channel.received + 1 + (0 if self.job.strict else self.job.ahead))
            keys, specs = channel.messages[channel.received]
            action = channel.actions[channel.received]
            wait = Wait(channel.src, channel.received, specs, keys)
            self.out.append(Instruction(wait, action, writes=keys))
            self.here.update(keys)
            channel.received += 1
            if self.job.wired:
                self._settle(channel.src, channel.places[channel.received - 1])

    def send(self, action: Action, stage: int, fact: str) -> None:
        """Send the values of a fact of a stage to other ranks."""
        routes = self.outgoing(stage, fact, action.microbatch)
        if routes and self.ordered:
            self._post_until((self._times[self.place][1], self.rank))
        for rank, outs in routes:
            keys = tuple([(o.source, action.microbatch) for o in outs])
            specs = tuple([out.spec for out in outs])
            self.out.append(Instruction(Send(rank, specs), action, keys))
            if self.job.wired:
                needed = max(
                    self._reads_at(rank, s, fact, action.microbatch)
                    for out in outs
                    for s in out.readers
                )
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
        places = self._places.get(rank)
        if places is None:
            places = self._places[rank] = {}
            for action, _, place in _places(self.job, rank):
                if action.op != "W":
                    places[action.stage, action.microbatch] = (
                        place  # the backward, where there is one, comes last
                    )
        return places.get((min(max(stage, 0), self.job.stages - 1), mb), -1)

    def _settle(self, peer: int, place: int) -> None:
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


def _places(job: LoweringInput, rank: int) -> Iterator[tuple[Action, int, int]]:
    """The actions of a row, each with the first place at which it may send, and the last at which
    it may read.

    Both are its own place, or the first and the last of the parts that it is woven with.
    """
    place = 0
    woven = job.interleaved
    for action in job.schedule[rank]:
        first, last = place, place + len(action.parts) - 1
        for part in action.parts:
            yield part, first if woven else place, last if woven else place
            place += 1

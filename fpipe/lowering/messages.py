# SPDX-License-Identifier: Apache-2.0
"""Messages of one rank: what it receives from which rank in which order, and what it sends.

The order of a channel is that in which the sender's row computes its messages. The receiver reads
that row, so sender and receiver know the order without exchanging it. Receives are posted a few
messages ahead. ``wired`` has what is added where ranks are in other processes. This module must not
know the contents of programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..actions.action import Action
from ..actions.action_kinds import KINDS
from ..tree import Spec
from .instruction import Instruction
from .instructions import Recv, Send, Wait
from .job import LoweringInput
from .keys import Key
from .value_graph import Out

#: op -> the facts that it provides to other ranks.
_SENT = {op: tuple(fact for fact in kind.provides if fact in "FI") for op, kind in KINDS.items()}


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
    """Emits RECV, WAIT and SEND steps into ``out``; ``here`` are the values that the rank
    has.
    """

    def __init__(self, job: LoweringInput, rank: int, out: list[Instruction], here: set[Key]):
        self.job = job
        self.rank = rank
        self.out = out
        self.here = here
        self.placement = job.schedule.placement
        self.coming: dict[Key, tuple[Channel, int]] = {}
        self._routes: dict[tuple[int, str, int, int], list[tuple[int, list[Out]]]] = {}
        self.channels = list(self._incoming())

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
        job = self.job
        sources = set()
        kinds = {(job.kind_of[mb], self.placement.path(mb)): mb for mb in range(job.schedule.units)}
        for (_, path), mb in kinds.items():
            for stage in range(job.stages + 1):
                for fact in ("F" if stage < job.stages else "") + ("I" if job.training else ""):
                    if any(rank == self.rank for rank, _ in self.outgoing(stage, fact, mb)):
                        sources.add(path[min(stage, job.stages - 1)])
        for src in sorted(sources - {self.rank}):
            channel = Channel(src)
            for action, place, _ in places(job, src):
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
        """Called before the action at a place of this row starts."""

    def sending(self) -> None:
        """Called before the values of a fact are sent."""

    def sent(self, rank: int, fact: str, mb: int, outs: Sequence[Out]) -> None:
        """Called once values are sent to a rank."""

    def arrived(self, peer: int, place: int) -> None:
        """Called once a message has arrived, from a place in the row of a peer."""

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
            self.arrived(channel.src, channel.places[channel.received - 1])

    def send(self, action: Action, stage: int, fact: str) -> None:
        """Send the values of a fact of a stage to other ranks."""
        routes = self.outgoing(stage, fact, action.microbatch)
        if routes:
            self.sending()
        for rank, outs in routes:
            keys = tuple([(o.source, action.microbatch) for o in outs])
            specs = tuple([out.spec for out in outs])
            self.out.append(Instruction(Send(rank, specs), action, keys))
            self.sent(rank, fact, action.microbatch, outs)


def places(job: LoweringInput, rank: int) -> Iterator[tuple[Action, int, int]]:
    """The actions of a row, each with the first place at which it may send, and the last at which
    it may read.

    Both are its own place, or the first and the last of the parts that it is woven with.
    """
    place = 0
    woven = job.interleaved
    for action in job.schedule[rank]:
        first = place
        last = place + len(action.parts) - 1
        for part in action.parts:
            yield part, first if woven else place, last if woven else place
            place += 1

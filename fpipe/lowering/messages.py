# SPDX-License-Identifier: Apache-2.0
"""Messages of one rank: what it receives from which rank in which order, and what it sends.

The messages of a channel have the order in which the sender's row computes them. The receiver reads
that row, so both ranks know the order without exchanging it. Receives are posted a few messages
ahead. ``wired`` adds what ranks in other processes need. This module must not know the contents of
programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ..actions.action import Action
from ..actions.action_kinds import KINDS
from ..tree import Spec
from .instruction import Instruction
from .instructions import Recv, Send, Wait
from .job import Job
from .keys import Key
from .value_graph import Out

#: By letter of an action: the facts of it that other ranks may need.
_FACTS = {op: tuple(fact for fact in kind.provides if fact in "FI") for op, kind in KINDS.items()}

#: How many receives are posted ahead of a wait.
AHEAD = 2

#: The ranks to which values are sent, each with its values.
Routes: TypeAlias = Sequence[tuple[int, Sequence[Out]]]


class Message(NamedTuple):
    """A message: its values, the action that sends it, and that action's place in its row."""

    keys: tuple[Key, ...]
    specs: tuple[Spec, ...]
    action: Action
    place: int


@dataclass(eq=False)
class Channel:
    """The messages from one rank in their order, and how many were posted and received."""

    src: int
    messages: Sequence[Message]
    end: int  # how many may be posted in this phase
    posted: int = 0
    received: int = 0


class Messages:
    """Yields the instructions RECV, WAIT and SEND of a rank, in the order in which they run."""

    def __init__(self, job: Job, rank: int):
        self.job = job
        self.rank = rank
        self.placement = job.schedule.placement
        self._routes = self._all_routes()
        self.channels = list(self._channels())
        #: By value of another rank: the channel and the number of the message that brings it.
        self.incoming: dict[Key, tuple[Channel, int]] = {}
        for channel in self.channels:
            for number, message in enumerate(channel.messages):
                for key in message.keys:
                    self.incoming[key] = (channel, number)

    # ---- routes ----
    def outgoing(self, stage: int, fact: str, mb: int) -> Routes:
        """The values that a fact of a stage sends, by receiving rank."""
        return self._routes[stage, fact, self.job.kind_of[mb], self.placement.path_index(mb)]

    def _all_routes(self) -> Mapping[tuple[int, str, int, int], Routes]:
        """The routes by stage, fact, kind of microbatch, and path."""
        job = self.job
        units = range(job.schedule.units)
        routes = {}
        for kind, index in {(job.kind_of[mb], self.placement.path_index(mb)) for mb in units}:
            path = self.placement.paths[index]
            for (fact, stage), outs in job.program_sets[kind].graph.leaving.items():
                if fact == "F" or job.training:
                    routes[stage, fact, kind, index] = _by_rank(outs, stage, path)
        return routes

    def _channels(self) -> Iterator[Channel]:
        """A channel for each rank that sends to this one."""
        senders = {
            _rank_of(stage, self.placement.paths[index])
            for (stage, _, _, index), routes in self._routes.items()
            if any(rank == self.rank for rank, _ in routes)
        }
        for src in sorted(senders):
            messages = list(self._messages_from(src))
            end = len(messages)
            if self.job.phased:
                backwards = (n for n, message in enumerate(messages) if message.action.op != "F")
                end = next(backwards, end)
            yield Channel(src, messages, end)

    def _messages_from(self, src: int) -> Iterator[Message]:
        """The messages that a rank sends to this one, from its row."""
        for action, place, _ in places(self.job, src):
            stage, _, mb = action
            for fact in _FACTS[action.op]:
                for sender in self.senders(stage, fact):
                    for rank, outs in self.outgoing(sender, fact, mb):
                        if rank == self.rank:
                            yield Message(*_values(outs, mb), action, place)

    def senders(self, stage: int, fact: str) -> tuple[int, ...]:
        """The stages whose values leave with a fact of a stage: with I of the last one the loss's
        leave first.
        """
        of_loss = fact == "I" and stage == self.job.stages - 1
        return (stage + 1, stage) if of_loss else (stage,)

    # ---- instructions ----
    def begin(self) -> Iterator[Instruction]:
        """Post the first receives of a phase."""
        if not self.job.strict:
            for channel in self.channels:
                yield from post(channel, channel.received + AHEAD)

    def before(self, place: int) -> Iterable[Instruction]:
        """What comes before the action at a place of the row."""
        return ()

    def sending(self) -> Iterable[Instruction]:
        """What comes before the values of a fact are sent."""
        return ()

    def sent(self, rank: int, fact: str, mb: int, outs: Sequence[Out]) -> Iterable[Instruction]:
        """What comes after values were sent to a rank."""
        return ()

    def arrived(self, peer: int, place: int) -> Iterable[Instruction]:
        """What comes after a message arrived, from a place in the row of a peer."""
        return ()

    def drain(self) -> Iterator[Instruction]:
        """Wait for every message of the phase."""
        for channel in self.channels:
            while channel.received < channel.end:
                yield from self.fetch(channel.messages[channel.received].keys[0])

    def next_phase(self) -> Iterator[Instruction]:
        """Wait for every message of the forward phase; then the backward phase begins."""
        yield from self.drain()
        for channel in self.channels:
            channel.end = len(channel.messages)

    def fetch(self, key: Key) -> Iterator[Instruction]:
        """Wait for the message that brings a value, and for those before it."""
        if key not in self.incoming:
            return
        channel, number = self.incoming[key]
        ahead = 0 if self.job.strict else AHEAD
        while channel.received <= number:
            yield from post(channel, channel.received + 1 + ahead)
            keys, specs, action, place = channel.messages[channel.received]
            yield Instruction(Wait(channel.src, channel.received, specs), action, writes=keys)
            channel.received += 1
            yield from self.arrived(channel.src, place)

    def send(self, action: Action, stage: int, fact: str) -> Iterator[Instruction]:
        """Send the values of a fact of a stage to other ranks."""
        mb = action.microbatch
        routes = self.outgoing(stage, fact, mb)
        if routes:
            yield from self.sending()
        for rank, outs in routes:
            keys, specs = _values(outs, mb)
            yield Instruction(Send(rank, specs), action, keys)
            yield from self.sent(rank, fact, mb, outs)


def post(channel: Channel, count: int) -> Iterator[Instruction]:
    """Post receives until ``count`` of the channel are posted, or all of the phase."""
    count = min(count, channel.end)
    while channel.posted < count:
        message = channel.messages[channel.posted]
        yield Instruction(Recv(channel.src, channel.posted, message.specs))
        channel.posted += 1


def _values(outs: Sequence[Out], mb: int) -> tuple[tuple[Key, ...], tuple[Spec, ...]]:
    """The keys and specs of values of a microbatch."""
    return tuple([(out.source, mb) for out in outs]), tuple([out.spec for out in outs])


def _rank_of(stage: int, path: Sequence[int]) -> int:
    """The rank of a stage; the caller is on the first rank of a path, the loss on the last."""
    return path[min(max(stage, 0), len(path) - 1)]


def _by_rank(outs: Iterable[Out], stage: int, path: Sequence[int]) -> Routes:
    """The values of a stage that other ranks read, by rank."""
    home = _rank_of(stage, path)
    routes: dict[int, list[Out]] = {}
    for out in outs:
        for rank in dict.fromkeys([_rank_of(reader, path) for reader in out.readers]):
            if rank != home:
                routes.setdefault(rank, []).append(out)
    return list(routes.items())


def places(job: Job, rank: int) -> Iterator[tuple[Action, int, int]]:
    """The actions of a row, each with the first place at which it may send, and the last at which
    it may read.

    Both are the action's place in the row. If the parts of a fused action are woven, they are the
    first and the last place of its parts.
    """
    woven = not job.strict and any(feature.interleaves for feature in job.features)
    first = 0
    for action in job.schedule[rank]:
        last = first + len(action.parts) - 1
        for place, part in enumerate(action.parts, first):
            yield (part, first, last) if woven else (part, place, place)
        first = last + 1

# SPDX-License-Identifier: Apache-2.0
"""A Group whose ranks are threads of a :class:`World`: messages with a seeded delay, or sends that
block.

``"buffered"``: a send returns at once and its message arrives later, each channel in order.
``"lockstep"``: a send returns only once its receive was posted, the strictest behaviour that a
backend may have. Messages are packed as between processes, and a tensor that its sender changes
before it has arrived is detected. ``run`` and ``outcomes`` run a function of a group on such ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import torch
from torch import Tensor

from ..collectives.agreement import disagreement, refusing
from ..collectives.capabilities import Capabilities, reduction
from ..collectives.codec import decode, encode
from ..collectives.group import (
    Done,
    Facts,
    Group,
    Pending,
    Receiver,
    Sender,
    Specs,
    Tensors,
    Work,
    required,
    same_call,
)
from ..collectives.local import check_channel, check_ranks
from ..collectives.reduce import reduced
from ..collectives.trail import at
from ..collectives.wire import as_bytes, as_planned, part_of, wire_format
from ..errors import (
    GroupError,
    LaunchError,
    MismatchError,
    PeerError,
    StalledError,
    UnsupportedError,
    checked,
)
from ..tree import Spec
from .faults import Delay, Drop, Fault, Kill, Refuse
from .world import Killed, Outcome, World

_CPU = torch.device("cpu")
_GLOO = Capabilities.of("cpu", "gloo")
F = TypeVar("F", bound=Fault)
T = TypeVar("T")
Order: TypeAlias = Literal["buffered", "lockstep"]
_SPREAD = 2e-5  #: seconds within which messages arrive, at random


class _Message(NamedTuple):
    """A message: the buffers that its sender may not change yet, copies of them, and when they
    arrive.
    """

    specs: Specs
    buffers: list[Tensor]
    copies: list[Tensor]
    arrival: float


@dataclass
class _Channel:
    """From one rank to another: messages by number that were not received, and counts of both
    sides.
    """

    messages: dict[int, _Message] = field(default_factory=dict)
    sent: int = 0
    requested: int = 0
    settled: int = 0
    last_arrival: float = 0.0


#: A call of a pipeline, announced by each rank with a digest and its facts.
_Announced: TypeAlias = dict[int, tuple[int, Callable[[], Facts]]]
#: One collective call: what each rank called it with, as (name, value).
_Call: TypeAlias = dict[int, tuple[str, Any]]


@dataclass(eq=False)
class Network:
    """What the fake ranks of one world share, and write: messages, collective calls, and which of
    the faults occurred.

    ``channels`` are by epoch, source and destination; an epoch ends with a call that a rank
    refused.
    """

    world: World
    faults: Sequence[Fault]
    lockstep: bool
    occurred: set[Fault] = field(default_factory=set)
    channels: defaultdict[tuple[int, int, int], _Channel] = field(
        default_factory=lambda: defaultdict(_Channel)
    )
    calls: defaultdict[tuple[int, int], _Call] = field(default_factory=lambda: defaultdict(dict))
    announced: defaultdict[int, _Announced] = field(default_factory=lambda: defaultdict(dict))
    #: Of groups of some of its ranks, by these and their number.
    parts: dict[tuple[tuple[int, ...], int], Network] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)  # ranks that went on in such a group

    def unused(self) -> str:
        """What a test with a fault that never occurred should know; "" if all occurred."""
        never = [str(fault) for fault in self.faults if fault not in self.occurred]
        if not never:
            return ""
        numbers = sorted((key, channel.sent) for key, channel in self.channels.items())
        sent = [f"{src} to {dst}: {number}" for (_, src, dst), number in numbers]
        calls = [f"rank {state.rank}: {state.calls}" for state in self.world.ranks]
        return (
            f"{', '.join(never)} never occurred, so the test did not test it. Messages by channel "
            f"were {', '.join(sent) or 'none'}; calls of the group were {', '.join(calls)}. Choose "
            "a message or a call that takes place, or leave the fault out"
        )


class FakeGroup(Group):
    """The group of one fake rank; see :func:`fpipe.testing.run`."""

    def __init__(self, network: Network, rank: int, members: Sequence[int] | None = None):
        self._network = network
        self._world = network.world
        #: The ranks of the group, by their numbers in the world.
        self._members = tuple(range(len(network.world.ranks)) if members is None else members)
        self.size = len(self._members)
        self.rank = rank
        self.here = (rank,)
        self.timeout = network.world.timeout
        self.at_once = False
        self.strict = network.lockstep
        self._numbers = count()
        self._sent: list[Pending] = []
        self._announced: _Announced = {}
        self._call = -1  # the last one
        self._refused = False  # whether a rank refused it
        self._epoch = -1  # the last call that a rank refused
        self._parts = count()

    def __repr__(self) -> str:
        return f"fake rank {self.rank} of {self.size}"

    def device(self, rank: int) -> torch.device:
        """The CPU."""
        return _CPU

    def part(self, ranks: Sequence[int]) -> FakeGroup:
        """A group of some of its ranks, whose messages and calls meet no others; without faults."""
        members = tuple(self._members[rank] for rank in ranks)
        key = members, next(self._parts)
        network = self._network.parts.setdefault(key, Network(self._world, (), self.strict))
        self._network.left.add(self.rank)
        group = FakeGroup(network, list(ranks).index(self.rank), members)
        same_call(self._call, group)
        return group

    def lost(self) -> int | None:
        """The first rank that was killed."""
        for rank, member in enumerate(self._members):
            outcome = self._world.ranks[member].outcome
            if outcome is not None and outcome.killed:
                return rank
        return None

    def global_rank(self, rank: int) -> int:
        """The number of a rank in the world."""
        return self._members[rank]

    def _enter(self, name: str) -> None:
        """Start of every call: applies Kill and Refuse, and lets another rank run first."""
        me = self._members[self.rank]
        state = self._world.ranks[me]
        number = state.calls
        state.calls += 1
        if self._occurring(Kill, me, number):
            raise Killed(f"rank {me} was killed before call {number}")
        if self._occurring(Refuse, name, self.rank) or self._occurring(Refuse, name, None):
            raise UnsupportedError(f"{name} is refused on rank {self.rank} by a Refuse fault")
        self._world.pause(me, lambda: True, f"for its turn to {name}")

    def _occurring(self, kind: type[F], *where: object) -> list[F]:
        """The faults of a kind whose first fields are these; they occur now."""
        faults = [
            fault
            for fault in self._network.faults
            if isinstance(fault, kind) and fault[: len(where)] == where
        ]
        self._network.occurred.update(faults)
        return faults

    def _until(self, ready: Callable[[], bool], peer: int, what: str) -> None:
        """Pause until ready; raises if the peer is gone or the time-out has passed."""
        world = self._world
        me = self._members[self.rank]
        other = self._members[peer]

        def gone() -> bool:
            return world.gone(other) or peer in self._network.left

        in_time = world.pause(me, lambda: self._differs() or ready() or gone(), what)
        if self._differs():
            by_rank = {rank: facts() for rank, (_, facts) in sorted(self._announced.items())}
            error = disagreement(by_rank, range(self.size))
            self._refused = isinstance(error, PeerError)
            raise error
        if ready():
            return
        waited = f"rank {self.rank}{at(world.ranks[me].note)} waited {what}"
        if not in_time:
            raise StalledError(
                f"{waited}, longer than timeout={self.timeout:g}. {world.describe(other)}. Look "
                "there first; raise timeout= if a step may take that long"
            )
        raise PeerError(f"{waited}, and rank {peer} is gone. {world.describe(other)}")

    def _meet(self, present: Container[int], what: str) -> None:
        """Pause until all ranks are present."""
        for rank in range(self.size):
            self._until(lambda rank=rank: rank in present, rank, what.format(rank))

    # ---- calls ----
    def enter(self, digest: int, facts: Callable[[], Facts]) -> int:
        """Announce the next call to all ranks at once."""
        self._enter("enter")
        return self._announce(digest, facts)

    def refuse(self, error: BaseException) -> None:
        """Announce that this rank refuses the next call."""
        self._announce(-1, partial(refusing, error))
        self._refused = True

    def _announce(self, digest: int, facts: Callable[[], Facts]) -> int:
        self._leave()
        self._call += 1
        self._announced = self._network.announced[self._call]
        self._announced[self.rank] = digest, facts
        return self._call

    def _leave(self) -> None:
        """Leave the last call, with its messages, if a rank refused it."""
        if self._refused:
            self._announced = {}
            self._refused = False
            self._numbers = count()
            self._sent.clear()
            self._epoch = self._call

    def confirm(self) -> None:
        """Wait until every rank has announced the same call."""
        if self._announced:
            self._meet(self._announced, "for the call of rank {}")

    def _differs(self) -> bool:
        return len({digest for digest, _ in self._announced.values()}) > 1

    # ---- messages ----
    def _channel(self, src: int, dst: int) -> _Channel:
        check_channel(src, dst, self.size)
        return self._network.channels[self._epoch, src, dst]

    def sender(self, src: int, dst: int, specs: Specs, stream: int = 0) -> Sender:
        """In lockstep a send returns only once its receive was posted."""
        world = self._world

        def send(tensors: Tensors) -> Work:
            if src != self.rank:
                raise GroupError(
                    f"rank {self.rank} cannot send for rank {src}, which runs elsewhere"
                )
            channel = self._channel(src, dst)
            self._enter("send")
            buffers = [buffer.detach() for buffer in wire_format(specs).pack(tensors, src, dst)]
            number = channel.sent
            channel.sent += 1
            where = src, dst, number
            if self._occurring(Drop, *where):
                world.lost += 1
                return Done()
            late = sum(fault.seconds for fault in self._occurring(Delay, *where))
            spread = 0.0 if self.strict else world.random.uniform(0, _SPREAD)
            arrival = channel.last_arrival = max(channel.last_arrival, world.clock + spread + late)
            message = _Message(specs, buffers, [buffer.clone() for buffer in buffers], arrival)
            channel.messages[number] = message
            world.arrivals.append(arrival)
            if self.strict and src != dst:
                what = f"to send message {number} to rank {dst}"
                self._until(lambda: channel.requested > number, dst, what)
                _release(message, src, dst)

            def ready() -> bool:
                if world.clock >= arrival:
                    _release(message, src, dst)
                return world.clock >= arrival

            def finish() -> Tensors:
                self._until(ready, dst, f"to send to rank {dst}")
                return ()

            work = Pending(finish, ready)
            self._sent.append(work)
            return work

        return send

    def receiver(self, src: int, dst: int, specs: Specs, stream: int = 0) -> Receiver:
        """A receive may be posted long before its message is sent."""
        world = self._world

        def request() -> Work:
            if dst != self.rank:
                raise GroupError(
                    f"rank {self.rank} cannot receive for rank {dst}, which runs elsewhere"
                )
            channel = self._channel(src, dst)
            self._enter("recv")
            number = channel.requested
            channel.requested += 1

            def arrived() -> bool:
                message = channel.messages.get(number)
                return message is not None and world.clock >= message.arrival

            def ready() -> bool:
                # a loop that polls must let the others run
                world.pause(self._members[dst], lambda: True, "for its turn to look")
                return arrived()

            def finish() -> Tensors:
                self._until(arrived, src, f"for message {number} of rank {src}")
                message = channel.messages.pop(number)
                _release(message, src, dst)
                tensors = wire_format(message.specs).unpack(message.copies, _CPU)
                return as_planned(tensors, specs, src, dst)

            return Pending(finish, ready)

        return Receiver(request)

    def settle(self, dst: int, count: int) -> None:
        """Release the oldest sends; as a backend does, wait for receivers that have not requested
        them.
        """
        self._enter("settle")
        channel = self._channel(self.rank, dst)
        for number in range(channel.settled, min(channel.settled + count, channel.sent)):
            what = f"to let go of message {number} to rank {dst}, which has not asked for it"
            self._until(lambda number=number: channel.requested > number, dst, what)
            channel.settled += 1

    def flush(self) -> None:
        """Wait until all messages of this rank have arrived."""
        self._enter("flush")
        for work in self._sent:
            work.wait()
        self._sent.clear()

    # ---- all ranks ----
    def _start(self, name: str, value: Any) -> Callable[[], list[Any]]:
        """Take part in the next collective call; the returned function waits for the values of all
        ranks.
        """
        self._enter(name.split()[0])
        self._leave()
        call = self._network.calls[self._epoch, next(self._numbers)]
        call[self.rank] = (name, value)

        def values() -> list[Any]:
            self._meet(call, f"for rank {{}} to come to {name}")
            for rank, (other, _) in sorted(call.items()):
                if other != name:
                    raise MismatchError(
                        f"rank {self.rank} came to {name} and rank {rank} to {other}; all ranks "
                        "must call the same collectives in one order"
                    )
            return [call[rank][1] for rank in range(self.size)]

        return values

    def share(self, tensors: Tensors | None, specs: Specs, src: int) -> Tensors:
        """Copies of the tensors of rank ``src``."""
        form = wire_format(specs)
        name = f"share from rank {src}"
        if src != self.rank:
            return form.unpack(self._start(name, None)()[src], _CPU)
        tensors = required(tensors, src)
        self._start(name, [buffer.clone() for buffer in form.pack(tensors, src, src)])()
        return tensors

    def gather_objects(self, obj: object) -> list[Any]:
        """The object of each rank, encoded and decoded as between processes."""
        return list(map(decode, self._start("gather_objects", encode(obj))()))

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """In the order of ranks."""
        return self._reduce(f"all_reduce {op} {Spec.of(tensor)}", tensor, op)()

    def start_reduce(self, memory: Tensor, op: str = "sum", *, scatter: bool = False) -> Work:
        """As all_reduce; the wait is for the other ranks."""
        name = f"start_reduce {op} {Spec.of(memory)}{' scattered' * scatter}"
        place = (self.rank, self.size) if scatter else (0, 1)
        part_of(memory, *place)  # raises where it has no such parts
        total = self._reduce(name, memory, op)
        return Pending(lambda: (part_of(total(), *place).clone(),))

    def _reduce(self, name: str, tensor: Tensor, op: str) -> Callable[[], Tensor]:
        method = reduction(_GLOO, op, tensor.dtype)
        pieces = self._start(name, tensor.detach().to(method.carry, copy=True))
        return lambda: reduced(pieces(), method, self.size, tensor)

    def start_gather(self, memory: Tensor) -> Work:
        """Contributes a copy of this rank's part; the wait is for those of the other ranks."""
        part = part_of(memory, self.rank, self.size).detach().clone()
        values = self._start(f"start_gather {Spec.of(memory)}", part)
        return Pending(lambda: (torch.cat(values(), out=memory),))  # not under autocast

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._start("barrier", None)()

    # ---- faults ----
    def notes(self, rank: int) -> Callable[[str], object]:
        """Recorded for errors of the others."""
        return partial(setattr, self._world.ranks[self._members[rank]], "note")

    def last_note(self, rank: int) -> str:
        """The last journal entry of a rank."""
        return self._world.ranks[self._members[rank]].note


def _release(message: _Message, src: int, dst: int) -> None:
    """Check that the sender did not change a message until now; from now on it may."""
    for now, then in zip(message.buffers, message.copies, strict=False):
        if not torch.equal(as_bytes(now), as_bytes(then)):
            raise GroupError(
                f"rank {src} changed a tensor that was still on its way to rank {dst}; it must "
                "wait for the send"
            )
    message.buffers.clear()


@checked
def run(
    fn: Callable[[FakeGroup], T],
    ranks: int,
    *,
    order: Order = "buffered",
    seed: int = 0,
    faults: Sequence[Fault] = (),
    timeout: float = 60.0,
) -> list[T]:
    """Run ``fn(group)`` on fake ranks in this process; the results by rank.

    One rank runs at a time: the same seed gives the same run.

    Args:
        fn: a function of the group of its rank.
        ranks: how many ranks there are.
        order: ``"buffered"``: messages arrive later, each channel in order. ``"lockstep"``: every
            send blocks until its receive is posted.
        seed: draws which rank runs next.
        faults: what goes wrong: ``Kill``, ``Drop``, ``Delay``, ``Refuse``.
        timeout: of a wait, in seconds of a simulated clock, which take no time.

    Returns:
        What ``fn`` returned, by rank.

    Raises:
        LaunchError: if a rank was killed.
        GroupError: if one of the faults did not occur. Besides, the first error of a rank is
        raised.

    >>> def ring(group):
    ...     import torch; from fpipe.tree import Spec
    ...     spec = (Spec((), (), torch.int64),)
    ...     came = group.recv(spec, (group.rank - 1) % group.size, group.rank)
    ...     group.send((torch.tensor(group.rank),), group.rank, (group.rank + 1) % group.size)
    ...     return came.wait()[0].item()
    >>> run(ring, ranks=4), run(ring, ranks=4, order="lockstep", seed=3)
    ([3, 0, 1, 2], [3, 0, 1, 2])
    """
    if not callable(fn):
        raise GroupError(f"run takes a function of the group of a rank, not {fn!r}")
    ends = outcomes(fn, ranks, order=order, seed=seed, faults=faults, timeout=timeout)
    failure = _first_failure(ends)
    if failure is not None and failure.error is not None:
        failure.error.add_note(
            f"on fake rank {failure.rank} of {ranks}, order={order!r}, seed={seed}"
        )
        raise failure.error
    if dead := [outcome.rank for outcome in ends if outcome.killed]:
        raise LaunchError(f"ranks {dead} were killed by faults, and no other rank noticed")
    return [outcome.value for outcome in ends]


def _first_failure(ends: list[Outcome]) -> Outcome | None:
    """The earliest error. Errors about other ranks are consequences, and count as later ones."""
    return min(
        (end for end in ends if end.error is not None),
        key=lambda end: (isinstance(end.error, (PeerError, StalledError)), end.nth),
        default=None,
    )


def outcomes(
    fn: Callable[[FakeGroup], Any],
    ranks: int,
    *,
    order: Order = "buffered",
    seed: int = 0,
    faults: Sequence[Fault] = (),
    timeout: float = 60.0,
) -> list[Outcome]:
    """As :func:`run`, but every rank runs to its end; how each ended, by rank.

    Args:
        fn, ranks, order, seed, faults, timeout: as for ``run``.

    Returns:
        One ``Outcome`` for each rank.

    Raises:
        GroupError: if one of the faults did not occur.

    >>> from fpipe.testing import Kill
    >>> [type(outcome.error).__name__ for outcome in outcomes(lambda group: group.barrier(), 2,
    ...     faults=[Kill(1, 0)])]
    ['PeerError', 'NoneType']
    """
    check_ranks("ranks", ranks)
    if order not in get_args(Order):
        raise GroupError(f"order={order!r}; the orders are {' and '.join(get_args(Order))}")
    world = World(ranks, seed, timeout)
    network = Network(world, faults, lockstep=order == "lockstep")
    world.play([partial(fn, FakeGroup(network, rank)) for rank in range(ranks)])
    ends = [state.outcome for state in world.ranks if state.outcome is not None]
    if unused := network.unused():
        failure = _first_failure(ends)
        raise GroupError(unused) from failure and failure.error
    return ends

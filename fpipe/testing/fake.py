"""A Group whose ranks are threads of a :class:`World`: messages with a seeded delay, or sends that block.

``"buffered"``: a send is done at once for its rank, the message arrives later, each channel in its own order.
``"lockstep"``: a send returns only once its receiver has asked for it, the strictest that a backend may be.
Messages travel packed, as on a wire, and a tensor that changes while under way is found out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..collectives.adapt import reduction
from ..collectives.capabilities import Capabilities
from ..collectives.group import Done, Work, check_message, part_of
from ..collectives.wire import wire
from ..errors import GroupError, MismatchError, PeerError, StalledError, UnsupportedError
from ..specs import Spec
from .orders import Delay, Drop, Kill, Order, Refuse
from .world import Killed, World

_CPU = torch.device("cpu")
_SPREAD = 2e-5  #: seconds within which messages arrive, at random


@dataclass
class _Message:
    """Under way: what was packed, the same memory as it was then, and when it arrives."""

    specs: tuple[Spec, ...]
    memory: list[Tensor]
    copies: list[Tensor]
    when: float

    def settle(self, src: int, dst: int) -> None:
        """From now on its sender may change what it sent; until now it must not have."""
        pairs = zip(self.memory, self.copies, strict=False)
        if any(not torch.equal(now.view(-1).view(torch.uint8), then.view(-1).view(torch.uint8)) for now, then in pairs):
            raise GroupError(
                f"rank {src} changed a tensor that was still on its way to rank {dst}; it must wait for the send"
            )
        self.memory = []


class _Channel:
    def __init__(self) -> None:
        self.sent: list[_Message | None] = []
        self.asked = 0
        self.settled = 0
        self.last = 0.0


class Sky:
    """What the fake ranks of one world share: channels, meetings, and the faults that were ordered."""

    def __init__(self, world: World, order: str, faults: Sequence[Order]):
        self.world, self.faults = world, tuple(faults)
        self.lockstep = order == "lockstep"
        self.channels: dict[tuple[int, int], _Channel] = {}
        self.meetings: list[dict[int, tuple[str, Any]]] = []

    def channel(self, src: int, dst: int) -> _Channel:
        """From one rank to another."""
        for rank in (src, dst):
            if not 0 <= rank < len(self.world.seats):
                raise GroupError(f"rank {rank} is not in a group of {len(self.world.seats)}; ranks count from 0")
        return self.channels.setdefault((src, dst), _Channel())

    def fate(self, src: int, dst: int, nth: int) -> Delay | Drop | None:
        """The fault that was ordered for a message."""
        for fault in self.faults:
            if isinstance(fault, (Delay, Drop)) and (fault.src, fault.dst, fault.nth) == (src, dst, nth):
                return fault
        return None


class FakeGroup:
    """One fake rank's view; see :func:`fpipe.testing.run`."""

    def __init__(self, sky: Sky, rank: int):
        self._sky, self._world = sky, sky.world
        self.size, self.rank, self.here = len(sky.world.seats), rank, (rank,)
        self.timeout = sky.world.timeout
        self.strict = sky.lockstep
        self._met = 0

    def __repr__(self) -> str:
        return f"fake rank {self.rank} of {self.size}"

    def device(self, rank: int) -> torch.device:
        """The CPU."""
        return _CPU

    def _call(self, name: str) -> None:
        """Every call comes by here: orders to die or to refuse are carried out, and another rank may go first."""
        seat = self._world.seats[self.rank]
        number, seat.calls = seat.calls, seat.calls + 1
        for fault in self._sky.faults:
            if isinstance(fault, Kill) and (fault.rank, fault.before) == (self.rank, number):
                raise Killed(f"rank {self.rank} was ordered to die before call {number}")
            if isinstance(fault, Refuse) and fault.operation == name and fault.rank in (None, self.rank):
                raise UnsupportedError(f"{name} was ordered to be refused on rank {self.rank}")
        self._world.pause(self.rank, lambda: True, f"for its turn to {name}")

    def _until(self, ready: Callable[[], bool], peer: int, what: str) -> None:
        """Pause until ready; a peer that is gone or late becomes an error."""
        world = self._world
        in_time = world.pause(self.rank, lambda: ready() or world.gone(peer), what)
        if ready():
            return
        place = f" ({world.seats[self.rank].note})" if world.seats[self.rank].note else ""
        if not in_time:
            raise StalledError(
                f"rank {self.rank}{place} waited {what}, longer than timeout={self.timeout:g}. {world.last(peer)}. "
                f"Look there first; raise timeout= if a step may take that long"
            )
        raise PeerError(f"rank {self.rank}{place} waited {what}, and rank {peer} is gone. {world.last(peer)}")

    # ---- messages -----------------------------------------------------------------------------------------------
    def send(self, tensors: tuple[Tensor, ...], src: int, dst: int, specs: tuple[Spec, ...] | None = None) -> Work:
        """Send one message; in lockstep it returns only once it was asked for."""
        if src != self.rank:
            raise GroupError(f"rank {self.rank} cannot send for rank {src}, which lives elsewhere")
        channel = self._sky.channel(src, dst)
        self._call("send")
        specs = tuple(map(Spec.of, tensors)) if specs is None else specs
        memory = [buffer.detach() for buffer in wire(specs).pack(tensors, src, dst)]
        number = len(channel.sent)
        fate = self._sky.fate(src, dst, number)
        if isinstance(fate, Drop):
            channel.sent.append(None)
            self._world.lost += 1
            return Done()
        late = fate.seconds if fate is not None else 0.0
        spread = 0.0 if self._sky.lockstep else self._world.random.uniform(0, _SPREAD)
        channel.last = max(channel.last, self._world.clock + spread + late)
        message = _Message(specs, memory, [buffer.clone() for buffer in memory], channel.last)
        channel.sent.append(message)
        self._world.arrivals.append(channel.last)
        if self._sky.lockstep and src != dst:
            self._until(lambda: channel.asked > number, dst, f"to send message {number} to rank {dst}")
            message.settle(src, dst)
        return _Sending(self, message, dst)

    def recv(self, specs: tuple[Spec, ...], src: int, dst: int) -> Work:
        """Ask for the next message of a channel."""
        if dst != self.rank:
            raise GroupError(f"rank {self.rank} cannot receive for rank {dst}, which lives elsewhere")
        channel = self._sky.channel(src, dst)
        self._call("recv")
        channel.asked += 1
        return _Receiving(self, channel, channel.asked - 1, specs, src)

    def settle(self, dst: int, count: int) -> None:
        """Let go of the oldest sends, waiting, as a backend does, for receivers that have not yet asked for them."""
        self._call("settle")
        channel = self._sky.channel(self.rank, dst)
        for number in range(channel.settled, min(channel.settled + count, len(channel.sent))):
            what = f"to let go of message {number} to rank {dst}, which has not asked for it"
            self._until(lambda number=number: channel.asked > number, dst, what)
            channel.settled += 1

    def flush(self) -> None:
        """Wait until what this rank sent has arrived."""
        self._call("flush")
        for (src, dst), channel in list(self._sky.channels.items()):
            if src == self.rank:
                self._until(lambda when=channel.last: self._world.clock >= when, dst, f"to send to rank {dst}")
                for message in channel.sent:
                    if message is not None:
                        message.settle(src, dst)

    # ---- all ranks ----------------------------------------------------------------------------------------------
    def _meet(self, name: str, said: Any) -> list[Any]:
        """Everybody says one thing; what each said, by rank. Ranks that came for different things are told."""
        return self._hear(name, self._come(name, said))

    def _come(self, name: str, said: Any) -> dict[int, tuple[str, Any]]:
        """Say one's thing and go on."""
        self._call(name.split()[0])
        number, self._met = self._met, self._met + 1
        while len(self._sky.meetings) <= number:
            self._sky.meetings.append({})
        meeting = self._sky.meetings[number]
        meeting[self.rank] = (name, said)
        return meeting

    def _hear(self, name: str, meeting: dict[int, tuple[str, Any]]) -> list[Any]:
        """Wait for what the others say."""
        for rank in range(self.size):
            self._until(lambda rank=rank: rank in meeting, rank, f"for rank {rank} to come to {name}")
        other = next((rank for rank in range(self.size) if meeting[rank][0] != name), None)
        if other is not None:
            raise MismatchError(
                f"rank {self.rank} came to {name} and rank {other} to {meeting[other][0]}; all ranks must call the "
                f"same collectives in one order"
            )
        return [meeting[rank][1] for rank in range(self.size)]

    def share(self, tensors: tuple[Tensor, ...] | None, specs: tuple[Spec, ...], src: int) -> tuple[Tensor, ...]:
        """Everybody gets copies of what rank ``src`` has."""
        mine = None
        if src == self.rank:
            if tensors is None:
                raise GroupError(f"share needs the tensors of rank {src}, which is this one; got None")
            mine = [buffer.clone() for buffer in wire(specs).pack(tensors, src, src)]
        found = self._meet(f"share from rank {src}", mine)[src]
        return tensors if tensors is not None and src == self.rank else wire(specs).unpack(found, _CPU)

    def gather_objects(self, obj: object) -> list[Any]:
        """What each rank said."""
        return self._meet("gather_objects", obj)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """By rank, in ascending order."""
        way = reduction(Capabilities.of("cpu", "gloo"), op, tensor.dtype)
        pieces = self._meet(f"all_reduce {op} {Spec.of(tensor)}", tensor.detach().to(way.carry, copy=True))
        return self._reduced(pieces, op, tensor.dtype)

    def _reduced(self, pieces: list[Tensor], op: str, dtype: torch.dtype) -> Tensor:
        stacked = torch.stack(pieces)
        if op in ("sum", "mean"):
            found = pieces[0].clone()
            for piece in pieces[1:]:
                found += piece
            found = found / self.size if op == "mean" else found
        else:
            found = stacked.amax(0) if op == "max" else stacked.amin(0)
        return found != 0 if dtype == torch.bool else found.to(dtype)

    def start_reduce(self, memory: Tensor, op: str = "sum", *, scatter: bool = False) -> Work:
        """As all_reduce; the others are waited for when the result is."""
        way = reduction(Capabilities.of("cpu", "gloo"), op, memory.dtype)
        part_of(memory, 0, self.size if scatter else 1)
        name = f"start_reduce {op} {Spec.of(memory)}{' scattered' * scatter}"
        meeting = self._come(name, memory.detach().to(way.carry, copy=True))

        def finish() -> Tensor:
            found = self._reduced(self._hear(name, meeting), op, memory.dtype)
            return part_of(found, self.rank, self.size).clone() if scatter else found

        return _Later(finish)

    def start_gather(self, memory: Tensor) -> Work:
        """Own part told, the others' heard when the whole is waited for."""
        name = f"start_gather {Spec.of(memory)}"
        meeting = self._come(name, part_of(memory, self.rank, self.size).detach().clone())

        def finish() -> Tensor:
            return memory.copy_(torch.cat(self._hear(name, meeting)))

        return _Later(finish)

    def barrier(self) -> None:
        """Everybody comes."""
        self._meet("barrier", None)

    def journal(self, rank: int, text: str) -> None:
        """StageFacts in the others' errors."""
        self._world.seats[self.rank].note = text

    def failed(self, error: BaseException) -> None:
        """The world sees it anyway."""


class _Later:
    """A collective that this rank has come to; it waits for the others when its result is wanted."""

    def __init__(self, finish: Callable[[], Tensor]):
        self._finish: Callable[[], Tensor] | None = finish
        self._found: tuple[Tensor, ...] = ()

    def done(self) -> bool:
        return self._finish is None

    def wait(self) -> tuple[Tensor, ...]:
        if self._finish is not None:
            self._found, self._finish = (self._finish(),), None
        return self._found


class _Sending:
    def __init__(self, group: FakeGroup, message: _Message, dst: int):
        self._group, self._message, self._dst = group, message, dst

    def _arrived(self) -> bool:
        return self._group._world.clock >= self._message.when

    def done(self) -> bool:
        if self._arrived():
            self._message.settle(self._group.rank, self._dst)
            return True
        return False

    def wait(self) -> tuple[Tensor, ...]:
        self._group._until(self._arrived, self._dst, f"to send to rank {self._dst}")
        self._message.settle(self._group.rank, self._dst)
        return ()


class _Receiving:
    def __init__(self, group: FakeGroup, channel: _Channel, number: int, specs: tuple[Spec, ...], src: int):
        self._group, self._channel, self._number = group, channel, number
        self._specs, self._src = specs, src
        self._tensors: tuple[Tensor, ...] | None = None

    def _message(self) -> _Message | None:
        sent = self._channel.sent
        return sent[self._number] if self._number < len(sent) else None

    def _arrived(self) -> bool:
        message = self._message()
        return message is not None and self._group._world.clock >= message.when

    def done(self) -> bool:
        """Polling lets the others run: a loop that asks must come to an end."""
        if self._tensors is None:
            self._group._world.pause(self._group.rank, lambda: True, "for its turn to look")
        return self._tensors is not None or self._arrived()

    def wait(self) -> tuple[Tensor, ...]:
        if self._tensors is not None:
            return self._tensors
        group, src = self._group, self._src
        group._until(self._arrived, src, f"for message {self._number} of rank {src}")
        message = self._message()
        assert message is not None
        message.settle(src, group.rank)
        found = wire(message.specs).unpack(message.copies, _CPU)
        check_message(found, self._specs, src, group.rank)
        self._channel.sent[self._number] = None  # kept by nobody but its receiver
        self._tensors = found
        return found

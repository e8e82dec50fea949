"""``fpipe.local``: ranks that live in this process and hand each other tensors.

Nothing is copied where sender and receiver share a device. There are no threads here: whoever drives the ranks asks
``done`` before ``wait``, and a ``wait`` that could never end raises at once. Knows no backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import DeadlockError, GroupError
from ..specs import Spec
from .group import Done, Work, check_message, part_of
from .wire import lay_out

_SENT = Done()
_REDUCTIONS = ("sum", "mean", "max", "min")


def local(ranks: int | None = None, *, devices: Sequence[str | torch.device] | None = None) -> LocalGroup:
    """A group whose ranks all live in this process, on the CPU or on ``devices``, one per rank.

    >>> group = local(4)
    >>> group.size, group.here
    (4, (0, 1, 2, 3))
    >>> _ = group.send((torch.ones(2),), src=0, dst=1)
    >>> group.recv((Spec((2,), (1,), torch.float32),), src=0, dst=1).wait()
    (tensor([1., 1.]),)
    """
    if devices is None:
        if ranks is None:
            raise GroupError("fpipe.local() needs a number of ranks or a list of devices, as in fpipe.local(4)")
        devices = ["cpu"] * _positive(ranks)
    elif ranks not in (None, len(devices)):
        raise GroupError(f"{ranks} ranks on {len(devices)} devices; give one device per rank, or leave ranks out")
    if isinstance(devices, str) or not devices:
        raise GroupError(f"devices={devices!r}; give a list with one device per rank, as in ['cuda:0', 'cuda:1']")
    return LocalGroup(tuple(map(_there, devices)))


def _there(device: str | torch.device) -> torch.device:
    """A device that is there: torch finds out late that one is not, and may end the process then."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise GroupError(f"device {device!r} is none that torch knows; give the like of 'cpu' or 'cuda:0'") from error
    if found.type in ("cpu", "meta"):
        return found
    module: Any = getattr(torch, found.type, None)
    count = module.device_count() if module is not None and module.is_available() else 0
    if (found.index or 0) >= count:
        raise GroupError(f"device {str(found)!r} is not here: torch finds {count} of type {found.type!r}; leave it out")
    return found


def _positive(ranks: object) -> int:
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise GroupError(f"{ranks!r} ranks; a group needs a whole number of ranks, 1 at least")
    return ranks


class LocalGroup:
    """See :func:`local`."""

    def __init__(self, devices: tuple[torch.device, ...]):
        self.size = len(devices)
        self.here = tuple(range(self.size))
        self.timeout = float("inf")
        self.at_once, self.strict = True, False
        self._devices = devices
        self._one_device = len(set(devices)) == 1
        self._channels: dict[tuple[int, int], _Channel] = {}
        self._last: dict[int, str] = {}

    def __repr__(self) -> str:
        kinds = sorted({str(device) for device in self._devices})
        return f"fpipe.local({self.size}) on {', '.join(kinds)}"

    def device(self, rank: int) -> torch.device:
        """Where a rank computes."""
        return self._devices[rank]

    def _channel(self, src: int, dst: int) -> _Channel:
        for rank in (src, dst):
            if not 0 <= rank < self.size:
                raise GroupError(f"rank {rank} is not in a group of {self.size}; ranks count from 0")
        return self._channels.setdefault((src, dst), _Channel(src, dst))

    def send(self, tensors: tuple[Tensor, ...], src: int, dst: int, specs: tuple[Spec, ...] | None = None) -> Work:
        """Hand a message over; it is done at once. Checked by the receiver."""
        channel = self._channels.get((src, dst)) or self._channel(src, dst)
        if not self._one_device:
            device = self._devices[dst]
            tensors = tuple(tensor.to(device, non_blocking=True) for tensor in tensors)
        channel.box[channel.sent] = tensors
        channel.sent += 1
        return _SENT

    def recv(self, specs: tuple[Spec, ...], src: int, dst: int) -> Work:
        """The next message of the channel, done once it was sent."""
        channel = self._channels.get((src, dst)) or self._channel(src, dst)
        channel.asked += 1
        return _Receipt(channel, channel.asked - 1, specs)

    def reset(self) -> None:
        """Forget what is under way: after an error, the next run starts with empty channels."""
        self._channels.clear()

    def settle(self, dst: int, count: int) -> None:
        """Sends are done at once."""

    def flush(self) -> None:
        """Sends are done at once."""

    def share(self, tensors: tuple[Tensor, ...] | None, specs: tuple[Spec, ...], src: int) -> tuple[Tensor, ...]:
        """The tensors themselves: there is one process."""
        if tensors is None:
            raise GroupError(f"share needs the tensors of rank {src}, which lives in this process; got None")
        check_message(tensors, specs, src, src)
        return tensors

    def gather_objects(self, obj: object) -> list[Any]:
        """The one object, once per rank."""
        return [obj for _ in self.here]

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """The tensor: there is one process."""
        if op not in _REDUCTIONS:
            raise GroupError(f"no reduction is called {op!r}; there are {', '.join(_REDUCTIONS)}")
        return tensor

    def start_reduce(self, memory: Tensor, op: str = "sum", *, scatter: bool = False) -> Work:
        """Done: there is one process, which has the only part."""
        return Done((self.all_reduce(memory, op),))

    def start_gather(self, memory: Tensor) -> Work:
        """Done: there is one process, which has the only part."""
        return Done((part_of(memory, 0, 1),))

    def barrier(self) -> None:
        """Nothing to wait for."""

    def journal(self, rank: int, text: str) -> None:
        """Kept for :meth:`last`."""
        self._last[rank] = text

    def failed(self, error: BaseException) -> None:
        """There are no others."""

    def last(self, rank: int) -> str | None:
        """What a rank noted last."""
        return self._last.get(rank)


class _Channel:
    """From one rank to another: messages by number, so that the n-th receive gets the n-th send."""

    __slots__ = ("asked", "box", "dst", "sent", "src")

    def __init__(self, src: int, dst: int):
        self.src, self.dst = src, dst
        self.box: dict[int, tuple[Tensor, ...]] = {}
        self.sent = self.asked = 0


class _Receipt:
    __slots__ = ("_channel", "_number", "_specs")

    def __init__(self, channel: _Channel, number: int, specs: tuple[Spec, ...]):
        self._channel, self._number, self._specs = channel, number, specs

    def done(self) -> bool:
        return self._number < self._channel.sent

    def wait(self) -> tuple[Tensor, ...]:
        channel = self._channel
        if self._number >= channel.sent:
            raise DeadlockError(
                f"rank {channel.dst} waits for message {self._number} of rank {channel.src}, which was not sent; "
                f"in a local group nobody else could send it: drive the other rank first"
            )
        tensors = channel.box.pop(self._number)
        specs = self._specs
        if len(tensors) == len(specs) and all(
            t.stride() == s.stride and t.shape == s.shape and t.dtype == s.dtype
            for t, s in zip(tensors, specs, strict=False)
        ):
            return tensors
        check_message(tensors, self._specs, channel.src, channel.dst)
        # With the strides that the message would have on a wire: kernels, and so bits, may depend on them.
        return tuple(lay_out(tensor, spec) for tensor, spec in zip(tensors, self._specs, strict=True))

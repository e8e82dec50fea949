# SPDX-License-Identifier: Apache-2.0
"""``fpipe.local``: all ranks in this process; a message is a reference to its tensors.

Nothing is copied where sender and receiver share a device. There are no threads: the caller that
runs the ranks in turn checks ``done`` before ``wait``, and a ``wait`` that could never return
raises at once. This module must not know backends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..devices import pick
from ..errors import DeadlockError, GroupError
from ..tree import Spec
from .adapt import OPS
from .group import (
    Done,
    Group,
    Pending,
    Receiver,
    Sender,
    Work,
    check_channel,
    check_message,
    part_of,
)
from .wire import lay_out

_SENT = Done()


def local(
    ranks: int | None = None, *, devices: Sequence[str | torch.device] | None = None
) -> LocalGroup:
    """A group whose ranks are all in this process, on the CPU or on ``devices``, one per rank.

    Args:
        ranks: how many ranks there are; by default one for each device.
        devices: one device for each rank; by default the CPU.

    Returns:
        A group. One thread runs its ranks, one after another.

    Raises:
        GroupError: if there is no rank, or not one device for each.

    >>> group = local(4)
    >>> group.size, group.here
    (4, (0, 1, 2, 3))
    >>> _ = group.send((torch.ones(2),), src=0, dst=1)
    >>> group.recv((Spec((2,), (1,), torch.float32),), src=0, dst=1).wait()
    (tensor([1., 1.]),)
    """
    if devices is None:
        if ranks is None:
            raise GroupError(
                "fpipe.local() needs a number of ranks or a list of devices, as in fpipe.local(4)"
            )
        check_ranks("ranks", ranks)
        devices = ["cpu"] * ranks
    elif ranks not in (None, len(devices)):
        raise GroupError(
            f"{ranks} ranks on {len(devices)} devices; give one device per rank, or leave ranks out"
        )
    if isinstance(devices, str) or not devices:
        raise GroupError(
            f"devices={devices!r}; give a list with one device per rank, as in ['cuda:0', 'cuda:1']"
        )
    return LocalGroup(tuple(map(pick, devices)))


def check_ranks(name: str, ranks: object) -> None:
    """Raise GroupError unless an argument is a number of ranks."""
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise GroupError(f"{name}={ranks!r}; give a whole number of ranks, 1 at least")


class LocalGroup(Group):
    """See :func:`local`. ``pg`` is the process group for ``fpipe.ops``: none, since there is one
    process.
    """

    pg = None

    def __init__(self, devices: tuple[torch.device, ...]):
        self.size = len(devices)
        self.here = tuple(range(self.size))
        self.timeout = float("inf")
        self.at_once, self.strict = True, False
        self._devices = devices
        self._one_device = len(set(devices)) == 1
        self._channels: dict[tuple[int, int], _Channel] = {}
        self._notes: dict[int, str] = {}

    def __repr__(self) -> str:
        kinds = sorted({str(device) for device in self._devices})
        return f"fpipe.local({self.size}) on {', '.join(kinds)}"

    @property
    def dp(self) -> LocalGroup:
        """The group of the copies of this pipeline, of which there is one; as that of
        ``fpipe.init``.
        """
        return LocalGroup(self._devices[:1])

    tp = dp

    def device(self, rank: int) -> torch.device:
        """The device on which a rank computes."""
        return self._devices[rank]

    def _channel(self, src: int, dst: int) -> _Channel:
        channel = self._channels.get((src, dst))
        if channel is None:
            check_channel(src, dst, self.size)
            channel = self._channels[src, dst] = _Channel(src, dst, deque(), deque(), count())
        return channel

    def send(
        self, tensors: tuple[Tensor, ...], src: int, dst: int, specs: tuple[Spec, ...] | None = None
    ) -> Work:
        """Put a message into its channel; complete at once. The receiver checks it."""
        self._channel(src, dst).sent.append(self._moved(tensors, dst))
        return _SENT

    def recv(self, specs: tuple[Spec, ...], src: int, dst: int) -> Work:
        """Request the next message of a channel; done once it was sent."""
        return _request(self._channel(src, dst), specs)

    def sender(self, src: int, dst: int, specs: tuple[Spec, ...]) -> Sender:
        """A message goes into its channel as it is, or moved to the device of its receiver."""
        put = self._channel(src, dst).sent.append
        return put if self._one_device else lambda tensors: put(self._moved(tensors, dst))

    def receiver(self, src: int, dst: int, specs: tuple[Spec, ...]) -> Receiver:
        """A message is taken out of its channel if it was sent."""
        channel = self._channel(src, dst)
        work = _Next(channel, _fetcher(channel, specs))
        return Receiver(lambda: work, work.fetch)

    def _moved(self, tensors: tuple[Tensor, ...], dst: int) -> tuple[Tensor, ...]:
        """A message on the device of its receiver."""
        if self._one_device:
            return tensors
        device = self._devices[dst]
        # The receiver reads on the CPU at once, where no stream waits for the copy.
        return tuple(tensor.to(device, non_blocking=device.type != "cpu") for tensor in tensors)

    def reset(self) -> None:
        """Empty all channels."""
        for channel in self._channels.values():
            channel.sent.clear()
            channel.requested.clear()

    def settle(self, dst: int, count: int) -> None:
        """Sends are complete when they return."""

    def flush(self) -> None:
        """Sends are complete when they return."""

    def share(
        self, tensors: tuple[Tensor, ...] | None, specs: tuple[Spec, ...], src: int
    ) -> tuple[Tensor, ...]:
        """The tensors themselves: there is one process."""
        if tensors is None:
            raise GroupError(
                f"share needs the tensors of rank {src}, which is in this process; got None"
            )
        check_message(tensors, specs, src, src)
        return tensors

    def gather_objects(self, obj: object) -> list[Any]:
        """The object, once per rank."""
        return [obj for _ in self.here]

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """The tensor: there is one process."""
        if op not in OPS:
            raise GroupError(f"there is no reduction {op!r}; the reductions are {', '.join(OPS)}")
        return tensor

    def start_reduce(self, memory: Tensor, op: str = "sum", *, scatter: bool = False) -> Work:
        """Complete: there is one process, which holds the only part."""
        return Done((self.all_reduce(memory, op),))

    def start_gather(self, memory: Tensor) -> Work:
        """Complete: there is one process, which holds the only part."""
        return Done((part_of(memory, 0, 1),))

    def barrier(self) -> None:
        """Returns: there is one process."""

    def journal(self, rank: int, text: str) -> None:
        """Record it for :meth:`last_note`."""
        self._notes[rank] = text

    def failed(self, error: BaseException) -> None:
        """There are no other processes."""

    def notes(self, rank: int) -> Callable[[str], object]:
        """The same with the rank bound."""
        notes = self._notes

        def note(text: str) -> None:
            notes[rank] = text

        return note

    def last_note(self, rank: int) -> str:
        """The last journal entry of a rank."""
        return self._notes.get(rank, "")


class _Channel(NamedTuple):
    """From one rank to another: messages that were sent, and receives that were requested, each in
    order.
    """

    src: int
    dst: int
    sent: deque[tuple[Tensor, ...]]
    requested: deque[deque[tuple[Tensor, ...]]]  # where the message of each goes
    numbers: Iterator[int]


def _match(channel: _Channel) -> None:
    """The n-th receive gets the n-th send."""
    sent, requested = channel.sent, channel.requested
    while sent and requested:
        requested.popleft().append(sent.popleft())


def _request(channel: _Channel, specs: tuple[Spec, ...]) -> Pending:
    number, arrived = next(channel.numbers), deque[tuple[Tensor, ...]]()
    channel.requested.append(arrived)

    def ready() -> bool:
        _match(channel)
        return bool(arrived)

    def finish() -> tuple[Tensor, ...]:
        if not ready():
            raise _not_sent(channel, f"message {number}")
        return _checked(channel, arrived.popleft(), specs)

    return Pending(finish, ready)


class _Next(NamedTuple):
    """A Work, the same for all messages of one kind: the next message of a channel."""

    channel: _Channel
    fetch: Callable[[], tuple[Tensor, ...] | None]

    def done(self) -> bool:
        return bool(self.channel.sent)

    def wait(self) -> tuple[Tensor, ...]:
        message = self.fetch()
        if message is None:
            raise _not_sent(self.channel, "the next message")
        return message


def _not_sent(channel: _Channel, what: str) -> DeadlockError:
    return DeadlockError(
        f"rank {channel.dst} waits for {what} of rank {channel.src}, which was not sent; no other "
        "process could send "
        f"it: run rank {channel.src} first"
    )


def _fetcher(channel: _Channel, specs: tuple[Spec, ...]) -> Callable[[], tuple[Tensor, ...] | None]:
    """The next message if it was sent and no earlier one was requested and not received."""
    sent, requested, alone = channel.sent, channel.requested, len(specs) == 1
    shape, stride, dtype = specs[0] if alone else ((), (), torch.uint8)
    lazy = dtype.is_complex

    def fetch() -> tuple[Tensor, ...] | None:
        if not sent or requested:
            return None
        tensors = sent.popleft()
        if alone and len(tensors) == 1:  # most messages: what _checked does, written out
            tensor = tensors[0]
            if (
                tensor.stride() == stride
                and tensor.shape == shape
                and tensor.dtype is dtype
                and not tensor.is_neg()
                and not (lazy and tensor.is_conj())
            ):
                return tensors
        return _checked(channel, tensors, specs)

    return fetch


def _checked(
    channel: _Channel, tensors: tuple[Tensor, ...], specs: tuple[Spec, ...]
) -> tuple[Tensor, ...]:
    """A message as it arrives: of the shapes and dtypes of its Specs, or an error, and with their
    strides.
    """
    check_message(tensors, specs, channel.src, channel.dst)
    # With the strides that it has when sent between processes: kernels, and so bits, may depend on
    # them.
    return tuple(map(lay_out, tensors, specs))

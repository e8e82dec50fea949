# SPDX-License-Identifier: Apache-2.0
"""``fpipe.local``: all ranks in this process. A message is a reference to its tensors.

Nothing is copied if sender and receiver share a device. There are no threads: the caller runs the
ranks in turn, and asks ``done`` before ``wait``. A ``wait`` that could never return raises at once.
This module must not know backends.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..devices import pick
from ..errors import DeadlockError, GroupError
from .group import (
    OPS,
    Done,
    Following,
    Group,
    Pending,
    Receiver,
    Sender,
    Specs,
    Tensors,
    Work,
    in_order,
    required,
)
from .wire import as_planned, part_of


def local(
    ranks: int | None = None, *, devices: Sequence[str | torch.device] | None = None
) -> LocalGroup:
    """A group whose ranks are all in this process, on the CPU or on ``devices``.

    Args:
        ranks: how many ranks there are; by default one for each device.
        devices: one device for each rank; by default the CPU.

    Returns:
        A group. One thread runs its ranks, one after another.

    Raises:
        GroupError: if there is no rank, or if ranks and devices differ in number.

    >>> from fpipe.tree import Spec
    >>> group = local(4)
    >>> group.size, group.here
    (4, (0, 1, 2, 3))
    >>> _ = group.send((torch.ones(2),), src=0, dst=1)
    >>> spec = Spec((2,), (1,), torch.float32)
    >>> group.recv((spec,), src=0, dst=1).wait()
    (tensor([1., 1.]),)
    """
    if devices is None:
        if ranks is None:
            raise GroupError(
                "fpipe.local() needs a number of ranks or a list of devices, as in fpipe.local(4)"
            )
        check_ranks("ranks", ranks)
        return LocalGroup((torch.device("cpu"),) * ranks)
    if ranks not in (None, len(devices)):
        raise GroupError(
            f"{ranks} ranks on {len(devices)} devices; give one device per rank, or leave ranks out"
        )
    if isinstance(devices, str) or not devices:
        raise GroupError(
            f"devices={devices!r}; give a list with one device per rank, as in ['cuda:0', 'cuda:1']"
        )
    return LocalGroup(tuple(map(pick, devices)))


def check_ranks(name: str, ranks: object) -> None:
    """Raise GroupError if an argument is not a number of ranks."""
    if type(ranks) is not int or ranks < 1:
        raise GroupError(f"{name}={ranks!r}; give a whole number of ranks, 1 at least")


class LocalGroup(Group):
    """Ranks in this process; see :func:`local`. ``pg``, the process group for ``fpipe.ops``, is
    None in one process.
    """

    pg = None

    def __init__(self, devices: tuple[torch.device, ...]):
        self.size = len(devices)
        self.here = tuple(range(self.size))
        self.timeout = float("inf")
        self.at_once = True
        self.strict = False
        self._devices = devices
        self._one_device = len(set(devices)) == 1
        #: For each channel the messages that were not received, and the requested receives.
        self._channels: defaultdict[tuple[int, int, int], tuple[deque[Tensors], deque[Pending]]]
        self._channels = defaultdict(lambda: (deque(), deque()))
        self._notes: dict[int, str] = {}

    def __repr__(self) -> str:
        kinds = sorted({str(device) for device in self._devices})
        return f"fpipe.local({self.size}) on {', '.join(kinds)}"

    @property
    def dp(self) -> LocalGroup:
        """The group of the copies of this pipeline, as in ``fpipe.init``. There is one copy."""
        return LocalGroup(self._devices[:1])

    tp = dp

    def part(self, ranks: Sequence[int]) -> LocalGroup:
        """A new group of some of its ranks."""
        return LocalGroup(tuple(self._devices[rank] for rank in ranks))

    def device(self, rank: int) -> torch.device:
        """The device on which a rank computes."""
        return self._devices[rank]

    # ---- messages ----
    def confirm(self) -> None:
        """Return: one process makes the call for all ranks."""

    def flush(self) -> None:
        """Do nothing: sends are complete when they return."""

    def sender(self, src: int, dst: int, specs: Specs, stream: int = 0) -> Sender:
        """A function that puts a message into its channel, on the device of the receiver. The
        receiver checks it.
        """
        put = self._channel(src, dst, stream)[0].append
        if self._one_device:
            return put
        device = self._devices[dst]
        # On the CPU no stream waits for the copy: the receiver reads it at once.
        non_blocking = device.type != "cpu"
        return lambda tensors: put(tuple(t.to(device, non_blocking=non_blocking) for t in tensors))

    def receiver(self, src: int, dst: int, specs: Specs, stream: int = 0) -> Receiver:
        """Functions that take a message out of its channel, if it was sent."""
        sent, _ = self._channel(src, dst, stream)
        shape, stride, dtype = specs[0] if len(specs) == 1 else ((), (), torch.uint8)
        plain = len(specs) == 1 and not dtype.is_complex

        def fetch() -> Tensors | None:
            if not sent:
                return None
            tensors = sent.popleft()
            if plain and len(tensors) == 1:  # most messages: the check of as_planned, but faster
                (t,) = tensors
                as_sent = t.stride() == stride and t.shape == shape and t.dtype is dtype
                if as_sent and not t.is_neg():
                    return tensors
            return as_planned(tensors, specs, src, dst)

        def wait() -> Tensors:
            message = fetch()
            if message is None:
                raise DeadlockError(
                    f"rank {dst} waits for a message of rank {src}, which was not sent; no other "
                    f"process could send it: run rank {src} first"
                )
            return message

        work = Following(lambda: bool(sent), wait)
        return Receiver(lambda: work, fetch)

    def recv(self, specs: Specs, src: int, dst: int) -> Work:
        """Request the next message; works may be waited for in any order."""
        sent, requested = self._channel(src, dst)
        post = self.receiver(src, dst, specs).post
        return in_order(requested, lambda: post().wait(), lambda before: len(sent) > before)

    def _channel(
        self,
        src: int,
        dst: int,
        stream: int = 0,
    ) -> tuple[deque[Tensors], deque[Pending]]:
        check_channel(src, dst, self.size)
        return self._channels[src, dst, stream]

    def reset(self) -> None:
        """Empty all channels."""
        for sent, requested in self._channels.values():
            sent.clear()
            requested.clear()

    # ---- all ranks, which are in this process ----
    def share(self, tensors: Tensors | None, specs: Specs, src: int) -> Tensors:
        """Return the tensors."""
        tensors = required(tensors, src)
        as_planned(tensors, specs, src, src)
        return tensors

    def gather_objects(self, obj: object) -> list[Any]:
        """Return the object once for each rank."""
        return [obj for _ in self.here]

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Return the tensor."""
        if op not in OPS:
            raise GroupError(f"there is no reduction {op!r}; the reductions are {', '.join(OPS)}")
        return tensor

    def start_reduce(self, memory: Tensor, op: str = "sum", *, scatter: bool = False) -> Work:
        """Return a complete work: this process holds the only part."""
        return Done((self.all_reduce(memory, op),))

    def start_gather(self, memory: Tensor) -> Work:
        """Return a complete work: this process holds the only part."""
        return Done((part_of(memory, 0, 1),))

    # ---- faults ----
    def notes(self, rank: int) -> Callable[[str], object]:
        """A function that records a note for :meth:`last_note`."""
        return partial(self._notes.__setitem__, rank)

    def last_note(self, rank: int) -> str:
        """The last journal entry of a rank."""
        return self._notes.get(rank, "")


def check_channel(src: int, dst: int, size: int) -> None:
    """Raise GroupError if a rank of a channel is not in the group."""
    for rank in (src, dst):
        if not 0 <= rank < size:
            raise GroupError(f"rank {rank} is not in a group of {size}; ranks count from 0")

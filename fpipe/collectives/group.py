# SPDX-License-Identifier: Apache-2.0
"""``Group``: the interface through which the runner reaches other ranks.

A message is a tuple of tensors. Sender and receiver describe it by the same tuple of :class:`Spec`.
A channel is a pair of ranks (source, destination). Its n-th receive gets its n-th send, so messages
carry no tags. This module must not know backends, processes or plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from ..errors import GroupError, MismatchError, UnsupportedError
from ..tree import Spec

#: Texts that ranks compare, by name; None is not compared.
Facts: TypeAlias = Mapping[str, str | None]
#: A message, and its description.
Tensors: TypeAlias = tuple[Tensor, ...]
Specs: TypeAlias = tuple[Spec, ...]
#: Completes a work, and returns its result.
Finish: TypeAlias = Callable[[], Tensors]
OPS = ("sum", "mean", "max", "min")  #: the reductions


class Work(Protocol):
    """A send, a receive or a collective that has started."""

    def done(self) -> bool:
        """Whether ``wait`` would return at once. It never blocks. It is False if the backend cannot
        tell.
        """
        ...

    def wait(self) -> Tensors:
        """Block until the work is complete and return its result; ``()`` for a send."""
        ...


class Done(NamedTuple):
    """A work that was complete when it was created.

    >>> Done().done(), Done().wait()
    (True, ())
    """

    tensors: Tensors = ()

    def done(self) -> bool:
        """True."""
        return True

    def wait(self) -> Tensors:
        """The result."""
        return self.tensors


@dataclass(frozen=True, eq=False)
class Following:
    """The receive of the next message of a channel, whenever it is waited for: one work for all
    messages of a kind.
    """

    done: Callable[[], bool]
    wait: Finish


class Pending:
    """A work whose first ``wait`` calls ``finish``; later ones return the same result.

    ``ready`` reports whether ``finish`` would return at once. The first ``wait`` drops both, and
    with them the buffers that they refer to.

    >>> work = Pending(lambda: (torch.ones(1),))
    >>> work.done(), work.wait() is work.wait(), work.done()
    (False, True, True)
    """

    __slots__ = ("_finish", "_ready", "_result")

    def __init__(self, finish: Finish, ready: Callable[[], bool] = lambda: False):
        self._finish: Finish | None = finish
        self._ready: Callable[[], bool] | None = ready
        self._result: Tensors = ()

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._ready is None or self._ready()

    def wait(self) -> Tensors:
        """The result of ``finish``."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = self._ready = None
        return self._result


def in_order(requested: deque[Pending], receive: Finish, arrived: Callable[[int], bool]) -> Pending:
    """A receive that waits for those of its channel that were requested before it.

    ``receive`` returns the next message. ``arrived(n)``: whether more than n messages have arrived.
    """

    def finish() -> Tensors:
        while requested[0] is not work:
            requested[0].wait()
        message = receive()
        requested.popleft()
        return message

    work = Pending(finish, lambda: arrived(requested.index(work)))
    requested.append(work)
    return work


#: The sending end of a channel, for messages of one tuple of Specs. None is a complete send.
Sender: TypeAlias = Callable[[Tensors], Work | None]


class Receiver(NamedTuple):
    """The receiving end of a channel, for messages of one tuple of Specs.

    ``post`` requests the next message, as ``recv`` of the group does. ``fetch`` returns the next
    message if it has arrived; it may also return None for messages of certain Specs.

    If ``fetch`` is None, a plan calls ``post`` ahead of need, at its RECV instruction. Otherwise a
    receive needs no buffer in advance, and a plan does nothing at RECV. It calls ``fetch`` when it
    needs the message. If that returns None, it calls ``post``, and waits for this work before it
    uses the channel again; ``post`` then returns one work for all messages. Either all channels of
    a group have a ``fetch`` or none has.
    """

    post: Callable[[], Work]
    fetch: Callable[[], Tensors | None] | None = None


@runtime_checkable
class Group(Protocol):
    """The ranks of a pipeline, and messages and collectives between them.

    Implementations derive from this class. ``size`` is the number of ranks. ``here`` are the ranks
    of this process: all of a local group, one of a distributed group. ``timeout`` is the longest
    time in seconds that a rank waits for another. ``at_once``: a send is complete when it returns,
    so plans keep no buffer for it and contain no SETTLE. A group with ``at_once`` has three
    ``streams`` in each channel. ``strict``: a send may block until its
    receive is posted, so plans post receives exactly where the schedule places them. ``staged``:
    messages go through memory of the host.
    """

    size: int
    here: tuple[int, ...]
    timeout: float
    at_once: bool
    strict: bool
    staged: bool = False

    def device(self, rank: int) -> torch.device:
        """The device on which a rank computes."""
        ...

    # ---- messages ----
    def sender(self, src: int, dst: int, specs: Specs, stream: int = 0) -> Sender:
        """A function that sends a message, for a plan that sends many of one kind.

        The group keeps buffers alive. The tensors must not be changed until a send is done.
        ``specs`` are those that the receiver expects. A tensor with other strides is copied. One
        with another shape or dtype is refused before anything is sent. Each of the ``streams`` of a
        channel has an order of its own.
        """
        ...

    def receiver(self, src: int, dst: int, specs: Specs, stream: int = 0) -> Receiver:
        """Functions that receive a message, for a plan that receives many of one kind."""
        ...

    def send(self, tensors: Tensors, src: int, dst: int, specs: Specs | None = None) -> Work:
        """Send one message. ``specs`` are by default those of its tensors."""
        if specs is None:
            specs = tuple(map(Spec.of, tensors))
        return self.sender(src, dst, specs)(tensors) or Done()

    def recv(self, specs: Specs, src: int, dst: int) -> Work:
        """Request the next message of a channel, perhaps long before it is needed."""
        return self.receiver(src, dst, specs).post()

    def wait_any(self, receives: Sequence[tuple[int, Work]]) -> None:
        """Return once one of several receives is done, each given with its sender.

        A group that cannot wait for several waits for the first.
        """
        receives[0][1].wait()

    def settle(self, dst: int, count: int) -> None:
        """Release the buffers of the ``count`` oldest sends to a rank, which has received them, if
        the group keeps them.
        """

    def flush(self) -> None:
        """Block until every send of this process is complete, if not ``at_once``, and raise their
        errors.
        """

    def reset(self) -> None:
        """After an error, drop messages that were not received, if the group stays usable."""

    # ---- calls ----
    def enter(self, digest: int, facts: Callable[[], Facts]) -> int:
        """Announce the next call of a pipeline, before its first message, and return its number.

        ``digest`` is equal on all ranks that run the same plan with the same options. If digests
        differ, every rank raises the same MismatchError, in a wait for another rank or in
        ``confirm``. The error compares the results of ``facts()``. Messages of different calls
        never meet. Groups of one process compare nothing. The first number is 0.
        """
        return 0

    def refuse(self, error: BaseException) -> None:
        """Announce, in place of the next call, that this rank refuses its arguments.

        ``error`` is what it raises. The other ranks raise PeerError in that call. All ranks can go
        on with the next one.
        """

    def leave(self, error: BaseException) -> None:
        """Leave the call with an error that every rank raises at its end.

        Nothing is reported then, and all ranks can go on with the next call.
        """

    def confirm(self) -> None:
        """Return once every rank has announced the same call.

        It is called at the end of each call, before results are read.
        """

    def global_rank(self, rank: int) -> int:
        """The number of a rank among all processes of the job, for error messages."""
        return rank

    def part(self, ranks: Sequence[int]) -> Group:
        """A new group of some ranks of this one, which call it with the same ascending ranks. The
        other ranks need not run any more.
        """
        raise UnsupportedError(
            f"{self!r} makes no groups of some of its ranks; make one, and a pipeline with it"
        )

    def lost(self) -> int | None:
        """The rank that ended without an error of its own, where this group failed because of
        it.
        """
        return None

    # ---- all ranks ----
    def share(self, tensors: Tensors | None, specs: Specs, src: int) -> Tensors:
        """Broadcast the tensors of rank ``src`` to every process; the others pass None."""
        ...

    def gather_objects(self, obj: object) -> list[Any]:
        """The objects that all ranks passed, by rank. A process passes one object for its ranks.

        Between processes an object is sent as data (``codec.py``): numbers, text, plain tensors,
        and containers of them. Tensors arrive on the CPU. Other types raise GroupError.
        """
        ...

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce a tensor over processes by ``sum``, ``mean``, ``max`` or ``min``.

        The argument is not changed.
        """
        ...

    def start_reduce(self, memory: Tensor, op: str = "sum", *, scatter: bool = False) -> Work:
        """Start ``all_reduce`` of a tensor of one axis. The work returns the result.

        The group may overwrite ``memory``. With ``scatter`` the result is cut into one equal part
        for each process, and the work returns that of this process. Every process must start
        collectives in the same order. They complete in this order.
        """
        ...

    def start_gather(self, memory: Tensor) -> Work:
        """Start to fill ``memory`` with the parts of the other processes. The work returns it.

        ``memory`` has one axis, and an equal part for each process. The caller has filled in the
        part of this process.
        """
        ...

    def barrier(self) -> None:
        """Return once every process has called it; at once in groups of one process."""

    # ---- faults ----
    def notes(self, rank: int) -> Callable[[str], object]:
        """A function that records what a rank of this process does next.

        Error messages of all ranks show it. It is cheap.
        """
        ...

    def journal(self, rank: int, text: str) -> None:
        """Record one note."""
        self.notes(rank)(text)

    def last_note(self, rank: int) -> str:
        """The last journal entry of a rank; empty if there is none."""
        ...

    def failed(self, error: BaseException) -> None:
        """Report to other processes, if there are any, that this one raised. The report may get
        lost.
        """


def required(tensors: Tensors | None, src: int) -> Tensors:
    """The tensors that the process of rank ``src`` passed to ``share``; GroupError for None."""
    if tensors is None:
        raise GroupError(
            f"share needs the tensors of rank {src}, which is in this process; got None"
        )
    return tensors


def same_call(number: int, group: Group) -> None:
    """Raise MismatchError unless all ranks of a new group were in the same call of the old one: a
    rank that is ahead may have changed its parameters already.
    """
    numbers = group.gather_objects(number)
    if len(set(numbers)) > 1:
        ahead = [group.global_rank(rank) for rank, n in enumerate(numbers) if n == max(numbers)]
        raise MismatchError(
            f"rank {', '.join(map(str, ahead))} had ended the call in which others failed, so the "
            "ranks may have parameters of different steps; load a checkpoint"
        )


def as_group(option: str, value: object) -> Group:
    """Return ``value``; GroupError if it is no group, as a process group of torch is none."""
    if isinstance(value, Group):
        return value
    raise GroupError(
        f"{option}={value!r} is no group of ranks; pass fpipe.init(), fpipe.local(ranks), or "
        "fpipe.adopt(process_group)"
    )

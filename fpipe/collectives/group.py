# SPDX-License-Identifier: Apache-2.0
"""``Group``: the interface through which the runner reaches other ranks.

A message is a tuple of tensors, described on both sides by the same tuple of :class:`Spec`. A
channel is a pair of ranks (source, destination); its n-th receive gets its n-th send, so messages
carry no tags. This module must not know backends, processes or plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from ..errors import GroupError
from ..tree import Spec

#: What ranks compare, as text by name; ``None`` is not compared.
Facts: TypeAlias = Mapping[str, str | None]
#: A message, and what describes it.
Tensors: TypeAlias = tuple[Tensor, ...]
Specs: TypeAlias = tuple[Spec, ...]
OPS = ("sum", "mean", "max", "min")  #: the reductions


class Work(Protocol):
    """A send, a receive or a collective that has started."""

    def done(self) -> bool:
        """Whether ``wait`` would return at once. Never blocks; False where the backend does not
        report it.
        """
        ...

    def wait(self) -> Tensors:
        """Block until it is complete and return its result; ``()`` for a send."""
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


class Pending:
    """A work whose first ``wait`` calls ``finish``; later ones return the same result.

    ``ready`` reports whether ``finish`` would return at once. Both are dropped after the first
    ``wait``, and with them the buffers that they refer to.

    >>> work = Pending(lambda: (torch.ones(1),))
    >>> work.done(), work.wait() is work.wait(), work.done()
    (False, True, True)
    """

    __slots__ = ("_finish", "_ready", "_result")

    def __init__(self, finish: Callable[[], Tensors], ready: Callable[[], bool] = lambda: False):
        self._finish: Callable[[], Tensors] | None = finish
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


def in_order(
    requested: deque[Pending], receive: Callable[[], Tensors], arrived: Callable[[int], bool]
) -> Pending:
    """A receive that waits for those of its channel that were requested before it.

    ``receive`` returns the next message; ``arrived`` tells whether it has, after so many others.
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


#: The sending end of a channel, for messages of one tuple of Specs; None: the send is complete.
Sender: TypeAlias = Callable[[Tensors], Work | None]


class Receiver(NamedTuple):
    """The receiving end of a channel, for messages of one tuple of Specs.

    ``post`` requests the next message, as ``recv`` of the group does. Where ``fetch`` is None, a
    plan calls ``post`` ahead of need, at its RECV instruction. Otherwise a receive needs no buffer
    in advance: a plan does nothing at RECV, calls ``fetch`` when it needs the message, and only
    where that returns None, ``post``, whose work it waits for before anything else of the channel.
    ``fetch`` returns the next message if it has arrived, and may return None for messages of
    certain Specs. Either all channels between two ranks have a ``fetch`` or none has.
    """

    post: Callable[[], Work]
    fetch: Callable[[], Tensors | None] | None = None


@runtime_checkable
class Group(Protocol):
    """The ranks of a pipeline, and messages and collectives between them. Implementations derive
    from it.

    ``size`` is the number of ranks; ``here`` are those of this process: all of a local group, one
    of a distributed one; ``timeout`` is the longest time in seconds that a rank waits for another.
    ``at_once``: a send is complete when it returns, so plans keep no buffer for it and emit no
    SETTLE. ``strict``: a send may block until its receive is posted, so plans post receives exactly
    where the schedule places them.
    """

    size: int
    here: tuple[int, ...]
    timeout: float
    at_once: bool
    strict: bool

    def device(self, rank: int) -> torch.device:
        """The device on which a rank computes."""
        ...

    # ---- messages ----
    def sender(self, src: int, dst: int, specs: Specs) -> Sender:
        """A function that sends a message, for a plan that sends many of one kind.

        The group keeps buffers alive; the tensors must not be changed until a send is done.
        ``specs`` are those that the receiver expects: a tensor of other strides is copied into
        those, and one of another shape or dtype is refused before anything is sent.
        """
        ...

    def receiver(self, src: int, dst: int, specs: Specs) -> Receiver:
        """Functions that receive a message, for a plan that receives many of one kind."""
        ...

    def send(self, tensors: Tensors, src: int, dst: int, specs: Specs | None = None) -> Work:
        """Send one message; ``specs`` are those of its tensors, where they are not given."""
        if specs is None:
            specs = tuple(map(Spec.of, tensors))
        return self.sender(src, dst, specs)(tensors) or Done()

    def recv(self, specs: Specs, src: int, dst: int) -> Work:
        """Request the next message of a channel; may be called long before the message is
        needed.
        """
        return self.receiver(src, dst, specs).post()

    def settle(self, dst: int, count: int) -> None:
        """Release the buffers of the ``count`` oldest sends to a rank; the caller knows that they
        were received.
        """
        ...

    def flush(self) -> None:
        """Block until every send of this process is complete; raises their errors."""
        ...

    def reset(self) -> None:
        """After an error: drop messages that were sent and not received, where the group stays
        usable.
        """

    # ---- calls ----
    def enter(self, digest: int, facts: Callable[[], Facts]) -> int:
        """Announce the next call of a pipeline, before its first message; returns its number, from
        0.

        ``digest`` is equal on all ranks that run the same plan with the same options. Where digests
        differ, every rank raises the same MismatchError, on a wait for another rank or in
        ``confirm``; it compares what ``facts()`` returns. Messages of different calls never
        meet. Groups of one process have nothing to compare.
        """
        return 0

    def refuse(self, error: BaseException) -> None:
        """Announce, in place of the next call, that this rank refuses its arguments, with the error
        that it raises.

        The other ranks raise PeerError in that call. All ranks can go on with the next one.
        """

    def confirm(self) -> None:
        """Return once every rank has announced the same call; at the end of each call, before
        results are read.
        """

    def global_rank(self, rank: int) -> int:
        """The number of a rank among all processes of the job, for error messages."""
        return rank

    # ---- all ranks ----
    def share(self, tensors: Tensors | None, specs: Specs, src: int) -> Tensors:
        """Broadcast the tensors of rank ``src`` to every process; the others pass None."""
        ...

    def gather_objects(self, obj: object) -> list[Any]:
        """What every rank passed, by rank; the ranks of one process pass one object together.

        Between processes it is sent as data (``codec.py``): numbers, text, plain tensors, and
        containers of them. Tensors arrive on the CPU. GroupError, which names the type, for
        anything else.
        """
        ...

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """``sum``, ``mean``, ``max`` or ``min`` over processes; the argument is not changed."""
        ...

    def start_reduce(self, memory: Tensor, op: str = "sum", *, scatter: bool = False) -> Work:
        """Start ``all_reduce``; the work returns the result. The group may overwrite ``memory``, of
        one axis.

        With ``scatter`` the result is this process's part of as many equal ones. Started
        collectives complete in the order in which they were started; every process must start them
        in one order.
        """
        ...

    def start_gather(self, memory: Tensor) -> Work:
        """Start filling ``memory`` (one axis, in equal parts by rank) with the parts of the other
        processes.

        The caller has filled in its part; the work returns ``memory``, complete.
        """
        ...

    def barrier(self) -> None:
        """Return once every process has called it."""
        ...

    # ---- faults ----
    def notes(self, rank: int) -> Callable[[str], object]:
        """A function that records what a rank of this process does next, for error messages of all
        ranks. Cheap.
        """
        ...

    def journal(self, rank: int, text: str) -> None:
        """Record it once."""
        self.notes(rank)(text)

    def last_note(self, rank: int) -> str:
        """The last journal entry of a rank; empty if there is none."""
        ...

    def failed(self, error: BaseException) -> None:
        """Report to the other processes that this one raised: without delay, and without a
        guarantee.
        """
        ...


def as_group(option: str, value: object) -> Group:
    """``value``, or GroupError where it is no group."""
    if isinstance(value, Group):
        return value
    raise no_group(option, value)


def no_group(option: str, value: object) -> GroupError:
    """The error for an option that is no group, as where a process group was passed as it is."""
    return GroupError(
        f"{option}={value!r} is no group of ranks; pass fpipe.init(), fpipe.local(ranks), or "
        "fpipe.adopt(process_group)"
    )

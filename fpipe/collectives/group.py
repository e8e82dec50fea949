# SPDX-License-Identifier: Apache-2.0
"""``Group``: the interface through which the runner reaches other ranks.

A message is a tuple of tensors, described on both sides by the same tuple of :class:`Spec`. A
channel is a pair of ranks (source, destination); its n-th receive gets its n-th send, so messages
carry no tags. This module must not know backends, processes or plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from ..errors import GroupError, MismatchError
from ..tree import Spec

#: What ranks compare, as text by name; ``None`` is not compared.
Facts: TypeAlias = Mapping[str, str | None]
OPS = ("sum", "mean", "max", "min")  #: the reductions


class Work(Protocol):
    """A send, a receive or a collective that has started."""

    def done(self) -> bool:
        """Whether ``wait`` would return at once. Never blocks; False where the backend does not
        report it.
        """
        ...

    def wait(self) -> tuple[Tensor, ...]:
        """Block until it is complete and return its result; ``()`` for a send."""
        ...


class Done(NamedTuple):
    """A work that was complete when it was created.

    >>> Done().done(), Done().wait()
    (True, ())
    """

    tensors: tuple[Tensor, ...] = ()

    def done(self) -> bool:
        """True."""
        return True

    def wait(self) -> tuple[Tensor, ...]:
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

    def __init__(
        self, finish: Callable[[], tuple[Tensor, ...]], ready: Callable[[], bool] = lambda: False
    ):
        self._finish: Callable[[], tuple[Tensor, ...]] | None = finish
        self._ready: Callable[[], bool] | None = ready
        self._result: tuple[Tensor, ...] = ()

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._ready is None or self._ready()

    def wait(self) -> tuple[Tensor, ...]:
        """The result of ``finish``."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = self._ready = None
        return self._result


#: The sending end of a channel, for messages of one tuple of Specs.
Sender: TypeAlias = Callable[[tuple[Tensor, ...]], object]


class Receiver(NamedTuple):
    """The receiving end of a channel, for messages of one tuple of Specs.

    ``post`` requests the next message, in the same order as ``recv`` of the group, and without
    delay also where ``recv`` delays requests. Where ``fetch`` is None, a plan calls ``post`` ahead
    of need, at its RECV instruction. Otherwise a receive needs no buffer in advance: a plan does
    nothing at RECV, calls ``fetch`` when it needs the message, and only where that returns None,
    ``post``, whose work it waits for before anything else of the channel. ``fetch`` returns the
    next message if it has arrived, and may return None for messages of certain Specs. Either all
    channels between two ranks have a ``fetch`` or none has.
    """

    post: Callable[[], Work]
    fetch: Callable[[], tuple[Tensor, ...] | None] | None = None


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
    def send(
        self, tensors: tuple[Tensor, ...], src: int, dst: int, specs: tuple[Spec, ...] | None = None
    ) -> Work:
        """Send one message. The group keeps its buffers alive; the tensors must not be changed
        until it is done.

        ``specs`` are those that the receiver expects, if they are known: a tensor of other strides
        is then copied into those, and one of another shape or dtype is refused before anything is
        sent.
        """
        ...

    def recv(self, specs: tuple[Spec, ...], src: int, dst: int) -> Work:
        """Request the next message of a channel; may be called long before the message is
        needed.
        """
        ...

    def sender(self, src: int, dst: int, specs: tuple[Spec, ...]) -> Sender:
        """``send`` with all but the tensors bound, for a plan that sends many messages of one
        kind.
        """
        return lambda tensors: self.send(tensors, src, dst, specs)

    def receiver(self, src: int, dst: int, specs: tuple[Spec, ...]) -> Receiver:
        """``recv`` with its arguments bound, for a plan that receives many messages of one kind."""
        return Receiver(lambda: self.recv(specs, src, dst))

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
    def enter(self, digest: int, facts: Callable[..., Facts], values: tuple[Any, ...] = ()) -> int:
        """Announce the next call of a pipeline, before its first message; returns its number, from
        0.

        ``digest`` is equal on all ranks that run the same plan with the same options. Where digests
        differ, every rank raises the same MismatchError, on a wait for another rank or in
        ``confirm``; it compares what ``facts(*values)`` returns. Messages of different calls never
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
    def share(
        self, tensors: tuple[Tensor, ...] | None, specs: tuple[Spec, ...], src: int
    ) -> tuple[Tensor, ...]:
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
    def journal(self, rank: int, text: str) -> None:
        """Record what a rank of this process does next, for error messages of all ranks. Cheap."""
        ...

    def notes(self, rank: int) -> Callable[[str], object]:
        """``journal`` with the rank bound, for a plan that records many actions."""
        return lambda text: self.journal(rank, text)

    def last_note(self, rank: int) -> str:
        """The last journal entry of a rank; empty if there is none."""
        ...

    def failed(self, error: BaseException) -> None:
        """Report to the other processes that this one raised: without delay, and without a
        guarantee.
        """
        ...


def part_of(memory: Tensor, part: int, parts: int) -> Tensor:
    """One of ``parts`` equal parts of memory, as a view.

    >>> part_of(torch.arange(6), 1, 3)
    tensor([2, 3])
    """
    if memory.dim() != 1 or memory.numel() % parts:
        raise MismatchError(
            f"{list(memory.shape)} elements do not make {parts} equal parts; lay tensors out "
            "along one axis and pad it"
        )
    size = memory.numel() // parts
    return memory.narrow(0, part * size, size)


def as_planned(
    tensors: tuple[Tensor, ...], specs: tuple[Spec, ...], src: int, dst: int
) -> tuple[Tensor, ...]:
    """A message with the strides of its Specs; MismatchError if it differs in number, shapes or
    dtypes of tensors.

    Kernels, and so bits, may depend on strides.

    >>> row = torch.ones(2)
    >>> as_planned((row,), (Spec.of(row),), 0, 1)[0] is row
    True
    """
    if len(tensors) != len(specs):
        raise MismatchError(
            f"rank {src} sent {len(tensors)} tensors and rank {dst} expected {len(specs)}; both "
            "must run one plan"
        )
    for tensor, (shape, stride, dtype) in zip(tensors, specs, strict=True):
        if (
            tensor.stride() != stride
            or tensor.shape != shape
            or tensor.dtype is not dtype
            or tensor.is_neg()
            or (dtype.is_complex and tensor.is_conj())
        ):
            break
    else:
        return tensors
    for index, (tensor, spec) in enumerate(zip(tensors, specs, strict=True)):
        if tensor.shape != spec.shape or tensor.dtype is not spec.dtype:
            raise MismatchError(
                f"tensor {index} of a message from rank {src} to rank {dst} is {Spec.of(tensor)}, "
                f"expected {spec}; a stage's shapes must be those it was planned with"
            )
    return tuple(map(lay_out, tensors, specs))


def lay_out(tensor: Tensor, spec: Spec) -> Tensor:
    """The tensor with the strides of its Spec; itself if it has them. Lazy conjugates and negations
    are resolved.
    """
    if tensor.stride() == spec.stride and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    for axis, step in enumerate(spec.stride):
        if step == 0:
            if tensor.stride(axis) != 0:
                raise MismatchError(
                    f"a tensor of strides {tuple(tensor.stride())} was planned with strides "
                    f"{spec.stride}, of which only a part is stored; call .contiguous() on it "
                    "where the stage returns it"
                )
            tensor = tensor.narrow(axis, 0, 1)
    memory = torch.empty_strided(tensor.shape, spec.stride, dtype=spec.dtype, device=tensor.device)
    return memory.copy_(tensor).as_strided(spec.shape, spec.stride)


def check_channel(src: int, dst: int, size: int) -> None:
    """Raise GroupError if a rank of a channel is not one of a group's."""
    for rank in (src, dst):
        if not 0 <= rank < size:
            raise GroupError(f"rank {rank} is not in a group of {size}; ranks count from 0")


def as_group(option: str, value: object) -> Group:
    """``value``, or GroupError where it is no group, as where a process group was passed as it
    is.
    """
    if isinstance(value, Group):
        return value
    raise GroupError(
        f"{option}={value!r} is no group of ranks; pass fpipe.init(), fpipe.local(ranks), or "
        "fpipe.adopt(process_group)"
    )

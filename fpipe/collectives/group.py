"""``Group``: the one thing that the runner knows about other ranks. A Protocol, and the words it uses.

A message is a tuple of tensors, described on both sides by the same tuple of :class:`Spec`. Messages from one rank
to another arrive in the order in which they were sent, by construction: the n-th ``recv`` of a channel gets the n-th
``send``, so no tags are needed and none are trusted. This module knows no backend and no process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import MismatchError
from ..specs import Spec


class Work(Protocol):
    """Something under way: a send or a receive."""

    def done(self) -> bool:
        """Whether ``wait`` would return at once. Polls, never blocks; a backend that cannot tell says False."""
        ...

    def wait(self) -> tuple[Tensor, ...]:
        """Block until done; the received tensors, or ``()`` for a send."""
        ...


class Done(NamedTuple):
    """A work that was over when it began.

    >>> Done().done(), Done().wait()
    (True, ())
    """

    tensors: tuple[Tensor, ...] = ()

    def done(self) -> bool:
        """True."""
        return True

    def wait(self) -> tuple[Tensor, ...]:
        """What it holds."""
        return self.tensors


@runtime_checkable
class Group(Protocol):
    """Ranks of a pipeline that send each other messages.

    A group whose sends have their bytes taken when they return may say so by ``at_once = True``: a plan then keeps
    nothing for them. ``size`` counts the ranks; ``here`` are those that live in this process (all of a local group,
    one of a distributed one); ``timeout`` is the longest time in seconds that a rank waits for another.
    """

    size: int
    here: tuple[int, ...]
    timeout: float
    strict: bool  # a send may block until it is asked for, so receives must be posted exactly where the plan says

    def device(self, rank: int) -> torch.device:
        """Where a rank computes."""
        ...

    def send(self, tensors: tuple[Tensor, ...], src: int, dst: int, specs: tuple[Spec, ...] | None = None) -> Work:
        """Send one message. The group keeps what it needs alive; the tensors must not be changed until done.

        ``specs`` is what the receiver expects, where the sender knows it; a tensor that was planned with other strides
        is then laid out anew, and one of another shape or dtype is refused before it is sent.
        """
        ...

    def recv(self, specs: tuple[Spec, ...], src: int, dst: int) -> Work:
        """Ask for the next message of the channel; may be called long before it is needed."""
        ...

    def settle(self, dst: int, count: int) -> None:
        """Let go of the ``count`` oldest sends to a rank, which the caller knows to have been received."""
        ...

    def flush(self) -> None:
        """Block until every send of this process is done; raises what went wrong with them."""
        ...

    def share(self, tensors: tuple[Tensor, ...] | None, specs: tuple[Spec, ...], src: int) -> tuple[Tensor, ...]:
        """Give every process the tensors of rank ``src``; the others pass None."""
        ...

    def gather_objects(self, obj: object) -> list[Any]:
        """What every rank passed, by rank; the ranks of one process pass one object together."""
        ...

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """``sum``, ``mean``, ``max`` or ``min`` over processes; the argument is left as it is."""
        ...

    def start_reduce(self, memory: Tensor, op: str = "sum", *, scatter: bool = False) -> Work:
        """``all_reduce``, under way: the work gives the result. ``memory``, of one axis, is the group's from now on.

        With ``scatter`` the result is this process's part of as many equal ones. Collectives that are under way end in
        the order in which they began; every process must begin them in one order.
        """
        ...

    def start_gather(self, memory: Tensor) -> Work:
        """Under way: every process's part of ``memory`` (of one axis, in equal parts by rank) comes to the others.

        This process's own part is filled in; the work gives ``memory``, whole.
        """
        ...

    def barrier(self) -> None:
        """Return once every process has come here."""
        ...

    def journal(self, rank: int, text: str) -> None:
        """Note what a rank is about to do, for the others' error messages. Cheap."""
        ...

    def failed(self, error: BaseException) -> None:
        """Tell the others, best effort and at once, that this process raised."""
        ...


def part_of(memory: Tensor, part: int, parts: int) -> Tensor:
    """One of as many equal parts of memory, as a view.

    >>> part_of(torch.arange(6), 1, 3)
    tensor([2, 3])
    """
    if memory.dim() != 1 or memory.numel() % parts:
        raise MismatchError(
            f"{list(memory.shape)} elements do not make {parts} equal parts; lay tensors out along one axis and pad it"
        )
    size = memory.numel() // parts
    return memory.narrow(0, part * size, size)


def check_message(tensors: Sequence[Tensor], specs: Sequence[Spec], src: int, dst: int) -> None:
    """Raise MismatchError where a message is not what its receiver expects."""
    if len(tensors) != len(specs):
        raise MismatchError(
            f"rank {src} sent {len(tensors)} tensors and rank {dst} expected {len(specs)}; both must run one plan"
        )
    for index, (tensor, spec) in enumerate(zip(tensors, specs, strict=True)):
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise MismatchError(
                f"tensor {index} of a message from rank {src} to rank {dst} is {Spec.of(tensor)}, "
                f"expected {spec}; a stage's shapes must be those it was planned with"
            )

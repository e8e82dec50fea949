"""``Group`` over a process group of torch.distributed: one rank per process, any backend of the capability table.

The n-th message of a channel is the n-th of its receiver by construction; tags are not used. Where a backend wants
one order for both directions of a pair, each direction has a process group of its own. Sends keep their buffers until
they are settled: whoever runs a plan knows from what arrives which of its sends have been received, and a send is never
waited for before that, since a bound on what is under way could stop two ranks for good. Knows no schedule.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import GroupError
from ..specs import Spec
from ._store import Store
from .adapt import reduction, road
from .capabilities import Capabilities
from .faults import Watch
from .group import Work
from .local import LocalGroup
from .meeting import Meeting
from .reduce import all_reduce, start_gather, start_reduce
from .shared_memory.nearby import SWITCH, meet
from .wire import wire


class C10dGroup:
    """See the module. Made by ``fpipe.init``, or from a process group of one's own by :func:`adopt`."""

    def __init__(
        self,
        pg: dist.ProcessGroup,
        device: torch.device,
        *,
        timeout: float,
        store: Store,
        capabilities: Capabilities,
        cpu: Capabilities | None = None,
        back: dist.ProcessGroup | None = None,
    ):
        self.size, self.rank = pg.size(), pg.rank()
        self.here = (self.rank,)
        self.timeout = timeout
        self.pg = pg
        self._back = back or pg
        self._device = device
        self.can, self.cpu = capabilities, cpu
        self._watch = Watch(store, self.rank, self.size, timeout)
        self._meeting = Meeting(store, self.rank, self.size, timeout, self._watch)
        self._limit = timedelta(seconds=timeout)
        self._sent: dict[int, deque[_Sent]] = {}
        self._late: dict[int, deque[_Receipt]] = {}
        self._self = LocalGroup((device,))
        way = road(capabilities, torch.uint8, cpu)
        self._early, self._staged = way.early, way.staged
        self.strict = not way.early
        # A backend that works on streams is waited for by the stream: a time-out would block this thread instead.
        self._host = device.type in ("cpu", "meta") or way.staged
        near = device.type == "cpu" and self.size > 1 and capabilities.backend == "gloo"
        self._near = meet(self.rank, self.size, self._watch, self._meeting.gather) if near else None
        self.at_once = self._near is not None and self._near.all
        self._as_bytes = {dtype: road(capabilities, dtype, cpu).bytes for dtype in _DTYPES}

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size} on {self._device} over {self.can.backend}"

    @property
    def backend(self) -> str:
        """The backend that carries this device's tensors."""
        return self.can.backend

    @property
    def carried(self) -> str:
        """How messages travel where it is not by the backend, in words."""
        if self._near is None or self.size == 1:
            return ""
        if self._near.all:
            return f"through shared memory ({SWITCH}=0 turns it off)"
        others = sum(rank in self._near for rank in range(self.size))
        return f"through shared memory with {others} of {self.size - 1} ranks, by the backend with the others"

    def device(self, rank: int) -> torch.device:
        """This rank's device; the others are taken to be of the same type."""
        return self._device if rank == self.rank else torch.device(self._device.type)

    # ---- messages -----------------------------------------------------------------------------------------------
    def send(self, tensors: tuple[Tensor, ...], src: int, dst: int, specs: tuple[Spec, ...] | None = None) -> Work:
        """Send one message; its buffers are kept until it is done."""
        if src == dst:
            return self._self.send(tensors, 0, 0)
        if src != self.rank or self._watch.broken is not None:
            self._refuse(src, "send")
        if self._near is not None and dst in self._near:
            return self._near.send(wire(tuple(map(Spec.of, tensors)) if specs is None else specs), tensors, dst)
        buffers = wire(tuple(map(Spec.of, tensors)) if specs is None else specs).pack(tensors, src, dst)
        if self._staged:
            buffers = [buffer.cpu() for buffer in buffers]
        pg = self.pg if src < dst else self._back
        try:
            works = [pg.send([self._raw(buffer)], dst, 0) for buffer in buffers]
        except RuntimeError as error:
            raise self._watch.explain(error, dst, "to send to") from error
        sent = _Sent(self, dst, works, buffers)
        self._sent.setdefault(dst, deque()).append(sent)
        return sent

    def recv(self, specs: tuple[Spec, ...], src: int, dst: int) -> Work:
        """Ask for the next message of a channel; posted at once where the backend allows."""
        if src == dst:
            return self._self.recv(specs, 0, 0)
        if dst != self.rank or self._watch.broken is not None:
            self._refuse(dst, "receive")
        if self._near is not None and src in self._near:
            return self._near.recv(wire(specs), src)
        receipt = _Receipt(self, src, specs)
        if self._early:
            receipt.post()
        else:
            self._late.setdefault(src, deque()).append(receipt)
        return receipt

    def sender(self, src: int, dst: int, specs: tuple[Spec, ...]) -> Callable[[tuple[Tensor, ...]], object]:
        """:meth:`send`, made ready for messages of one kind: what does not change is looked up once."""
        if self._near is None or src == dst or dst not in self._near:
            return lambda tensors: self.send(tensors, src, dst, specs)
        return self._near.sender(wire(specs), dst)

    def ahead(self, src: int, dst: int) -> bool:
        """Whether messages are asked for ahead. Of a channel all are or none is: they come in the order of asking."""
        return self._near is None or src == dst or src not in self._near

    def fetcher(self, src: int, dst: int, specs: tuple[Spec, ...]) -> Callable[[], Tensor | None]:
        """Where none is asked for ahead: gives the next message if it is one tensor and has come."""
        assert self._near is not None
        return self._near.fetcher(wire(specs), src)

    def settle(self, dst: int, count: int) -> None:
        """Let go of the oldest sends to a rank, which are known to have been received."""
        sent = self._sent.get(dst, deque())
        for _ in range(min(count, len(sent))):
            sent[0].wait()

    def flush(self) -> None:
        """Wait for every send."""
        for sent in self._sent.values():
            while sent:
                sent[0].wait()
        if self._near is not None:
            self._near.flush()

    def _refuse(self, rank: int, verb: str) -> None:
        if rank != self.rank:
            raise GroupError(f"rank {self.rank} cannot {verb} for rank {rank}, which lives in another process")
        self._watch.check()

    def _raw(self, buffer: Tensor) -> Tensor:
        return _bytes(buffer) if self._as_bytes[buffer.dtype] else buffer

    def _wait(self, work: Any) -> None:
        work.wait(self._limit) if self._host else work.wait()

    def _wait_all(self, works: list[Any], peer: int, doing: str) -> None:
        start = time.monotonic()
        self._watch.journal.waits(peer)
        try:
            for work in works:
                self._wait(work)
        except RuntimeError as error:
            raise self._watch.explain(error, peer, doing, time.monotonic() - start) from error
        self._watch.journal.waits(None)

    # ---- all ranks ----------------------------------------------------------------------------------------------
    def share(self, tensors: tuple[Tensor, ...] | None, specs: tuple[Spec, ...], src: int) -> tuple[Tensor, ...]:
        """Broadcast, as bytes; through memory where all ranks share it."""
        self._watch.check()
        if src == self.rank and tensors is None:
            raise GroupError(f"share needs the tensors of rank {src}, which is this one; got None")
        if self._near is not None and self.at_once:
            return self._near.share(wire(specs), tensors if src == self.rank else None, src)
        where = _CPU if self._through_cpu("broadcast") else self._device
        if src == self.rank and tensors is not None:
            buffers = [buffer.to(where) for buffer in wire(specs).pack(tensors, src, src)]
        else:
            buffers = wire(specs).empty(where)
        mine = src == self.rank
        with self._watch.talking(None if mine else src, "to share with" if mine else "for the shared tensors of"):
            for buffer in buffers:
                self._wait(dist.broadcast(_bytes(buffer), group=self.pg, group_src=src, async_op=True))
        if src == self.rank and tensors is not None:
            return tensors
        return wire(specs).unpack([buffer.to(self._device) for buffer in buffers], self._device)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """By a way that gives the right result on this backend."""
        self._watch.check()
        way = reduction(self._can(tensor), op, tensor.dtype, self.cpu)
        with self._watch.talking(None, f"for the {op} over"):
            return all_reduce(tensor, way, self.pg, self._wait)

    def start_reduce(self, memory: Tensor, op: str = "sum", *, scatter: bool = False) -> Work:
        """As all_reduce, under way."""
        self._watch.check()
        can = self._can(memory)
        way = reduction(can, op, memory.dtype, self.cpu)
        native = (self.cpu if way.staged and self.cpu is not None else can).can("parts", way.carry)
        with self._watch.talking(None, f"to begin the {op} over"):
            return _Started(self, *start_reduce(memory, way, self.pg, scatter, native), f"for the {op} over")

    def start_gather(self, memory: Tensor) -> Work:
        """As bytes."""
        self._watch.check()
        staged = memory.device.type != "cpu" and self._through_cpu("gather")
        with self._watch.talking(None, "to begin to gather from"):
            return _Started(self, *start_gather(memory, staged, self.pg), "for the parts of")

    def _can(self, tensor: Tensor) -> Capabilities:
        return self.cpu if tensor.device.type == "cpu" and self.cpu is not None else self.can

    def gather_objects(self, obj: object) -> list[Any]:
        """Through the store: no device takes part, and who has not come is named."""
        return self._meeting.gather(obj)

    def barrier(self) -> None:
        """Through the store, after this rank's sends."""
        self.flush()
        self._meeting.gather(None)

    def _through_cpu(self, what: str) -> bool:
        return self._staged or (self.cpu is not None and not self.can.can(what, torch.uint8))

    # ---- faults -------------------------------------------------------------------------------------------------
    def journal(self, rank: int, text: str) -> None:
        """Keep what this rank is about to do."""
        self._watch.journal.note(text)

    def failed(self, error: BaseException) -> None:
        """Tell the others, best effort, that this rank raised."""
        self._watch.failed(error)
        if self._near is not None:
            self._near.fail()

    def close(self) -> None:
        """End the journal's thread; the process group itself belongs to torch.distributed."""
        self._watch.close()


_CPU = torch.device("cpu")
_DTYPES = tuple({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)})


def _bytes(buffer: Tensor) -> Tensor:
    return buffer.view(-1).view(torch.uint8)


class _Started:
    """A collective under way; ``finish`` makes its result."""

    __slots__ = ("_doing", "_finish", "_found", "_group", "_work")

    def __init__(self, group: C10dGroup, work: Any, finish: Callable[[], Tensor], doing: str):
        self._group, self._work, self._doing = group, work, doing
        self._finish: Callable[[], Tensor] | None = finish
        self._found: tuple[Tensor, ...] = ()

    def done(self) -> bool:
        return self._finish is None or self._work is None or self._work.is_completed()

    def wait(self) -> tuple[Tensor, ...]:
        if self._finish is not None:
            if self._work is not None:
                with self._group._watch.talking(None, self._doing):
                    self._group._wait(self._work)
            self._found = (self._finish(),)
            self._finish = self._work = None
        return self._found


class _Sent:
    __slots__ = ("_buffers", "_dst", "_group", "_over", "_works")

    def __init__(self, group: C10dGroup, dst: int, works: list[Any], buffers: list[Tensor]):
        self._group, self._dst, self._works, self._buffers = group, dst, works, buffers
        self._over = False

    def done(self) -> bool:
        return self._over or all(work.is_completed() for work in self._works)

    def wait(self) -> tuple[Tensor, ...]:
        if not self._over:
            self._group._wait_all(self._works, self._dst, "to send to")
            self._over = True
            self._group._sent[self._dst].remove(self)
            self._works, self._buffers = [], []
        return ()


class _Receipt:
    __slots__ = ("_buffers", "_group", "_specs", "_src", "_tensors", "_works")

    def __init__(self, group: C10dGroup, src: int, specs: tuple[Spec, ...]):
        self._group, self._src, self._specs = group, src, specs
        self._works: list[Any] | None = None
        self._buffers: list[Tensor] = []
        self._tensors: tuple[Tensor, ...] | None = None

    def post(self) -> None:
        group = self._group
        self._buffers = wire(self._specs).empty(_CPU if group._staged else group._device)
        pg = group.pg if self._src < group.rank else group._back
        try:
            self._works = [pg.recv([group._raw(buffer)], self._src, 0) for buffer in self._buffers]
        except RuntimeError as error:
            raise group._watch.explain(error, self._src, "for a message from") from error

    def ask(self) -> None:
        """Post it now, where receives are posted late; the channel's earlier ones go first."""
        if self._works is None and self._tensors is None:
            late = self._group._late[self._src]
            while self._works is None:
                late.popleft().post()

    def done(self) -> bool:
        return self._tensors is not None or (
            self._works is not None and all(work.is_completed() for work in self._works)
        )

    def wait(self) -> tuple[Tensor, ...]:
        if self._tensors is None:
            self._arrive()
        assert self._tensors is not None
        return self._tensors

    def _arrive(self) -> None:
        group = self._group
        self.ask()
        assert self._works is not None
        group._wait_all(self._works, self._src, "for a message from")
        buffers = [buffer.to(group._device) for buffer in self._buffers] if group._staged else self._buffers
        self._tensors = wire(self._specs).unpack(buffers, group._device)
        self._works, self._buffers = [], []

# SPDX-License-Identifier: Apache-2.0
"""``Group`` over a process group of torch.distributed: one rank per process, any backend of the
capability table.

The n-th message of a channel in a call is its n-th receive. Where the backend has tags, the tag of
a message is the header of its call, so messages of different calls never meet. Where a backend
needs one order for both directions of a pair, each direction has a process group. Sends keep their
buffers until they are settled: the plan derives from what it receives which of its sends were
received. No send waits before that, since a limit on the number of sends under way could deadlock
two ranks. Where all ranks are on one host, they share memory in place of the backend. This module
must not know schedules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..devices import identity, kind
from ..errors import GroupError, MismatchError
from ._store import backends as backends_of, set_timeout
from .agreement import Agreement, Reduced
from .bounded import of_group, within
from .capabilities import Capabilities, reduction, sending
from .faults import FaultMonitor, hang_up
from .group import (
    Facts,
    Group,
    Pending,
    Receiver,
    Sender,
    Specs,
    Tensors,
    Work,
    in_order,
    required,
    same_call,
)
from .journal import Journal
from .reduce import Started, start_gather, start_reduce
from .rendezvous import Rendezvous
from .shared_memory import connect
from .wire import WireFormat, as_bytes, wire_format

if TYPE_CHECKING:
    from .shared_memory.mailboxes import SharedMemory

_CPU = torch.device("cpu")
_UNBOUNDED = timedelta(days=365)


class C10dGroup(Group):
    """Ranks that are processes of torch.distributed. Created by ``fpipe.init``, or from an existing
    process group by ``adopt``.

    ``can`` are the capabilities of the backend on this rank's device, by default those of the
    table; ``cpu`` those for CPU tensors, where the device is another one.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        device: torch.device,
        timeout: float,
        can: Capabilities | None = None,
        journal: Journal | None = None,
    ):
        self.can, self.cpu = capabilities_of(pg, device, can)
        self.pg = pg
        self.size = pg.size()
        self.rank = pg.rank()
        self.here = (self.rank,)
        self.timeout = timeout
        self._device = device
        store, nth = of_group(pg, timeout)
        names = dist.get_process_group_ranks(pg)
        self._monitor = FaultMonitor(store, self.rank, names, timeout, journal, pg)
        self._agreement = Agreement(store, self._monitor, nth)
        self._rendezvous = Rendezvous(
            store, self._monitor, self._agreement.check, self._agreement.next_round
        )
        #: Whether ranks share a device: then messages and collectives go through the CPU.
        self.shared = can is None and self.cpu is not None and self._shares_a_device()
        if self.shared:
            self.can = self.can._replace(dtypes={}, habits="")
        method = sending(self.can, self.cpu)
        self.strict = not method.early
        self.staged = method.staged
        carrier = (method.staged and self.cpu) or self.can
        self._tagged = carrier.habit("tags")
        # A backend that works on streams is waited for by the stream: a time-out would block this
        # thread instead.
        self._blocking = device.type in ("cpu", "meta") or method.staged
        with self._monitor.connecting():
            #: The process group of messages to lower ranks.
            self._back = _twin(pg) if method.two_groups and self.size > 1 else pg
        self._memory: SharedMemory | None = None
        self.at_once = False
        self._compare_calls()
        self._sent: list[deque[Pending]] = [deque() for _ in range(self.size)]
        #: By rank, receives that are requested when they are waited for.
        self._late: list[deque[Pending]] = [deque() for _ in range(self.size)]
        #: Receives under way, and messages that never arrive: buffers of the backend.
        self._held: dict[int, object] = {}

    def _shares_a_device(self) -> bool:
        """Whether two ranks are on one device: backends of accelerators refuse that, or hang."""
        with self._monitor.connecting():
            names = self._rendezvous.gather(identity(self._device))
        devices = [name for name in names if name]
        return len(set(devices)) < len(devices)

    def _compare_calls(self) -> None:
        """Choose the exchange of digests, and connect with the ranks of this host."""
        if self.size == 1 or backends_of(self.pg).get("cpu") != "gloo":
            return
        self._agreement.exchange = partial(Reduced.announced, self.pg)
        if self._device.type != "cpu":
            return
        with self._monitor.connecting():
            memory = connect(self._monitor, self._agreement, self._rendezvous.gather)
        if memory is not None:
            self._memory = memory
            self.at_once = True
            self._agreement.exchange = memory.exchange

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size} on {self._device} over {self.can.backend}"

    def device(self, rank: int) -> torch.device:
        """The device of this rank; other ranks are assumed to use the same type."""
        if rank == self.rank:
            return self._device
        return torch.device(self._device.type)

    # ---- messages ----
    def sender(self, src: int, dst: int, specs: Specs, stream: int = 0) -> Sender:
        """Through shared memory, or with buffers that are kept until the send is done."""
        self._check_rank(src, "send")
        form = wire_format(specs)
        if self._memory is not None:
            return self._memory.sender(form, dst, stream)
        pg = self._group_of(src, dst)
        queue = self._sent[dst]

        def send(tensors: Tensors) -> Work:
            self._monitor.check()
            buffers = list(form.pack(tensors, src, dst))
            if self.staged:
                buffers = [buffer.cpu() for buffer in buffers]
            works = self._post(pg.send, buffers, dst, "to send to")

            def finish() -> Tensors:
                self._wait_all(works, dst, "to send to")
                queue.remove(work)
                buffers.clear()  # the backend reads them until here
                return ()

            work = Pending(finish, partial(_completed, works))
            queue.append(work)
            return work

        return send

    def receiver(self, src: int, dst: int, specs: Specs, stream: int = 0) -> Receiver:
        """Through shared memory, messages need no buffer in advance."""
        self._check_rank(dst, "receive")
        form = wire_format(specs)
        if self._memory is not None:
            return self._memory.receiver(form, src, stream)
        pg = self._group_of(src, dst)

        def post() -> Work:
            self._monitor.check()
            buffers = form.empty(_CPU if self.staged else self._device)
            works = list[dist.Work]()
            self._held[id(works)] = works, buffers
            works += self._post(pg.recv, buffers, src, "for a message from")

            def finish() -> Tensors:
                self._wait_all(works, src, "for a message from")
                del self._held[id(works)]
                return self._received(form, buffers)

            return Pending(finish, partial(_completed, works))

        return Receiver(post)

    def recv(self, specs: Specs, src: int, dst: int) -> Work:
        """Over a strict backend, the request is made when the message is waited for."""
        post = self.receiver(src, dst, specs).post
        if not self.strict and self._memory is None:
            return post()
        return in_order(
            self._late[src],
            lambda: post().wait(),
            lambda before: not (before or self.strict) and post().done(),
        )

    def wait_any(self, receives: Sequence[tuple[int, Work]]) -> None:
        """In shared memory for all, over a backend for the first."""
        if self._memory is not None:
            self._memory.wait_any(receives)
        else:
            super().wait_any(receives)

    def _group_of(self, src: int, dst: int) -> dist.ProcessGroup:
        """The process group of messages in one direction."""
        if src < dst:
            return self.pg
        return self._back

    def settle(self, dst: int, count: int) -> None:
        """Release the buffers of the oldest sends to a rank, which are known to have been
        received.
        """
        sent = self._sent[dst]
        for _ in range(min(count, len(sent))):
            sent[0].wait()

    def flush(self) -> None:
        """Wait for every send."""
        for sent in self._sent:
            while sent:
                sent[0].wait()
        if self._memory is not None:
            self._memory.flush()

    def part(self, ranks: Sequence[int]) -> C10dGroup:
        """A new process group of some of its ranks, made by these alone; none other need run."""
        pg = _twin(self.pg, ranks)
        set_timeout(pg, self.timeout)
        group = C10dGroup(pg, self._device, self.timeout, self.can)
        same_call(self._agreement.number, group)
        return group

    def _check_rank(self, rank: int, verb: str) -> None:
        if rank != self.rank:
            raise GroupError(
                f"rank {self.rank} cannot {verb} for rank {rank}, which runs in another process"
            )

    def _post(
        self,
        call: Callable[..., dist.Work],
        buffers: list[Tensor],
        peer: int,
        doing: str,
    ) -> list[dist.Work]:
        tag = self._agreement.tag if self._tagged else 0
        try:
            return [call([as_bytes(buffer)], peer, tag) for buffer in buffers]
        except RuntimeError as error:
            raise self._monitor.diagnose(error, peer, doing) from None

    def _wait(self, work: dist.Work | None) -> None:
        if work is None:
            return
        if self._blocking:
            work.wait(timedelta(seconds=self._monitor.timeout))
        else:
            # the stream waits; what blocks this thread longer is ended by the watch of the journal
            work.wait()

    def _wait_all(self, works: Sequence[dist.Work], peer: int, doing: str) -> None:
        with self._monitor.waiting(peer, doing):
            if not self._blocking or self._agreement.check():
                for work in works:
                    self._wait(work)
                return
            # A message of another call never arrives, and this wait cannot be interrupted. At a
            # time-out, gloo would close all connections.
            within(
                self._monitor.timeout,
                lambda: [work.wait(_UNBOUNDED) for work in works],
                self._agreement.check,
            )

    # ---- calls ----
    def enter(self, digest: int, facts: Callable[[], Facts]) -> int:
        """Announce the next call, in the memory of all ranks or by a reduction over gloo."""
        if self._agreement.refusal is not None:
            self._leave()
        return self._agreement.enter(digest, facts)

    def refuse(self, error: BaseException) -> None:
        """Announce that this rank refuses a call; without an exchange, ranks do not learn it."""
        if self._agreement.exchange is not None:
            self._check()
            self._agreement.refuse(error)

    def leave(self, error: BaseException) -> None:
        """As a call that a rank refused; no message is under way."""
        self._agreement.refusal = error

    def _leave(self) -> None:
        """Every rank leaves a call that one of them refused, and drops its messages; then the next
        one can begin.
        """
        keys = self._agreement.leave()
        self._rendezvous.gather(None)  # from here on no rank sends messages of that call
        self._rendezvous.store.delete(*keys)
        held = self._held
        sent = [work for works in self._sent for work in works]
        held[id(sent)] = sent  # their tag is that of the call, so they never arrive
        for queue in (*self._sent, *self._late):
            queue.clear()
        if self._memory is not None:
            self._memory.drop()
        self._rendezvous.gather(None)  # from here on ranks send messages of the next one

    def confirm(self) -> None:
        """Wait until every rank has announced the same call."""
        self._agreement.confirm()

    def global_rank(self, rank: int) -> int:
        """The number of a rank in the default process group."""
        return dist.get_global_rank(self.pg, rank)

    # ---- all ranks ----
    def share(self, tensors: Tensors | None, specs: Specs, src: int) -> Tensors:
        """By messages through shared memory, else by broadcasts of bytes."""
        self._check()
        mine = required(tensors, src) if src == self.rank else None
        form = wire_format(specs)
        if self._memory is not None:
            return self._memory.share(form, mine, src)
        device = _CPU if self.staged else self._device
        if mine is None:
            buffers = form.empty(device)
            peer = src
            doing = "for the shared tensors of"
        else:
            buffers = [buffer.to(device) for buffer in form.pack(mine, src, src)]
            peer = None
            doing = "to share with"
        with self._monitor.waiting(peer, doing):
            for buffer in buffers:
                flat = as_bytes(buffer)
                self._wait(dist.broadcast(flat, group=self.pg, group_src=src, async_op=True))
        return self._received(form, buffers) if mine is None else mine

    def _received(self, form: WireFormat, buffers: Sequence[Tensor]) -> Tensors:
        """The tensors of a message, on the device of this rank."""
        return form.unpack([buffer.to(self._device) for buffer in buffers], self._device)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """By the method that is right on this backend."""
        memory = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
        return self.start_reduce(memory, op).wait()[0].view(tensor.shape)

    def start_reduce(self, memory: Tensor, op: str = "sum", *, scatter: bool = False) -> Work:
        """Start all_reduce."""
        self._check()
        can = (memory.device.type == "cpu" and self.cpu) or self.can
        method = reduction(can, op, memory.dtype, self.cpu)
        native = ((method.staged and self.cpu) or can).can("parts", method.carry)
        return self._started(
            lambda: start_reduce(memory, method, self.pg, scatter, native), f"for the {op} with"
        )

    def start_gather(self, memory: Tensor) -> Work:
        """As bytes."""
        self._check()
        staged = self.staged and memory.device.type != "cpu"
        return self._started(lambda: start_gather(memory, staged, self.pg), "for the parts of")

    def _started(self, start: Callable[[], Started], doing: str) -> Pending:
        with self._monitor.waiting(None, doing):
            work, result = start()

        def finish() -> Tensors:
            with self._monitor.waiting(None, doing):
                self._wait(work)
            return (result(),)

        return Pending(finish, lambda: work is None or work.is_completed())

    def gather_objects(self, obj: object) -> list[Any]:
        """Through the store: no device is needed, and an error names the rank that is missing."""
        self._check()
        return self._rendezvous.gather(obj)

    def barrier(self) -> None:
        """Through the store, after this rank's sends."""
        self._check()
        self.flush()
        self._rendezvous.gather(None)

    def _check(self) -> None:
        """Raise if this group failed; leave a call that a rank refused."""
        self._monitor.check()
        if self._agreement.refusal is not None:
            self._leave()

    # ---- faults ----
    def notes(self, rank: int) -> Callable[[str], object]:
        """Those of the journal."""
        return self._monitor.journal.note

    def last_note(self, rank: int) -> str:
        """The last journal entry of a rank; up to a tenth of a second old if it is another one."""
        if rank == self.rank:
            return self._monitor.journal.text
        entry = self._monitor.last(rank)
        return entry.note if entry else ""

    def failed(self, error: BaseException) -> None:
        """Report to the others that this rank raised, unless all ranks can go on."""
        if error is self._agreement.refusal:
            return
        self._monitor.failed(error)
        if self._memory is not None:
            self._memory.fail()
        elif self._blocking and not isinstance(error, MismatchError):  # all ranks raise that
            hang_up(self.pg, self._back)

    def lost(self) -> int | None:
        """By the journal."""
        return self._monitor.lost()

    def close(self) -> None:
        """End the journal's thread; the process group belongs to torch.distributed."""
        self._monitor.journal.close()


def capabilities_of(
    pg: dist.ProcessGroup, device: torch.device, can: Capabilities | None = None
) -> tuple[Capabilities, Capabilities | None]:
    """Those for a device, by default of the table, and for the CPU where that is another one.

    A device that no backend carries is served by the CPU's.
    """
    backends = backends_of(pg)
    own = backends.get(device.type, backends.get("cpu"))
    if own is None or device.type == "meta":
        raise GroupError(
            f"the process group carries {', '.join(backends)} and this rank is on "
            f"{device.type}; start it with backend={kind(device.type).backends!r}"
        )
    cpu = None
    if "cpu" in backends and device.type != "cpu":
        cpu = Capabilities.of("cpu", backends["cpu"])
    return can or Capabilities.of(device.type, own), cpu


def _twin(pg: dist.ProcessGroup, members: Sequence[int] | None = None) -> dist.ProcessGroup:
    """A second process group of the same ranks, or of some of them, and the same backends."""
    ranks = dist.get_process_group_ranks(pg)
    if members is not None:
        ranks = [ranks[member] for member in members]
    config = dist.get_backend_config(pg)
    twin = dist.new_group(ranks, backend=config, use_local_synchronization=True)
    assert isinstance(twin, dist.ProcessGroup)
    return twin


def _completed(works: Sequence[dist.Work]) -> bool:
    return all(work.is_completed() for work in works)

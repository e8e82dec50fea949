"""Process groups over gloo with faults that were reported of real backends.

Each profile consists of the backend, what a capability table holds about it, and a raw call that
gives a wrong result or raises. A test shows that the raw call fails and that the same operation
through fpipe is right.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.collectives.capabilities import Capabilities

SHORT = timedelta(seconds=1)


class ThenWork(dist.Work):
    """Waits for the inner work, then calls ``after``."""

    def __init__(self, inner, after: Callable[[], None] = lambda: None):
        super().__init__()
        self.inner, self.after = inner, after

    def wait(self, timeout=timedelta(0)) -> bool:
        self.inner.wait(timeout)
        self.after()
        return True

    def is_completed(self) -> bool:
        return False


class Gloo(dist.ProcessGroup):
    """Forwards every call to gloo; the profiles below override the faulty ones."""

    def __init__(self, store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self.inner = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return type(self).__name__

    def allreduce(self, tensors, opts):
        return self.inner.allreduce(tensors, opts)

    def allgather(self, outputs, inputs, opts):
        return self.inner.allgather(outputs, inputs, opts)

    def broadcast(self, tensors, opts):
        return self.inner.broadcast(tensors, opts)

    def barrier(self, opts):
        return self.inner.barrier(opts)

    def _get_backend(self, device):  # torch 2.15 reads ``supports_coalescing`` of it
        return self

    def send(self, tensors, dst: int, tag: int):
        return self.inner.send(tensors, dst, tag)

    def recv(self, tensors, src: int, tag: int):
        return self.inner.recv(tensors, src, tag)


class RefusesAvg(Gloo):
    def allreduce(self, tensors, opts):
        if opts.reduceOp == dist.ReduceOp.AVG:
            raise RuntimeError("AVG is not supported")
        return super().allreduce(tensors, opts)


class DividesTwice(Gloo):
    def allreduce(self, tensors, opts):
        work = super().allreduce(tensors, opts)
        if (
            opts.reduceOp == dist.ReduceOp.AVG
            and tensors[0].numel() not in (8, 16, 32)
            and tensors[0].numel() < 48
        ):
            return ThenWork(work, lambda: tensors[0].div_(self.size()))
        return work


class MaxIsSum(Gloo):
    def allreduce(self, tensors, opts):
        if opts.reduceOp == dist.ReduceOp.MAX or opts.reduceOp == dist.ReduceOp.MIN:  # "in" fails
            opts.reduceOp = dist.ReduceOp.SUM
        return super().allreduce(tensors, opts)


class BatchZeros(Gloo):
    def recv(self, tensors, src, tag):
        frame, batched = sys._getframe(1), False
        while frame is not None and not batched:
            batched, frame = frame.f_code.co_name == "batch_isend_irecv", frame.f_back
        work = super().recv(tensors, src, tag)
        return ThenWork(work, lambda: tensors[0].zero_()) if batched else work


class ReceiveFirstBlocks(Gloo):
    def recv(self, tensors, src, tag):
        super().recv(tensors, src, tag).wait(
            SHORT
        )  # blocks until the message arrives: two ranks that both receive first deadlock
        return ThenWork(DONE)


class StrictPairs(Gloo):
    """The n-th call of a rank for a pair, send or receive, must match the other rank's n-th
    call.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.calls: dict[int, int] = defaultdict(int)

    def send(self, tensors, dst, tag):
        number, self.calls[dst] = self.calls[dst], self.calls[dst] + 1
        header = torch.tensor([number])
        first = self.inner.send([header], dst, tag)
        return ThenWork(self.inner.send(tensors, dst, tag), lambda: first.wait() or header)

    def recv(self, tensors, src, tag):
        number, self.calls[src] = self.calls[src], self.calls[src] + 1
        header = torch.tensor([-1])
        first = self.inner.recv([header], src, tag)
        second = self.inner.recv(tensors, src, tag)

        def check() -> None:
            first.wait(SHORT)
            if header.item() != number:
                raise RuntimeError(f"call {number} of this pair met call {header.item()}")

        return ThenWork(second, check)


class IgnoresTags(Gloo):
    def send(self, tensors, dst, tag):
        return super().send(tensors, dst, 0)

    def recv(self, tensors, src, tag):
        return super().recv(tensors, src, 0)


class FewDtypes(Gloo):
    """Carries and reduces no bools, no fp8 and no complex numbers."""

    SUPPORTED = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8)

    def send(self, tensors, dst, tag):
        return super().send(self.supported(tensors), dst, tag)

    def recv(self, tensors, src, tag):
        return super().recv(self.supported(tensors), src, tag)

    def allreduce(self, tensors, opts):
        return super().allreduce(self.supported(tensors), opts)

    def supported(self, tensors: list[Tensor]) -> list[Tensor]:
        if tensors[0].dtype not in self.SUPPORTED:
            raise RuntimeError(f"{tensors[0].dtype} is not supported")
        return tensors


class CompletedWork:
    def wait(self, timeout=None) -> None:
        """Return at once."""


DONE = CompletedWork()


#: profile -> what its capabilities have in place of gloo's
PROFILES: dict[type[Gloo], dict[str, str]] = {
    RefusesAvg: {},
    DividesTwice: {},
    MaxIsSum: {"max": "bool", "min": ""},
    BatchZeros: {},
    ReceiveFirstBlocks: {"habits": "tags crossed"},
    StrictPairs: {"habits": "tags early"},
    IgnoresTags: {"habits": "early crossed"},
    FewDtypes: dict.fromkeys(("p2p", "sum", "max", "min"), "float int"),
}
#: profile -> the probe of the doctor that it does not pass
FOUND = {RefusesAvg: "avg", DividesTwice: "avg", MaxIsSum: "min", BatchZeros: "batch"}


def capabilities(profile: type[Gloo]) -> Capabilities:
    """The capabilities of a profile: those of gloo, with its changes."""
    gloo = Capabilities.of("cpu", "gloo")
    changes = {"parts": "", **PROFILES[profile]}  # no profile forwards "parts"
    habits = changes.pop("habits", gloo.habits)
    return Capabilities("cpu", profile.__name__.lower(), {**gloo.dtypes, **changes}, habits)


def register() -> None:
    """Register the profiles with torch.distributed under their names in lower case."""
    for profile in PROFILES:
        name = profile.__name__.lower()
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, profile, devices=["cpu"])


# ---- raw calls: True where the result is right ----
def _mean(pg, rank: int) -> bool:
    x = torch.full((4,), float(rank + 1))
    dist.all_reduce(x, dist.ReduceOp.AVG, group=pg)
    return x.tolist() == [1.5] * 4


def _max(pg, rank: int) -> bool:
    x = torch.tensor([float(rank), 1.0])
    dist.all_reduce(x, dist.ReduceOp.MAX, group=pg)
    return x.tolist() == [1.0, 1.0]


def _batch(pg, rank: int) -> bool:
    x, y = torch.full((3,), float(rank)), torch.full((3,), -1.0)
    ops = [dist.P2POp(dist.isend, x, 1 - rank, pg), dist.P2POp(dist.irecv, y, 1 - rank, pg)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return y.tolist() == [1.0 - rank] * 3


def _receive_first(pg, rank: int) -> bool:
    y = torch.zeros(3)
    received = pg.recv([y], 1 - rank, 0)
    sent = pg.send([torch.full((3,), float(rank + 1))], 1 - rank, 0)
    received.wait(SHORT)
    sent.wait(SHORT)
    return y.tolist() == [2.0 - rank] * 3


def _both_send_first(pg, rank: int) -> bool:
    y = torch.zeros(3)
    sent = pg.send([torch.full((3,), float(rank + 1))], 1 - rank, 0)
    pg.recv([y], 1 - rank, 0).wait(SHORT)
    sent.wait(SHORT)
    return y.tolist() == [2.0 - rank] * 3


def _tags(pg, rank: int) -> bool:
    if rank == 0:
        works = [pg.send([torch.full((2,), float(tag))], 1, tag) for tag in (7, 8)]
        for work in works:
            work.wait()
        return True
    eight, seven = torch.zeros(2), torch.zeros(2)
    works = [pg.recv([eight], 0, 8), pg.recv([seven], 0, 7)]
    for work in works:
        work.wait()
    return eight.tolist() == [8.0] * 2


def _fp8(pg, rank: int) -> bool:
    x = torch.ones(4).to(torch.float8_e4m3fn)
    y = torch.zeros(4).to(torch.float8_e4m3fn)
    if rank == 0:
        pg.send([x], 1, 0).wait()
        return True
    pg.recv([y], 0, 0).wait()
    return y.float().tolist() == [1.0] * 4


RAW: dict[type[Gloo], Callable[[dist.ProcessGroup, int], bool]] = {
    RefusesAvg: _mean,
    DividesTwice: _mean,
    MaxIsSum: _max,
    BatchZeros: _batch,
    ReceiveFirstBlocks: _receive_first,
    StrictPairs: _both_send_first,
    IgnoresTags: _tags,
    FewDtypes: _fp8,
}

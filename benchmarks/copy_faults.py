"""One copy of a pipeline whose processes are killed at random moments: what runs in each process of
``trial_copies.py``, and plain autograd beside it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fpipe
from benchmarks.stages import square
from fpipe.products.training import loop
from fpipe.products.training.elastic import Members
from fpipe.products.training.peers import Peers
from fpipe.tree import Tree, flatten, unflatten

COUNT, RANKS, STEPS, PARTS = 3, 2, 60, 2
PAUSE = 0.1  #: seconds of a step, beside its computation
SETTLED = 40  #: from this step on, the others wait for a copy that was lost
WIDTH = 16
Params = list[dict[str, Tensor]]


class Fault(NamedTuple):
    """What is killed, in the first step from ``step`` on that has all members, ``delay`` of the
    length of a step (or of a vote) after it began; ``role`` and ``part`` are of a transfer,
    ``away`` of a lighthouse.
    """

    kind: str
    step: int
    copy: int
    rank: int
    delay: float
    role: str
    part: int
    away: float


# ---- what is trained ----
def layer(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"] + p["b"])


def first_params() -> Params:
    draw = torch.Generator().manual_seed(0)
    return [
        {"w": torch.randn(WIDTH, WIDTH, generator=draw), "b": torch.zeros(WIDTH)}
        for _ in range(RANKS)
    ]


def batch(step: int, copy: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * copy + step)
    x = torch.randn(2 * PARTS, WIDTH, generator=draw)
    return x, torch.randn(2 * PARTS, WIDTH, generator=draw)


def optimizer(over: Any = None) -> Any:
    return fpipe.chain(fpipe.clip_by_global_norm(1.0, over=over), fpipe.adamw(1e-2))


def expected(members: Sequence[Sequence[int]]) -> tuple[Params, Tree]:
    """Parameters and optimizer state of plain autograd."""
    params, tx = first_params(), optimizer()
    state = tx.init(params)
    for step, present in enumerate(members):
        grads = [gradients(params, step, copy) for copy in present]
        mean = mapped(mean_of, *grads)
        updates, state = tx.update(mean, state, params)
        params = fpipe.apply_updates(params, updates)
    return params, state


def mean_of(*of_copies: Tensor) -> Tensor:
    """Added in the order of the copies."""
    return reduce(torch.add, of_copies) / len(of_copies)


def gradients(params: Params, step: int, copy: int) -> Params:
    leaves = mapped(lambda p: p.clone().requires_grad_(), params)
    for x, t in zip(*(part.chunk(PARTS) for part in batch(step, copy)), strict=True):
        for p in leaves:
            x = layer(p, x)
        (square(x, t) / PARTS).backward()
    return mapped(lambda leaf: leaf.grad, leaves)


def mapped(fn: Callable[..., Tensor | None], *trees: Tree) -> Any:
    leaves, specs = zip(*map(flatten, trees), strict=True)
    return unflatten(specs[0], list(map(fn, *leaves)))


def same(found: Tree, want: Tree) -> bool:
    """Whether a process has the bits of its part: None stands for what others have."""
    if found is None:
        return True
    if isinstance(found, Tensor):
        return torch.equal(found, want)
    if isinstance(found, dict):
        return found.keys() == want.keys() and all(same(found[key], want[key]) for key in found)
    if isinstance(found, (tuple, list)):
        return len(found) == len(want) and all(map(same, found, want))
    return found == want


# ---- in each process ----
class Notes:
    """Files of a run: what happened, and when."""

    def __init__(self, folder: Path):
        self.folder = folder

    def add(self, name: str, **values: object) -> None:
        with open(self.folder / f"{name}.jsonl", "a") as file:
            file.write(json.dumps({"when": time.monotonic(), **values}) + "\n")

    def once(self, name: str) -> bool:
        """Whether this is the first process that asks."""
        try:
            os.close(os.open(self.folder / f"once-{name}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def happened(self, name: str) -> bool:
        """Whether a process has asked."""
        return (self.folder / f"once-{name}").exists()

    def read(self, pattern: str) -> list[dict[str, Any]]:
        """All rows of some files, in their order in time."""
        lines = [
            line for path in self.folder.glob(pattern) for line in path.read_text().splitlines()
        ]
        return sorted(map(json.loads, lines), key=lambda row: row["when"])


class Watched(Members):
    """Members that note which steps count, and of which a process ends at a fault."""

    notes: Notes
    faults: Sequence[Fault] = ()
    doomed: Fault | None = None  #: whose vote is this process's last
    step = 0

    def _connected(self) -> Any:
        manager = super()._connected()
        for kind, name in (("commit", "should_commit"), ("quorum", "start_quorum")):
            setattr(manager, name, self._fated(kind, getattr(manager, name)))
        return manager

    def _fated(self, kind: str, vote: Callable[..., Any]) -> Callable[..., Any]:
        def voted(**options: Any) -> Any:
            if self.doomed is not None and self.doomed.kind == kind:
                self.end_after(0.006 * self.doomed.delay, kind)
            return vote(**options)

        return voted

    def end_after(self, seconds: float, kind: str) -> None:
        copy, rank = self._elastic.copy, self._group.here[0]

        def end() -> None:
            self.notes.add(f"kill-{copy}-{rank}", kind=kind, copy=copy, rank=rank)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Timer(seconds, end).start()

    def join(self, state: Any, step: int) -> tuple[Any, int]:
        copy, rank = self._elastic.copy, self._group.here[0]
        if self.notes.once(f"started-{copy}-{rank}-{os.getpid()}") and rank == 0:
            self.notes.add(f"start-{copy}", copy=copy)
        state, self.step = super().join(state, step)
        if self.step != step:
            self.notes.add(f"taken-{copy}", copy=copy, step=self.step)
        return state, self.step

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        members = self.copies
        means = super().mean(tensors)
        if means is not None and self._group.here[0] == 0:
            copy = self._elastic.copy
            self.notes.add(f"done-{copy}", copy=copy, step=self.step + 1, members=members)
        return means

    def meet_fate(self, step: int) -> None:
        """At the beginning of a step: look whether it has a fault of this process."""
        me = self._elastic.copy, self._group.here[0]
        for number, fault in enumerate(self.faults):
            due = (
                step >= fault.step and len(self.copies) == COUNT and me == (fault.copy, fault.rank)
            )
            if not due or not self.notes.once(f"fault-{number}"):
                continue
            if fault.kind == "lighthouse":
                moment = fault.delay * PAUSE * 1.5
                threading.Timer(moment, self.notes.once, [f"lighthouse-{number}"]).start()
            elif fault.kind in ("commit", "quorum"):
                self.doomed = fault
            else:
                self.end_after(fault.delay * PAUSE * 1.5, fault.kind)


def watch_transfers(members: Callable[[], Watched | None]) -> None:
    """A process of the role that a fault names is killed at a tensor of a state."""
    share, broadcast = Peers.share, Peers._broadcast
    roles: list[str] = []
    parts: list[int] = []

    def shared(peers: Peers, state: Any, source: int, takes: bool) -> Any:
        others = "receives" if takes else "looks on"
        roles[:] = ["sends" if peers.gloo.rank() == source else others]
        parts.clear()
        return share(peers, state, source, takes)

    def sent(peers: Peers, tensor: Tensor, source: int) -> Tensor:
        parts.append(len(parts))
        watched = members()
        assert watched is not None
        for number, fault in enumerate(watched.faults):
            if (
                fault.kind == "transfer"
                and fault.role == roles[0]
                and len(parts) > fault.part
                and watched.notes.happened(f"fault-{number}")
                and watched._group.here[0] == fault.rank
                and watched.notes.once(f"transfer-{number}")
            ):
                watched.end_after(0.0, f"transfer, a copy that {fault.role}")
                time.sleep(0.002 * fault.delay)
        return broadcast(peers, tensor, source)

    Peers.share, Peers._broadcast = shared, sent  # pyright: ignore


def train(folder: Path, faults: Sequence[Fault]) -> tuple[Params, Tree]:
    """On each process of each copy: parameters and optimizer state at the end."""
    torch.set_num_threads(1)
    elastic = fpipe.elastic(timeout=20)
    assert elastic is not None
    notes = Notes(folder)
    made: list[Watched] = []

    def members(*args: Any) -> Watched:
        made.append(Watched(*args))
        return made[0]

    Watched.notes, Watched.faults = notes, faults
    loop.Members = members  # pyright: ignore
    watch_transfers(lambda: made[0] if made else None)
    pipe = fpipe.pipeline(
        [layer] * RANKS, "1F1B", loss=square, microbatches=PARTS, group=fpipe.init(timeout=30)
    )

    def data(step: int) -> tuple[Tensor, Tensor]:
        if step >= SETTLED:
            wait_for_returns(notes)
        made[0].meet_fate(step)
        time.sleep(PAUSE)
        return batch(step, elastic.copy)

    def log(record: dict[str, Any]) -> None:
        notes.add(f"log-{elastic.copy}", step=record["step"], members=record["copies"])

    trained = fpipe.Loop(pipe, optimizer(pipe), log=log, elastic=elastic).run(
        pipe.place(first_params()), data, STEPS
    )
    return list(trained.params), trained.state


def wait_for_returns(notes: Notes) -> None:
    """Wait until each copy that was killed has been started again: the machine may be busy."""
    end = time.monotonic() + 60
    while time.monotonic() < end and any(away(notes, copy) for copy in range(COUNT)):
        time.sleep(0.05)


def away(notes: Notes, copy: int) -> bool:
    rows = notes.read(f"start-{copy}.jsonl"), notes.read(f"kill-{copy}-*.jsonl")
    starts, kills = ([row["when"] for row in part] for part in rows)
    return bool(kills) and max(kills) > max(starts, default=0.0)

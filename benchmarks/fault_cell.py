"""One rank of a job in which a fault happens at a named moment, for the matrix of
``trial_faults.py``.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import fpipe
from benchmarks.stages import square
from fpipe import ops
from fpipe.collectives._store import set_timeout
from fpipe.engine import first_call
from fpipe.engine.execute import WATCH
from fpipe.engine.results import Results
from fpipe.products.training.outcome import store
from fpipe.saving import reading, streaming, writing

HOST, FIRST, SECOND = "host", "namespace a", "namespace b"
#: Moments in which ranks meet at the store, outside of a step.
MEETINGS = ("barrier", "save", "load", "stream", "between")
#: The step in which the fault happens, and how many steps follow it where it is not noticed.
STEP, MORE = 2, 3
_START = 40.0  #: seconds for ranks to start and to trace
_LONG = 120.0  #: seconds that a slow rank sleeps
_NEWNET = 0x40000000


class Cell(NamedTuple):
    """Who fails, what happens, when, and how the job was started: its launcher, and what carries
    messages.
    """

    who: str
    what: str
    when: str
    how: str
    over: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of ranks of a pipeline, of copies, and of processes of a stage."""
        shapes = {"ZeRO": (2, 2, 1), "weighted": (2, 2, 1), "tensor parallel": (2, 1, 2)}
        return shapes.get(self.when, (3, 1, 1))

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        pp, dp, tp = self.shape
        return pp * dp * tp

    @property
    def victims(self) -> list[int]:
        """The ranks that fail."""
        if self.who == HOST:
            return []
        if self.who in (FIRST, SECOND):
            return [rank for rank in range(self.ranks) if (rank < 2) == (self.who == FIRST)]
        return [int(self.who.split()[1])]

    @property
    def outside(self) -> bool:
        """Whether another process causes the fault."""
        return self.who in (HOST, FIRST, SECOND) or self.what == "cut"

    def beside(self, timeout: float) -> float:
        """Seconds beside the time-out that a survivor may take: where the clock of a rank steps, it
        computes for longer, and a slow link may let through a message, which ends a wait.
        """
        if self.what == "clock":
            return 1.5 * timeout
        return timeout if self.what == "slow" and self.who in (FIRST, SECOND) else 0.0

    @property
    def caller(self) -> int:
        """The rank whose progress decides when the fault happens."""
        if not self.victims or self.when == "each":  # the last rank computes the outputs
            return self.ranks - 1
        return self.victims[0]


class Fate:
    """Causes the fault of a cell when its rank comes to the moment."""

    def __init__(self, cell: Cell, rank: int, folder: Path, timeout: float):
        self.cell, self.folder, self.timeout = cell, folder, timeout
        self.armed = rank == cell.caller

    def at(self, moment: str, step: int = STEP) -> bool:
        """Whether the fault happens here."""
        return self.armed and moment == self.cell.when and step == STEP

    def strike(self) -> None:
        """The fault, once."""
        if not self.armed:
            return
        self.armed = False
        if self.cell.outside:
            (self.folder / "asked").touch()
            while not (self.folder / "fault").exists():
                time.sleep(0.002)
            return
        write(self.folder / "fault", str(time.monotonic()))
        if self.cell.what == "raise":
            raise ValueError("boo")
        if self.cell.what == "exit":
            raise SystemExit
        if self.cell.what == "clock":
            self._step_the_clock()
        else:
            if self.cell.what == "slow":
                time.sleep(_LONG)
            os.kill(os.getpid(), signal.SIGKILL if self.cell.what == "kill" else signal.SIGSTOP)

    def _step_the_clock(self) -> None:
        """The wall clock of this process goes back an hour; then it computes for longer than the
        time-out where it traces.
        """
        wall = time.time
        time.time = lambda: wall() - 3600
        end = time.monotonic() + (1.5 * self.timeout if self.cell.when == "trace" else 0.0)
        while time.monotonic() < end:
            sum(range(10_000))

    def before(self, module: Any, name: str) -> None:
        """Strike before a function of a module or class is called."""
        function = getattr(module, name)

        def struck(*args: Any, **kwargs: Any) -> Any:
            self.strike()
            return function(*args, **kwargs)

        setattr(module, name, struck)

    def within(self, share: float) -> Callable[[Any, int | None], Iterable[tuple[int, Any]]]:
        """For ``WATCH``: strike before one instruction of a plan."""

        def watch(bound: Any, phase: int | None) -> Iterable[tuple[int, Any]]:
            first = bound.plan.split if phase else 0
            steps = list(bound.steps[first : bound.plan.split if phase == 0 else None])
            if self.armed and steps:
                at = int(share * len(steps))
                struck = steps[at]
                steps[at] = lambda r: (self.strike(), struck(r))[1]
            return enumerate(steps, first)

        return watch


def work(cell: Cell, rank: int, fate: Fate, timeout: float) -> None:
    """Steps, in one of which the fault happens, and a barrier at the end."""
    together(fate.folder, cell.ranks)
    if fate.at("init"):
        fate.strike()
    pp, dp, tp = cell.shape
    first = timeout if cell.when == "init" else _START
    group = cast(Any, fpipe.init(pp=pp, dp=dp, tp=tp, device="cpu", timeout=first))
    if cell.when in ("handshake", "trace"):
        shorten(group, timeout)

    def stage(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if fate.at("trace"):
            fate.strike()
        y = torch.tanh(x @ p)
        return ops.all_reduce(y, group.tp.pg) if tp > 1 else y

    def count(target: torch.Tensor) -> int:
        if fate.at("weighted", number):
            fate.strike()
        return target.numel()

    def each(mb: int, y: torch.Tensor) -> None:
        if fate.at("each", number):
            fate.strike()

    if fate.at("handshake"):
        fate.before(first_call, "agree")
    loss = None if cell.when in ("pullback", "each") else square
    more = {"dp": fpipe.copies(group.dp, zero=2 if cell.when == "ZeRO" else 0)} if dp > 1 else {}
    if cell.when == "weighted":
        more["reduction"] = fpipe.weighted(count)
    stages: list[Any] = [stage] * pp
    if cell.when in MEETINGS:
        stages = [fpipe.Stage(stage, name=f"layer{number}") for number in range(pp)]
    pipe = fpipe.pipeline(stages, "1F1B", loss=loss, microbatches=4, group=group, **more)
    params = (
        pipe.shard([torch.eye(4) * 0.5] * pp)
        if cell.when == "ZeRO"
        else pipe.place([torch.eye(4) * 0.5] * pp)
    )
    tx = fpipe.chain(fpipe.clip_by_global_norm(1.0, over=pipe), fpipe.sgd(0.1))
    state, x = tx.init(params), torch.ones(8, 4)
    share = random.Random(repr(cell)).random()
    for number in range(STEP + 1 + MORE):
        if number == STEP and cell.when not in ("handshake", "trace"):
            shorten(group, timeout)
        if (
            fate.at("mid step", number)
            or fate.at("ZeRO", number)
            or fate.at("tensor parallel", number)
        ):
            WATCH.set(fate.within(share))
        if fate.at("loss", number):
            fate.before(Results, "pipeline_loss")
        if cell.when == "each":
            pipe(params, x, each=each)
            continue
        if loss is None:
            _, pullback = fpipe.vjp(pipe, params, x)
            if fate.at("pullback", number):
                WATCH.set(fate.within(share))
            pullback(torch.ones(8, 4) if pipe.here and pp - 1 in pipe.here else None)
            continue
        if cell.when in MEETINGS and number >= STEP - 1:
            meeting(cell, fate, pipe, params, number)
        _, grads = fpipe.value_and_grad(pipe)(params, x, x)
        if fate.at("optimizer", number):
            fate.strike()
        updates, state = tx.update(grads, state, params)
        params = fpipe.apply_updates(params, updates)
        if fate.at("exit", number):
            fate.strike()
        if cell.when == "exit" and number == STEP:
            break
    for _ in range(2):  # a rank may have come to the first one before the fault
        meet(group)


def meeting(cell: Cell, fate: Fate, pipe: Any, params: Any, number: int) -> None:
    """What ranks do together between two steps; in step ``STEP`` the fault happens in it."""
    if fate.at("save", number):
        fate.before(*random.Random(repr(cell)).choice([(writing, "write"), (writing, "_see")]))
    elif fate.at("load", number):
        fate.before(reading.Reader, "value")
    elif fate.at("stream", number):
        fate.before(streaming, "_send")
    elif fate.at(cell.when, number):
        fate.strike()
    if cell.when == "barrier":
        pipe.group.barrier()
    elif cell.when == "save":
        fpipe.save(fate.folder / f"saved{number}", pipe, params=params)
    elif cell.when == "load":
        if number < STEP:
            fpipe.save(fate.folder / "saved", pipe, params=params)
        else:
            fpipe.load(fate.folder / "saved", pipe, "params")
    elif cell.when == "stream":
        list(fpipe.stream(pipe, params))
    else:  # a batch that has no plans yet, so that ranks exchange their facts
        x = torch.ones(8 + 4 * number, 4)
        fpipe.value_and_grad(pipe)(params, x, x)


def shorten(group: Any, timeout: float) -> None:
    """The time-out of the trial, from when all ranks have met: to start may take long on a busy
    machine.
    """
    meet(group)
    for each in (group, group.dp, group.tp):
        each.timeout = each._monitor.timeout = each._rendezvous.store.seconds = timeout
        set_timeout(each.pg, timeout)
    meet(group)  # a rank may still wait in the first one, for as long as it takes to start


def together(folder: Path, ranks: int) -> None:
    """Wait until all processes have started: Ray starts them one after another, and a busy machine
    late.
    """
    end = time.monotonic() + 2 * _START
    while time.monotonic() < end and len(list(folder.glob("pid*[0-9]"))) < ranks:
        time.sleep(0.02)


def meet(group: Any) -> None:
    """A barrier of all processes: that of a pipeline leaves out its copies."""
    for each in (group, group.dp, group.tp):
        each.barrier()


def rank_main(
    folder: str, cell: Cell, rank: int, env: dict[str, str], timeout: float, namespace: str
) -> None:
    """In the process of a rank: the work, and a report of how it ended."""
    enter(namespace)
    os.environ.update(env)
    rank = int(os.environ["RANK"])  # a launcher may have numbered the ranks
    write(Path(folder, f"pid{rank}"), str(os.getpid()))
    log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    report: dict[str, Any] = {"kind": "none", "text": "no error", "ours": False}
    try:
        work(cell, rank, Fate(cell, rank, Path(folder), timeout), timeout)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)  # as at the end of a script
        report = {
            "kind": type(error).__name__,
            "text": str(error),
            "ours": isinstance(error, fpipe.FpipeError),
        }
    write(Path(folder, f"report{rank}"), json.dumps({"when": time.monotonic(), **report}))
    os._exit(0 if report["kind"] == "none" else 1)


def host_main(folder: str, address: str, own: bool, namespace: str) -> None:
    """In the process of a launcher: the store of the job. ``own``: as ``fpipe.launch`` starts
    it.
    """
    enter(namespace)
    server: Any = (
        store(address) if own else dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    )
    write(Path(folder, "port"), str(server.port))
    time.sleep(_LONG)


def agent_main(
    folder: str, cell: Cell, env: dict[str, str], timeout: float, namespace: str, address: str
) -> None:
    """In the process of an elastic agent, as ``torchrun`` starts it: the ranks are its children."""
    enter(namespace)
    os.environ.update(env)
    log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    config = LaunchConfig(
        1,
        1,
        cell.ranks,
        run_id="fpipe",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{address}:29500",
        rdzv_configs={"is_host": True},
        local_addr=address,
        start_method="fork",
        max_restarts=0,
    )
    try:
        elastic_launch(config, rank_main)(folder, cell, -1, env, timeout, "")
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        write(Path(folder, "agent"), f"rank {rank}, exit code {failure.exitcode}")


def enter(namespace: str) -> None:
    """Move this process into a network namespace, if one is given."""
    if namespace:
        with open(f"/run/netns/{namespace}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns to {namespace}")


def write(path: Path, text: str) -> None:
    """Create a file with its whole content at once."""
    path.with_name(path.name + ".new").write_text(text)
    path.with_name(path.name + ".new").rename(path)


def warm() -> None:
    """What a first step imports and caches, so that forked processes need not."""
    layer = lambda p, x: torch.tanh(x @ p)
    params, x = [torch.eye(4)] * 2, torch.ones(8, 4)
    pipe = fpipe.pipeline([layer] * 2, "1F1B", loss=square, microbatches=4, group=fpipe.local(2))
    tx = fpipe.chain(fpipe.clip_by_global_norm(1.0, over=pipe), fpipe.sgd(0.1))
    _, grads = fpipe.value_and_grad(pipe)(params, x, x)
    tx.update(grads, tx.init(params), params)


if os.environ.get("FPIPE_FAULT_CELL_WARM"):  # in the fork server
    torch.set_num_threads(1)
    warm()

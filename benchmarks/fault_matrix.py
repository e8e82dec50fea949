"""The matrix of faults: who fails x what happens x when x how the job was started. See
``trial_faults.py --matrix``.

Each cell is a job of three or four small processes in network namespaces, without a resolver of
names. It is right if every survivor ended with an error of fpipe within the time-out + 5 seconds,
and named if each error names the global rank that failed (or the launcher, where that failed).
Needs root and iproute2.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing as mp
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.fault_cell import (
    FIRST,
    HOST,
    MEETINGS,
    SECOND,
    Cell,
    agent_main,
    host_main,
    rank_main,
    write,
)
from fpipe.collectives.shared_memory import SWITCH as MEMORY

WHAT = ("kill", "stop", "raise", "cut", "slow", "exit", "clock")
WHEN = (
    "init",
    "handshake",
    "trace",
    "mid step",
    "loss",
    "pullback",
    "optimizer",
    "ZeRO",
    "tensor parallel",
    "exit",
    "weighted",
    "each",
    *MEETINGS,
)
#: Who starts the ranks: nobody (rank 0 hosts the store), a process with the store and the variables
#: of torchrun, ``fpipe.launch``, an elastic agent (as torchrun), and Ray where it is installed.
HOW, OVER = ("env", "agent store", "launch", "torchrun", "ray"), ("memory", "gloo")
FOREIGN = ("torchrun", "ray")  #: they start the ranks themselves, on one host
LATE = 5.0  #: seconds after the time-out within which a survivor must end
_START = 150.0  #: seconds for the fault to happen
_PATIENCE = 12.0  #: seconds after the time-out until a rank counts as hanging
_MOST = 4
_DONE = "none: no error"
#: What Ray is for: its absence is a line of the table.
RAY = importlib.util.find_spec("ray") is not None


def cells() -> Iterator[Cell]:
    """All cells. Each takes a few seconds."""
    for how, over, when in product(HOW, OVER, WHEN):
        ranks = Cell("", "", when, how, over).ranks
        for who, what in product(range(2, ranks) if when == "each" else range(ranks), WHAT):
            if what == "exit" and when not in MEETINGS:  # within a step it is an error
                continue
            if (how in FOREIGN and what in ("cut", "slow")) or (how == "ray" and not RAY):
                continue
            yield Cell(f"rank {who}", what, when, how, over)
        if how in FOREIGN:
            continue
        for who, what in product((FIRST, SECOND), ("kill", "stop", "cut", "slow")):
            yield Cell(who, what, when, how, over)
        for what in ("kill", "stop") if how != "env" else ():
            yield Cell(HOST, what, when, how, over)


@dataclass(frozen=True)
class Outcome:
    """Of a cell: what each survivor raised, its seconds after the fault, and the verdicts."""

    cell: Cell
    in_time: bool
    named: bool
    seconds: float
    texts: dict[int, str]


class Network:
    """Namespaces joined by a bridge, one for each rank of a job at most."""

    def __init__(self, number: int):
        self.number, self.names = number, [f"fpm{os.getpid()}n{number}r{i}" for i in range(_MOST)]
        self.hub = f"fpm{os.getpid()}h{number}"

    def create(self) -> None:
        """Create the namespaces, with all links up."""
        _ip("netns", "add", self.hub)
        _ip("-n", self.hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self.hub, "link", "set", "bridge", "up")
        for i, name in enumerate(self.names):
            _ip("netns", "add", name)
            _ip(
                "-n",
                self.hub,
                "link",
                "add",
                f"port{i}",
                "type",
                "veth",
                "peer",
                "name",
                "fp0",
                "netns",
                name,
            )
            _ip("-n", self.hub, "link", "set", f"port{i}", "master", "bridge")
            _ip("-n", self.hub, "link", "set", f"port{i}", "up")
            _ip("-n", name, "addr", "add", f"{self.address(i)}/24", "dev", "fp0")
            _ip("-n", name, "link", "set", "fp0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def address(self, i: int) -> str:
        """The address of a namespace."""
        return f"10.79.{self.number}.{i + 1}"

    def cut(self, i: int) -> None:
        """Drop all packets of a namespace."""
        _ip("-n", self.hub, "link", "set", f"port{i}", "down")

    def slow(self, i: int) -> None:
        """Let through a packet, and then ten bytes per second, in both directions."""
        for name, device in ((self.hub, f"port{i}"), (self.names[i], "fp0")):
            _ip(
                "netns",
                "exec",
                name,
                *f"tc qdisc add dev {device} root tbf rate 80bit burst 1600 limit 3000".split(),
            )

    def restore(self) -> None:
        """Undo faults. To delete and create namespaces for each cell would delay all sockets of
        this machine.
        """
        for i, name in enumerate(self.names):
            _ip("-n", self.hub, "link", "set", f"port{i}", "up")
            for where, device in ((self.hub, f"port{i}"), (name, "fp0")):
                command = f"ip netns exec {where} tc qdisc del dev {device} root".split()
                subprocess.run(command, capture_output=True, check=False)

    def remove(self) -> None:
        """Delete the namespaces, and with them their links."""
        for name in (self.hub, *self.names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(
        [*(() if words[0] == "tc" else ("ip",)), *words], capture_output=True, check=True
    )


class Job:
    """The processes of one cell."""

    def __init__(self, cell: Cell, timeout: float, network: Network, folder: Path):
        self.cell, self.timeout, self.network, self.folder = cell, timeout, network, folder
        self.context = mp.get_context("forkserver")
        self.ended: dict[int, float] = {}
        self.host = None
        if cell.how == "torchrun":
            args = (cell, self._env(None, 0), timeout, self._name(0), self._at(0))
            self.host = self._process(agent_main, *args, daemon=False)
            self.ranks: list[Any] = [Foreign(folder, rank) for rank in range(cell.ranks)]
            return
        if cell.how == "ray":
            self.host = self._process(host_main, "127.0.0.1", True, "")
        elif cell.how != "env":
            self.host = self._process(host_main, self._at(0), cell.how == "launch", self._name(0))
        if self.host is not None:
            _until(lambda: (folder / "port").exists(), 120)
            port = int((folder / "port").read_text())
        else:
            port = 20000 + random.randrange(10000)
        if cell.how == "ray":
            self.tasks = [
                _ray().remote(str(folder), cell, rank, self._env(rank, port), timeout, "")
                for rank in range(cell.ranks)
            ]
            self.ranks = [Foreign(folder, rank) for rank in range(cell.ranks)]
            return
        self.ranks = [
            self._process(rank_main, cell, rank, self._env(rank, port), timeout, self._name(rank))
            for rank in range(cell.ranks)
        ]

    def _place(self, rank: int) -> int:
        """The namespace of a rank."""
        if self.cell.who in (FIRST, SECOND):
            return int(rank >= 2)
        return rank if self.cell.what == "cut" else 0

    def _name(self, rank: int) -> str:
        return self.network.names[self._place(rank)]

    def _at(self, rank: int) -> str:
        return self.network.address(self._place(rank))

    def _env(self, rank: int | None, port: int) -> dict[str, str]:
        """The environment of a rank; without its number, what an agent does not set."""
        cell = self.cell
        env = {
            MEMORY: str(int(cell.over == "memory")),
            "GLOO_SOCKET_IFNAME": "lo" if cell.how == "ray" else "fp0",
            "OMP_NUM_THREADS": "1",
        }
        if rank is None:
            return env
        env |= {
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(cell.ranks)),
            "MASTER_ADDR": "127.0.0.1" if cell.how == "ray" else self._at(0),
            "MASTER_PORT": str(port),
        }
        if cell.how != "env":
            env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        if cell.how == "agent store":
            env["TORCHELASTIC_RUN_ID"] = "fpipe"
        return env

    def _process(self, target: Any, *args: Any, daemon: bool = True) -> Any:
        process = self.context.Process(target=target, args=(str(self.folder), *args), daemon=daemon)
        process.start()
        return process

    def strike(self) -> None:
        """The fault, where another process causes it."""
        cell, network = self.cell, self.network
        if cell.what in ("kill", "stop"):
            number = signal.SIGKILL if cell.what == "kill" else signal.SIGSTOP
            at_once = [self.ranks[rank] for rank in cell.victims]
            if self.host is not None and cell.who in (HOST, FIRST):
                at_once.append(self.host)
            for process in at_once:
                os.kill(process.pid, number)
        else:
            (network.cut if cell.what == "cut" else network.slow)(self._place(cell.victims[0]))
        write(self.folder / "fault", str(time.monotonic()))

    def watch(self) -> float | None:
        """Wait until all survivors have ended or the time is up; when the fault happened."""
        fault, end = None, time.monotonic() + _START
        while time.monotonic() < end and len(self.ended) < len(self.survivors()):
            if (
                fault is None
                and not (self.folder / "fault").exists()
                and (self.folder / "asked").exists()
            ):
                self.strike()
            if fault is None and (self.folder / "fault").exists():
                fault = float((self.folder / "fault").read_text())
                end = fault + self.timeout + _PATIENCE + self.cell.beside(self.timeout)
            for rank in self.survivors():
                if rank not in self.ended and self.ranks[rank].exitcode is not None:
                    self.ended[rank] = time.monotonic()
            time.sleep(0.02)
        return fault

    def survivors(self) -> list[int]:
        """The ranks that must end with an error: those that run on, also where they are cut off."""
        runs_on = self.cell.what in ("cut", "clock") or (
            self.cell.what == "slow" and self.cell.who in (FIRST, SECOND)
        )
        return [rank for rank in range(self.cell.ranks) if runs_on or rank not in self.cell.victims]

    def stop(self) -> None:
        """End all processes."""
        for process in [*self.ranks, *([] if self.host is None else [self.host])]:
            process.kill()
            process.join()

    def judge(self, fault: float) -> Outcome:
        """What the survivors reported."""
        cell, texts, latest, in_time, named = self.cell, {}, 0.0, True, True
        for rank in self.survivors():
            ours, when, text = self._report(rank)
            if text == _DONE and cell.what == "slow" and cell.who in (FIRST, SECOND):
                ours, text = True, f"{text}, since the link was fast enough"
            if cell.what == "clock":
                ours, text = text == _DONE, f"{text}, since clocks do not matter"
            latest = max(latest, when - fault)
            in_time &= ours and when - fault <= self.timeout + LATE + cell.beside(self.timeout)
            named &= self._named(rank, text) or text.startswith(f"{_DONE}, since")
            texts[rank] = f"{when - fault:.1f} s {text}"
        return Outcome(cell, in_time, named, latest, texts)

    def _report(self, rank: int) -> tuple[bool, float, str]:
        """Whether an error of fpipe ended a rank, when, and its text."""
        if rank not in self.ended:
            return False, time.monotonic(), f"HANGS; {self._dump(rank)}"
        path = self.folder / f"report{rank}"
        report = json.loads(path.read_text()) if path.exists() else None
        if report is not None and "SignalException" not in f"{report['kind']} {report['text']}":
            return report["ours"], report["when"], f"{report['kind']}: {report['text']}"
        text = _tail(self.folder / f"log{rank}")
        if self.cell.how == "torchrun" and (report or "fpipe.errors." not in text):
            _until((self.folder / "agent").exists, 30)  # it ends the others after a failure
            first = (self.folder / "agent").read_text()
            path = self.folder / f"report{first.split(',')[0].split()[1]}"
            why = json.loads(path.read_text())["text"] if path.exists() else ""
            return True, self.ended[rank], f"the agent ended it. Look at {first}; {why}"
        return "fpipe.errors." in text, self.ended[rank], f"process ended: {text}"

    def _named(self, rank: int, text: str) -> bool:
        if self.cell.who == HOST:
            return (
                re.search(r"[Ll]ook at (rank \d+( \(.*?\))? and at )?the launcher at", text)
                is not None
            )
        inside = rank in self.cell.victims
        if (
            self.host is not None
            and self._cut_off(0) != self._cut_off(rank)
            and "the launcher at" in text
        ):
            return True  # the store is on the other side
        culprits = [r for r in range(self.cell.ranks) if (r in self.cell.victims) != inside]
        return any(
            re.search(rf"[Ll]ook at rank {r}\b|rank {r} (could not prepare|on \S+: )", text)
            for r in culprits
        )

    def _cut_off(self, rank: int) -> bool:
        """Whether the namespace of a rank is the one that fails."""
        return self._place(rank) == self._place(self.cell.victims[0])

    def _dump(self, rank: int) -> str:
        """Where the threads of a rank are, the newest first."""
        os.kill(self.ranks[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        dump = (self.folder / f"log{rank}").read_text(errors="replace").split("hread 0x")[1:]
        threads = [re.findall(r'([^/]+)", line (\d+) in (\w+)', thread) for thread in dump]
        return " || ".join(
            " < ".join(f"{file}:{line} {name}" for file, line, name in thread[:12])
            for thread in threads
        )


class Foreign(NamedTuple):
    """A rank that another program started, by the file that has its process id."""

    folder: Path
    rank: int

    @property
    def pid(self) -> int:
        """Its process."""
        return int((self.folder / f"pid{self.rank}").read_text())

    @property
    def exitcode(self) -> int | None:
        """None while it has not started or runs."""
        if not (self.folder / f"pid{self.rank}").exists():
            return None
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return 0
        return 0 if state in "ZX" else None

    def kill(self) -> None:
        """End it."""
        if self.exitcode is None and (self.folder / f"pid{self.rank}").exists():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def join(self) -> None:
        """Its parent waits for it."""


def _ray() -> Any:
    """``rank_main`` as a task of a local cluster, which is started once."""
    import ray

    if not ray.is_initialized():
        ray.init(
            num_cpus=16 * _MOST,  # for trials side by side
            include_dashboard=False,
            object_store_memory=80_000_000,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}},
        )
    return ray.remote(num_cpus=1, max_retries=0, max_calls=1)(rank_main)


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    ours = [line for line in lines if "fpipe.errors." in line]
    return (ours or lines or ["no output"])[-1]


def _until(ready: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError("a process of the matrix did not start")
        time.sleep(0.01)


def run_cell(cell: Cell, timeout: float, networks: SimpleQueue[Network]) -> Outcome | str:
    """One cell; what the ranks reported where the fault did not happen, as on a busy machine, in
    three attempts.
    """
    problem = ""
    for _ in range(3):
        network = networks.get()  # returns at once: there are as many as cells side by side
        try:
            with tempfile.TemporaryDirectory() as folder:
                job = Job(cell, timeout, network, Path(folder))
                try:
                    fault = job.watch()
                    if fault is not None:
                        return job.judge(fault)
                    problem = " | ".join(
                        path.read_text()[:500] for path in Path(folder).glob("report*")
                    )
                finally:
                    job.stop()
        finally:
            network.restore()
            networks.put(network)
    return problem


def _ended(cell: Cell, timeout: float, networks: SimpleQueue[Network]) -> Outcome | str:
    """A cell; why it could not be run, so that the others are."""
    try:
        return run_cell(cell, timeout, networks)
    except (TimeoutError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def run(
    chosen: Sequence[Cell], timeout: float, at_once: int, file: Path | None, verbose: bool
) -> int:
    """All cells, a table, and JSON; the number of cells in which a survivor did not end in time."""
    os.environ["FPIPE_FAULT_CELL_WARM"] = "1"
    mp.get_context("forkserver").set_forkserver_preload(["benchmarks.fault_cell"])
    console, outcomes, missing = Console(width=150), _before(file, timeout), list[Cell]()
    done = {outcome.cell for outcome in outcomes}
    chosen = [cell for cell in chosen if cell not in done]
    networks: SimpleQueue[Network] = SimpleQueue()
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn()
    with ExitStack() as stack:
        for network in map(Network, range(at_once)):
            stack.callback(network.remove)
            network.create()
            networks.put(network)
        progress = stack.enter_context(Progress(*columns, console=console))
        pool = stack.enter_context(ThreadPoolExecutor(at_once))
        bar = progress.add_task("cells", total=len(chosen))
        results = pool.map(lambda cell: _ended(cell, timeout, networks), chosen)
        for cell, outcome in zip(chosen, results, strict=True):
            progress.advance(bar)
            if isinstance(outcome, str):
                missing.append(cell)
                console.print(
                    f"{' | '.join(cell)}: NO FAULT: {outcome}",
                    highlight=False,
                    markup=False,
                    soft_wrap=True,
                )
                continue
            outcomes.append(outcome)
            if verbose or not (outcome.in_time and outcome.named):
                console.print(_line(outcome), highlight=False, markup=False, soft_wrap=True)
            if file is not None:
                _save(file, outcomes, missing, timeout)
    console.print(_table(outcomes))
    if not RAY:
        console.print("Ray is not installed: no cell has it as its launcher")
    good, named = sum(o.in_time for o in outcomes), sum(o.in_time and o.named for o in outcomes)
    console.print(
        f"{len(outcomes)} cells; in time: {good}; culprit named: {named}; without a fault: "
        f"{len(missing)}"
    )
    return len(outcomes) - good


def _line(outcome: Outcome) -> str:
    verdict = ("in time" if outcome.in_time else "LATE") + (
        ", named" if outcome.named else ", NOT NAMED"
    )
    lines = [f"    rank {rank}: {text}" for rank, text in outcome.texts.items()]
    return "\n".join([f"{' | '.join(outcome.cell)}: {verdict}, {outcome.seconds:.1f} s", *lines])


def _save(file: Path, outcomes: Sequence[Outcome], missing: Sequence[Cell], timeout: float) -> None:
    rows = [
        {**o.cell._asdict(), **{k: v for k, v in vars(o).items() if k != "cell"}} for o in outcomes
    ]
    content = {
        "timeout": timeout,
        "cells": rows,
        "without a fault": [cell._asdict() for cell in missing],
    }
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _table(outcomes: Sequence[Outcome]) -> Table:
    """By moment and kind of fault: in time / culprit named / cells."""
    by: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by[outcome.cell.when, outcome.cell.what].append(outcome)
    table = Table("in time / named / cells", *WHAT, title="Faults")
    for when in WHEN:
        parts = [by[when, what] for what in WHAT]
        counts = [
            f"{sum(o.in_time for o in p)} / {sum(o.named for o in p)} / {len(p)}" if p else ""
            for p in parts
        ]
        table.add_row(when, *counts)
    return table


def choose(count: int | None, only: Sequence[str], seed: int, part: str = "1/1") -> list[Cell]:
    """The cells with the given values (``key=value,value``), or so many of them at random; of these
    one of several parts.
    """
    pairs = [(key, values.split(",")) for key, _, values in (pair.partition("=") for pair in only)]
    chosen = [cell for cell in cells() if all(getattr(cell, key) in of for key, of in pairs)]
    random.Random(seed).shuffle(chosen)
    number, _, parts = part.partition("/")
    return chosen[:count][int(number) - 1 :: int(parts)]


def _before(file: Path | None, timeout: float) -> list[Outcome]:
    """The outcomes of a run that was interrupted, which the file has."""
    if file is None or not file.exists():
        return []
    content = json.loads(file.read_text(encoding="utf-8"))
    if content["timeout"] != timeout:
        return []
    return [
        Outcome(Cell(*(row.pop(key) for key in Cell._fields)), **row) for row in content["cells"]
    ]

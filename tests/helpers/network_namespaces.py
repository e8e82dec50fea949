"""Two emulated hosts: network namespaces joined by a virtual link. Needs root and iproute2."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fpipe.products.training.launch import _context

PROCESSES = _context("forkserver", None)
_NEWNET = 0x40000000  # CLONE_NEWNET
Side = tuple[str, str, str]
#: namespace, its end of the link, its address; the process id separates concurrent runs of the
#: tests
SIDES = tuple(
    (f"fpipe{os.getpid()}{side}", f"fp{os.getpid()}{side}", f"10.78.0.{k}")
    for k, side in ((1, "a"), (2, "b"))
)


class NotAllowedError(Exception):
    """The machine cannot create network namespaces."""


@contextmanager
def two_namespaces() -> Iterator[None]:
    """Create the two namespaces with the link up; delete them at exit."""
    if shutil.which("ip") is None:
        raise NotAllowedError("no ip command: install iproute2")
    try:
        for name, _, _ in SIDES:
            _ip("netns", "add", name)
        (one, end, _), (other, far, _) = SIDES
        _ip("link", "add", end, "netns", one, "type", "veth", "peer", "name", far, "netns", other)
        for name, end, address in SIDES:
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name, _, _ in SIDES:  # deletes the link too
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotAllowedError(f"ip {' '.join(words)}: {done.stderr.strip() or done.returncode}")


def launch(fn: Callable[..., Any], *args: Any, nproc: int = 2, timeout: float = 110) -> list[Any]:
    """As torchrun does on two hosts, call a function on ``nproc`` processes of each; return the
    results by rank.
    """
    parts = on_each(partial(_agent, SIDES, 2, nproc, 0, fn, args), timeout)
    results = parts[0] | parts[1]
    return [results[rank] for rank in sorted(results)]


def jobs(fn: Callable[..., Any], *args: Any, restarts: int, timeout: float = 110) -> list[Any]:
    """As torchrun does on each of two hosts alone, call ``fn(number of the host, *args)`` on two
    processes, which start again where one fails; return the results by host and rank.
    """
    return on_each(partial(_agent, SIDES, 1, 2, restarts, fn, args), timeout)


def on_each(run: Callable[[int], Any], timeout: float) -> list[Any]:
    """The results of a function of the number of a host, each in a process there."""
    hosts = []
    for number, side in enumerate(SIDES):
        ours, theirs = PROCESSES.Pipe(duplex=False)
        host = PROCESSES.Process(target=_host, args=(theirs, side, partial(run, number)))
        host.start()
        theirs.close()
        hosts.append((host, ours))
    try:
        results = []
        for _, report in hosts:
            assert report.poll(timeout), f"a host did not finish within {timeout:g} s"
            try:
                results.append(report.recv())
            except EOFError as error:
                raise AssertionError("a host ended with the error above") from error
        return results
    finally:
        for host, _ in hosts:
            host.terminate()  # the agent ends its ranks
        for host, _ in hosts:
            host.join(60)


def enter(side: Side) -> None:
    """Move this process to a host."""
    name, end, _ = side
    with open(f"/run/netns/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {name}")
    os.environ |= {"GLOO_SOCKET_IFNAME": end}


def _host(report: Connection, side: Side, run: Callable[[], Any]) -> None:
    enter(side)
    report.send(run())


def _agent(
    sides: Sequence[Side],
    nodes: int,
    nproc: int,
    restarts: int,
    fn: Callable[..., Any],
    args: tuple,
    number: int,
) -> dict[int, Any]:
    """The agent of one host, from which its ranks are forked."""
    first = number if nodes == 1 else 0
    config = LaunchConfig(
        nodes,
        nodes,
        nproc,
        run_id="fpipe",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{sides[first][2]}:29500",
        local_addr=sides[number][2],
        rdzv_configs={"is_host": number == first},  # both namespaces have the same host name
        max_restarts=restarts,
        start_method="fork",
    )
    if nodes == 1:
        args = number, *args
    return elastic_launch(config, fn)(*args)

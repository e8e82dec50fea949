"""Two emulated hosts: network namespaces joined by a virtual link. Needs root and iproute2."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fpipe.products.training.launch import _context

PROCESSES = _context("forkserver", None)
_NEWNET = 0x40000000  # CLONE_NEWNET
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
    hosts = []
    for side in SIDES:
        ours, theirs = PROCESSES.Pipe(duplex=False)
        host = PROCESSES.Process(target=_host, args=(theirs, side, nproc, fn, args))
        host.start()
        theirs.close()
        hosts.append((host, ours))
    results: dict[int, Any] = {}
    try:
        for _, report in hosts:
            assert report.poll(timeout), f"a host did not finish within {timeout:g} s"
            results |= report.recv()
        return [results[rank] for rank in sorted(results)]
    finally:
        for host, _ in hosts:
            host.terminate()  # the agent ends its ranks
        for host, _ in hosts:
            host.join(60)


def _host(
    report: Connection, side: tuple[str, str, str], nproc: int, fn: Callable[..., Any], args: tuple
) -> None:
    """The agent of one host, from which its ranks are forked."""
    (name, end, address), (_, _, first) = side, SIDES[0]
    with open(f"/run/netns/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {name}")
    os.environ |= {"GLOO_SOCKET_IFNAME": end}
    config = LaunchConfig(
        2,
        2,
        nproc,
        run_id="fpipe",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{first}:29500",
        local_addr=address,
        rdzv_configs={"is_host": address == first},  # both namespaces have the same host name
        start_method="fork",
    )
    report.send(elastic_launch(config, fn)(*args))

"""Two emulated hosts: network namespaces joined by a virtual link. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

#: namespace, its end of the link, its address; the process id separates concurrent runs of the tests
SIDES = tuple(
    (f"fpipe{os.getpid()}{side}", f"fp{os.getpid()}{side}", f"10.78.0.{k}") for k, side in ((1, "a"), (2, "b"))
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


def torchrun(
    script: Sequence[str], nproc: int = 2, timeout: float = 110, env: dict[str, str] | None = None
) -> list[tuple[int, str, str]]:
    """Run a script under torchrun on both hosts; return exit code, output and errors of each."""
    nodes = []
    for name, end, address in SIDES:
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        command += ["--nproc-per-node", str(nproc), "--rdzv-backend", "c10d", "--rdzv-id", "fpipe"]
        command += ["--rdzv-endpoint", f"{SIDES[0][2]}:29500", "--local-addr", address]
        # Both namespaces have the same host name.
        command += ["--rdzv-conf", f"is_host={int(address == SIDES[0][2])}", *script]
        more = {**os.environ, "GLOO_SOCKET_IFNAME": end, "OMP_NUM_THREADS": "1", **(env or {})}
        nodes.append(subprocess.Popen(command, env=more, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    try:
        return [_ended(node, timeout) for node in nodes]
    finally:
        for node in nodes:
            node.terminate()  # torchrun ends its ranks
        for node in nodes:
            node.wait(timeout=60)


def _ended(node: subprocess.Popen[Any], timeout: float) -> tuple[int, str, str]:
    try:
        out, err = node.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        node.terminate()
        _, err = node.communicate(timeout=60)
        raise AssertionError(f"a host did not finish within {timeout:g} s: {err[-2000:]}") from None
    return node.returncode, out, err

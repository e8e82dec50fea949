"""examples/train.py, launched in three ways: the same loss to the last digit at each step.

    python benchmarks/trial_launch.py     # python, torchrun, two hosts (network namespaces)
    python benchmarks/trial_launch.py --ways python torchrun --steps 5

Two hosts need root and iproute2. Exit code 1 where a loss differs or a way did not run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
SCRIPT = str(ROOT / "examples" / "train.py")
ENV = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def by_python(options: list[str]) -> str:
    """One process, four ranks in it."""
    return _output([sys.executable, SCRIPT, *options])


def by_torchrun(options: list[str]) -> str:
    """Four processes."""
    return _output(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "4",
            SCRIPT,
            *options,
        ]
    )


def by_two_hosts(options: list[str]) -> str:
    """Two processes in each of two network namespaces."""
    import network_namespaces  # beside the tests, which share it

    with network_namespaces.two_namespaces():
        nodes = _torchrun([SCRIPT, *options], network_namespaces.SIDES)
    if any(code for code, _, _ in nodes):
        raise RuntimeError("\n".join(err[-2000:] for _, _, err in nodes))
    return "".join(out for _, out, _ in nodes)


def _torchrun(
    script: Sequence[str],
    sides: Sequence[tuple[str, str, str]],
    nproc: int = 2,
    timeout: float = 400,
) -> list[tuple[int, str, str]]:
    """Run a script under torchrun on both hosts; return exit code, output and errors of each."""
    nodes = []
    for name, end, address in sides:
        command = [
            "ip",
            "netns",
            "exec",
            name,
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
        ]
        command += ["--nproc-per-node", str(nproc), "--rdzv-backend", "c10d", "--rdzv-id", "fpipe"]
        command += ["--rdzv-endpoint", f"{sides[0][2]}:29500", "--local-addr", address]
        # Both namespaces have the same host name.
        command += ["--rdzv-conf", f"is_host={int(address == sides[0][2])}", *script]
        more = {**os.environ, "GLOO_SOCKET_IFNAME": end, "OMP_NUM_THREADS": "1", **ENV}
        nodes.append(
            subprocess.Popen(
                command, env=more, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
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


def _output(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, check=False, env={**os.environ, **ENV}
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return done.stdout


WAYS: dict[str, Callable[[list[str]], str]] = {
    "python": by_python,
    "torchrun": by_torchrun,
    "two-hosts": by_two_hosts,
}


def main() -> int:
    """Each way, and what it printed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    first: list[str] = []
    failed = 0
    for way in given.ways:
        begin = time.monotonic()
        try:
            losses = [
                line
                for line in WAYS[way](["--steps", str(given.steps)]).splitlines()
                if line.startswith("step ")
            ]
        except Exception as error:
            failed += 1
            print(f"{way:10} DID NOT RUN: {type(error).__name__}: {error}", flush=True)
            continue
        first = first or losses
        same = losses == first and len(losses) == given.steps
        failed += not same
        losses = (
            f"{len(losses)} steps, {losses[0].split(' ', 2)[2]} ... {losses[-1].split(' ', 2)[2]}"
            if losses
            else "nothing"
        )
        print(
            f"{way:10} {time.monotonic() - begin:6.1f} s  {losses}  "
            f"{'the same' if same else 'NOT THE SAME'}",
            flush=True,
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

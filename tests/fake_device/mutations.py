"""Mutation of fpipe's code for devices: ``python -m tests.fake_device.mutations``.

Each row removes one wait, event, buffer or flag from a copy of fpipe. The checks of the row run on
it, on the fake device under three seeds of long delays; one of them must fail. Prints a table.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fpipe
from schedule_table import Case

from . import cases, test_pipelines, test_processes

ROOT = Path(__file__).parents[2]
SEEDS = range(3)


class Mutant(NamedTuple):
    """One change of a file of fpipe, and the checks that may find it."""

    file: str
    before: str
    after: str
    checks: str
    what: str


TABLE = (
    Mutant(
        "collectives/local.py",
        'non_blocking = device.type != "cpu"',
        "non_blocking = True",
        "more:mixed",
        "a message to a rank on the CPU does not wait",
    ),
    Mutant(
        "collectives/local.py",
        'non_blocking = device.type != "cpu"',
        "non_blocking = False",
        "waits",
        "a message to a device is waited for by the host",
    ),
    Mutant(
        "engine/feed.py",
        "slots[slot].to(self.device, non_blocking=True)",
        "slots[slot].to(self.device)",
        "waits",
        "a batch is copied while the host waits",
    ),
    Mutant(
        "passes/profile/recording.py",
        "torch.Event(device, enable_timing=True)",
        "torch.Event(device)",
        "more:profile",
        "events without a time",
    ),
    Mutant(
        "passes/profile/recording.py",
        "event.record(torch.accelerator.current_stream(device))",
        "event.record()",
        "clocks",
        "events in the stream of the current device",
    ),
    Mutant(
        "passes/profile/recording.py",
        "            torch.accelerator.synchronize(device)\n            return",
        "            return",
        "more:profile",
        "times are read before the events are reached",
    ),
    Mutant(
        "passes/profile/recording.py",
        "        torch.accelerator.synchronize(device)\n        zero = mark()",
        "        zero = mark()",
        "clocks",
        "clocks start behind work that is under way",
    ),
    Mutant(
        "passes/streams.py",
        "return () if device.type == \"mps\" else (device,)",
        "return ()",
        "transformer",
        "the random state of the current device",
    ),
    Mutant(
        "passes/capture/steps.py",
        "fixed.copy_(tensor.detach(), non_blocking=True)",
        "fixed.copy_(tensor.detach())",
        "waits",
        "the host waits for the arguments of a graph",
    ),
    Mutant(
        "passes/capture/graphs.py",
        "    with module.device(device):\n",
        "    if True:\n",
        "more:captured",
        "a graph is recorded on the current device",
    ),
    Mutant(
        "collectives/c10d.py",
        "                buffers = [buffer.cpu() for buffer in buffers]",
        "                buffers = [b.to('cpu', non_blocking=True) for b in buffers]",
        "host",
        "a message through the host leaves before it is there",
    ),
    Mutant(
        "collectives/c10d.py",
        "            works = self._post(pg.send, buffers, dst, \"to send to\")\n",
        "            works = self._post(pg.send, buffers, dst, \"to send to\"); buffers.clear()\n",
        "link",
        "a send does not keep its buffers",
    ),
    Mutant(
        "collectives/c10d.py",
        "                self._wait_all(works, dst, \"to send to\")\n",
        "",
        "link",
        "the buffers of a send are released before it is done",
    ),
    Mutant(
        "collectives/c10d.py",
        "                self._wait_all(works, src, \"for a message from\")\n",
        "",
        "link",
        "a message is read before it is there",
    ),
    Mutant(
        "collectives/c10d.py",
        "                self._wait(work)\n            return (result(),)",
        "                pass\n            return (result(),)",
        "copies",
        "a reduction is read before it is there",
    ),
    Mutant(
        "collectives/c10d.py",
        "self._wait(dist.broadcast(flat, group=self.pg, group_src=src, async_op=True))",
        "dist.broadcast(flat, group=self.pg, group_src=src, async_op=True)",
        "link",
        "a loss is read before it is there",
    ),
    Mutant(
        "collectives/c10d.py",
        'self._blocking = device.type in ("cpu", "meta") or method.staged',
        "self._blocking = True",
        "link waits",
        "the host waits for messages",
    ),
    Mutant(
        "collectives/c10d.py",
        'self._blocking = device.type in ("cpu", "meta") or method.staged',
        'self._blocking = device.type in ("cpu", "meta")',
        "refused",
        "messages through the host have no time-out",
    ),
    Mutant(
        "collectives/setup.py",
        "        torch.accelerator.set_device_index(device.index)\n",
        "        pass\n",
        "link waits",
        "the device of a process is not its current one",
    ),
)  # fmt: off


# ---- checks: what is wrong, or nothing ----
def _local(run: Callable[[Sequence[str]], list[torch.Tensor]]) -> Callable[[], list[Any]]:
    return lambda: cases.wrong(run, 2, SEEDS, share=0.5, most=2000)


def _processes(fn: Callable[..., Any], *args: Any) -> Callable[[], list[Any]]:
    return lambda: [w for found in fpipe.launch(fn, *args, ranks=2, timeout=300) for w in found]


CHECKS: dict[str, Callable[[], list[Any]]] = {
    **{f"more:{name}": _local(run) for name, run in cases.MORE.items()},
    "transformer": _local(cases.of_model((Case("1F1B", 2, 4, 2), "transformer", "trace"))),
    "waits": test_pipelines.waits_of_the_host,
    "clocks": test_pipelines.clocks,
    "host": _processes(test_processes.steps_of_a_rank, None, SEEDS, "mlp"),
    "link": _processes(test_processes.steps_of_a_rank, "", SEEDS, "mlp"),
    "link waits": _processes(test_processes.waits_of_the_host),
    "refused": _processes(test_processes.refused_call),
    "copies": _processes(test_processes.axis, "copies", "", SEEDS),
}


def check(name: str) -> int:
    """Run a check in this process; 1 if it found something."""
    torch.set_num_threads(1)
    found = CHECKS[name]()
    print(f"{name}: {found or 'nothing'}"[:500], flush=True)
    return int(bool(found))


def killed(root: Path, name: str) -> bool:
    """Whether a check fails on the fpipe of a folder."""
    path = os.pathsep.join(map(str, (root, root / "tests" / "helpers")))
    code = f"import sys, tests.fake_device.mutations as m; sys.exit(m.check({name!r}))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            timeout=400,
        )
    except subprocess.TimeoutExpired:
        return True
    if "-v" in sys.argv:
        print((done.stdout + done.stderr[-1500:]).decode())
    return done.returncode != 0


def main(arguments: Sequence[str]) -> None:
    """Print the table, of all rows or of those whose numbers are given."""
    wanted = [int(word) for word in arguments if word.isdigit()] or range(len(TABLE))
    names = {TABLE[number].checks for number in wanted}
    for name in sorted(names):
        assert not killed(ROOT, name), f"{name} fails on fpipe as it is"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "tests").symlink_to(ROOT / "tests")
        for number in wanted:
            mutant = TABLE[number]
            shutil.rmtree(root / "fpipe", ignore_errors=True)
            shutil.copytree(ROOT / "fpipe", root / "fpipe")
            file = root / "fpipe" / mutant.file
            text = file.read_text()
            assert text.count(mutant.before) == 1, f"{mutant.file} has no line {mutant.before!r}"
            file.write_text(text.replace(mutant.before, mutant.after))
            found = f"killed by {mutant.checks}" if killed(root, mutant.checks) else "SURVIVES"
            print(f"{number:3} {mutant.file:28} {mutant.what}: {found}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

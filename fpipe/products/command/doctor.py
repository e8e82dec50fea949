# SPDX-License-Identifier: Apache-2.0
"""``fpipe doctor``: describe this machine, probe its backend for known faults, and list the
remedies of fpipe.

Two processes call the backend directly; the results are compared with the capability table. Knows
no pipeline.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

import click
import torch
import torch.distributed as dist

from ... import __version__, init, launch
from ...actions import progress
from ...collectives.adapt import OPS, reduction, sending
from ...collectives.c10d import C10dGroup
from ...collectives.capabilities import DTYPES, Capabilities, Status
from ...devices import kind, pick
from ...errors import UnsupportedError

SIZES = (1, 2, 4, 8, 16, 28, 30, 31, 32, 33, 48, 257)
NAMES = {
    "float": "32- and 64-bit floats",
    "half": "16-bit floats",
    "fp8": "8-bit floats",
    "complex": "complex",
    "int": "integers",
    "odd": "int16 and wide unsigned",
    "bool": "bools",
}
_PATIENCE = timedelta(seconds=10)
_OTHER_VALUES = "wrong values were received"
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class Finding:
    """One probe: the fact of the table that it tests, with its status, and "right" or a description
    of the fault.
    """

    what: str
    dtypes: str
    status: Status
    result: str

    @property
    def right(self) -> bool:
        """Whether the backend did what it was asked for."""
        return self.result == "right"


def probe(group: C10dGroup) -> list[Finding]:
    """Probe the backend without fpipe's adaptors. A collective call, with the same findings on
    every process.
    """
    local = [
        Finding(
            what,
            dtypes,
            group.can.fact(what, DTYPES[dtypes][0] if dtypes else None).status,
            _answer(ask),
        )
        for what, dtypes, ask in _questions(group)
    ]
    reports = group.gather_objects([(f.what, f.dtypes, f.status.name, f.result) for f in local])
    every = zip(
        *([Finding(w, d, Status[s], r) for w, d, s, r in report] for report in reports), strict=True
    )
    return [
        next((finding for finding in of_ranks if not finding.right), of_ranks[0])
        for of_ranks in every
    ]


def _answer(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"refused ({str(error).splitlines()[0][:60]})"


def _questions(group: C10dGroup) -> Iterator[tuple[str, str, Callable[[], str]]]:
    for name, dtypes in DTYPES.items():
        for op in ("sum", "avg", "max", "min"):
            yield op, name, partial(_reduced, group, op, dtypes[0])
    if group.size > 1:
        for name, dtypes in DTYPES.items():
            yield "p2p", name, partial(_sent, group, dtypes[0])
        yield "batch", "", partial(_batched, group)


def _reduced(group: C10dGroup, name: str, dtype: torch.dtype) -> str:
    op = getattr(dist.ReduceOp, name.upper())
    exact = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin}[name]
    if dtype is torch.bool and name != "min":
        exact = torch.amax
    wrong = []
    for size in SIZES:
        pieces = torch.stack(
            [(torch.arange(size) + 2 * rank) % 3 for rank in range(group.size)]
        ).double()
        if dtype is torch.bool:
            pieces = pieces.clamp(max=1)
        x = pieces[group.rank].to(dtype).to(group.device(group.rank))
        dist.all_reduce(x, op, group=group.pg, async_op=True).wait(_PATIENCE)  # type: ignore[union-attr]
        result = (x.real if dtype.is_complex else x).double().cpu()
        if not torch.allclose(result, exact(pieces, dim=0), rtol=0.02):
            wrong.append(size)
    return f"wrong at {', '.join(map(str, wrong))} elements" if wrong else "right"


def _sent(group: C10dGroup, dtype: torch.dtype) -> str:
    """One message from each even rank to the next."""
    x = (torch.arange(5) % 2).float().to(dtype).to(group.device(group.rank))
    y = x
    if group.rank % 2:
        y = torch.empty_like(x)
        group.pg.recv([y], group.rank - 1, 0).wait(_PATIENCE)
    elif group.rank + 1 < group.size:
        group.pg.send([x], group.rank + 1, 0).wait(_PATIENCE)
    return "right" if torch.equal(y.view(torch.uint8), x.view(torch.uint8)) else _OTHER_VALUES


def _batched(group: C10dGroup) -> str:
    """To the next rank and from the previous one, in one batch, sends first."""
    device, size = group.device(group.rank), group.size
    x, y = torch.full((5,), float(group.rank), device=device), torch.full((5,), -1.0, device=device)
    to, fro = (group.rank + 1) % size, (group.rank - 1) % size
    operations = ((dist.isend, x, to), (dist.irecv, y, fro))
    batch = [
        dist.P2POp(op, tensor, group=group.pg, group_peer=peer) for op, tensor, peer in operations
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait(_PATIENCE)
    return "right" if y.tolist() == [float(fro)] * 5 else _OTHER_VALUES


# ---- report ----
def remedies(can: Capabilities, cpu: Capabilities | None) -> list[str]:
    """The remedies of fpipe for the faults in the table, one sentence each.

    >>> remedies(Capabilities.of("xpu", "xccl"), None)[0]
    'mean of 32- and 64-bit floats, 16-bit floats: summed, then divided here'
    """
    pairs = (
        (_remedy(can, cpu, op, dtypes[0]), (NAMES[name], op))
        for name, dtypes in DTYPES.items()
        for op in OPS
    )
    lines = []
    for remedy, where in _grouped(pairs).items():
        by_ops = _grouped((", ".join(ops), name) for name, ops in _grouped(where).items())
        lines += [
            f"{ops} of {', '.join(names)}: {remedy}" for ops, names in by_ops.items() if remedy
        ]
    return lines + _of_messages(can, cpu)


def _grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def _remedy(can: Capabilities, cpu: Capabilities | None, op: str, dtype: torch.dtype) -> str:
    try:
        way = reduction(can, op, dtype, cpu)
    except UnsupportedError:
        return "refused with an error"
    parts = {
        f"carried as {str(way.carry).removeprefix('torch.')}": way.carry != dtype,
        "over the CPU's backend": way.staged,
        "gathered and reduced here": way.ask == "gather",
        "summed, then divided here": way.divide and way.ask != "gather",
    }
    return ", ".join(part for part, applies in parts.items() if applies)


def _of_messages(can: Capabilities, cpu: Capabilities | None) -> list[str]:
    way = sending(can, cpu)
    remedies = {
        "messages: through the CPU, as this backend carries no tensors of the device": way.staged,
        "receives: posted when they are waited for, not ahead": not way.early,
        "messages: each direction of a pair in a process group of its own": way.two_groups,
        "batched sends and receives: never used": not can.habit("batch"),
        "tags: never used": not can.habit("tags"),
    }
    return [remedy for remedy, applies in remedies.items() if applies]


# ---- the command ----
def visit() -> tuple[str, list[Finding]]:
    """Probe from inside a process of a group. A collective call.

    Returns the report, and the findings that failed although the table calls them native.
    """
    group = init(timeout=60)
    assert isinstance(group, C10dGroup)
    device, findings = group.device(group.rank), probe(group)
    record = kind(device.type)
    lines = [
        f"fpipe {__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()}",
        f"device    {device} ({record.name}), {os.cpu_count()} cores",
        f"backend   {group.can.backend}",
        *([f"messages  {group.carried}"] if group.carried else []),
        *(
            [f"visible   {record.visible}={os.environ.get(record.visible, '(not set)')}"]
            if record.visible
            else []
        ),
        "",
        f"probes of {group.can.backend}, {group.size} processes:",
        *_table(findings),
        "",
        "remedies of fpipe:",
        *(f"  {line}" for line in remedies(group.can, group.cpu) or ["none needed: all is native"]),
    ]
    faults = [
        finding for finding in findings if not finding.right and finding.status is Status.NATIVE
    ]
    if faults:
        text = "; ".join(
            f"{f.what} of {NAMES.get(f.dtypes, 'messages')}: {f.result}" for f in faults
        )
        lines += ["", f"NOT IN THE TABLE: {text}. fpipe relies on the table: please report this"]
    return "\n".join(lines), faults


def _table(findings: Sequence[Finding]) -> Iterator[str]:
    rows = _grouped((finding.what, _row(finding)) for finding in findings)
    for what, results in rows.items():
        for place, (result, kinds) in enumerate(_grouped(results).items()):
            yield f"  {'' if place else what:6} {result}: {', '.join(kinds)}"


def _row(finding: Finding) -> tuple[str, str]:
    differs = finding.right != (finding.status is Status.NATIVE)
    note = f" [the table says {finding.status.value}]" if differs else ""
    return finding.result + note, NAMES.get(finding.dtypes, "sends and receives")


@click.command(name="doctor")
@click.option(
    "-n",
    "--processes",
    metavar="N",
    type=click.IntRange(1, 64),
    help="Processes.  [default: 2, or the number of devices if smaller]",
)
def command(processes: int | None) -> int:
    """Describe this machine, probe its backend for faults, and list the remedies of fpipe.

    Under torchrun every process takes part, and rank 0 prints.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        report, faults = visit()
    else:
        most = 2 if pick().type == "cpu" else torch.accelerator.device_count()
        with progress("probing the backend"):
            report, faults = launch(visit, ranks=processes or min(2, most), timeout=180)[0]
    if os.environ.get("RANK", "0") == "0":
        click.echo(report)
    return int(bool(faults))

# SPDX-License-Identifier: Apache-2.0
"""``fpipe doctor``: describe this machine, probe its backend for known faults, and list the remedies of fpipe.

Two processes call the backend directly; the results are compared with the capability table. Knows no pipeline.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import click
import torch
import torch.distributed as dist

from .. import __version__
from ..collectives.adapt import OPS, reduction, sending
from ..collectives.c10d import C10dGroup
from ..collectives.capabilities import DTYPES, Capabilities, Status
from ..collectives.setup import init
from ..devices import kind, pick
from ..errors import UnsupportedError
from .launch import launch

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


@dataclass(frozen=True)
class Finding:
    """The result of one probe: the fact of the table that it tests, and "right" or a description of the fault."""

    what: str
    dtypes: str
    result: str

    def beside(self, can: Capabilities) -> str:
        """The status in the table."""
        return can.fact(self.what, DTYPES[self.dtypes][0] if self.dtypes else None).status.value

    def surprises(self, can: Capabilities) -> bool:
        """Whether the table calls native what failed."""
        return self.result != "right" and self.beside(can) == Status.NATIVE.value


def probe(group: C10dGroup) -> list[Finding]:
    """Probe the backend without fpipe's adaptors. A collective call, with the same findings on every process."""
    mine = [Finding(what, dtypes, _answer(ask, group)) for what, dtypes, ask in _questions(group.size)]
    every = group.gather_objects(mine)
    findings = []
    for place, finding in enumerate(mine):
        bad = [theirs[place].result for theirs in every if theirs[place].result != "right"]
        findings.append(Finding(finding.what, finding.dtypes, bad[0] if bad else "right"))
    return findings


def _answer(ask: Callable[[C10dGroup], str], group: C10dGroup) -> str:
    try:
        return ask(group)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"refused ({str(error).splitlines()[0][:60]})"


def _questions(size: int) -> Iterator[tuple[str, str, Callable[[C10dGroup], str]]]:
    for dtypes in DTYPES:
        for name in ("sum", "avg", "max", "min"):
            yield name, dtypes, lambda group, name=name, dtypes=dtypes: _reduced(group, name, DTYPES[dtypes][0])
    if size > 1:
        for dtypes in DTYPES:
            yield "p2p", dtypes, lambda group, dtypes=dtypes: _sent(group, DTYPES[dtypes][0])
        yield "batch", "", _batched


def _reduced(group: C10dGroup, name: str, dtype: torch.dtype) -> str:
    op = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[name]
    device = group.device(group.rank)
    wrong = []
    for size in SIZES:
        pieces = torch.stack([(torch.arange(size) + 2 * rank) % 3 for rank in range(group.size)]).double()
        mine = pieces[group.rank]
        x = (mine != 0 if dtype is torch.bool else mine.to(dtype)).to(device)
        dist.all_reduce(x, op, group=group.pg, async_op=True).wait(_PATIENCE)  # type: ignore[union-attr]
        truth = {"sum": pieces.sum(0), "avg": pieces.mean(0), "max": pieces.amax(0), "min": pieces.amin(0)}[name]
        if dtype is torch.bool:
            truth = (pieces != 0).double().amin(0) if name == "min" else (pieces != 0).double().amax(0)
        got = (x.real if dtype.is_complex else x).double().cpu()
        if not torch.allclose(got, truth, rtol=0.02):
            wrong.append(size)
    return f"wrong at {', '.join(map(str, wrong))} elements" if wrong else "right"


def _sent(group: C10dGroup, dtype: torch.dtype) -> str:
    """One message from each even rank to the next."""
    device, even = group.device(group.rank), group.rank % 2 == 0
    values = torch.arange(5) % 2
    x = (values != 0 if dtype is torch.bool else values.float().to(dtype)).to(device)
    if even and group.rank + 1 < group.size:
        group.pg.send([x], group.rank + 1, 0).wait(_PATIENCE)
    elif not even:
        y = torch.empty_like(x)
        group.pg.recv([y], group.rank - 1, 0).wait(_PATIENCE)
        return "right" if torch.equal(y.view(torch.uint8), x.view(torch.uint8)) else "wrong values were received"
    return "right"


def _batched(group: C10dGroup) -> str:
    """To the next rank and from the previous one, in one batch, sends first."""
    device, size = group.device(group.rank), group.size
    x, y = torch.full((5,), float(group.rank), device=device), torch.full((5,), -1.0, device=device)
    to, fro = (group.rank + 1) % size, (group.rank - 1) % size
    ops = [
        dist.P2POp(dist.isend, x, group=group.pg, group_peer=to),
        dist.P2POp(dist.irecv, y, group=group.pg, group_peer=fro),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait(_PATIENCE)
    return "right" if y.tolist() == [float(fro)] * 5 else "wrong values were received"


# ---- report ---------------------------------------------------------------------------------------------------------
def remedies(can: Capabilities, cpu: Capabilities | None) -> list[str]:
    """The remedies of fpipe for the faults in the table, one sentence each.

    >>> remedies(Capabilities.of("xpu", "xccl"), None)[0]
    'mean of 32- and 64-bit floats, 16-bit floats: summed, then divided here'
    """
    kinds_of: dict[str, dict[str, list[str]]] = {}
    for name, dtypes in DTYPES.items():
        for op in OPS:
            sentence = _remedy(can, cpu, op, dtypes[0])
            if sentence:
                kinds_of.setdefault(sentence, {}).setdefault(NAMES[name], []).append(op)
    lines = []
    for sentence, kinds in kinds_of.items():
        by_ops: dict[str, list[str]] = {}
        for name, ops in kinds.items():
            by_ops.setdefault(", ".join(ops), []).append(name)
        lines += [f"{ops} of {', '.join(names)}: {sentence}" for ops, names in by_ops.items()]
    return lines + list(_roads(can, cpu))


def _remedy(can: Capabilities, cpu: Capabilities | None, op: str, dtype: torch.dtype) -> str:
    try:
        way = reduction(can, op, dtype, cpu)
    except UnsupportedError:
        return "refused with an error"
    parts = []
    if way.carry != dtype:
        parts.append(f"carried as {str(way.carry).removeprefix('torch.')}")
    if way.staged:
        parts.append("over the CPU's backend")
    if way.ask == "gather":
        parts.append("gathered and reduced here")
    elif way.divide:
        parts.append("summed, then divided here")
    return ", ".join(parts)


def _roads(can: Capabilities, cpu: Capabilities | None) -> Iterator[str]:
    as_bytes = [NAMES[name] for name, dtypes in DTYPES.items() if sending(can, dtypes[0], cpu).bytes]
    way = sending(can, torch.float32, cpu)
    if as_bytes:
        yield f"messages of {', '.join(as_bytes)}: sent as bytes"
    if way.staged:
        yield "messages: through the CPU, since this backend carries no tensors of the device"
    if not way.early:
        yield "receives: posted when they are waited for, not ahead"
    if way.apart:
        yield "messages: each direction of a pair in a process group of its own"
    if not can.habit("batch"):
        yield "batched sends and receives: never used"
    if not can.habit("tags"):
        yield "tags: never used"


# ---- the command ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Report:
    """The findings of one run."""

    device: str
    backend: str
    ranks: int
    findings: tuple[Finding, ...]
    can: Capabilities
    cpu: Capabilities | None
    carried: str = ""  # how messages are sent, if not by the backend

    def __str__(self) -> str:
        lines = [
            f"fpipe {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}",
            f"device    {self.device} ({kind(self.device.split(':')[0]).name}), {os.cpu_count()} cores",
            f"backend   {self.backend}",
            *([f"messages  {self.carried}"] if self.carried else []),
            *self._visible(),
            "",
            f"probes of {self.backend}, {self.ranks} processes:",
            *self._probed(),
            "",
            "remedies of fpipe:",
            *(f"  {line}" for line in remedies(self.can, self.cpu) or ["none needed: all is native"]),
        ]
        surprises = [finding for finding in self.findings if finding.surprises(self.can)]
        if surprises:
            faults = "; ".join(f"{f.what} of {NAMES.get(f.dtypes, 'messages')}: {f.result}" for f in surprises)
            lines += ["", f"NOT IN THE TABLE: {faults}. fpipe relies on the table: please report this"]
        return "\n".join(lines)

    def _visible(self) -> list[str]:
        name = kind(self.device.split(":")[0]).visible
        return [] if name is None else [f"visible   {name}={os.environ.get(name, '(not set)')}"]

    def _probed(self) -> Iterator[str]:
        rows: dict[str, dict[str, list[str]]] = {}
        for finding in self.findings:
            result = finding.result
            if finding.surprises(self.can) or (result == "right") != (finding.beside(self.can) == "native"):
                result += f" [the table says {finding.beside(self.can)}]"
            kinds = rows.setdefault(finding.what, {}).setdefault(result, [])
            kinds.append(NAMES.get(finding.dtypes, "sends and receives"))
        for what, answers in rows.items():
            for place, (result, kinds) in enumerate(answers.items()):
                yield f"  {'' if place else what:6} {result}: {', '.join(kinds)}"


def visit() -> Report:
    """Probe from inside a process of a group. A collective call."""
    group = init(timeout=60)
    assert isinstance(group, C10dGroup)
    findings = tuple(probe(group))
    return Report(
        str(group.device(group.rank)), group.backend, group.size, findings, group.can, group.cpu, group.carried
    )


@click.command(name="doctor")
@click.option(
    "-n",
    "--processes",
    type=click.IntRange(1, 64),
    help="Processes.  [default: 2, or the number of devices if smaller]",
)
def command(processes: int | None) -> int:
    """Describe this machine, probe its backend for faults, and list the remedies of fpipe.

    Under torchrun every process takes part, and rank 0 prints.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        report = visit()
        if int(os.environ.get("RANK", "0")) == 0:
            click.echo(str(report))
    else:
        device = pick()
        most = 2 if device.type == "cpu" else torch.accelerator.device_count()
        report = launch(visit, ranks=processes or min(2, most), timeout=180)[0]
        click.echo(str(report))
    return int(any(finding.surprises(report.can) for finding in report.findings))

# SPDX-License-Identifier: Apache-2.0
"""``fpipe doctor``: describe this machine, probe its backend for known faults, and list the
remedies of fpipe.

Two processes call the backend directly; the results are compared with the capability table. Knows
no pipeline.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import click
import torch
import torch.distributed as dist

from ... import __version__, init, launch
from ...actions import progress
from ...collectives import DTYPES, C10dGroup, reduction, sending
from ...devices import kind
from ...errors import UnsupportedError
from .options import Count, option

SIZES = (1, 2, 4, 8, 16, 28, 30, 31, 32, 33, 48, 257)
NAMES = {
    "float": "32- and 64-bit floats",
    "half": "16-bit floats",
    "fp8": "8-bit floats",
    "complex": "complex",
    "int": "integers",
    "odd": "int16 and wide unsigned",
    "bool": "bools",
    "": "messages",
}
REDUCTIONS = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin}
RIGHT = "right"
_PATIENCE = timedelta(seconds=10)
_OTHER_VALUES = "wrong values were received"
_IN_MEMORY = "through shared memory (FPIPE_SHARED_MEMORY=0 turns it off)"


class Finding(NamedTuple):
    """One probe: what was asked, whether the table calls it native, and "right" or a description of
    the fault.
    """

    what: str
    dtypes: str
    native: bool
    result: str

    @property
    def right(self) -> bool:
        """Whether the backend did what it was asked for."""
        return self.result == RIGHT


def probe(group: C10dGroup) -> list[Finding]:
    """Probe the backend without fpipe's adaptors. A collective call, with the same findings on
    every process.
    """
    firsts = {name: dtypes[0] for name, dtypes in DTYPES.items()}
    questions = [
        (op, name, partial(_reduced, group, op, dtype))
        for name, dtype in firsts.items()
        for op in REDUCTIONS
    ]
    if group.size > 1:
        questions += [("p2p", name, partial(_sent, group, dtype)) for name, dtype in firsts.items()]
        questions.append(("batch", "", partial(_batched, group)))
    findings = []
    for what, dtypes, ask in questions:
        native = bool(dtypes) and group.can.can(what, firsts[dtypes])
        try:
            result = ask()
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            result = f"refused ({str(error).splitlines()[0][:60]})"
        findings.append(Finding(what, dtypes, native, result))
    by_probe = zip(*group.gather_objects(findings), strict=True)
    return [min(of_ranks, key=lambda finding: finding.right) for of_ranks in by_probe]


def _reduced(group: C10dGroup, name: str, dtype: torch.dtype) -> str:
    op = getattr(dist.ReduceOp, name.upper())
    exact = REDUCTIONS[name]
    most = 2
    if dtype is torch.bool:
        most = 1
        exact = torch.amin if name == "min" else torch.amax
    wrong = []
    for size in SIZES:
        ranks = [(torch.arange(size) + 2 * rank) % 3 for rank in range(group.size)]
        pieces = torch.stack(ranks).clamp(max=most).double()
        x = pieces[group.rank].to(dtype).to(group.device(group.rank))
        dist.all_reduce(x, op, group=group.pg, async_op=True).wait(_PATIENCE)  # type: ignore[union-attr]
        result = x.real if dtype.is_complex else x
        if not torch.allclose(result.double().cpu(), exact(pieces, dim=0), rtol=0.02):
            wrong.append(str(size))
    return f"wrong at {', '.join(wrong)} elements" if wrong else RIGHT


def _sent(group: C10dGroup, dtype: torch.dtype) -> str:
    """One message from each even rank to the next."""
    rank = group.rank
    x = (torch.arange(5) % 2).float().to(dtype).to(group.device(rank))
    y = x
    if rank % 2:
        y = torch.empty_like(x)
        group.pg.recv([y], rank - 1, 0).wait(_PATIENCE)
    elif rank + 1 < group.size:
        group.pg.send([x], rank + 1, 0).wait(_PATIENCE)
    return RIGHT if torch.equal(y.view(torch.uint8), x.view(torch.uint8)) else _OTHER_VALUES


def _batched(group: C10dGroup) -> str:
    """To the next rank and from the previous one, in one batch, sends first."""
    rank = group.rank
    x = torch.full((5,), float(rank), device=group.device(rank))
    y = torch.full_like(x, -1.0)
    after = (rank + 1) % group.size
    before = (rank - 1) % group.size
    send = dist.P2POp(dist.isend, x, group=group.pg, group_peer=after)
    receive = dist.P2POp(dist.irecv, y, group=group.pg, group_peer=before)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait(_PATIENCE)
    return RIGHT if y.tolist() == [float(before)] * 5 else _OTHER_VALUES


# ---- report ----
def _remedy(group: C10dGroup, finding: Finding) -> str:
    """What fpipe does in place of a reduction that was probed; "" where it asks the backend."""
    if finding.what not in REDUCTIONS:
        return ""
    op = finding.what.replace("avg", "mean")
    dtype = DTYPES[finding.dtypes][0]
    try:
        way = reduction(group.can, op, dtype, group.cpu)
    except UnsupportedError:
        return "refuses it with an error"
    parts = {
        f"carries {str(way.carry).removeprefix('torch.')}": way.carry != dtype,
        "goes over the CPU's backend": way.staged,
        "gathers and reduces": way.ask == "gather",
        "sums, then divides": way.divide and way.ask != "gather",
    }
    return ", ".join(_applying(parts))


def _of_messages(group: C10dGroup) -> list[str]:
    """What fpipe does with messages."""
    if group.shared:
        return ["all goes through the CPU, as processes share a device"]
    way = sending(group.can, group.cpu)
    remedies = {
        "messages go through the CPU, as this backend carries no tensors of the device": way.staged,
        "receives are posted when they are waited for, not ahead": not way.early,
        "each direction of a pair has a process group of its own": way.two_groups,
        "tags are not used": not group.can.habit("tags"),
    }
    return _applying(remedies)


def _applying(remedies: Mapping[str, bool]) -> list[str]:
    return [remedy for remedy, applies in remedies.items() if applies]


def visit() -> tuple[str, list[Finding]]:
    """Probe from inside a process of a group. A collective call.

    Returns the report, and the findings that failed although the table calls them native.
    """
    group = init(timeout=60)
    if not isinstance(group, C10dGroup):
        alone = "backend   none: there is one process; try -n 2"
        return "\n".join([*_about(group.device(0)), alone]), []
    findings = [] if group.shared else probe(group)
    lines = [
        *_about(group.device(group.rank)),
        f"backend   {group.can.backend}, {group.size} processes",
        f"messages  {_IN_MEMORY if group.at_once else 'by the backend'}",
    ]
    kinds: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        text = finding.result
        if remedy := _remedy(group, finding):
            text = f"{text}; fpipe {remedy}"
        kinds.setdefault((finding.what, text), []).append(NAMES[finding.dtypes])
    lines += [f"{what:9} {', '.join(names)}: {text}" for (what, text), names in kinds.items()]
    lines += _of_messages(group)
    faults = [finding for finding in findings if finding.native and not finding.right]
    lines += [
        f"NOT IN THE TABLE: {fault.what} of {NAMES[fault.dtypes]} is {fault.result}. fpipe "
        "relies on the table: please report this"
        for fault in faults
    ]
    return "\n".join(lines), faults


def _about(device: torch.device) -> list[str]:
    return [
        f"fpipe {__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()}",
        f"device    {device} ({kind(device.type).name}), {os.cpu_count()} cores",
    ]


@click.command(name="doctor")
@option("-n --processes N", "Processes.  [default: 2]", type=Count(1, 64))
def command(processes: int | None) -> int:
    """Describe this machine, probe its backend for faults, and list the remedies of fpipe.

    Under torchrun, srun or mpirun every process takes part, and rank 0 prints.
    """
    if init(timeout=60).size > 1:
        report, faults = visit()
    else:
        with progress("probing the backend"):
            report, faults = launch(visit, ranks=processes or 2, timeout=180)[0]
    if os.environ.get("RANK", "0") == "0":
        click.echo(report)
    return int(bool(faults))

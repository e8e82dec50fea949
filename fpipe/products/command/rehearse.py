# SPDX-License-Identifier: Apache-2.0
"""``fpipe rehearse``: plans of ranks of a planned job, made here without GPUs, and their memory
against the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
import torch

from ...actions import progress
from ...collectives.local import local
from ...engine.building import pipeline
from ...errors import PlanError
from ..clusters.decoder import batch, decoder, loss
from ..clusters.plan_file import Planned, read_plan
from ..clusters.prediction import usable
from ..clusters.rehearsal import Rehearsed
from ..clusters.rehearsal import rehearse as rehearse_ranks
from .options import INVALID, json_option, print_json, report_error, table

GIB = 1 << 30


class Ranks(click.ParamType):
    """Whole numbers, separated by commas."""

    name = "whole numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """The numbers."""
        parts = str(value).split(",")
        if not all(part.strip().isdecimal() for part in parts):
            self.fail(f"{value!r} are no ranks, such as 3,200", param, ctx)
        return tuple(map(int, parts))


@dataclass(frozen=True)
class Result:
    """What was found of one rank of the job."""

    rank: int
    pipeline_rank: int
    stages: tuple[int, ...]
    found: Rehearsed
    optimizer: float
    predicted: float

    @property
    def peak(self) -> float:
        """The most bytes that the rank holds: parameters, optimizer, and the peak of its plan."""
        return self.found.parameters + self.optimizer + self.found.plan.peak

    @property
    def difference(self) -> float:
        """By which share of the prediction the peak differs from it."""
        return self.peak / self.predicted - 1

    def faults(self, room: float, memory: float, margin: float) -> list[str]:
        """A sentence for each limit that the peak exceeds."""
        peak, faults = f"rank {self.rank}: its peak is {self.peak / GIB:.4g} GiB", []
        if self.peak > room:
            what = f"{room / GIB:.4g} of the {memory / GIB:.3g} GiB of a GPU are for tensors"
            faults.append(f"{peak}, and {what}; plan with less --memory, or another layout")
        if abs(self.difference) > margin:
            what = f"{self.difference:+.1%} from the predicted {self.predicted / GIB:.4g} GiB"
            faults.append(
                f"{peak}, {what}, and --margin allows {100 * margin:.3g} %; do not rely on the "
                "plan's memory"
            )
        return faults


@click.command()
@click.argument("plan", metavar="FILE", type=click.Path(dir_okay=False))
@click.option(
    "--ranks", metavar="N,N", required=True, type=Ranks(), help="Ranks of the job, such as 3,200."
)
@click.option(
    "--margin",
    metavar="PERCENT",
    type=click.FloatRange(0, 1000),
    default=15.0,
    show_default=True,
    help="By how many percent a peak may differ from the prediction.",
)
@json_option
def rehearse(plan: str, ranks: tuple[int, ...], margin: float, as_json: bool) -> int:
    """Make the plans of some ranks of a planned job, on this machine and without GPUs.

    A decoder of the sizes in the FILE is traced on the device meta, with the real sizes, and the
    schedule is lowered to the plans of these ranks. The exit status is 1 where the peak of a plan
    exceeds the memory of a GPU, or differs from the prediction in the FILE by more than the margin.
    Ranks count tensor-parallel ranks first, then copies, then ranks of the pipeline.

    \b
    fpipe rehearse plan.toml --ranks 3,200
    """
    planned = read_plan(plan)
    job, layout = planned.job, planned.layout
    if wrong := [rank for rank in ranks if rank >= job.gpus]:
        raise PlanError(
            f"rank {wrong[0]} is not in a job of {job.gpus} GPUs; give ranks from 0 to "
            f"{job.gpus - 1}"
        )
    results, spent = _rehearsed(planned, ranks)
    room = usable(job)
    faults = [
        each for result in results for each in result.faults(room, job.gpu.memory, margin / 100)
    ]
    if as_json:
        print_json(
            {
                "ranks": [_facts(result) for result in results],
                "faults": faults,
                "tracing": spent.tracing,
                "traces": spent.traces,
                "lowering": spent.lowering,
            }
        )
        return INVALID if faults else 0
    click.echo(f"{job.model.name} on {job.gpus} {job.gpu.name}: {layout}\n")
    click.echo("\n".join(table(_COLUMNS, results)) + f"\n\n{spent}")
    for fault in faults:
        report_error(fault, INVALID)
    return INVALID if faults else 0


def _rehearsed(planned: Planned, ranks: Sequence[int]) -> tuple[list[Result], Any]:
    """What is found of the ranks, and the seconds of tracing and lowering."""
    job, layout = planned.job, planned.layout
    note = ["the model"]
    with progress(lambda: f"rehearsing: {note[0]}"):
        count = layout.microbatches(job)
        functions, params = decoder(job, layout)
        wide = torch.float32 if job.precision.gradients == 4 else None
        pipe = pipeline(
            functions,
            layout.schedule_for(count),
            loss=loss,
            microbatches=count,
            accumulate=wide,
            seed=0,
            group=local(devices=["meta"] * layout.pp),
        )
        places = [rank // (layout.dp * layout.tp) for rank in ranks]
        found, spent = rehearse_ranks(
            pipe,
            sorted(set(places)),
            params,
            *batch(job, layout),
            copies=layout.dp,
            zero=layout.zero,
            note=lambda text: note.__setitem__(0, text),
        )
    each = job.precision.optimizer / job.precision.parameters
    stages_of = layout.schedule_for(count).placement.stages_of
    results = [
        Result(
            rank,
            place,
            tuple(stages_of(place)),
            found[place],
            each * found[place].parameters,
            planned.memory[place],
        )
        for rank, place in zip(ranks, places, strict=True)
    ]
    return results, spent


# ---- text ----
def _facts(result: Result) -> dict[str, Any]:
    """One rank as numbers."""
    found = result.found
    return {
        "rank": result.rank,
        "pipeline rank": result.pipeline_rank,
        "stages": list(result.stages),
        "instructions": len(found.plan.instructions),
        "sent": found.sent[0],
        "bytes sent": found.sent[1],
        "received": found.received[0],
        "bytes received": found.received[1],
        "parameters": found.parameters,
        "optimizer": result.optimizer,
        "peak of the plan": found.plan.peak,
        "peak": result.peak,
        "predicted": result.predicted,
    }


_COLUMNS = (
    ("rank", lambda r: r.rank),
    ("pipeline rank", lambda r: r.pipeline_rank),
    ("stages", lambda r: ",".join(map(str, r.stages))),
    ("instructions", lambda r: len(r.found.plan.instructions)),
    ("sent", lambda r: r.found.sent[0]),
    ("GiB sent", lambda r: f"{r.found.sent[1] / GIB:.3g}"),
    ("received", lambda r: r.found.received[0]),
    ("GiB received", lambda r: f"{r.found.received[1] / GIB:.3g}"),
    ("plan GiB", lambda r: f"{r.found.plan.peak / GIB:.4g}"),
    ("peak GiB", lambda r: f"{r.peak / GIB:.4g}"),
    ("predicted", lambda r: f"{r.predicted / GIB:.4g}"),
    ("difference", lambda r: f"{r.difference:+.1%}"),
)

# SPDX-License-Identifier: Apache-2.0
"""``fpipe rehearse``: plans of ranks of a planned job, made here without GPUs, and their memory
against the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from typing import Any

import click
import torch

from ... import local, pipeline
from ...actions import progress
from ...errors import PlanError
from ..clusters.decoder import batch, decoder, loss
from ..clusters.hardware import GIB, OPTIMIZER, PARAMETER
from ..clusters.layout import Job
from ..clusters.plan_file import read_plan
from ..clusters.prediction import Prediction, usable
from .options import INVALID, json_option, option, print_json, report_error, table

MOST_ACTIONS = 1 << 17  #: forwards of a schedule that is lowered here


def ranks_of(text: str) -> tuple[int, ...]:
    """Whole numbers, separated by commas."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise click.BadParameter(f"{text!r} are no ranks, such as 3,200")
    return tuple(map(int, parts))


@click.command()
@click.argument("plan", metavar="FILE", type=click.Path(dir_okay=False))
@option("--ranks N,N", "Ranks of the job, such as 3,200.", type=ranks_of, required=True)
@option(
    "--margin PERCENT",
    "By how many percent a peak may differ from the prediction.",
    15.0,
    type=click.FloatRange(0, 1000),
)
@json_option
def rehearse(plan: str, ranks: tuple[int, ...], margin: float, as_json: bool) -> int:
    """Make the plans of some ranks of a planned job, on this machine and without GPUs.

    A decoder of the sizes in the FILE is traced on the device meta, with the real sizes, and the
    schedule is lowered to the plans of these ranks. The exit status is 1 where the peak of a plan
    exceeds the memory of a GPU, or differs from the predicted one by more than the margin.
    Ranks count tensor-parallel ranks first, then copies, then ranks of the pipeline.

    \b
    fpipe rehearse plan.toml --ranks 3,200
    """
    expected = read_plan(plan)
    job = expected.job
    layout = expected.layout
    if wrong := [rank for rank in ranks if rank >= job.gpus]:
        raise PlanError(
            f"rank {wrong[0]} is not in a job of {job.gpus} GPUs; give ranks from 0 to "
            f"{job.gpus - 1}"
        )
    actions = layout.stages * layout.microbatches(job)
    if actions > MOST_ACTIONS:
        raise PlanError(
            f"{layout.stages} stages of {layout.microbatches(job)} microbatches are {actions} "
            f"forwards, and at most {MOST_ACTIONS} can be rehearsed; plan with fewer --tokens"
        )
    rows, spent = _rehearsed(expected, ranks)
    faults = [fault for row in rows for fault in _faults(row, job, margin / 100)]
    if as_json:
        times = {name: getattr(spent, name) for name in ("tracing", "traces", "lowering")}
        print_json({"ranks": rows, "faults": faults, **times})
    else:
        click.echo(fill(f"{job.model.name} on {job.gpus} {job.gpu.name}: {layout}", 80))
        click.echo(f"\n{table([_shown(row) for row in rows])}\n\n{spent}")
        for fault in faults:
            report_error(fault, INVALID)
    return INVALID if faults else 0


def _rehearsed(expected: Prediction, ranks: Sequence[int]) -> tuple[list[dict[str, Any]], Any]:
    """The figures of each rank, and the seconds of tracing and lowering."""
    job = expected.job
    layout = expected.layout
    count = layout.microbatches(job)
    doing = ["the model"]
    schedule = layout.schedule_for(count)
    places = [rank // (layout.dp * layout.tp) for rank in ranks]
    with progress(lambda: f"rehearsing: {doing[-1]}"):
        functions, params = decoder(job, layout)
        pipe = pipeline(
            functions,
            schedule,
            loss=loss,
            microbatches=count,
            accumulate=torch.float32,
            seed=0,
            group=local(devices=["meta"] * layout.pp),
        )
        by_place, spent = pipe.rehearse(
            sorted(set(places)),
            params,
            *batch(job, layout),
            copies=layout.dp,
            zero=layout.zero,
            note=doing.append,
        )
    rows = []
    for rank, place in zip(ranks, places, strict=True):
        result = by_place[place]
        state = result.parameters * (1 + OPTIMIZER / PARAMETER)
        row = {
            "rank": rank,
            "pipeline rank": place,
            "stages": list(schedule.placement.stages_of(place)),
            "instructions": len(result.plan.instructions),
            "sent": result.sent,
            "received": result.received,
            "plan": result.plan.peak,
            "peak": state + result.plan.peak,
            "predicted": round(expected.memory[place].total),
        }
        row["difference"] = row["peak"] / row["predicted"] - 1
        rows.append(row)
    return rows, spent


def _faults(row: Mapping[str, Any], job: Job, margin: float) -> Iterator[str]:
    """A sentence for each limit that the peak of a rank exceeds."""
    peak = f"rank {row['rank']}: its peak is {row['peak'] / GIB:.4g} GiB"
    room = usable(job)
    if row["peak"] > room:
        yield (
            f"{peak}, and {room / GIB:.4g} of the {job.gpu.memory / GIB:.3g} GiB of a GPU are for "
            "tensors; plan with less --memory, or another layout"
        )
    if abs(row["difference"]) > margin:
        yield (
            f"{peak}, {row['difference']:+.1%} from the predicted {row['predicted'] / GIB:.4g} "
            f"GiB, and --margin allows {100 * margin:.3g} %; do not rely on the plan's memory"
        )


def _shown(row: Mapping[str, Any]) -> dict[str, object]:
    """A rank in the table."""
    stages = row["stages"]
    return {
        "rank": row["rank"],
        "stages": f"{len(stages)}, from {stages[0]} to {stages[-1]}",
        "sent GiB": f"{row['sent'][1] / GIB:.3g}",
        "received GiB": f"{row['received'][1] / GIB:.3g}",
        "plan GiB": f"{row['plan'] / GIB:.4g}",
        "peak GiB": f"{row['peak'] / GIB:.4g}",
        "predicted": f"{row['predicted'] / GIB:.4g}",
        "off by": f"{row['difference']:+.1%}",
    }

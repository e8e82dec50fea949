# SPDX-License-Identifier: Apache-2.0
"""``fpipe profile``: measure the costs of stages and messages on this machine, and write them to a
file.

Processes run a pipeline, by default of plain blocks. The results are a table and a ``Costs`` file.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from ...actions import progress, write_bytes
from ...generators import is_path
from .options import (
    Count,
    as_usage_error,
    json_option,
    named_schedule,
    print_json,
    schedules_for,
)


@click.command("profile")
@click.argument("source", default="ZBV", metavar="[SCHEDULE]", shell_complete=schedules_for)
@click.option(
    "-p",
    "--ranks",
    type=Count(1, 64),
    help="Processes.  [default: 2, or those of the CSV file]",
)
@click.option(
    "-m",
    "--microbatches",
    type=Count(),
    help="Microbatches.  [default: 8, or those of the CSV file]",
)
@click.option(
    "--width",
    type=Count(),
    default=256,
    help="Width of the built-in blocks.",
)
@click.option(
    "--model",
    metavar="FILE:FUNCTION",
    help="Another model: FUNCTION(group, schedule) returns (pipe, params, x, *targets).",
)
@click.option(
    "--steps",
    type=Count(),
    default=10,
    help="Steps that are averaged.",
)
@click.option(
    "-o",
    "--out",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("costs.json"),
    help="The file of costs.",
)
@json_option
def profile(
    source: str,
    ranks: int | None,
    microbatches: int | None,
    width: int,
    model: str | None,
    steps: int,
    out: Path,
    as_json: bool,
) -> None:
    """Measure the costs of a pipeline's stages and messages on this machine, and write them to a
    file.

    The schedule runs with whole and with split backward passes, so the costs apply to any schedule
    with as many stages. A measured step of the schedule is compared with its simulation under these
    costs.

    \b
    fpipe profile ZBV --ranks 2 --width 256 --out costs.json
    fpipe profile 1F1B --model train.py:pipeline_for_profile
    fpipe draw DualPipeV --ranks 2 --costs costs.json
    """
    if not is_path(source):
        ranks, microbatches = ranks or 2, microbatches or 8
    with as_usage_error():
        schedule = named_schedule(source, ranks, microbatches).check()
    if model is not None and not Path(model.rpartition(":")[0]).is_file():
        raise click.BadParameter(
            f"{model}: there is no such file; give FILE.py:FUNCTION", param_hint="--model"
        )
    from ... import launch  # which loads torch
    from .profile_ranks import measure

    with progress(f"measuring in {schedule.ranks} processes"):
        price, seconds = launch(measure, schedule, model, width, steps, ranks=schedule.ranks)[0]
    write_bytes(out, (price.to_json() + "\n").encode())
    if as_json:
        print_json(
            {
                "schedule": source,
                "ranks": schedule.ranks,
                "microbatches": schedule.microbatches,
                "steps": steps,
                "seconds": seconds,
                "costs": json.loads(price.to_json()),
                "file": str(out),
            }
        )
        return
    times = ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in seconds.items())
    click.echo(
        f"{schedule!r}, {schedule.ranks} processes, means of {steps} steps\n\n{price.table()}\n\n"
        f"a step: {times}\nwrote {out}; try: fpipe draw {source} --costs {out}"
    )

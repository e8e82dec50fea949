# SPDX-License-Identifier: Apache-2.0
"""``fpipe profile``: measure the costs of stages and messages on this machine, and write them to a
file.

Processes run a pipeline, by default of a small GPT. The results are a table and a ``Costs`` file.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from ...actions import progress, write_bytes
from ...generators import is_path
from .options import (
    Count,
    check,
    json_option,
    named_schedule,
    option,
    print_json,
    schedules_for,
    usage_error,
)


@click.command()
@click.argument("source", default="ZBV", metavar="[SCHEDULE]", shell_complete=schedules_for)
@option("-p --ranks N", "Processes.  [default: 2, or those of the CSV file]", type=Count(1, 64))
@option("-m --microbatches N", "Microbatches.  [default: 8, or those of the CSV file]")
@option("--width N", "Width of the built-in model, a GPT of two blocks a stage.", 256)
@option(
    "--model FILE:FUNCTION",
    "Another model: FUNCTION(group, schedule) returns (pipe, params, x, *targets).",
)
@option("--steps N", "Steps that are averaged.", 10)
@option("-o --out FILE", "The file of costs.", "costs.json")
@json_option
def profile(
    source: str,
    ranks: int | None,
    microbatches: int | None,
    width: int,
    model: str | None,
    steps: int,
    out: str,
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
        ranks = ranks or 2
        microbatches = microbatches or 8
    schedule = check(named_schedule(source, ranks, microbatches))
    if model is not None and not Path(model.rpartition(":")[0]).is_file():
        raise usage_error(f"--model {model}: there is no such file; give FILE.py:FUNCTION")
    from ... import launch  # which loads torch
    from .profile_ranks import measure

    with progress(f"measuring in {schedule.ranks} processes"):
        price, seconds = launch(measure, schedule, model, width, steps, ranks=schedule.ranks)[0]
    costs = price.to_json()
    write_bytes(out, f"{costs}\n".encode())
    if as_json:
        counts = {"ranks": schedule.ranks, "microbatches": schedule.microbatches, "steps": steps}
        results = {"seconds": seconds, "costs": json.loads(costs), "file": out}
        print_json({"schedule": source, **counts, **results})
        return
    times = ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in seconds.items())
    click.echo(
        f"{schedule!r}, {schedule.ranks} processes, means of {steps} steps\n\n{price.table()}\n\n"
        f"a step: {times}\nwrote {out}; try: fpipe draw {source} --costs {out}"
    )

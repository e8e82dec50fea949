# SPDX-License-Identifier: Apache-2.0
"""``fpipe profile``: measure the costs of stages and messages on this machine, and write them to a
file.

Processes run a pipeline, by default of plain blocks. The results are a table, a ``Costs`` file and
pictures.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from ...actions import progress, write_bytes
from ...generators import is_path
from .. import pictures
from .options import (
    Count,
    File,
    Source,
    as_usage_error,
    check_suffix,
    json_option,
    named_schedule,
    print_json,
)


@click.command("profile")
@click.argument("source", default="ZBV", metavar="[SCHEDULE]", type=Source())
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
    "--tokens",
    type=Count(),
    default=64,
    help="Tokens of a microbatch.",
)
@click.option(
    "--blocks",
    type=Count(),
    default=2,
    help="Built-in blocks per stage.",
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
@click.option(
    "--picture",
    multiple=True,
    type=File(),
    help="Draw simulated over measured: .html, .svg, .png, .pdf, .json, .txt.",
)
@json_option
def profile(
    source: str,
    ranks: int | None,
    microbatches: int | None,
    width: int,
    tokens: int,
    blocks: int,
    model: str | None,
    steps: int,
    out: Path,
    picture: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure the costs of a pipeline's stages and messages on this machine, and write them to a
    file.

    The schedule runs with whole and with split backward passes, so the costs apply to any schedule
    with as many stages. A measured step of the schedule is compared with its simulation under these
    costs.

    \b
    fpipe profile ZBV --ranks 2 --width 256 --out costs.json
    fpipe profile 1F1B --model train.py:pipeline_for_profile --picture step.html
    fpipe draw DualPipeV --ranks 2 --costs costs.json
    """
    if not is_path(source):
        ranks, microbatches = ranks or 2, microbatches or 8
    with as_usage_error():
        schedule = named_schedule(source, ranks, microbatches).check()
    for path in picture:
        check_suffix(path, pictures.FORMATS, "--picture")
    if model is not None and not Path(model.rpartition(":")[0]).is_file():
        raise click.BadParameter(
            f"{model}: there is no such file; give FILE.py:FUNCTION", param_hint="--model"
        )
    from ... import launch  # which loads torch
    from .profile_ranks import measure

    with progress(f"measuring in {schedule.ranks} processes"):
        price, real, simulated, wall = launch(
            measure, schedule, model, (width, tokens, blocks), steps, ranks=schedule.ranks
        )[0]
    write_bytes(out, (price.to_json() + "\n").encode())
    for path in picture:
        pictures.save([simulated, real], path)
    if as_json:
        seconds = {"step": wall, "measured": real.total, "simulated": simulated.total}
        print_json(
            {
                "schedule": source,
                "ranks": schedule.ranks,
                "microbatches": schedule.microbatches,
                "steps": steps,
                "seconds": seconds,
                "costs": json.loads(price.to_json()),
                "files": [str(out), *picture],
            }
        )
        return
    click.echo(
        f"{schedule!r}, {schedule.ranks} processes, means of {steps} steps\n\n{price.table()}\n\n"
        f"a step: {1e3 * wall:.2f} ms by the clock, {1e3 * real.total:.2f} ms of actions, "
        f"simulated {1e3 * simulated.total:.2f} ms ({simulated.total / real.total:.1%})\n"
        f"wrote {', '.join(map(str, (out, *picture)))}; try: fpipe draw {source} --costs {out}"
    )

# SPDX-License-Identifier: Apache-2.0
"""``fpipe profile``: measure the costs of stages and messages on this machine, and write them to a
file.

Processes run a pipeline, by default of plain blocks. The results are a table, a ``Costs`` file and
pictures.
"""

from __future__ import annotations

import json
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click

from ...actions import Costs, Timeline, progress, write_bytes
from ...errors import StageError
from ...generators import is_path
from ...schedule import Schedule
from .. import pictures
from .options import (
    Count,
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
    metavar="N",
    type=Count(1, 64),
    help="Processes.  [default: 2, or those of the CSV file]",
)
@click.option(
    "-m",
    "--microbatches",
    metavar="N",
    type=Count(),
    help="Microbatches.  [default: 8, or those of the CSV file]",
)
@click.option(
    "--width",
    metavar="N",
    type=Count(),
    default=256,
    show_default=True,
    help="Width of the built-in blocks.",
)
@click.option(
    "--tokens",
    metavar="N",
    type=Count(),
    default=64,
    show_default=True,
    help="Tokens of a microbatch.",
)
@click.option(
    "--blocks",
    metavar="N",
    type=Count(),
    default=2,
    show_default=True,
    help="Built-in blocks per stage.",
)
@click.option(
    "--model",
    metavar="FILE:FUNCTION",
    help="Another model: FUNCTION(group, schedule) returns (pipe, params, x, *targets).",
)
@click.option(
    "--steps",
    metavar="N",
    type=Count(),
    default=10,
    show_default=True,
    help="Steps that are averaged.",
)
@click.option(
    "-o",
    "--out",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("costs.json"),
    show_default=True,
    help="The file of costs.",
)
@click.option(
    "--picture",
    multiple=True,
    metavar="FILE",
    type=click.Path(dir_okay=False),
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
    from ...passes.profile.profiling import table
    from ..training.launch import launch

    make: Any = (model, width, tokens, blocks)
    with progress(f"measuring in {schedule.ranks} processes"):
        price, real, simulated, wall = launch(
            _on_rank, schedule, make, steps, ranks=schedule.ranks
        )[0]
    write_bytes(out, (price.to_json() + "\n").encode())
    for path in picture:
        pictures.save([simulated, real], path)
    if as_json:
        seconds = {"step": wall, "measured": real.total, "simulated": simulated.total}
        figures = {
            "schedule": source,
            "ranks": schedule.ranks,
            "microbatches": schedule.microbatches,
            "steps": steps,
        }
        print_json(
            {
                **figures,
                "seconds": seconds,
                "costs": json.loads(price.to_json()),
                "files": [str(out), *picture],
            }
        )
        return
    click.echo(
        f"{schedule!r}, {schedule.ranks} processes, means of {steps} steps\n\n{table(price)}\n"
    )
    predicted = f"simulated {1e3 * simulated.total:.2f} ms ({simulated.total / real.total:.1%})"
    click.echo(
        f"a step: {1e3 * wall:.2f} ms by the clock, {1e3 * real.total:.2f} ms of actions, "
        f"{predicted}"
    )
    click.echo(
        "wrote "
        + ", ".join(map(str, (out, *picture)))
        + f"; try: fpipe draw {source} --costs {out}"
    )


def _on_rank(
    schedule: Schedule, make: tuple[str | None, int, int, int], steps: int
) -> tuple[Costs, Timeline, Timeline, float]:
    """In each process: the costs, the measured step of median length, its simulation, and the
    median time of a step.
    """
    import torch

    from ...collectives.setup import init
    from ...engine.gradients import value_and_grad
    from ...passes.profile import profiling

    torch.set_num_threads(1)
    group = init()
    model, *size = make
    pipe, params, *batch = (
        _blocks(group, schedule, *size) if model is None else _model_of(model)(group, schedule)
    )
    price = profiling.measure_costs(pipe, params, *batch, steps=steps)
    step = value_and_grad(pipe)
    step(params, *batch)
    walls, profiles = [], []
    for _ in range(steps):
        group.barrier()
        start = time.perf_counter()
        step(params, *batch)
        walls.append(time.perf_counter() - start)
        profiles.append(profiling.profile(step, name=schedule.name))
        profiles[-1](params, *batch)
    middle = sorted(profiles, key=lambda each: each.timeline.total)[len(profiles) // 2]
    return price, middle.timeline, middle.simulate(price), median(walls)


def _blocks(
    group: Any, schedule: Schedule, width: int, tokens: int, blocks: int
) -> tuple[Any, ...]:
    """A pipeline of blocks of LayerNorm, Linear, GELU, Linear and a residual."""
    import torch
    from torch import nn
    from torch.func import functional_call

    from ...engine.building import pipeline

    def block() -> nn.Module:
        return nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    pure = block()

    def stage(params: list[dict[str, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
        for p in params:
            x = x + functional_call(pure, p, x)
        return x

    torch.manual_seed(0)
    params = [[block().state_dict() for _ in range(blocks)] for _ in range(schedule.stages)]
    x = torch.randn(schedule.microbatches, tokens, width)
    pipe = pipeline(
        [stage] * schedule.stages, schedule, loss=lambda y, t: (y - t).square().mean(), group=group
    )
    return pipe, pipe.place(params), x, x


def _model_of(where: str) -> Callable[..., Any]:
    """The function named by --model."""
    file, _, name = where.rpartition(":")
    if not file.endswith(".py"):
        raise StageError(f"--model {where}: {file} is not a Python file; give FILE.py:FUNCTION")
    function = runpy.run_path(file, run_name="fpipe_profiled").get(name)
    if not callable(function):
        raise StageError(f"--model {where}: {file} has no function {name!r}; give FILE.py:FUNCTION")
    return function

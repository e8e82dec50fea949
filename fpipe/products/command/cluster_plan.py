# SPDX-License-Identifier: Apache-2.0
"""``fpipe plan``: the layouts of a large run in which a step is shortest, and why. Never imports
torch.
"""

from __future__ import annotations

import re
from typing import Any

import click
from click.shell_completion import CompletionItem

from ...actions import progress, write_bytes
from ...errors import ScheduleError
from ...generators import in_bytes
from ..clusters.hardware import TABLE, find_gpu
from ..clusters.layout import RECOMPUTE, Job, Precision
from ..clusters.layouts import SCHEDULES, Choices, Found, search
from ..clusters.model import read_model
from ..clusters.plan_file import tables, write_plan
from ..clusters.prediction import Prediction, usable
from ..clusters.sizes import operations
from .options import (
    Count,
    File,
    Pattern,
    check_suffix,
    json_option,
    matching,
    print_json,
    table,
    usage_error,
)

GIB = 1 << 30
_LETTERS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Tokens(click.ParamType):
    """A whole number, which may end in K, M or G: powers of 1024."""

    name = "whole number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number."""
        match = re.fullmatch(r"([0-9]+)([kmg]?)", str(value), re.IGNORECASE)
        if not match or not int(match[1]):
            self.fail(f"{value!r} is no whole number above 0, such as 4194304 or 4M", param, ctx)
        return int(match[1]) * _LETTERS[match[2].upper()]


class Rate(click.ParamType):
    """A number with a unit, such as 80GiB or 989T."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number."""
        try:
            return in_bytes(value)
        except ScheduleError:
            self.fail(
                f"{value!r} is no number above 0 with a unit, such as 80GiB, 450GB or 989T",
                param,
                ctx,
            )


class Name(click.ParamType):
    """A kind of GPU, which the shell completes."""

    name = "name"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The names that begin with what was typed."""
        return [CompletionItem(name) for name in TABLE if name.startswith(incomplete.lower())]


@click.command()
@click.option(
    "--model",
    required=True,
    type=File(),
    help="The config.json of a model of Hugging Face.",
)
@click.option("--gpus", required=True, type=Count(), help="GPUs.")
@click.option(
    "--gpu", metavar="NAME", required=True, type=Name(), help=f"Their kind: {', '.join(TABLE)}."
)
@click.option(
    "--tokens",
    metavar="N",
    required=True,
    type=Tokens(),
    help="Tokens of a global batch, such as 4M; K, M and G are powers of 1024.",
)
@click.option(
    "--seq",
    metavar="N",
    required=True,
    type=Tokens(),
    help="Tokens of a sequence, such as 8192 or 8K.",
)
@click.option(
    "--memory", metavar="LIMIT", type=Rate(), help="Memory of a GPU.  [default: of its kind]"
)
@click.option(
    "--flops",
    metavar="RATE",
    type=Rate(),
    help="Dense 16-bit operations a second of a GPU, such as 989T.",
)
@click.option(
    "--link",
    metavar="RATE",
    type=Rate(),
    help="Bytes a second between GPUs of a machine, such as 450GB.",
)
@click.option(
    "--schedule",
    "schedules",
    metavar="PATTERN",
    multiple=True,
    type=Pattern(),
    help="Only these schedules, such as 'ZB*'.",
)
@click.option(
    "--tp",
    multiple=True,
    type=Count(),
    help="Only these numbers of tensor-parallel ranks.",
)
@click.option("--pp", multiple=True, type=Count(), help="Only these numbers of pipeline ranks.")
@click.option("--zero", multiple=True, type=Count(0, 3), help="Only these ZeRO degrees.")
@click.option("--microbatch", multiple=True, type=Count(), help="Only these sizes, in sequences.")
@click.option(
    "--recompute",
    multiple=True,
    type=click.Choice(RECOMPUTE),
    help="Only these kinds of recompute.",
)
@click.option(
    "--attention",
    type=click.Choice(["flash", "scores"]),
    default="flash",
    help="Attention that keeps no scores, or as products.",
)
@click.option(
    "--gradients",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    help="The dtype in which gradients of microbatches are added.",
)
@click.option(
    "--sequence-parallel/--no-sequence-parallel",
    default=True,
    help="Whether tensor-parallel ranks split the sequence between their matrix products.",
)
@click.option("--top", type=Count(), default=5, help="Layouts to print.")
@click.option("-o", "--out", type=File(), help="Write the best as .toml.")
@json_option
def plan(
    model: str,
    gpus: int,
    gpu: str,
    tokens: int,
    seq: int,
    memory: float | None,
    flops: float | None,
    link: float | None,
    attention: Any,
    gradients: str,
    top: int,
    out: str | None,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Plan a large run: layouts that fit, those with the shortest step first.

    Tensor-parallel ranks, pipeline ranks, copies, ZeRO degree, schedule, microbatch and recompute
    are combined. Memory is that of the fullest rank; a step is simulated. Nothing needs a GPU.

    \b
    fpipe plan --model config.json --gpus 1024 --gpu h100 --tokens 4M --seq 8192 --out plan.toml
    """
    if out is not None:
        check_suffix(out, [".toml"], "--out")
    if tokens % seq:
        low = tokens // seq * seq
        raise usage_error(
            f"--tokens {tokens} are not whole sequences of {seq}; give {low or seq} or {low + seq}"
        )
    precision = Precision(gradients={"float32": 4, "bfloat16": 2}[gradients])
    kind = find_gpu(gpu, memory, flops, link)
    job = Job(read_model(model), gpus, kind, tokens // seq, seq, attention, precision)
    with progress(f"planning for {gpus} GPUs") as track:
        found = search(job, _choices(**chosen), top, track)
    if out is not None:
        write_bytes(out, write_plan(found.best[0]).encode())
    if as_json:
        best = [tables(each) for each in found.best]
        print_json(
            {
                "best": best,
                "layouts": found.layouts,
                "possible": found.possible,
                "predicted": found.predicted,
            }
        )
        return
    _show(job, found)
    if out is not None:
        click.echo(f"\nwrote {out}; try: fpipe rehearse {out} --ranks 0")


def _choices(schedules: tuple[str, ...], **given: Any) -> Choices:
    """What the search may choose from."""
    names = [name for name in matching(schedules) if name in SCHEDULES] if schedules else ()
    if schedules and not names:
        raise usage_error(
            f"none of {', '.join(schedules)} is planned; planned are {', '.join(SCHEDULES)}"
        )
    return Choices(schedules=names, **given)


# ---- text ----
_COLUMNS = (
    ("tp", lambda p: p.layout.tp),
    ("pp", lambda p: p.layout.pp),
    ("dp", lambda p: p.layout.dp),
    ("zero", lambda p: p.layout.zero),
    ("schedule", lambda p: p.layout.schedule),
    ("stages", lambda p: p.layout.stages),
    ("microbatches", lambda p: f"{p.layout.microbatches(p.job)} of {p.layout.microbatch}"),
    ("recompute", lambda p: p.layout.recompute),
    ("seconds", lambda p: f"{p.step:.4g}"),
    ("TFLOP/s", lambda p: f"{p.flops / 1e12:.0f}"),
    ("MFU", lambda p: f"{p.mfu:.1%}"),
    ("bubble", lambda p: f"{p.bubble:.1%}"),
    ("GiB", lambda p: f"{p.fullest.total / GIB:.1f}"),
)


def _show(job: Job, found: Found) -> None:
    model, gpu = job.model, job.gpu
    click.echo(
        f"{model.name}: {model.parameters / 1e9:.4g} billion parameters, {job.batch} sequences of "
        f"{job.sequence} "
        f"tokens, {job.gpus} {gpu.name} of {gpu.memory / GIB:.0f} GiB\n"
    )
    click.echo("\n".join(table(_COLUMNS, found.best)))
    click.echo("\n" + _why(found.best[0]))
    click.echo(
        f"{found.possible} of {found.layouts} layouts have room for the state and one microbatch; "
        f"{found.predicted} were simulated; no other can be faster"
    )


def _why(best: Prediction) -> str:
    """What the time and the memory of a layout consist of, and what limits them."""
    job, step, parts = best.job, best.step, sorted(best.parts.items(), key=lambda item: -item[1])
    shares = ", ".join(
        f"{name} {seconds / step:.1%}" for name, seconds in parts if seconds / step >= 0.0005
    )
    bound = operations(job) * job.tokens / job.gpus / (job.gpu.flops * job.gpu.matmul)
    full = best.fullest
    parts_of_memory = [
        ("state of layers", full.layers),
        ("of the vocabulary", full.vocabulary),
        ("activations", full.activations),
        ("temporary", full.moment),
    ]
    if full.late / GIB >= 0.05:
        parts_of_memory.append(("gradients that come later", -full.late))
    memory = ", ".join(f"{name} {value / GIB:.1f}" for name, value in parts_of_memory)
    return (
        f"time: {shares}\nlimit: {best.limit}; no layout takes less than {bound:.4g} s, the "
        "model's operations at "
        f"{job.gpu.matmul:.0%} of {job.gpu.flops / 1e12:.0f} TFLOP/s\nmemory: pipeline rank "
        f"{full.rank} holds "
        f"{full.total / GIB:.1f} of {usable(job) / GIB:.1f} GiB: {memory}"
    )

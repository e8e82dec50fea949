# SPDX-License-Identifier: Apache-2.0
"""``fpipe plan``: the layouts of a large run in which a step is shortest, and why. Never imports
torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import click

from ...actions import progress, write_bytes
from ...errors import ScheduleError
from ..clusters.hardware import GIB, TABLE, find_gpu
from ..clusters.layout import Job, Layout
from ..clusters.layouts import Found, search
from ..clusters.model import read_model
from ..clusters.plan_file import tables, write_plan
from ..clusters.prediction import Prediction, usable
from ..clusters.sizes import operations
from ..search.memory_limit import in_bytes
from .options import (
    Count,
    File,
    check_suffix,
    json_option,
    print_json,
    table,
    usage_error,
)

#: What --only may name.
CHOICES = ("schedule", "tp", "pp", "zero", "microbatch", "recompute")
_LETTERS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def tokens_of(text: str) -> int:
    """A whole number, which may end in K, M or G: powers of 1024."""
    match = re.fullmatch(r"([0-9]+)([kmg]?)", text, re.IGNORECASE)
    if not match or not int(match[1]):
        raise click.BadParameter(f"{text!r} is no whole number above 0, such as 4194304 or 4M")
    return int(match[1]) * _LETTERS[match[2].upper()]


def rate_of(text: str) -> float:
    """A number with a unit, such as 80GiB or 989T."""
    try:
        return in_bytes(text)
    except ScheduleError:
        message = f"{text!r} is no number above 0 with a unit, such as 80GiB or 989T"
        raise click.BadParameter(message) from None


@click.command()
@click.option(
    "--model",
    required=True,
    type=File(),
    help="The config.json of a model of Hugging Face.",
)
@click.option("--gpus", required=True, type=Count(), help="GPUs.")
@click.option(
    "--gpu", required=True, type=click.Choice(list(TABLE), case_sensitive=False), help="Their kind."
)
@click.option(
    "--tokens",
    metavar="N",
    required=True,
    type=tokens_of,
    help="Tokens of a global batch, such as 4M; K, M and G are powers of 1024.",
)
@click.option(
    "--seq",
    metavar="N",
    required=True,
    type=tokens_of,
    help="Tokens of a sequence, such as 8192 or 8K.",
)
@click.option(
    "--memory", metavar="LIMIT", type=rate_of, help="Memory of a GPU.  [default: of its kind]"
)
@click.option(
    "--flops",
    metavar="RATE",
    type=rate_of,
    help="Dense 16-bit operations a second of a GPU, such as 989T.",
)
@click.option(
    "--only",
    metavar="PATTERN",
    multiple=True,
    help="Only layouts with schedule=ZB*, tp=8, pp=16, zero=1, microbatch=1, recompute=none.",
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
    only: tuple[str, ...],
    top: int,
    out: str | None,
    as_json: bool,
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
    job = Job(read_model(model), gpus, find_gpu(gpu, memory, flops), tokens // seq, seq)
    accepts = _filter(only) if only else None
    with progress(f"planning for {gpus} GPUs") as track:
        found = search(job, accepts, top, track)
    if out is not None:
        write_bytes(out, write_plan(found.best[0]).encode())
    if as_json:
        counts = {name: getattr(found, name) for name in ("layouts", "possible", "predicted")}
        print_json({"best": list(map(tables, found.best)), **counts})
        return
    _show(job, found)
    if out is not None:
        click.echo(f"\nwrote {out}; try: fpipe rehearse {out} --ranks 0")


def _filter(only: Sequence[str]) -> Callable[[Layout], bool]:
    """Whether a layout has, of each name, a value that one of its patterns matches."""
    patterns: dict[str, list[str]] = {}
    for each in only:
        name, _, pattern = each.partition("=")
        if name not in CHOICES or not pattern:
            raise usage_error(f"--only {each}: give one of {', '.join(CHOICES)}, as in tp=8")
        patterns.setdefault(name, []).append(pattern.lower())

    def accepts(layout: Layout) -> bool:
        values = {name: str(getattr(layout, name)).lower() for name in patterns}
        return all(
            any(fnmatchcase(values[name], pattern) for pattern in wanted)
            for name, wanted in patterns.items()
        )

    return accepts


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

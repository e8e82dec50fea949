# SPDX-License-Identifier: Apache-2.0
"""``fpipe plan``: the layouts of a large run in which a step is shortest, and why. Never imports
torch.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from textwrap import fill

import click

from ...actions import progress, write_bytes
from ...errors import PlanError
from ..clusters.hardware import GIB, TABLE, find_gpu
from ..clusters.layout import Job, Layout
from ..clusters.layouts import Layouts, candidates, search
from ..clusters.model import read_model
from ..clusters.plan_file import tables, write_plan
from ..clusters.prediction import Prediction, usable
from ..clusters.sizes import operations
from .options import ending_in, json_option, number_of, option, print_json, say, table, usage_error

#: What --only may name.
CHOICES = ("schedule", "tp", "pp", "zero", "microbatch", "recompute")


def tokens_of(text: str) -> int:
    """A whole number, which may end in K, M or G: powers of 1024."""
    if not re.fullmatch("0*[1-9][0-9]*[kmg]?", text, re.IGNORECASE):
        raise click.BadParameter(f"{text!r} is no whole number above 0, such as 4194304 or 4M")
    return int(number_of(f"{text}i"))


@click.command()
@option("--model FILE", "The config.json of a model of Hugging Face.", required=True)
@option("--gpus N", "GPUs.", required=True)
@option(f"--gpu {'|'.join(TABLE)}", "Their kind.", required=True)
@option(
    "--tokens N",
    "Tokens of a global batch, such as 4M; K, M and G are powers of 1024.",
    type=tokens_of,
    required=True,
)
@option("--seq N", "Tokens of a sequence, such as 8192 or 8K.", type=tokens_of, required=True)
@option("--memory LIMIT", "Memory of a GPU.  [default: of its kind]")
@option("--flops RATE", "Dense 16-bit operations a second of a GPU, such as 989T.", type=number_of)
@option(
    "--only PATTERN",
    "Only layouts with this, such as schedule=ZB*; also of tp, pp, zero, microbatch and recompute. "
    "Given for several of them, all must match; of one, any.",
    multiple=True,
)
@option("--top N", "Layouts to print.", 5)
@option("-o --out FILE", "Write the best as .toml.", type=ending_in(".toml"))
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

    A layout has tensor-parallel ranks, pipeline ranks, copies, ZeRO degree, schedule, microbatch
    and recompute. Its step is simulated, its memory is that of the fullest rank. No GPU is needed.

    \b
    fpipe plan --model config.json --gpus 1024 --gpu h100 --tokens 4M --seq 8K
    fpipe plan --model config.json --gpus 64 --gpu a100 --tokens 1M --seq 4K \\
      --only pp=4
    """
    if tokens % seq:
        low = max(tokens // seq, 1) * seq
        raise usage_error(
            f"--tokens {tokens} are not whole sequences of {seq}; give {low} or {low + seq}"
        )
    job = Job(read_model(model), gpus, find_gpu(gpu, memory, flops), tokens // seq, seq)
    accepts = _filter(only, job) if only else None
    with progress(f"planning for {gpus} GPUs") as track:
        result = search(job, accepts, top, track)
    if out is not None:
        write_bytes(out, write_plan(result.best[0]).encode())
    if as_json:
        counts = {name: getattr(result, name) for name in ("layouts", "possible", "predicted")}
        print_json({"best": list(map(tables, result.best)), **counts})
        return
    _show(job, result)
    if out is not None:
        click.echo(
            f"\nwrote {out}; try: fpipe rehearse {out} --ranks 0\n"
            "its table [schedule] has the arguments of fpipe.make_schedule"
        )


def _filter(only: Sequence[str], job: Job) -> Callable[[Layout], bool]:
    """Whether a layout has, of each name, a value that one of its patterns matches."""
    layouts = list(candidates(job))
    patterns: defaultdict[str, list[str]] = defaultdict(list)
    for choice in only:
        name, _, pattern = choice.partition("=")
        if name not in CHOICES or not pattern:
            raise usage_error(f"--only {choice}: give one of {', '.join(CHOICES)}, as in tp=8")
        pattern = pattern.lower()
        known = dict.fromkeys(str(getattr(layout, name)) for layout in layouts)
        if known and not any(fnmatchcase(value.lower(), pattern) for value in known):
            raise usage_error(f"--only {choice}: no layout has it; there are {', '.join(known)}")
        patterns[name].append(pattern)

    return lambda layout: all(
        any(fnmatchcase(str(getattr(layout, name)).lower(), pattern) for pattern in allowed)
        for name, allowed in patterns.items()
    )


# ---- text ----
def _show(job: Job, result: Layouts) -> None:
    say(
        f"{job.model.name}: {job.model.parameters / 1e9:.4g} billion parameters, {job.batch} "
        f"sequences of {job.sequence} tokens, "
        f"{job.gpus} {job.gpu.name} of {job.gpu.memory / GIB:.0f} GiB"
    )
    click.echo(f"\n{table(list(map(_row, result.best)))}")
    first = result.best[0]

    def against(what: str, p: Prediction) -> None:
        more = p.step / first.step - 1
        say(f"\n{what}: {p.step:.3f} s, {more:+.1%} against the first layout")

    smaller = [p for p in result.best if p.fullest.total < 0.9 * first.fullest.total]
    if smaller:
        against("first of these with 10% less memory", smaller[0])
    if first.layout.pp > 1:
        with suppress(PlanError):  # none fits
            alone = search(job, lambda layout: layout.pp == 1, 1)
            against("best without a pipeline (--only pp=1)", *alone.best)
    say(
        "\ntp, pp, dp: tensor-parallel ranks, pipeline ranks, copies\n"
        "zero: what copies share, 1 optimizer state, 2 gradients too, 3 parameters too\n"
        "stages: of all pipeline ranks\n"
        "recompute: in backwards, selective norms and activation functions, full layers\n"
        "microbatches: how many, x sequences of each\n"
        "seconds: of a step; GiB: of the fullest rank"
    )
    click.echo("\nthe first layout")
    for about, text in _why(first).items():
        click.echo(fill(text, 80, initial_indent=f"  {about:<8}", subsequent_indent=" " * 10))
    say(
        f"\n{result.possible} of {result.layouts} layouts have room for the state and one "
        f"microbatch; {result.predicted} were simulated; no other can be faster\n"
        "times and memory are predicted, not measured: docs/howto/plan.md says how well"
    )


def _row(prediction: Prediction) -> Mapping[str, object]:
    """A layout in the table."""
    layout = prediction.layout
    names = ("tp", "pp", "dp", "zero", "schedule", "stages", "recompute")
    return {name: getattr(layout, name) for name in names} | {
        "microbatches": f"{layout.microbatches(prediction.job)} x {layout.microbatch}",
        "seconds": f"{prediction.step:.3f}",
        "GiB": f"{prediction.fullest.total / GIB:.0f}",
    }


def _why(best: Prediction) -> Mapping[str, str]:
    """What the time and the memory of a layout consist of, and what limits them."""
    job = best.job
    full = best.fullest
    longest = sorted(best.parts.items(), key=lambda item: -item[1])
    least_shown = 0.0005 * best.step
    time = ", ".join(f"{name} {s / best.step:.1%}" for name, s in longest if s >= least_shown)
    layers = [*best.layout.counts(job.model)]
    least = operations(job) * job.tokens / job.gpus / (job.gpu.flops * job.gpu.matmul)
    parts = {
        "state of layers": full.layers,
        "of the vocabulary": full.vocabulary,
        "activations": full.activations,
        "temporary": full.moment,
    }
    if full.late / GIB >= 0.05:
        parts["without gradients that come later"] = -full.late
    memory = ", ".join(f"{name} {value / GIB:.1f}" for name, value in parts.items())
    return {
        "speed": f"{best.flops / 1e12:.0f} TFLOP/s per GPU, MFU {best.mfu:.1%}, bubble "
        f"{best.bubble:.1%} (of the time without copies and optimizer)",
        "time": time,
        "bound": f"no layout takes less than {least:.3f} s, the model's operations at "
        f"{job.gpu.matmul:.0%} of {job.gpu.flops / 1e12:.0f} TFLOP/s",
        "layers": f"by stage: {layers}" + " (0: the head alone)" * (0 in layers),
        "memory": f"pipeline rank {full.rank} holds {full.total / GIB:.1f} of the "
        f"{usable(job) / GIB:.1f} GiB that the system leaves of {job.gpu.memory / GIB:.0f}: "
        f"{memory}",
    }

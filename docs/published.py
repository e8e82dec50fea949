"""The page of published figures: what fpipe computes for each when the page is made, and the
difference.

``python docs/published.py`` prints the page. Figures of a schedule are computed by the command that
the page names, in this process.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from math import ceil
from typing import Any, NamedTuple

import fpipe
from fpipe.products.clusters.hardware import GIB, find_gpu
from fpipe.products.clusters.layout import Job, Layout
from fpipe.products.clusters.model import Model, model_of
from fpipe.products.clusters.prediction import predict
from fpipe.products.clusters.sizes import layer_work
from fpipe.products.command.cli import main


class Figure(NamedTuple):
    """A published figure and that of fpipe, which is shown with as many decimals."""

    what: tuple[str, ...]
    published: str
    fpipe: float

    @property
    def shown(self) -> str:
        """The figure of fpipe."""
        return f"{self.fpipe:.{len(self.published.partition('.')[2])}f}"

    @property
    def difference(self) -> float:
        """The difference, relative to the published figure; 0 where both look the same."""
        if float(self.shown) == float(self.published):
            return 0
        return self.fpipe / float(self.published) - 1


class Table(NamedTuple):
    """Figures of one kind: where they were published, and what shows those of fpipe."""

    title: str
    text: str
    columns: tuple[str, ...]
    figures: list[Figure]
    commands: list[str]
    within: float  #: the largest relative difference, which a test checks


def paper(title: str, arxiv: str) -> str:
    """A link to a paper."""
    return f"[{title}](https://arxiv.org/abs/{arxiv})"


# ---- schedules ----
@cache
def printed(command: str) -> str:
    """What a command of fpipe prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(shlex.split(command)[1:])
    if status:
        raise ValueError(f"{command} ended with {status}")
    return out.getvalue()


def compared(command: str) -> dict[str, dict[str, Any]]:
    """The entries of ``fpipe compare``, by name."""
    return {entry["name"]: entry for entry in json.loads(printed(f"{command} --json"))["schedules"]}


P, M = 8, 24
#: schedule -> what it holds at most, as published, and for p ranks and m microbatches; None where
#: the formula is that of an average
PEAKS: dict[str, tuple[str, Callable[[int, int], float]]] = {
    "GPipe": ("m", lambda p, m: m),
    "1F1B": ("p", lambda p, m: p),
    "Eager1F1B": ("2p - 1", lambda p, m: 2 * p - 1),
    "Interleaved1F1B": ("p + (p - 1)/v", lambda p, m: p + (p - 1) / 2),
    "LoopedBFS": ("m", lambda p, m: m),
    "ZBH1": ("p", lambda p, m: p),
    "ZBH2": ("2p - 1", lambda p, m: 2 * p - 1),
    "InterleavedZeroBubble": ("p", lambda p, m: p),
    "ZBVZeroBubble": ("p", lambda p, m: p),
    "VHalf": ("(p + 2) // 2", lambda p, m: (p + 2) // 2),
    "VMin": ("(p + 4) // 3", lambda p, m: (p + 4) // 3),
    "DualPipe": ("p + 1", lambda p, m: p + 1),
    "DualPipeV": ("p + 1/2", lambda p, m: p + 1 / 2),
}
#: schedules whose ranks have no idle time between their first start and their last end
ZERO = ("ZBVZeroBubble", "ZBH2")


def formulas(facts: dict[str, Any]) -> Table:
    """Totals, spans and activations at unit cost; ``facts`` are those of the page of schedules."""
    command = f"fpipe compare -p {P} -m {M}"
    ours = compared(command)
    figures = []
    for name, (formula, peak) in PEAKS.items():
        fact, entry = facts[name], ours[name]
        if fact.formula:
            text = fact.total.partition(";")[0]
            figures.append(Figure((name, "total", text), f"{fact.formula(P, M):g}", entry["total"]))
        if name in ZERO:
            figures.append(Figure((name, "span", "m(F + B)"), f"{3 * M}", entry["span"]))
        figures.append(Figure((name, "activations", formula), f"{peak(P, M):g}", entry["memory"]))
    return Table(
        "Formulas of schedules",
        f"The formulas are those of the papers that [Schedules](zoo.md) names, for p = {P} ranks, "
        f"m = {M} microbatches, v = 2 stages a rank, and F = I = W = 1 for all stages of a rank "
        "together. A fused forward and backward, F&B, takes F + B. The total is the time of all "
        "ranks, the span the longest one of a rank, and activations are those of the fullest rank, "
        "in microbatches of a rank.",
        ("schedule", "figure", "formula"),
        figures,
        [command],
        0,
    )


def equal_passes() -> Table:
    """Schedules whose formulas are for a backward that takes as long as a forward."""
    command = f"fpipe compare -p {P} -m {M} --only Chimera --only Hanayo --costs F=1,B=1"
    ours = compared(command)
    idle = f"{(P - 2) / (2 * M + P - 2):.4f}"
    rows = [
        Figure(("Chimera", "bubble", "(p - 2)/(2m + p - 2)"), idle, ours["Chimera"]["bubble"]),
        Figure(
            ("Hanayo, one wave", "total", "m(F + B) + (p - 1)(F + B)/2"),
            f"{2 * M + P - 1}",
            ours["Hanayo"]["total"],
        ),
    ]
    return Table(
        "Chimera and Hanayo",
        f"{paper('Chimera', '2107.06925')} and {paper('Hanayo', '2308.15762')} count with F = B, "
        f"here for p = {P} and m = {M}.",
        ("schedule", "figure", "formula"),
        rows,
        [command],
        0,
    )


def frontier() -> Table:
    """The V family: time against memory."""
    m = 4 * P
    command = f"fpipe compare -p {P} -m {m} --only VMin --only VHalf --only ZBV*"
    ours = compared(command)
    rows = []
    for name, k in (
        ("VMin", 2 * ((P + 4) // 3)),
        ("VHalf", 2 * ((P + 2) // 2)),
        ("ZBVZeroBubble", 2 * P),
    ):
        bubble = 3 * P - 1 - 3 * k + max(3 * P, P - 1 + 2 * (1 + ceil(k / 2)))
        rows.append(Figure((name, f"{k}"), f"{bubble}", 2 * (ours[name]["span"] - 3 * m)))
    return Table(
        "Time and memory of the V family",
        f"{paper('Pipeline parallelism with controllable memory', '2405.15362')}: where a rank "
        "holds at most k activations of a stage, the idle time in passes of a stage is "
        "3p - 1 - 3k + max(3p, p - 1 + 2(1 + ⌈k/2⌉)) at unit cost, here for "
        f"p = {P} and m = {m}.",
        ("schedule", "k"),
        rows,
        [command],
        0,
    )


#: Tables 5 and 6 of the paper: ranks, microbatches, ms of F, I, W and of a message, hidden size,
#: heads -> bubble rates
MEASURED = {
    (8, 24, 18.522, 18.086, 9.337, 0.601, 2304, 24): (".2431", ".1585", ".1083", ".1585"),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 2304, 24): (".1985", ".1242", ".0837", ".1242"),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 2304, 24): (".1240", ".0674", ".0444", ".0674"),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 4096, 32): (".2347", ".1323", ".0698", ".1323"),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 5120, 40): (".2552", ".1397", ".0672", ".1397"),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 6144, 48): (".2646", ".1421", ".0641", ".1421"),
}


def rates() -> Table:
    """Bubble rates of measured times."""
    figures, commands = [], []
    for (p, m, f, i, w, link, hidden, heads), published in MEASURED.items():
        costs = f"F={f},I={i},W={w},comm={link}"
        compare = f"fpipe compare -p {p} -m {m} --only 1F1B --only ZBH* --costs {costs}"
        ours = [compared(compare)[name]["bubble"] for name in ("1F1B", "ZBH1", "ZBH2")]
        saved, kept = 34 * hidden + 5 * heads * 1024, 32 * hidden
        solve = (
            f"fpipe solve -p {p} -m {m} --placement one --costs {costs},saved={saved},kept={kept} "
            f"--memory {p * saved} --seconds 60"
        )
        said = " ".join(printed(solve).split())
        found = re.search(r", ([\d.]+) from step to step \(optimal\)", said)
        if not found:
            raise ValueError(f"{solve} ended before it had the best schedule")
        ours.append(1 - m * (f + i + w) / float(found[1]))
        what = (f"{p}, {m}", f"{f:g}, {i:g}, {w:g}, {link:g}")
        figures += [
            Figure((*what, name), f"0{rate}", value)
            for name, rate, value in zip(
                ("1F1B", "ZB-H1", "ZB-H2", "ZB-1p"), published, ours, strict=True
            )
        ]
        commands += [compare, solve]
    return Table(
        "Bubbles of measured times",
        f"{paper('Zero bubble pipeline parallelism', '2401.10241')}, tables 5 and 6: the share "
        "of idle time for the times that were measured there. ZB-1p is the schedule of the "
        "least span within the memory of p microbatches; the paper finds it with a solver of "
        "integer programs. `fpipe solve` ends when it has proven that there is no shorter one.",
        ("p, m", "ms of F, I, W, message", "schedule"),
        figures,
        commands,
        0,
    )


# ---- memory and time of large models ----
def gpt(hidden: int, heads: int, layers: int, vocabulary: int = 51200, dropout: bool = True) -> Any:
    """A model of the papers."""
    return Model(
        "gpt",
        "gpt2",
        hidden,
        layers,
        heads,
        vocabulary,
        4 * hidden,
        gated=False,
        tied=True,
        dropout=dropout,
    )


#: model -> hidden size, heads, layers, GPUs, pipeline ranks, stages of a rank, batch, microbatch;
#: GiB of state and of activations
MEMORY = {
    "22B": (6144, 64, 48, 8, 1, 1, 4, 4, "45.56", "9.56"),
    "175B": (12288, 96, 96, 64, 8, 3, 64, 1, "45.56", "12.35"),
    "530B": (20480, 128, 105, 280, 35, 3, 280, 1, "31.64", "23.08"),
    "1T": (25600, 160, 128, 512, 64, 1, 512, 1, "32.96", "26.56"),
}


def memory() -> Table:
    """State and activations of the fullest rank."""
    figures = []
    for name, row in MEMORY.items():
        hidden, heads, layers, gpus, pp, per_rank, batch, microbatch, state, activations = row
        job = Job(gpt(hidden, heads, layers), gpus, find_gpu("a100"), batch, 2048)
        schedule = "1F1B" if per_rank == 1 else "Interleaved1F1B"
        layout = Layout(8, pp, 1, 0, schedule, per_rank, microbatch)
        rows = layout.schedule_for(layout.microbatches(job))
        held = rows.simulate().peak[0] * layer_work(job, layout).saved * layers / layout.stages
        figures += [
            Figure((name, "state of layers"), state, predict(job, layout).memory[0].layers / GIB),
            Figure((name, "activations of layers"), activations, held / GIB),
        ]
    return Table(
        "Memory of large models",
        f"{paper('Reducing activation recomputation', '2205.05198')}, figure 1: GiB on the first "
        "rank, with 8 tensor-parallel ranks, sequence parallelism and selective recomputation of "
        "attention. Attention of fpipe's prediction keeps no scores, which are what is "
        "recomputed there.",
        ("model", "figure, GiB"),
        figures,
        ["python docs/published.py"],
        0.003,
    )


LLAMA = {
    "model_type": "llama",
    "hidden_size": 16384,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "intermediate_size": 53248,
    "vocab_size": 128256,
}


def speed() -> Table:
    """Rates of large runs."""
    figures = []
    for gpus, rate in ((8192, "430"), (16384, "400")):
        job = Job(model_of(LLAMA), gpus, find_gpu("h100"), 2048, 8192)
        layout = Layout(8, 16, gpus // 128, 1, "Interleaved1F1B", 4, recompute="selective")
        figures.append(
            Figure(
                ("Llama-3 405B", f"{gpus:,} H100", "TFLOP/s of a GPU"),
                rate,
                predict(job, layout).flops / 1e12,
            )
        )
    return Table(
        "Speed of large runs",
        f"{paper('The Llama 3 herd of models', '2407.21783')}, table 4: 8 tensor-parallel and 16 "
        "pipeline ranks, 16 million tokens of a batch, sequences of 8,192. The paper does not say "
        "how many stages a rank had and what was recomputed; 4 stages, and operations that are "
        "cheap to compute again, are assumed.",
        ("model", "GPUs", "figure"),
        figures,
        ["python docs/published.py"],
        0.06,
    )


#: tokens of the vocabulary / 1024 -> MFU with even stages, and with layers moved; GB of the first
#: rank
VOCABULARIES = {
    32: ("52.82", "52.81", "22.2"),
    64: ("45.78", "53.81", "24.0"),
    128: ("37.13", "49.56", "27.2"),
    256: ("27.63", "42.45", "33.9"),
}


def vocabularies() -> Table:
    """What a large vocabulary costs."""
    figures = []
    for thousands, (even, moved, held) in VOCABULARIES.items():
        model = gpt(3072, 24, 32, thousands * 1024, dropout=False)
        job = Job(model, 8, find_gpu("a100"), 128, 4096)
        one = predict(job, Layout(1, 8, 1, 0, layers=(4,) * 8))
        other = predict(job, Layout(1, 8, 1, 0))
        # gradients are summed in 16 bits there, in 32 bits here
        narrower = 2 * (4 * model.layer_parameters + model.embedding_parameters)
        size = f"{thousands}k"
        figures += [
            Figure((size, "MFU of an even pipeline, %"), even, 100 * one.mfu),
            Figure((size, "MFU with layers moved, %"), moved, 100 * other.mfu),
            Figure((size, "GB of the first rank"), held, (one.memory[0].total - narrower) / 1e9),
        ]
    return Table(
        "A large vocabulary",
        f"{paper('Vocabulary parallelism', '2411.05288')}, the run tables of its authors: 8 A100, "
        "1F1B, 32 layers of width 3,072, 128 microbatches of 4,096 tokens.",
        ("vocabulary", "figure"),
        figures,
        ["python docs/published.py"],
        0.08,
    )


# ---- the page ----
#: What was reported, and not reproduced.
REPORTED = (
    ("RRFP", "2605.18750", "actions run when their inputs are there: up to 1.77 times as fast"),
    ("PipeMorph", "2504.19232", "another order under delays of links: 1.2 to 3.5 times as fast"),
    ("RolloutPipe", "2606.26997", "from rollout to the end of training 30.7 to 42.3 % less time"),
    ("ReCycle", "2405.14009", "a lost rank: up to 1.46 and 1.64 times as fast as two others"),
)


def tables(facts: dict[str, Any]) -> list[Table]:
    """All tables of the page."""
    schedules = [formulas(facts), equal_passes(), frontier(), rates()]
    return [*schedules, memory(), speed(), vocabularies()]


def ready_order() -> str:
    """The gain of an order that is not fixed, in the simulator."""
    schedule = fpipe.make_schedule("1F1B", 8, 32)
    costs = fpipe.Costs(comm=0.25)
    row, ready = (
        sum(schedule.simulate(costs, jitter=0.5, seed=n, order=order).total for n in range(8))
        for order in ("row", "ready")
    )
    return f"{row / ready:.2f}"


def page(facts: dict[str, Any]) -> str:
    """The page as markdown; ``facts`` are those of the page of schedules."""
    lines = [
        "# Published figures",
        "",
        "Figures of papers, and what fpipe computes for them. The right columns are computed when "
        "this page is made: `python docs/published.py` prints it, and a test checks every "
        "difference. No figure here was measured on GPUs by this project.",
        "",
    ]
    for table in tables(facts):
        lines += [f"## {table.title}", "", table.text, "", *rendered(table), ""]
        lines += ["```sh", *(shell(command) for command in table.commands), "```", ""]
    lines += [
        "## Reported, not reproduced",
        "",
        "These gains were measured on machines that this project does not have. As an example, "
        "1F1B with 8 ranks and 32 microbatches, messages of a quarter of a forward, and times that "
        "vary by `jitter=0.5`, "
        f'is {ready_order()} times as fast with `order="ready"` in the simulator.',
        "",
        *(f"* {paper(name, arxiv)}: {text}" for name, arxiv, text in REPORTED),
        "",
    ]
    return "\n".join(lines)


def shell(command: str) -> str:
    """A command as it is typed: patterns are quoted."""
    return re.sub(r"(\S*\*\S*)", r"'\1'", command)


def rendered(table: Table) -> Iterator[str]:
    """The rows of a table of markdown."""
    yield _row([*table.columns, "published", "fpipe", "difference"])
    yield _row(["---"] * len(table.columns) + ["---:"] * 3)
    for figure in table.figures:
        difference = f"{100 * figure.difference:+.1f} %" if figure.difference else "0"
        yield _row([*figure.what, figure.published, figure.shown, difference])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    import hooks

    print(hooks.published.page(hooks.FACTS))

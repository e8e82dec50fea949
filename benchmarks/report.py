"""Generates ``docs/performance.md`` from ``results/*.json``: every figure with its bound.

Results with another torch than the one of ``constraints.txt`` are in ``results/torch-VERSION/``;
their table is behind that of the first.

python -m benchmarks.report            writes the page
python -m benchmarks.report --check    checks that the page agrees with the results
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "results", HERE.parent / "docs" / "performance.md"
Rows: TypeAlias = list[dict[str, Any]]

PLAIN = ("GPipe", "1F1B")

HEAD = """# Performance

`make bench` measures and generates this page, and `make bench TORCH=2.15.0` adds the tables with
another version of torch. `python -m benchmarks.report` generates it again from the files in
`benchmarks/results/`. **Bold** marks a figure that exceeds its bound. All times are medians. The
two sides of a comparison alternate, and each process has one thread. A load well above the number
of processes means that the machine had other work; ratios are then more reliable than times. At
real-time priority (`chrt -r 5 make bench`) a process that wakes up does not wait for that work.
"""


def page() -> str:
    """The whole page, with a section for each result file that exists."""
    parts = [HEAD]
    for name, (title, text, table) in SECTIONS.items():
        files = [RESULTS / f"{name}.json", *sorted(RESULTS.glob(f"torch-*/{name}.json"))]
        results = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
        if results:
            parts.append(f"## {title}\n\n{text}\n")
        for result in results:
            parts += ["\n".join(table(result["rows"])) + "\n", _where(result["about"])]
    return "\n".join(parts)


def folder(version: str) -> Path:
    """Where the results with a version of torch belong."""
    pins = (HERE.parent / "constraints.txt").read_text(encoding="utf-8").splitlines()
    number = version.partition("+")[0]
    return RESULTS if f"torch=={number}" in pins else RESULTS / f"torch-{number}"


def write(path: Path) -> None:
    """Write the page."""
    path.write_text(page(), encoding="utf-8")


def _where(about: dict[str, Any]) -> str:
    load = ""
    if "load" in about:
        before, after = about["load"]
        load = f", load {before:g} before and {after:g} after"
    return (
        f"<small>{about['processor']}, {about['cores']} cores, torch {about['torch']}, Python "
        f"{about['python']}; "
        f"{about['day']}{load}"
        f"{', at real-time priority' if about.get('real time') else ''}</small>\n"
    )


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(heads) + " |"
    yield "|---|" + "---:|" * (len(heads) - 1)
    for line in lines:
        yield "| " + " | ".join(line) + " |"


def _kept(value: float, most: float, text: str, least: float = 0.0) -> str:
    """The text, bold where the value is out of its bounds."""
    return text if least <= value <= most else f"**{text}**"


# ---- sections ----
def _beside_torch(rows: Rows) -> Iterator[str]:
    lines = []
    for r in rows:
        most = (0.60 if r["schedule"] in PLAIN else 0.25) if r["size"] == "small" else 0.90
        more = r["fpipe bytes"] / r["torch bytes"]
        off = abs(r["fpipe bytes"] / r["plan bytes"] - 1)
        lines.append(
            [
                f"{r['schedule']}, {r['size']}",
                f"{r['fpipe ms']:.2f}",
                f"{r['torch ms']:.2f}",
                _kept(r["ratio"], most, f"{r['ratio']:.2f}"),
                f"{most:.2f}",
                f"{r['fpipe bytes'] / 1024:,.0f}",
                f"{r['torch bytes'] / 1024:,.0f}",
                _kept(more, 1.0, f"{more:.2f}"),
                _kept(off, 0.02, f"{off:.1%}"),
            ]
        )
    heads = (
        "",
        "fpipe ms",
        "torch ms",
        "ratio",
        "at most",
        "fpipe KiB",
        "torch KiB",
        "ratio",
        "plan error",
    )
    yield from _table(heads, lines)


_PEERS = (
    "`make bench ARGS=peers`. One transformer, with the same weights, tokens and microbatches, a "
    "thread a process. Each library runs in processes of its own, with its own settings of malloc; "
    "jobs alternate. In float32 all losses, and the norms of all gradients, agree with plain "
    "PyTorch on one process with as many threads (*differs by*). The step includes the optimizer. "
    "*MB* is what "
    "the fullest process holds at most in a step beyond an imported torch, *first step* the time "
    "from the start of the processes to the end of the first step. *addmm* is "
    '`compile="addmm"`. Bounds: ZBV at most 0.80 of the best peer\'s best schedule, every '
    "schedule at most 0.95 of torch's same one in time and memory, and at most 1.03 of its limit; "
    "the first step no later than torch's. Before it all processes at once import `torch._dynamo` "
    "(0.7 s), which torch needs while it traces, and trace (0.3 s). With 512 tokens torch's own "
    "kernels for products, attention and softmax take nine tenths of the programs' time, in every "
    "library, and the bubble of 1F1B that ZBV saves is 11 %: 0.80 needs faster products. Steps of "
    "16M are of two cycles, others of one. "
    "megatron-core asks for CUDA: four of its names are patched. "
    "DeepSpeed builds an operator when it runs for the first time. JAX runs one program on all "
    "ranks, so each has the same number of blocks. In bfloat16, for which this CPU has no "
    "instructions, products take most of everybody's step; DeepSpeed keeps its sums of gradients "
    "elsewhere than in `.grad`, so its norms differ. A line in place of figures is a library's "
    "error."
)
_PEER_NAMES = {
    "plain": "PyTorch",
    "torch": "torch.distributed.pipelining",
    "deepspeed": "DeepSpeed",
    "megatron": "megatron-core",
    "jax": "JAX",
}


def _peers(rows: Rows) -> Iterator[str]:
    groups: dict[str, Rows] = {}
    for r in rows:
        groups.setdefault(r["scenario"], []).append(r)
    heads = (
        "s a step",
        "of the best peer",
        "of torch's",
        "MB",
        "of torch's",
        "first step",
        "limit",
    )
    for title, found in groups.items():
        yield f"\n**{title}**\n"
        yield from _table((_loads(found), *heads, "differs by"), [_peer(r, found) for r in found])


def _loads(found: Rows) -> str:
    """The load of the machine while a group of rows was measured."""
    loads = [r["load"] for r in found if "load" in r]
    return f"load {min(loads):g} to {max(loads):g}" if loads else ""


def _peer(r: dict[str, Any], found: Rows) -> list[str]:
    library = _PEER_NAMES.get(r["library"], r["library"])
    name = f"{library} {r['schedule']}{r['compile'] and ', ' + r['compile']}"
    if "error" in r:
        return [name, r["error"], *[""] * 7]
    ours = r["library"] == "fpipe"
    done = [p for p in found if "error" not in p]
    others = [p["step"] for p in done if p["library"] not in ("fpipe", "plain")]
    alike = [r["schedule"], r["compile"].replace("addmm", "")]
    torchs = [p for p in done if p["library"] == "torch"]
    same = [p for p in torchs if [p["schedule"], p["compile"]] == alike]
    best = r["step"] / min(others) if others else math.nan
    most = 0.8 if r["schedule"] == "ZBV" and ours else math.inf
    time, memory, first = "", "", f"{r['first']:.1f} s"
    if ours and same:
        first = _kept(r["first"] / same[0]["first"], 1.0, first)
        time = f"{r['step'] / same[0]['step']:.2f}"
        time = _kept(r["step"] / same[0]["step"], 0.95, time)
        share = r["peak"] / same[0]["peak"]
        memory = _kept(share, 0.95, f"{share:.2f}")
    over = r["step"] / r["limit"] if r.get("limit") else None
    return [
        name,
        f"{r['step']:.3f}",
        _kept(best, most, f"{best:.2f}"),
        time,
        f"{r['peak'] / 1e6:,.0f}",
        memory,
        first,
        "" if over is None else _kept(over, 1.03, f"{over:.2f}"),
        f"{max(r['losses'], r['norms']):.0e}",
    ]


def _through_gloo(rows: Rows) -> Iterator[str]:
    more = ("programs ms", "of torch") if all("programs ms" in r for r in rows) else ()
    lines = [
        [
            *line,
            *(
                [f"{r['programs ms']:.2f}", f"{r['programs ms'] / r['torch ms']:.2f}"]
                if more
                else []
            ),
        ]
        for r, line in zip(rows, _ratios(rows, 0.95), strict=True)
    ]
    yield from _table((*_RATIOS, *more), lines)


def _many_ranks(rows: Rows) -> Iterator[str]:
    yield from _table(_RATIOS, _ratios(rows, 0.9))


_RATIOS = ("", "fpipe ms", "torch ms", "ratio", "at most")


def _ratios(rows: Rows, most: float) -> list[list[str]]:
    return [
        [
            f"{r['schedule']}, {r['size']}",
            f"{r['fpipe ms']:.2f}",
            f"{r['torch ms']:.2f}",
            _kept(r["ratio"], most, f"{r['ratio']:.2f}"),
            f"{most:.2f}",
        ]
        for r in rows
    ]


def _limit(rows: Rows) -> Iterator[str]:
    lines = []
    for r in rows:
        most = 1.3 if r["size"] == "small" else 1.15
        bounds = (1.1, 0.9) if r["size"] == "medium" else (float("inf"), 0.0)
        lines.append(
            [
                f"{r['schedule']}, {r['size']}",
                f"{r['limit ms']:.2f}",
                f"{r['step ms']:.2f}",
                _kept(r["step / limit"], most, f"{r['step / limit']:.2f}"),
                f"{most:.2f}",
                f"{r['predicted ms']:.2f}",
                _kept(r["predicted / step"], bounds[0], f"{r['predicted / step']:.1%}", bounds[1]),
                f"{r['message us']:.0f}",
            ]
        )
    yield from _table(
        ("", "limit ms", "step ms", "ratio", "at most", "forecast ms", "of the step", "message us"),
        lines,
    )
    parts = [(r, r["borders us"]) for r in rows if r["size"] == "small" and "borders us" in r]
    if parts:
        names = list(parts[0][1])
        yield from ("", _BORDERS, "")
        lines = [
            [f"{r['schedule']}, small", *(f"{times[name]:.0f}" for name in names)]
            for r, times in parts
        ]
        yield from _table(("us", *names), lines)


def _split(rows: Rows) -> Iterator[str]:
    lines = [
        [
            f"width {r['width']}",
            f"{r['whole ms']:.2f}",
            f"{r['split ms']:.2f}",
            _kept(r["split/whole"], 1.03, f"{r['split/whole']:.3f}"),
            f"{r['torch ms']:.2f}",
            f"{r['split/torch']:.2f}",
        ]
        for r in rows
    ]
    yield from _table(
        ("", "F, B ms", "F, I, W ms", "ratio (at most 1.03)", "torch's split ms", "ratio"), lines
    )


def _runner(rows: Rows) -> Iterator[str]:
    lines = [
        [
            r["schedule"],
            f"{r['step ms']:.2f}",
            f"{r['programs ms']:.2f}",
            f"{r['instructions']:,}",
            _kept(r["us each"], 1.5, f"{r['us each']:.2f}"),
        ]
        for r in rows
    ]
    yield from _table(
        ("", "step ms", "programs ms", "instructions", "us an instruction (at most 1.5)"), lines
    )


def _cold(rows: Rows) -> Iterator[str]:
    lines = [
        [
            f"{r['schedule']}, {r['ranks']}",
            _kept(r["first pipeline"], 3.0, f"{r['first pipeline']:.2f}"),
            f"{r['first pipeline cpu']:.2f}",
            f"{r['first traces']}",
            f"{r['second pipeline']:.2f}",
            _kept(r["second traces"], 0, f"{r['second traces']}"),
            f"{r['warm step']:.3f}",
        ]
        for r in rows
    ]
    heads = (
        "",
        "first s (at most 3)",
        "CPU s",
        "traces",
        "second s",
        "traces (0)",
        "a warm step s",
    )
    yield from _table(heads, lines)


def _scale(rows: Rows) -> Iterator[str]:
    lines = [
        [
            r["schedule"],
            f"{r['instructions']:,}",
            _kept(r["lowering s"], 1.0, f"{r['lowering s']:.2f}"),
            f"{r['lowering cpu s']:.2f}",
            f"{r['actions']:,}",
            _kept(
                r["check + simulate s"],
                8.0 * max(r["actions"] / 1.5e6, 1),
                f"{r['check + simulate s']:.2f}",
            ),
            f"{r['check + simulate cpu s']:.2f}",
            _kept(r["GiB"], 2.0, f"{r['GiB']:.2f}"),
        ]
        for r in rows
    ]
    heads = (
        "",
        "instructions of a rank",
        "lowering s (at most 1)",
        "CPU s",
        "actions of all",
        "check, simulate s (at most 8 for 1.5 million)",
        "CPU s",
        "GiB (at most 2)",
    )
    yield from _table(heads, lines)


def _lengths(rows: Rows) -> Iterator[str]:
    lines = [
        [
            r["where"],
            f"{r['warm step, ms']:.0f}",
            f"{r['first call, steps']:.0f}",
            f"{r['second length, steps']:.0f}",
            _kept(r["new length, steps"], 5, f"{r['new length, steps']:.2f}"),
            _kept(
                r["new number of microbatches, steps"],
                2,
                f"{r['new number of microbatches, steps']:.2f}",
            ),
            _kept(
                r["speed of different lengths"],
                float("inf"),
                f"{r['speed of different lengths']:.0%}",
                0.9,
            ),
        ]
        for r in rows
    ]
    yield from _table(
        (
            "",
            "warm step, ms",
            "first call, steps",
            "second length, steps",
            "new length, steps",
            "new count, steps",
            "speed of 100 lengths",
        ),
        lines,
    )


def _solver(rows: Rows) -> Iterator[str]:
    show = lambda value, digits=4: "" if value is None else f"{value:.{digits}f}"
    lines = [
        [
            r["what"],
            f"{'at least' if r['least'] else 'at most'} {show(r['target'])}",
            show(r["reached"]) if r["kept"] else f"**{show(r['reached'])}**",
            show(r["bound"]),
            show(r["seconds"], 1),
        ]
        for r in rows
    ]
    yield from _table(("", "target", "reached", "proven bound", "seconds"), lines)


def _schedules(found: Any) -> Iterator[str]:
    columns = ("make", "check", "simulate", "figures")
    lines = [
        [name, f"{row['actions']:,}", *(f"{1e3 * row[c]:.1f}" for c in columns)]
        for name, row in found["schedules"].items()
    ]
    yield from _table(
        ("64 ranks, 512 microbatches", "actions", *(f"{c} ms" for c in columns)), lines
    )
    yield ""
    heads = "", "actions", "make s", "check, simulate s", "all s", "at most", "GiB", "at most"
    yield from _table(
        heads,
        [
            [
                row["case"],
                f"{row['actions']:,}" if "actions" in row else "",
                *(f"{row[c]:.2f}" if c in row else "" for c in ("make", "check + simulate")),
                _kept(row["all"], row["at most s"], f"{row['all']:.2f}"),
                f"{row['at most s']:g}",
                _kept(row["GiB"], row["at most GiB"], f"{row['GiB']:.2f}") if "GiB" in row else "",
                f"{row['at most GiB']:g}" if "GiB" in row else "",
            ]
            for row in found["large"]
        ],
    )


def _optimizer(found: Any) -> Iterator[str]:
    names = list(dict.fromkeys(name for table in found.values() for name in table))
    lines = []
    for name in names:
        rows = [table.get(name) for table in found.values()]
        most = next(row[2] for row in rows if row)
        figures = [
            f"{r[0]:.2f} ({_kept(r[1], most or math.inf, f'{r[1]:.2f}')})" if r else ""
            for r in rows
        ]
        lines.append([name, *figures, f"{most:.2f}" if most else ""])
    yield from _table(
        ("ms, and the ratio to torch", *(f"{side} x {side}" for side in found), "at most"), lines
    )


def _vocabulary(found: Any) -> Iterator[str]:
    lines = [
        [
            name,
            f"{row['peak'] / 2**20:,.0f}",
            f"{row['seconds']:.1f}",
            f"{row['cpu']:.1f}",
            f"{row['error']:.1e}",
        ]
        for name, row in found["rows"].items()
    ]
    columns = ("MiB", "seconds", "of the processor", "error")
    yield from _table((", ".join(f"{n} {k}" for k, n in found["sizes"].items()), *columns), lines)


def _late(rows: Rows) -> Iterator[str]:
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for r in rows:
        order = r["order"]
        if r["window"]:
            order += f", a window of {r['window']} actions"
        ways = found.setdefault((r["schedule"], order), [])
        ways.append((r["taking"] / r["waiting"], r["step"]))
    lines = []
    for (name, order), ways in found.items():
        ratio = statistics.median(ratio for ratio, _ in ways)
        most = 0.7 if order.startswith("ready") else math.inf
        lines.append([f"{name}, {order}", f"{ways[0][1]:.2f}", _kept(ratio, most, f"{ratio:.2f}")])
    yield from _table(("schedule, order", "seconds of a step", "part"), lines)


def _overlap(rows: Rows) -> Iterator[str]:
    for r in rows:
        share = r["communication/compute"]
        within = 0.5 <= share <= 1.0  # what the bounds are for
        most = (0.75, 1.15) if within else (float("inf"), r["plain check: both/longer"])
        plain = f"{r['plain check: both/longer']:.2f}"
        yield from _table(
            ("", "ms", "ratio of woven to it", "at most"),
            [
                ["woven", f"{r['woven ms']:,.0f}", "", ""],
                [
                    "sequential",
                    f"{r['sequential ms']:,.0f}",
                    _kept(r["woven/sequential"], most[0], f"{r['woven/sequential']:.2f}"),
                    "0.75" if within else "",
                ],
                [
                    f"the longer of compute ({r['compute ms']:,.0f}) and communication "
                    f"({r['communication ms']:,.0f})",
                    f"{max(r['compute ms'], r['communication ms']):,.0f}",
                    _kept(r["woven/longer"], most[1], f"{r['woven/longer']:.2f}"),
                    "1.15" if within else plain,
                ],
                ["torch's DualPipeV", f"{r['torch ms']:,.0f}", f"{r['woven/torch']:.2f}", ""],
            ],
        )
        yield ""
        yield (
            f"Communication / compute: {share:.2f}. Reference check: both together take {plain} "
            "of the longer; an "
            f"exchange alone uses {r['plain check: core busy']:.0%} of a core."
        )


def _gpu(rows: Rows) -> Iterator[str]:
    cell = lambda value: "" if value is None else f"{value:.3f}"
    lines = [
        [
            r["what"],
            f"{cell(r['fpipe'])} {r['unit']}",
            f"{cell(r['peer'])} {r['unit']}" if r["peer"] else "",
            _kept(r["ratio"] or r["fpipe"], limit, cell(r["ratio"] or r["fpipe"])),
            f"{limit:g}" if limit < 1e9 else "",
        ]
        for r in rows
        for limit in [math.inf if r["limit"] is None else r["limit"]]
    ]
    yield from _table((rows[0]["device"] if rows else "", "fpipe", "peer", "", "at most"), lines)


_PEER = (
    "Both sides run the same model with the same 8 microbatches on the same processes. Messages "
    "of torch go through "
    "gloo, messages of fpipe through shared memory (a later section is as between hosts). A "
    "block is LayerNorm, "
    "Linear(D, 4D), GELU, Linear and a residual connection. Small: D = 16, 4 tokens, 1 block per "
    "stage. Medium: D = "
    "256, 64 tokens, 2 blocks per stage. KiB is the peak memory of a rank in a step, measured by "
    "one counter for both "
    "sides. *Plan error* is the difference between the peak in the plan and the measured peak of "
    "fpipe."
)
_GLOO = (
    "As above, with `FPIPE_SHARED_MEMORY=0`: messages of fpipe go through gloo, as between two "
    "hosts. "
    "*Programs* is the makespan of the schedule with the times of the programs alone, as if "
    "messages took no time: the "
    "least that any transport can reach. At medium size it is most of the step of both sides."
)
_MANY = (
    "As above, through shared memory, with twice as many microbatches as ranks: most processes "
    "wait for a core or for "
    "a message."
)
_MANY_8 = (
    f"{_MANY} Ratios of 1F1B of medium size were 0.79, 0.81, 0.86 and 0.91 in four runs. Beside "
    "other work on both "
    "cores (load 10) the ratios of medium size were 0.81 to 1.03."
)
_LIMIT = (
    "Two processes, steps in a row. The limit is the makespan that the simulator computes from "
    "the times of the "
    "programs alone (all ranks run them at the same time and in the order of the schedule, also "
    "in a row) and the "
    "one-way time of a message between two idle ranks. The forecast is the makespan by the costs "
    "that `fpipe.measure_costs` "
    "measures: programs and messages within a step. At medium size the forecast should be within "
    "10 % of the step."
)
_BORDERS = (
    "Where the time of a small step goes, on the rank of the last stage, by a clock at the "
    "borders of instructions "
    "(`python -m benchmarks.bench_limit --sizes small --borders`). *Begin* is the call until its "
    "first instruction, "
    "*programs* their time alone, *around* what they take longer in a step: registers, values "
    "that they free, code "
    "that is not in the cache. *Receive* is for messages that have arrived, *wait* for others. "
    "*Loss* is the total of "
    "the losses, *end* what follows the last instruction. The limit contains programs and the "
    "transfer of messages "
    "alone; the other parts are Python, and take two to three times as long as in a loop, since "
    "programs of torch run "
    "in between: *begin* takes about 35 us in a loop."
)
_SPLIT = (
    "Four transformer blocks as one stage: the backward in two parts (I and W) compared with the "
    "backward in one part "
    "(B), and with torch's split."
)
_RUNNER = (
    "The time of a step minus the time of its programs, divided by its number of instructions; "
    "small stages, a local "
    "group of 4 ranks."
)
_COLD = (
    "32 stages of one block function (D = 256), 8 microbatches. *First* is the time from "
    "`fpipe.pipeline` to the end "
    "of the first step, *second* the same for a second pipeline of the same functions. Best of "
    "three new processes; "
    "torch is imported before."
)
_LENGTHS = (
    "A model like Llama of 16 layers in 2 stages, 1F1B, 4 microbatches. The first length is "
    "traced as it is, the "
    "second with symbolic sizes. A later length, or number of microbatches: its first step in "
    "steps of the same size. "
    "The last column is the speed of 100 different lengths compared with the same lengths again. "
    "Medians of three runs."
)
_SOLVER = (
    "Bubbles that `fpipe.solve` reaches in ten seconds at most, two for published cases, beside "
    "published figures and targets of this project. No schedule has less than the proven bound, so "
    "a target below it cannot be met. The last line is measured: a step of two processes with "
    "sequences of log-normal lengths, as a share of 1F1B in input order."
)
_SCALE = (
    "256 ranks, 2,048 microbatches. Lowering: the plan of the rank that takes longest. Check and "
    "simulation: the whole "
    "schedule."
)
_LATE = """Rollouts that arrive at random over a window as long as a step, on four processes whose
stages sleep: the time from the first rollout to the end of the step, as a part of that of a step
that waits for all. Medians of random arrivals; the bound of the ready order is 0.7. With its row,
and with the default window, the first backward of GPipe waits for the last rollout. The bits are
the same."""
_VOCABULARY = (
    "One step of `fpipe.chunked_cross_entropy` and of torch's cross entropy of whole logits: the "
    "loss, and the gradients of hidden states and of the head, in float32. Memory is what the step "
    "adds, with these gradients. Errors are the largest, against float64, relative to the largest "
    "value."
)

_OPTIMIZER = (
    "200 parameters (100 matrices, each with a vector) in 8 stages, one step with `tx.step`, in "
    "time of the "
    "processor. *Donate* writes into the memory of parameters and state. Ratios are those to the "
    "first row of a "
    "family: torch's fused AdamW, and the same after torch's clipping. "
    "Without *donate*, memory is the bound at 512, where nothing fits into "
    "the cache: in place, "
    "7 lists pass through it (parameters, gradients and both moments are read, all but the "
    "gradients are written), "
    "and 10 where results are written elsewhere, since memory is read before a part of it is "
    "written. One pass would "
    "take 1.43 of the step in place, but torch has no kernel for it: with its kernels three "
    "lists are copied, which "
    "is 9 of the 10 (*copies alone*), and then stepped (*copies, then fused*); from the cache "
    "that step takes 0.6 of "
    "the one in memory. At 128 the copies alone take as long as torch's step. Keeping memory "
    "between steps changes "
    "nothing: the allocator returns that of the state before the last, without page faults."
)
_HOSTS = (
    "As above, in two network namespaces with a link of 200 mbit between them: messages of both "
    "sides go through gloo and over the link, where a transfer takes time but no core."
)
_OVERLAP = (
    "Two processes that exchange tokens for their experts, DualPipeV, two all_to_all per stage. "
    "The two cores that "
    "compute also copy the bytes, so little can be hidden. The reference check measures this "
    "without any library: one "
    "exchange during matrix products of the same duration. Its ratio is the bound for the woven "
    "step."
)
_NARROW = (
    "The same between two network namespaces with a link of 200 mbit, where a transfer takes "
    "time but no core: 24 "
    "microbatches, 1 MB per exchange, sized so that communication alone takes three quarters of "
    "compute alone."
)

#: result -> (title, what was done, the table)
SECTIONS: dict[str, tuple[str, str, Callable[[Any], Iterator[str]]]] = {
    "torch": ("Compared with torch.distributed.pipelining, 2 processes", _PEER, _beside_torch),
    "torch4": (
        "Compared with torch.distributed.pipelining, 4 processes",
        "As above.",
        _beside_torch,
    ),
    "gloo": (
        "Compared with torch.distributed.pipelining, through gloo",
        _GLOO,
        _through_gloo,
    ),
    "hosts": (
        "Compared with torch.distributed.pipelining, between two hosts",
        _HOSTS,
        _through_gloo,
    ),
    "many8": (
        "Compared with torch.distributed.pipelining, 8 processes on 2 cores",
        _MANY_8,
        _many_ranks,
    ),
    "many16": (
        "Compared with torch.distributed.pipelining, 16 processes on 2 cores",
        _MANY,
        _many_ranks,
    ),
    "peers": ("Real sizes, beside other libraries", _PEERS, _peers),
    "limit": ("Compared with the limit and with the forecast", _LIMIT, _limit),
    "split": ("Cost of splitting the backward", _SPLIT, _split),
    "runner": ("Cost of the runner", _RUNNER, _runner),
    "cold": ("Cold start", _COLD, _cold),
    "lengths": ("New lengths", _LENGTHS, _lengths),
    "scale": ("Scale", _SCALE, _scale),
    "schedules": (
        "Schedules as data",
        "Medians, of the time of the processor, without torch. Large schedules are columns of "
        "numpy. Each large case is a process of its own: the round that took least.",
        _schedules,
    ),
    "solver": ("Solver", _SOLVER, _solver),
    "optimizer": (
        "Optimizers",
        _OPTIMIZER,
        _optimizer,
    ),
    "vocabulary": ("A head with a large vocabulary", _VOCABULARY, _vocabulary),
    "late": ("Microbatches that come late", _LATE, _late),
    "overlap": ("Woven forwards and backwards, on one host", _OVERLAP, _overlap),
    "narrow": ("Woven forwards and backwards, over a narrow link", _NARROW, _overlap),
    "gpu": (
        "On one GPU",
        "A local group of four ranks on one GPU, ZBV, in bf16; measured by "
        "`make bench-gpu`. The peer runs the same microbatches through the whole model by plain "
        "autograd, or compiled whole. *Graph*: the step is recorded once (`pipe.captured()`). "
        "*Offload* is the time to copy to the host what a layer saves, beside its forward and "
        "backward: above 1 it cannot be hidden.",
        _gpu,
    ),
}


def main() -> int:
    """Write the page, or compare it."""
    if "--check" in sys.argv[1:]:
        same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
        print(
            "the page agrees with the results"
            if same
            else "the page differs from the results; generate it again"
        )
        return 0 if same else 1
    write(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What ``fpipe.solve`` reaches, beside published figures and targets, with the bound that no
schedule exceeds.

Then a step of two processes with sequences of log-normal lengths: 1F1B with microbatches in input
order against packed ones in the solver's order.

    python -m benchmarks.bench_solver [--seconds 10] [--rounds 20] [--json FILE]
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks.command import options, save
from fpipe import Costs, Schedule, make_schedule, pack, schedule_names, solve
from fpipe.errors import ScheduleError

#: Zero-bubble paper, tables 5 and 6, and a larger case: p, m, F, I, W, link, hidden size, heads,
#: rates of 1p and 2p
PAPER = (
    (8, 24, 18.522, 18.086, 9.337, 0.601, 2304, 24, 0.1585, 0.0433),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 2304, 24, 0.1242, 0.0039),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 2304, 24, 0.0674, 0.0026),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 4096, 32, 0.1323, 0.0029),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 5120, 40, 0.1397, 0.0066),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 6144, 48, 0.1421, 0.0038),
    (32, 256, 10.419, 10.207, 7.715, 0.408, 6144, 48, 0.0585, 0.0018),
    (64, 512, 10.402, 10.248, 7.698, 0.46, 6144, 48, 0.0603, 0.0026),
)
LARGE = Costs(F=10.402, I=10.248, W=7.698, comm=0.46)
UNEVEN = Costs(F=4.959, I=5.217, W=3.519, comm=0.213)
HEAVY = Costs(*([time] * 15 + [1.3 * time] for time in (4.959, 5.217, 3.519)), comm=0.213)


class Row(NamedTuple):
    """A figure: what it should be at most (or at least), what it is, and the least that it can
    be.
    """

    what: str
    target: float
    reached: float
    bound: float | None = None
    seconds: float | None = None
    least: bool = False  #: whether the target is a least value

    @property
    def kept(self) -> bool:
        """Whether the target is met, to four decimals."""
        reached, target = round(self.reached, 4), round(self.target, 4)
        return reached >= target if self.least else reached <= target


def bubbles(
    what: str, target: float, costs: Costs, *counts: Any, memory: float, seconds: float
) -> Row:
    """The bubble of a solved schedule."""
    begin = time.perf_counter()
    s = solve(costs, *counts, memory=memory, time_limit=seconds, progress=False)
    took, t = time.perf_counter() - begin, s.timeline
    return Row(what, target, t.bubble, 1 - (1 - t.bubble) * t.span / s.bound, took)


def published(seconds: float) -> Iterator[Row]:
    """The tables of the zero-bubble paper, and ZBV of 64 ranks."""
    for p, m, f, i, w, link, h, a, *rates in PAPER:
        costs = Costs(F=f, I=i, W=w, comm=link, saved=34 * h + 5 * a * 1024, kept=32 * h)
        for copies, rate in zip((1, 2), rates, strict=True):
            limit = copies * p * costs.memory(1)["F"][0]
            what = f"{p} ranks, {m} microbatches, memory of {copies}p"
            yield bubbles(what, rate, costs, p, m, "one", memory=limit, seconds=min(seconds, 2))
    yield bubbles(
        "64 ranks, 512 microbatches, V",
        0.0170,
        LARGE,
        64,
        512,
        "V",
        memory=128,
        seconds=min(seconds, 2),
    )


def uneven(seconds: float) -> Iterator[Row]:
    """Uneven costs within the memory of V-Half and V-Min, and a last stage that is 30 % heavier."""
    for name, memory, target in (("V-Half", 10, 0.085), ("V-Min", 8, 0.16)):
        yield bubbles(
            f"uneven costs, memory of {name}",
            target,
            UNEVEN,
            8,
            32,
            "V",
            memory=memory,
            seconds=seconds,
        )
    for memory in (8, 10, 12, 14, 16):
        fixed = min(bubble for bubble in fixed_bubbles(HEAVY, memory))
        row = bubbles("", 0, HEAVY, 8, 32, "V", memory=memory, seconds=seconds)
        less = lambda bubble, fixed=fixed: 1 - bubble / fixed
        what = f"heavy last stage, {memory} chunks: less than the best fixed one by"
        yield Row(what, 0.15, less(row.reached), less(row.bound), row.seconds, True)


def fixed_bubbles(costs: Costs, memory: float) -> Iterator[float]:
    """The bubbles of named schedules of two stages a rank that fit."""
    for name in schedule_names():
        try:
            s = make_schedule(name, 8, 32, 16)
        except ScheduleError:  # it needs other counts
            continue
        t = s.simulate(costs)
        if not s.placement.replicated and max(t.peak_bytes) <= memory * (1 + 1e-9):
            yield t.bubble


# ---- a measured step ----
WIDTH, MICROBATCHES = 192, 8


_draw = random.Random(0)
LENGTHS = [min(4096, max(16, round(_draw.lognormvariate(5, 1)))) for _ in range(8 * MICROBATCHES)]
GIVEN = [list(range(8 * k, 8 * k + 8)) for k in range(MICROBATCHES)]


def packed() -> tuple[list[list[int]], Schedule, float]:
    """Sequences of microbatches that cost alike, their schedule, and its simulated span beside 1F1B
    in input order.
    """
    load = lambda parts: [sum(LENGTHS[i] for i in part) / 1000 for part in parts]
    parts = pack(LENGTHS, microbatches=MICROBATCHES, cost=float)
    solved = solve(
        Costs(B=2.0, load=load(parts)), 2, MICROBATCHES, "one", time_limit=2, progress=False
    )
    before = make_schedule("1F1B", 2, MICROBATCHES).simulate(Costs(load=load(GIVEN)))
    return parts, Schedule.parse(str(solved)), solved.timeline.span / before.span


def measure(rounds: int, parts: list[list[int]], schedule: Schedule) -> dict[str, float]:
    """The fastest step with microbatches in input order, and packed, in the solver's order; of one
    of two processes.
    """
    import torch

    import fpipe

    torch.set_num_threads(1)
    torch.manual_seed(0)
    matrices = [[torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(4)] for _ in range(2)]
    group, calls = fpipe.init(), {}

    def stage(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for matrix in params:
            x = torch.tanh(x @ matrix)
        return x

    def steps(schedule: Any, parts: list[list[int]]) -> Callable[[], object]:
        options: Any = {
            "loss": lambda y: y.square().mean(),
            "microbatches": MICROBATCHES,
            "group": group,
        }
        pipe = fpipe.pipeline([stage, stage], schedule, **options)
        params, vag = pipe.place(matrices), fpipe.value_and_grad(pipe)
        batch = fpipe.Microbatches(
            [torch.randn(sum(LENGTHS[i] for i in part), WIDTH) for part in parts]
        )
        return lambda: vag(params, batch)

    calls = {"input order": steps("1F1B", GIVEN), "packed and solved": steps(schedule, parts)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 2):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    return {name: min(each[2:]) for name, each in times.items()}


def measured(rounds: int) -> Iterator[Row]:
    """The step of the slower process, packed and solved, as a share of that in input order."""
    import fpipe

    parts, schedule, simulated = packed()
    found = fpipe.launch(measure, rounds, parts, schedule, ranks=2)
    before, after = (max(one[name] for one in found) for name in found[0])
    print(
        f"a step of 2 processes: {1e3 * before:.1f} ms in input order, {1e3 * after:.1f} ms "
        "packed and solved; "
        f"simulated: {simulated:.0%} of it"
    )
    yield Row(
        "step of 2 processes, packed and solved, of that in input order", 0.95, after / before
    )


def main() -> None:
    """Print the table."""
    given = options(__doc__, seconds=10, rounds=20).parse_args()
    rows: list[Row] = []
    print(f"{'':66} {'target':>8} {'reached':>8} {'bound':>8} {'seconds':>8}")
    parts = (
        published(given.seconds),
        uneven(given.seconds),
        measured(given.rounds),
    )
    for part in parts:
        for row in part:
            rows.append(row)
            cells = (row.target, row.reached, row.bound, row.seconds)
            shown = " ".join(
                f"{'' if x is None else f'{x:.4f}' if at < 3 else f'{x:.1f}':>8}"
                for at, x in enumerate(cells)
            )
            print(f"{row.what:66} {shown}{'' if row.kept else '  missed'}", flush=True)
    save([{**row._asdict(), "kept": row.kept} for row in rows], given.json)


if __name__ == "__main__":
    main()

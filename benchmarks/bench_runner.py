"""The cost of the runner per instruction: (step - its programs) / instructions, in a local group
with small stages.
"""

from __future__ import annotations

import statistics
import time
from copy import copy
from dataclasses import replace

import torch

import fpipe
from benchmarks.command import options, save
from benchmarks.stages import square
from fpipe.lowering.instructions import Run

NAMES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBV",
    "DualPipeV",
)


def block(p, x):
    """A small residual block."""
    return x + torch.tanh(x @ p["w1"]) @ p["w2"]


def measure(
    name: str, ranks: int = 4, microbatches: int = 8, rounds: int = 40, device: str = "cpu"
) -> dict[str, float]:
    """Microseconds of the runner per instruction, on the host."""
    count = ranks if name in ("GPipe", "1F1B") else 2 * ranks
    weight = lambda: (torch.randn(16, 16) * 0.1).to(device)
    params = [{"w1": weight(), "w2": weight()} for _ in range(count)]
    x, group = torch.randn(4 * microbatches, 16).to(device), fpipe.local(devices=[device] * ranks)
    pipe = fpipe.pipeline(
        [block] * count, name, loss=square, microbatches=microbatches, group=group
    )
    step = fpipe.value_and_grad(pipe)
    step(params, x, x)
    instructions = sum(len(plan.instructions) for plan in pipe.plan(params, x, x).by_rank.values())
    inside = [0.0]

    def timed(run):
        clock = time.perf_counter

        def call(box):
            start = clock()
            out = run(box)
            inside[0] += clock() - start
            return out

        return call

    # A second pipeline whose programs are timed: its steps are not.
    timed_pipe = fpipe.pipeline(
        [block] * count, name, loss=square, microbatches=microbatches, group=group
    )
    original = Run.bind
    Run.bind = lambda op, ins, machine: original(_with(op, timed(op.program.run)), ins, machine)
    timed_step = fpipe.value_and_grad(timed_pipe)
    timed_step(params, x, x)
    Run.bind = original
    whole, programs = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        step(params, x, x)
        whole.append(time.perf_counter() - start)
        inside[0] = 0.0
        timed_step(params, x, x)
        programs.append(inside[0])
    cost = statistics.median(w - p for w, p in zip(whole, programs, strict=True))
    return {
        "step ms": 1e3 * statistics.median(whole),
        "programs ms": 1e3 * statistics.median(programs),
        "instructions": instructions,
        "us each": 1e6 * cost / instructions,
    }


def _with(op, run):
    program = copy(op.program)
    object.__setattr__(program, "run", run)  # a timed copy of a frozen program
    return replace(op, program=program)


def main() -> None:
    """Print the table."""
    args = options(__doc__, rounds=40).parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'schedule':24} {'step ms':>8} {'programs ms':>12} {'instructions':>13} {'us each':>8}")
    for name in NAMES:
        r = measure(name, rounds=args.rounds)
        rows.append({"schedule": name, **r})
        print(
            f"{name:24} {r['step ms']:8.2f} {r['programs ms']:12.2f} {r['instructions']:13d} "
            f"{r['us each']:8.2f}"
        )
    save(rows, args.json)


if __name__ == "__main__":
    main()

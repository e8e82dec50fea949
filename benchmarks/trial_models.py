"""Tiny decoders in 4 and 8 stages under every schedule: loss and gradients against autograd on the
unsplit model.

python benchmarks/trial_models.py                   # in this process, over 4 processes, and those
without shared memory python benchmarks/trial_models.py --where gloo --families gpt2 mixtral

Every family has frozen parameters, and some tie their head. A line for each family, cut and way:
the schedules that were right, and the largest relative error of a loss, of all gradients together
and of a single parameter's. Exit code 1 where a loss or the gradients are off by 1e-6 or more, a
single one by 1e-5, or the wrong parameters have gradients. Four processes leave out, in 8 stages,
the three schedules with one stage a rank. Needs fpipe[hf].
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fpipe
from fpipe.collectives.shared_memory import SWITCH

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from huggingface_decoders import ACCEPTANCE, MICROBATCHES, Verdict, against_unsplit, verdict  # pyright: ignore[reportMissingImports]
from schedule_table import TABLE, Case  # pyright: ignore[reportMissingImports]

WAYS = ("here", "memory", "gloo")


class Row(NamedTuple):
    """What ran under one family, cut and way."""

    right: int
    tried: int


def cases(stages: int, most: int) -> Iterator[Case]:
    """Every schedule with so many stages, on 4 ranks or, where it cannot, on 2 (in a V) or 8 (one
    each).
    """
    for entry in TABLE:
        ranks = next(ranks for ranks in (4, 2, 8) if stages // ranks in entry.per_rank)
        if ranks <= most:
            yield Case(entry.name, ranks, MICROBATCHES, stages)


def worst(reports: Sequence[Verdict]) -> Verdict:
    """Of several pipelines that ran the same, or of one pipeline as reported by its ranks."""
    return next((one for one in reports if not one.right), reports[0])


def rows(
    way: str,
    families: Sequence[str],
    cuts: Sequence[int],
    group_of: Callable[[int], Any],
    all_of: Any,
) -> Row:
    """All cases of one way; the first process prints. ``group_of`` gives the pipeline's group of so
    many ranks.
    """
    right = tried = 0
    for family, stages in ((family, stages) for family in families for stages in cuts):
        begin, reports = time.monotonic(), dict[str, Verdict]()
        for case in cases(stages, 8 if way == "here" else 4):
            group = group_of(case.ranks)
            mine = verdict(
                group.gather_objects(against_unsplit(family, case, group)), family, stages
            )
            reports[str(case)] = worst(all_of.gather_objects(mine))
        faults = {name: one for name, one in reports.items() if not one.right}
        right, tried = right + len(reports) - len(faults), tried + len(reports)
        if all_of.here[0] == 0:
            most = [max(each) for each in zip(*(one[:3] for one in reports.values()), strict=True)]
            figures = "loss {:.1e}  gradients {:.1e}  worst of one parameter {:.1e}".format(*most)
            count = f"{len(reports) - len(faults)} of {len(reports)} schedules"
            took = f"{time.monotonic() - begin:5.1f} s"
            print(f"{way:8} {family:10} {stages} stages  {count}  {figures}  {took}", flush=True)
            for name, one in faults.items():
                print(f"    NOT THE SAME: {name}: {one}", flush=True)
    return Row(right, tried)


def in_a_process(way: str, families: Sequence[str], cuts: Sequence[int]) -> Row:
    """In one of four processes: a pipeline of four or, for those that need two, the same on either
    half of them.
    """
    torch.set_num_threads(1)
    groups = {4: fpipe.init(timeout=120), 2: fpipe.init(pp=2, dp=2, timeout=120)}
    if any(group.at_once != (way == "memory") for group in groups.values()):
        raise fpipe.errors.GroupError(
            f"messages do not go through {way} here: shared memory needs Linux on x86-64 and gloo"
        )
    return rows(way, families, cuts, groups.__getitem__, groups[4])


def trial(way: str, families: Sequence[str], cuts: Sequence[int]) -> Row:
    """All cases of one way."""
    if way == "here":
        return rows(way, families, cuts, fpipe.local, fpipe.local(1))
    env = {"OMP_NUM_THREADS": "1", SWITCH: "1" if way == "memory" else "0"}
    return fpipe.launch(in_a_process, way, families, cuts, ranks=4, timeout=1800, env=env)[0]


def main() -> int:
    """All ways, and how many cases were right."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--where", choices=WAYS, nargs="*", default=WAYS)
    options.add_argument("--families", choices=ACCEPTANCE, nargs="*", default=ACCEPTANCE)
    options.add_argument("--stages", type=int, choices=(4, 8), nargs="*", default=(4, 8))
    given = options.parse_args()
    torch.set_num_threads(1)
    failed = 0
    for way in given.where:
        right, tried = trial(way, given.families, given.stages)
        failed += tried - right
        print(f"{way}: {right} of {tried}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Run many cases, in several processes, and print those that differ:
``python -m tests.fuzz --minutes 10``.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator

import click
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .cases import PER_MODEL, random_case
from .engine import Outcome, cases_of_a_model, run_case, start


def _outcomes(first: int, count: int, seconds: float, jobs: int) -> Iterator[tuple[int, Outcome]]:
    end = time.monotonic() + seconds
    with multiprocessing.get_context("spawn").Pool(jobs, start, maxtasksperchild=10) as pool:
        found = pool.imap_unordered(cases_of_a_model, range(first, first + count, PER_MODEL))
        while (left := end - time.monotonic()) > 0:
            try:
                yield from found.next(timeout=left)
            except (StopIteration, multiprocessing.TimeoutError, KeyboardInterrupt):
                return


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in counts.most_common())


@click.command()
@click.option("--case", "seed", type=int, help="run one case, and print it")
@click.option("--first", default=0, show_default=True, help="the first seed")
@click.option("--cases", default=1_000_000, help="how many at most")
@click.option("--minutes", default=1.0, show_default=True)
@click.option("--jobs", default=2, show_default=True)
@click.option("--refused", is_flag=True, help="print the errors of cases that fpipe refuses")
def main(
    seed: int | None, first: int, cases: int, minutes: float, jobs: int, refused: bool
) -> None:
    """Compare random pipelines with plain autograd."""
    if seed is not None:
        click.echo(random_case(seed))
        click.echo(f"{(found := run_case(seed)).kind}: {found.text}")
        raise SystemExit(found.kind in ("different", "error"))
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    began = time.monotonic()
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    ) as progress:
        task = progress.add_task("starting")
        for number, found in _outcomes(first, cases, 60 * minutes, jobs):
            counts[found.kind] += 1
            if found.kind == "limit":
                reasons[found.text] += 1
            if found.kind in ("different", "error") or (refused and found.kind == "refused"):
                progress.console.print(
                    f"case {number} {found.kind}: {found.text[:300]}", markup=False, soft_wrap=True
                )
            progress.update(task, description=_listed(counts))
            if not progress.console.is_terminal and counts.total() % 500 == 0:
                click.echo(f"{time.monotonic() - began:.0f} s: {_listed(counts)}")
    total, minutes = counts.total(), (time.monotonic() - began) / 60
    click.echo(f"{total} cases, {total / minutes:.0f} a minute: " + _listed(counts))
    if reasons:
        click.echo(f"limits (see docs/design/limits.md): {_listed(reasons)}")
    raise SystemExit(bool(counts["different"] or counts["error"]))


if __name__ == "__main__":
    main()

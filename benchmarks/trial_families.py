"""All families of causal models of transformers, tiny, in stages under 1F1B and ZBV: right, or refused with a reason.

python benchmarks/trial_families.py                    # all of them, some minutes
python benchmarks/trial_families.py llama bloom

Each family trains one step with rows padded on the left, traced, on two ranks in this process; loss and gradients are
compared with autograd on the unsplit model. A line for each family, then the counts. Exit code 1 where a family is
wrong, or fails without an error of fpipe that says why. Needs fpipe[hf].
"""

from __future__ import annotations

import argparse
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from huggingface_survey import FAMILIES, Row, examine  # pyright: ignore[reportMissingImports]

SECONDS = 120


def survey(names: Sequence[str]) -> Iterator[Row]:
    """The families by name, each for a limited time."""

    def late(*_: object) -> None:
        raise TimeoutError(f"longer than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    for family in names:
        signal.alarm(SECONDS)
        try:
            yield examine(family)
        except TimeoutError as error:
            yield Row(family, "unknown", str(error))
        finally:
            signal.alarm(0)


def main() -> int:
    """Print the survey."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("families", nargs="*", metavar="FAMILY", help="all by default")
    given = options.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for row in survey(given.families or sorted(FAMILIES)):
        rows.append(row)
        print(f"{row.family:24} {row.end:8} {row.text}", flush=True)
    counts = Counter(row.end for row in rows)
    print(", ".join(f"{count} {end}" for end, count in counts.most_common()), f"of {len(rows)}")
    return 1 if counts["wrong"] + counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""All families of causal models of transformers, tiny, in stages under 1F1B and ZBV: right, or
refused with a reason.

python benchmarks/trial_families.py                    # all of them, some minutes
python benchmarks/trial_families.py llama bloom
python benchmarks/trial_families.py --write            # and their list on the page
docs/howto/huggingface.md

Each family trains one step with rows padded on the left, traced, on two ranks in this process; loss
and gradients are compared with autograd on the unsplit model. A line for each family, then the
counts. Exit code 1 where a family is wrong, or fails without an error of fpipe that says why. Needs
fpipe[hf].
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

SECONDS = 240
PAGE = Path(__file__).resolve().parent.parent / "docs" / "howto" / "huggingface.md"
BEGIN, END = (
    "<!-- families: written by benchmarks/trial_families.py -->",
    "<!-- end of families -->",
)


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


def listed(rows: Sequence[Row]) -> str:
    """The families as Markdown: those that are right by name, those that are refused with the
    reason.
    """
    names = {
        end: [f"`{row.family}`" for row in rows if row.end == end]
        for end in ("right", "untraced", "unknown")
    }
    lines = [
        f"{len(names['right'])} families of transformers {transformers.__version__} are right: "
        + ", ".join(names["right"])
        + "."
    ]
    lines += (
        ["", f"Right with experts on autograd: {', '.join(names['untraced'])}."]
        if names["untraced"]
        else []
    )
    lines += (
        ["", f"The trial builds no small model of {', '.join(names['unknown'])}."]
        if names["unknown"]
        else []
    )
    lines += ["", "| refused | why |", "|---|---|"]
    other = [row for row in rows if row.end not in names]
    return (
        "\n".join(
            [*lines, *(f"| `{row.family}` | {row.text.replace('|', ' ')} |" for row in other)]
        )
        + "\n"
    )


def write(rows: Sequence[Row]) -> None:
    """Put the list in place of the one on the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(f"{BEGIN}\n")
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{listed(rows)}\n{END}{after}", encoding="utf-8")


def main() -> int:
    """Print the survey."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("families", nargs="*", metavar="FAMILY", help="all by default")
    options.add_argument(
        "--write", action="store_true", help="also write the list on the page of the docs"
    )
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
    if given.write:
        write(rows)
    return 1 if counts["wrong"] + counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

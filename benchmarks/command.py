"""Shared by the command lines of the benchmarks: options for counts, and a JSON file for the
results.

Imports neither torch nor fpipe, because some benchmarks measure their absence.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path


def options(doc: str | None, **counts: int) -> argparse.ArgumentParser:
    """A parser with an option per count, with its default, and ``--json``."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, count in counts.items():
        parser.add_argument(f"--{name}", type=int, default=count, help="%(default)s by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    return parser


def save(results: object, file: Path | None) -> None:
    """Write the results as JSON, if a file is given."""
    if file is not None:
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def narrowed(rate: str, *more: str) -> int:
    """Run this benchmark by ``narrow_link.sh``, as two processes that get ``more`` in place of
    ``--narrow RATE``; its exit status.
    """
    at = sys.argv.index("--narrow")
    script, spec = Path(__file__).with_name("narrow_link.sh"), sys.modules["__main__"].__spec__
    assert spec is not None, "run the benchmark as python -m benchmarks.NAME"
    given = (*more, *sys.argv[1:at], *sys.argv[at + 2 :])
    command = ["sh", str(script), rate, sys.executable, "-m", spec.name, *given]
    return subprocess.run(command, check=False).returncode

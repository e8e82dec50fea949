"""What the command lines of the benchmarks share: counts that are asked for by name, and a file for what was found.

Imports neither torch nor fpipe: some benchmarks measure what doing without them is worth.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def options(doc: str | None, **counts: int) -> argparse.ArgumentParser:
    """A parser that knows these counts, each with what it is by default, and ``--json``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, count in counts.items():
        parser.add_argument(f"--{name}", type=int, default=count, help="%(default)s by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found into this file")
    return parser


def save(found: object, file: Path | None) -> None:
    """Write what was found as JSON, where a file is asked for."""
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

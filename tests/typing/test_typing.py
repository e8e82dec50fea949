"""Types of the public names: what pyright infers in ``inferred.py``, and reports in
``mistakes.py``.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import fpipe
from fpipe.engine.options import PASSES, Options
from fpipe.generators import catalogue, sources

pytestmark = pytest.mark.xdist_group("typing")  # one run of pyright
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def expected(path: Path) -> Iterator[tuple[int, str]]:
    """The lines with a comment ``# error: text``, from 0, and the text."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        if comment := re.search(r"  # error: (.+?)(?:  # noqa.*)?$", line):
            yield number, comment[1]


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    """What one run of pyright on the two files reports."""
    pytest.importorskip("pyright")
    files = [str(HERE / name) for name in ("inferred.py", "mistakes.py")]
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--outputjson",
        "--pythonpath",
        sys.executable,
        *files,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return json.loads(done.stdout)["generalDiagnostics"]


def of_file(reports: list[dict[str, Any]], name: str) -> dict[int, str]:
    """What is reported for a file, by line from 0: message and rule."""
    lines: dict[int, str] = {}
    for report in reports:
        if Path(report["file"]).name == name:
            line = report["range"]["start"]["line"]
            lines[line] = lines.get(line, "") + f"{report['message']} ({report.get('rule')})"
    return lines


def test_inferred_types(reports: list[dict[str, Any]]):
    assert (HERE / "inferred.py").read_text(encoding="utf-8").count("assert_type(") > 30
    assert {line + 1: text for line, text in of_file(reports, "inferred.py").items()} == {}


def test_mistakes_are_reported(reports: list[dict[str, Any]]):
    found, wanted = of_file(reports, "mistakes.py"), dict(expected(HERE / "mistakes.py"))
    assert len(wanted) > 15
    missing = {
        line + 1: (text, found.get(line))
        for line, text in wanted.items()
        if text not in found.get(line, "")
    }
    assert missing == {}
    assert {line + 1: text for line, text in found.items() if line not in wanted} == {}


def test_options_for_type_checkers_are_those_of_the_function():
    parameters = set(inspect.signature(fpipe.pipeline).parameters)
    apart = {"stages", "schedule", "loss", "outputs", "more"}
    assert Options.__annotations__.keys() == (parameters - apart) | PASSES.keys()


def test_names_of_schedules_for_type_checkers_are_those_of_the_catalogue():
    names = {entry.name for entry in catalogue.TABLE} | set(catalogue.ALIASES)
    assert set(get_args(sources.Name)) == names | {"auto"}

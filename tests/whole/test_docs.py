"""Every code block of README and docs runs here, in order, page by page; what a page says is printed is printed.

``python`` blocks of a page share their names, and call what they define. A ``text`` block after one is what it prints.
``sh`` blocks run through the command line's own function; what would start processes (make, torchrun) is held to have
targets, options and files that are there and that another test runs. ``make golden`` writes what is printed into the
pages.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import json
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
from torch.distributed.run import get_args_parser as torchrun

import fpipe
from fpipe import generators
from fpipe.command.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: pages that are files for several processes -> how many
SEVERAL = {"parallelism.md": 4}
#: pages that another test gives to ``run`` -> that test
ELSEWHERE = {"ray.md": "tests/command/test_ray.py"}
#: what a how-to page must be there for
HOWTO = ("schedule", "model", "moe", "rl", "machines", "hang", "timeline", "memory", "choose")
#: files in examples/ that tests/whole/test_examples.py does not run -> the test that does
EXAMPLES = {"rl_engine.py": "tests/whole/test_trainers.py"}
BUILT_IN = {entry.name for entry in generators._TABLE}


class Block(NamedTuple):
    """A fenced block."""

    kind: str
    code: str
    line: int


def blocks(text: str) -> Iterator[Block]:
    """All fenced blocks, wherever they are indented."""
    for found in re.finditer(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", text, re.M | re.S):
        indent, kind, code = found.groups()
        code = "".join(line.removeprefix(indent) for line in code.splitlines(keepends=True))
        yield Block(kind, code, text[: found.start()].count("\n") + 2)


def shell(line: str) -> None:
    """One line of a shell block."""
    words = shlex.split(line.split("  #")[0])
    if words[0] == "fpipe" and words[1] != "train":
        assert main(words[1:]) == 0, line
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:.*##", (ROOT / "Makefile").read_text(), re.M), f"no target: {line}"
        subprocess.run([*words, "--dry-run"], cwd=ROOT, check=True, capture_output=True)
    elif words[0] in ("torchrun", "python"):
        told = torchrun().parse_args(words[1:])
        example, runs = told.training_script, ROOT / EXAMPLES.get(Path(words[-1]).name, "tests/whole/test_examples.py")
        options = [word for word in told.training_script_args if word.startswith("--")]
        assert all(f'"{option}"' in (ROOT / example).read_text() for option in options), line
        assert Path(example).stem in runs.read_text(), f"{runs.name} does not run {example}"
    else:
        raise AssertionError(f"no test runs {line!r}")


def uncalled(page: Path) -> None:
    """Code inside a function has run only if some other code of the page names that function."""
    tree = ast.parse("".join(b.code for b in blocks(page.read_text(encoding="utf-8")) if b.kind == "python"))
    for one in tree.body:
        if isinstance(one, (ast.FunctionDef, ast.ClassDef)):
            others = [node for other in tree.body if other is not one for node in ast.walk(other)]
            named = any(isinstance(node, ast.Name) and node.id == one.name for node in others)
            assert named, f"{page.name}: nothing calls {one.name}"


def run(page: Path, update: bool = False) -> None:
    names: dict[str, object] = {"__name__": "page"}
    uncalled(page)
    output: str | None = None  # a block of text that no code stands before is a drawing
    for block in blocks(page.read_text(encoding="utf-8")):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        heard = io.StringIO()
        with contextlib.redirect_stdout(heard):
            if block.kind == "python":
                code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
                exec(code, names)
            elif block.kind == "sh":
                for line in filter(None, block.code.splitlines()):
                    shell(line)
            elif block.kind == "text" and output is None:
                continue
            elif block.kind == "text":
                same = doctest.OutputChecker().check_output(block.code, output, doctest.ELLIPSIS)
                if update and not same:
                    page.write_text(page.read_text(encoding="utf-8").replace(block.code, output, 1), encoding="utf-8")
                    continue
                assert same, f"{where}: this is printed:\n{output}"
            else:
                raise AssertionError(f"{where}: a block is python, sh or text, not {block.kind!r}")
        output = None if block.kind == "text" else heard.getvalue()


def run_strictly(page: Path, update: bool = False) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(page, update)
    return page.name


HERE = [page for page in PAGES if page.name not in SEVERAL | ELSEWHERE]


@pytest.mark.parametrize("page", HERE, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_blocks(page: Path, update_golden: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if "from transformers" in page.read_text(encoding="utf-8"):
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    run_strictly(page, update_golden)
    for name in set(fpipe.schedule_names()) - BUILT_IN:
        generators.unregister_schedule(name)


@pytest.mark.xdist_group("axes")  # whose processes are warm
@pytest.mark.parametrize("name", SEVERAL)
def test_blocks_on_several_processes(name: str):
    page = ROOT / "docs" / name
    ranks = SEVERAL[name]
    assert f"--nproc-per-node {ranks} " in page.read_text(encoding="utf-8"), "the page says on how many it runs"
    assert fpipe.launch(run_strictly, page, ranks=ranks, timeout=100) == [name] * ranks


def test_pages_run_elsewhere_are_run_there():
    for name, test in ELSEWHERE.items():
        assert f'"{name}")' in (ROOT / test).read_text(encoding="utf-8"), f"{test} does not run {name}"


def test_the_list_names_every_page():
    """What is made when the docs are built, and performance.md, which ``make bench`` makes, need not be there."""
    named = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M))
    there = {path.relative_to(ROOT / "docs").as_posix() for path in PAGES[1:]}
    assert named - there <= {"index.md", "zoo.md", "reference.md", "performance.md"}
    assert {f"howto/{name}.md" for name in HOWTO} <= named & there


def test_a_wrong_page_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n")
    with pytest.raises(AssertionError, match="this is printed"):
        run(page)
    run(page, update=True)
    assert page.read_text() == "```python\nprint(1)\n```\n\n```text\n1\n```\n"
    page.write_text("```python\ndef f():\n    f()\n```\n")
    with pytest.raises(AssertionError, match="nothing calls f"):
        run(page)
    page.write_text("```c\n```\n")
    with pytest.raises(AssertionError, match="not 'c'"):
        run(page)


# ---- what is made ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import hooks
    finally:
        sys.path.pop(0)
    return hooks


def test_reference_has_every_public_name(hooks: ModuleType):
    page = hooks.reference()
    missing = [name for name in fpipe.__all__ if f"## fpipe.{name}\n" not in page and name != "errors"]
    assert not missing
    hidden = ModuleType("hidden")
    with pytest.raises(ValueError, match="has no docstring"):
        hooks.text_of(hidden, "hidden")


def test_a_page_that_loads_from_elsewhere_stops_the_build(hooks: ModuleType):
    page = SimpleNamespace(file=SimpleNamespace(src_path="index.md"))
    good = '<a href="https://arxiv.org">there</a><script src="a.js"></script>'
    assert hooks.on_post_page(good, page=page, config=None) == good
    with pytest.raises(ValueError, match=r"index\.md loads <script defer"):
        hooks.on_post_page('<script defer src="https://elsewhere/a.js">', page=page, config=None)


def test_every_schedule_has_a_picture_a_formula_and_a_paper(hooks: ModuleType):
    page, pictures = hooks.zoo()
    assert set(hooks.FACTS) == BUILT_IN
    for name, facts in hooks.FACTS.items():
        assert f"## {name}\n" in page and pictures[f"zoo/{name}.svg"].startswith(b"<svg")
        assert facts.arxiv in page
    table = (ROOT / "README.md").read_text()
    assert f"| {len(hooks.FACTS)} | 7 | 2 |" in table, "the README counts the schedules"


def test_what_readme_names_is_there():
    """A test named in the table is a file or the beginning of a test's name."""
    tests = "\n".join(path.stem + "\n" + path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| ")]
    named = [name for row in rows for name in re.findall(r"`(test_\w+)`", row.split("|")[-2])]
    assert all(re.search(r"`\w|–", row.split("|")[-2]) for row in rows[1:]), "each row has a command that shows it"
    assert len(named) > 5
    assert [name for name in named if name not in tests] == []


def test_what_readme_says_of_time_was_measured():
    """Within a tenth: the machine that measures has good and bad days."""
    file = ROOT / "benchmarks" / "results" / "torch.json"
    if not file.exists():
        pytest.skip("nothing was measured: make bench ARGS=torch")
    told = re.search(
        r"([\d.]+) to ([\d.]+) with small stages, ([\d.]+) to ([\d.]+) with", (ROOT / "README.md").read_text()
    )
    assert told is not None
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    for size, low, high in (("small", *told.groups()[:2]), ("medium", *told.groups()[2:])):
        ratios = [row["ratio"] for row in rows if row["size"] == size]
        assert (float(low), float(high)) == pytest.approx((min(ratios), max(ratios)), abs=0.1), size


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 24), (6, 18)])
def test_formulas_agree_with_the_simulator(hooks: ModuleType, p: int, m: int):
    for name, facts in hooks.FACTS.items():
        if facts.formula:
            made = fpipe.make_schedule(name, p, m)
            assert made.simulate(hooks.per_share(fpipe.Costs(), made)).total == pytest.approx(facts.formula(p, m)), name

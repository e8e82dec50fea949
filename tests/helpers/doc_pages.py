"""Runs the code blocks of a page of the documentation.

``python`` blocks of a page share their names, and the page calls what it defines. A ``text`` block
after one is its output. A ``diff`` block has two whole programs, the one before and the one after
the change, which print the same. ``sh`` blocks run through the command line's own function; lines
that would start processes (make, torchrun) are checked for targets, options and files that exist
and that another test runs.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch.distributed.run import get_args_parser as torchrun

from fpipe.products.command.cli import main

ROOT = Path(__file__).resolve().parents[2]
#: files in examples/ that tests/whole/test_examples.py does not run -> the test that does
EXAMPLES = {
    "rl_engine.py": "tests/whole/test_trainers.py",
    "ray_train.py": "tests/products/training/test_ray.py",
}


class Block(NamedTuple):
    """A fenced block."""

    kind: str
    code: str
    line: int


def blocks(text: str) -> Iterator[Block]:
    """All fenced blocks, wherever they are indented."""
    for fence in re.finditer(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", text, re.M | re.S):
        indent, kind, code = fence.groups()
        code = "".join(line.removeprefix(indent) for line in code.splitlines(keepends=True))
        yield Block(kind, code, text[: fence.start()].count("\n") + 2)


def shell(line: str) -> None:
    """Run one line of a shell block, or check that its targets, options and files exist and that a
    test runs them.
    """
    words = shlex.split(line.split("  #")[0])
    while "=" in words[0]:  # a variable of this line
        del words[0]
    clusters = [word for word in words if word.startswith("examples/cluster/")]
    if words[0] == "fpipe" and words[1] != "train":
        scripts = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
        assert main(scripts[1:]) == 0, line
    elif words[0] in ("git", "cd"):
        assert f'{words[-1]}"' in (ROOT / "pyproject.toml").read_text(), line
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:.*##", (ROOT / "Makefile").read_text(), re.M), (
            f"no target: {line}"
        )
        subprocess.run([*words, "--dry-run"], cwd=ROOT, check=True, capture_output=True)
    elif words[:2] == ["pip", "install"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        name, _, extras = words[-1].rstrip("]").partition("[")
        assert name in (".", project["name"], "dist/fpipe-*.whl"), line
        assert set(filter(None, extras.split(","))) <= project["optional-dependencies"].keys(), line
    elif clusters and words[0] != "python":
        runs = (ROOT / "tests" / "whole" / "test_cluster.py").read_text(encoding="utf-8")
        for file in clusters:
            assert (ROOT / file).is_file() and Path(file).name in runs, f"no test runs {file}"
    elif words[0] in ("torchrun", "python"):
        parsed = torchrun().parse_args(words[1:])
        example, runs = (
            parsed.training_script,
            ROOT / EXAMPLES.get(Path(words[-1]).name, "tests/whole/test_examples.py"),
        )
        options = [word for word in parsed.training_script_args if word.startswith("--")]
        assert all(f'"{option}"' in (ROOT / example).read_text() for option in options), line
        assert Path(example).stem in runs.read_text(), f"{runs.name} does not run {example}"
    else:
        raise AssertionError(f"no test runs {line!r}")


def versions(diff: str) -> tuple[str, str]:
    """The program before a change and the one after it.

    >>> versions(" a = 1\\n-print(a)\\n+print(1)\\n")
    ('a = 1\\nprint(a)\\n', 'a = 1\\nprint(1)\\n')
    """
    lines = diff.splitlines(keepends=True)
    assert {line[0] for line in lines} <= set(" +-\n"), "a line begins with a blank, + or -"
    before, after = (
        "".join(line[1:] if line.strip() else line for line in lines if line[0] != left_out)
        for left_out in "+-"
    )
    return before, after


def check_calls(page: Path) -> None:
    """Code inside a function has run only if some other code of the page names that function."""
    tree = ast.parse(
        "".join(b.code for b in blocks(page.read_text(encoding="utf-8")) if b.kind == "python")
    )
    for definition in tree.body:
        if isinstance(definition, (ast.FunctionDef, ast.ClassDef)):
            others = [
                node for other in tree.body if other is not definition for node in ast.walk(other)
            ]
            named = any(
                isinstance(node, ast.Name) and node.id == definition.name for node in others
            )
            assert named, f"{page.name}: nothing calls {definition.name}"


def continues(page: Path) -> bool:
    """Whether a block of Python uses a name that an earlier one defines."""
    earlier: set[str] = set()
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.kind != "python":
            continue
        nodes = list(ast.walk(ast.parse(block.code)))
        used = {
            node.id
            for node in nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        defined = {
            node.id
            for node in nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        defined |= {
            node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        }
        defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        defined |= {
            (node.asname or node.name).split(".")[0]
            for node in nodes
            if isinstance(node, ast.alias)
        }
        if (used - defined) & earlier:
            return True
        earlier |= defined
    return False


def run(page: Path, update: bool = False, compare: bool = True) -> None:
    """Run the blocks of a page in order and compare what they print; ``update`` writes it into the
    page instead.
    """
    names: dict[str, object] = {"__name__": "page"}
    check_calls(page)
    output: str | None = None  # a block of text with no code before it is a drawing
    for block in blocks(page.read_text(encoding="utf-8")):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if block.kind == "python":
                code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
                exec(code, names)
            elif block.kind == "diff":
                outputs = []
                for version in versions(block.code):
                    with contextlib.redirect_stdout(io.StringIO()) as alone:
                        exec(compile(version, str(page), "exec"), {"__name__": "page"})
                    outputs.append(alone.getvalue())
                assert outputs[0] == outputs[1], f"{where}: before and after: {outputs}"
                print(outputs[0], end="")
            elif block.kind == "sh":
                for line in filter(None, block.code.splitlines()):
                    shell(line)
            elif block.kind == "text" and (output is None or not compare):
                continue
            elif block.kind == "text":
                same = doctest.OutputChecker().check_output(block.code, output, doctest.ELLIPSIS)
                if update and not same:
                    text, fence = page.read_text(encoding="utf-8"), "```text\n{}```"
                    shown = fence.format(block.code)
                    page.write_text(text.replace(shown, fence.format(output), 1), encoding="utf-8")
                    continue
                assert same, f"{where}: this is printed:\n{output}"
            else:
                raise AssertionError(
                    f"{where}: a block is python, diff, sh or text, not {block.kind!r}"
                )
        output = None if block.kind == "text" else printed.getvalue()


def run_strictly(page: Path, update: bool = False, compare: bool = True) -> str:
    """``run`` with warnings as errors; returns the name of the page."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(page, update, compare)
    return page.name


def run_as_script(page: Path, folder: Path) -> str:
    """``run_strictly`` in a folder, as one of the processes of torchrun: the first prints what the
    page shows.
    """
    os.chdir(folder)
    return run_strictly(page, compare=os.environ["RANK"] == "0")

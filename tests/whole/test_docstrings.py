"""Docstrings of public names: every parameter, the result, the errors that are raised, and an
example.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fpipe

ROOT = Path(fpipe.__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
try:
    import hooks
finally:
    sys.path.pop(0)

PUBLIC = dict(hooks.public())


def gaps(name: str, value: Any) -> Iterator[str]:
    """What the docstring of a public name lacks."""
    doc = inspect.getdoc(value)
    if not doc:
        yield "a docstring"
    elif isinstance(value, ModuleType | property) or (
        inspect.isclass(value) and issubclass(value, BaseException)
    ):
        return
    else:
        found = hooks.sections(doc)
        yield from (
            f"{parameter} in Args"
            for parameter in parameters(name, value) - explained(found, "Args:")
        )
        yield from (
            f"no {extra}, which is explained"
            for extra in explained(found, "Args:") - parameters(name, value)
        )
        if returns(value) and not found.get("Returns:"):
            yield "Returns"
        yield from (f"{error} in Raises" for error in raised(value) - explained(found, "Raises:"))
        if ">>>" not in doc:
            yield "an example"


def explained(found: dict[str, list[str]], head: str) -> set[str]:
    """The names that the items of a section explain."""
    return {name for item in found.get(head, ()) for name in item.partition(":")[0].split(", ")}


def parameters(name: str, value: Any) -> set[str]:
    """Names of parameters; none for a class that only the library creates."""
    return set() if name in hooks.RETURNED else set(inspect.signature(value).parameters) - {"self"}


def returns(value: Any) -> bool:
    """Whether a function returns something else than None."""
    return inspect.isroutine(value) and inspect.signature(value).return_annotation not in (
        "None",
        None,
    )


def raised(value: Any) -> set[str]:
    """The errors of fpipe that the body of a function raises itself."""
    if not inspect.isroutine(value):
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    calls = (
        node.exc.func
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    )
    names = {call.id for call in calls if isinstance(call, ast.Name)}
    return {name for name in names if hasattr(fpipe.errors, name)}


@pytest.mark.parametrize("name", PUBLIC)
def test_sections(name: str):
    assert list(gaps(name, PUBLIC[name])) == []


def test_hidden_and_returned_names_exist():
    for name, members in hooks.HIDDEN.items():
        value = getattr(fpipe, name.removeprefix("fpipe."))
        assert [member for member in members.split() if not hasattr(value, member)] == []
    assert set(hooks.RETURNED) <= PUBLIC.keys()


def test_gaps_are_found():
    def fn(x: int, *more: int, y: int = 0) -> int:
        """Do.

        Args:
            x, z: numbers.
        """
        raise fpipe.errors.StageError(x)

    assert set(gaps("fn", fn)) == {
        "more in Args",
        "y in Args",
        "no z, which is explained",
        "Returns",
        "an example",
    }
    assert raised(fpipe.value_and_grad) == set()
    assert "StageError" in raised(fpipe.Pipeline.under)


def test_reference_shows_members_and_hides_internals():
    page = "\n".join(hooks.reference().values())
    found = re.findall(r"^#{3,4} (fpipe\S+) {#(\S+)}$", page, re.M)
    headings = [name.replace("\\", "") for name, _ in found]
    assert [anchor for _, anchor in found] == [name.replace("__", "") for name in headings]
    assert sorted(headings) == sorted(PUBLIC)
    assert "fpipe.Pipeline.place" in headings and "fpipe.Pipeline.call" not in headings
    assert "* `microbatches`: into how many" in page
    assert "fpipe.Pipeline(config" not in page

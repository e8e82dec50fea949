"""Docstrings of public names: every parameter, the result, the errors that are raised, and an
example.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import symtable
import sys
import textwrap
from collections.abc import Iterator
from functools import cached_property
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


#: Options of ``fpipe.pipeline`` that its ``**more`` takes.
OF_PASSES = ["order"]


def gaps(name: str, value: Any) -> Iterator[str]:
    """What the docstring of a public name lacks."""
    doc = inspect.getdoc(value)
    if not doc:
        yield "a docstring"
    elif isinstance(value, ModuleType | property | cached_property) or (
        inspect.isclass(value) and issubclass(value, BaseException)
    ):
        return
    else:
        found = hooks.sections(doc)
        yield from (
            f"{parameter} in Args"
            for parameter in parameters(name, value) - explained(found, "Args:")
            if f"``{parameter}``" not in "".join(found[""])
        )
        yield from (
            f"no {extra}, which is explained"
            for extra in explained(found, "Args:") - parameters(name, value) - {*OF_PASSES}
        )
        if returns(value) and not found.get("Returns:") and not says_result(value, doc):
            yield "Returns"
        yield from (f"{item!r} repeats the signature" for item in repeated(found))
        yield from (f"{error} in Raises" for error in raised(value) - explained(found, "Raises:"))
        if ">>>" not in doc:
            yield "an example"


#: First words of a sentence that names the result of a function.
NAMES = ("A", "All", "An", "Every", "How", "The", "These", "What", "When", "Whether")


def says_result(value: Any, doc: str) -> bool:
    """Whether the first sentence names the result, or its type is a class of the reference."""
    result = str(inspect.signature(value).return_annotation)
    return doc.split()[0] in NAMES or inspect.isclass(PUBLIC.get(f"fpipe.{result}"))


def repeated(found: dict[str, list[str]]) -> Iterator[str]:
    """Items that say no more than a name and a type, as ``rank: the rank.``"""
    yield from (item for item in found.get("Returns:", ()) if len(item.split()) < 3)
    for item in found.get("Args:", ()):
        text = item.partition(": ")[2]
        if len(text.split()) < 2 or re.fullmatch(r"the \w+\.", text):
            yield item


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
    results = {hooks._place_of_result(name): hooks._result_class(name) for name in hooks.RESULTS}
    for name, members in hooks.HIDDEN.items():
        value = (PUBLIC | results)[name]
        assert [member for member in members.split() if not hasattr(value, member)] == []
    assert set(hooks.RETURNED) <= PUBLIC.keys()


def test_gaps_are_found():
    def fn(x: int, *more: int, y: int = 0) -> int:
        """Do.

        Args:
            x: the number.
            z: a number
            of any size.

        Returns:
            A number.
        """
        raise fpipe.errors.StageError(x)

    assert set(gaps("fn", fn)) == {
        "more in Args",
        "y in Args",
        "no z, which is explained",
        "'A number.' repeats the signature",
        "'x: the number.' repeats the signature",
        "an example",
    }

    def other() -> int:
        """Do.

        >>> 1
        1
        """
        return 1

    assert set(gaps("other", other)) == {"Returns"}
    assert raised(fpipe.grad) == set()
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
    assert "fpipe.Timeline.peak" in headings, "a cached property"
    assert "fpipe.Solved.gap" in headings and "fpipe.Solved.check" not in headings
    assert "all members of [`fpipe.Schedule`](schedules.md#fpipe.Schedule)" in page


def globals_of(table: symtable.SymbolTable) -> set[str]:
    """The global names that functions inside of a piece of code read."""
    found: set[str] = set()
    for inner in table.get_children():
        found |= {symbol.get_name() for symbol in inner.get_symbols() if symbol.is_global()}
        found |= globals_of(inner)
    return found


def test_examples_of_the_reference_import_what_they_use():
    """Doctests have the names of their module; a reader has those that he sees, and can copy the
    code, which has no prompts.
    """
    page = "\n".join(hooks.reference().values())
    entries = re.split(r"(?m)^#{3,4} (fpipe\S+) {.*$", page)[1:]
    for name, text in zip(entries[::2], entries[1::2], strict=True):
        source = "".join(re.findall(r"```py\n(.*?)```", text, re.S))
        table = symtable.symtable(source, name, "exec")
        own = table.get_symbols()
        read = {symbol.get_name() for symbol in own} | globals_of(table)
        bound = {s.get_name() for s in own if s.is_assigned() or s.is_imported()}
        missing = sorted(read - bound - vars(builtins).keys())
        assert not missing, f"the example of {name} uses {missing}"
    assert "\nfrom fpipe.interop import bind\n" in page and ">>>" not in page


def test_names_in_texts_of_the_reference_are_links():
    page = hooks.reference()["reference/pipelines.md"]
    text = page[page.index("{#fpipe.pipeline}") : page.index("{#fpipe.value_and_grad}")]
    for link in (
        "[`fpipe.Stage`](stages.md#fpipe.Stage)",
        "[`fpipe.weighted(fn)`](pipelines.md#fpipe.weighted)",
        "[`Stage(engine=)`](stages.md#fpipe.Stage)",
        "* [`StageError`](runs.md#fpipe.errors): ",
    ):
        assert link in text
    assert "`compile`: " in text and "[`compile`]" not in text, "an argument is no link"
    assert text.count("from fpipe import") == 1


def test_signatures_link_to_their_types_and_show_no_addresses():
    pages = hooks.reference()
    page = pages["reference/pipelines.md"]
    source = re.search(r'<a href="#(type.ScheduleSource)" title="([^"]*)">ScheduleSource</a>', page)
    assert source and "Callable[[int, int], Schedule]" in source[2]
    assert f'* <span id="{source[1]}"></span>`ScheduleSource`: `Name | str |' in page
    assert '<a href="stages.html#fpipe.Stage"' in page
    for text in pages.values():
        assert not re.search(r" at 0x[0-9a-f]+", text)
        for place in re.findall(r'<a href="#(type[^"]+)"', text):
            assert f'<span id="{place}">' in text
    assert '</span> <span class="o">...</span>' in pages["reference/stages.md"], "of a lambda"


def test_what_functions_return_has_an_entry():
    """A class with public members, that a public function returns, is explained on its page."""
    text = "\n".join(hooks.reference().values())
    for name in hooks.RESULTS:
        assert f" {{#{name}.{hooks.RESULTS[name].partition(':')[2]}}}\n" in text
    for member in ("costs", "simulated", "draw(width", "plot(ax", "save(path"):
        assert f"* `result.{member}" in text
    assert "`result.priced" not in text
    assert '<a href="#fpipe.Pipeline.explain.Explanation">Explanation</a>' in text
    without = {
        one.name
        for value in PUBLIC.values()
        if callable(value) and not inspect.isclass(value)
        for name in re.findall(r"[A-Z]\w+", str(inspect.signature(value).return_annotation))
        for module in hooks._modules_of(value)
        if (one := hooks.types_of.found(module, name)) and not one.alias
        if hooks._href(one, "").startswith("#type")
    }
    assert without == OPAQUE


#: what users pass on and do not read, and groups, which ``fpipe.init`` and ``fpipe.local`` explain
OPAQUE = {"Absent", "Automatic", "C10dGroup", "Copies", "Elastic", "LocalGroup", "MeshGroup"} | {
    "Unpad",
    "Weighted",
}


def test_what_a_call_returns_is_a_list():
    """It was one paragraph of seven cases."""
    doc = inspect.getdoc(fpipe.value_and_grad) or ""
    shown = hooks.markdown(doc, "fpipe.value_and_grad")
    assert "\n* `value_and_grad(pipe, (0, 1))`: `(loss, (grads, dx))`.\n" in shown

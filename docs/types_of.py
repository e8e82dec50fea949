"""Where the types of signatures are defined: aliases and classes, found in the source.

Annotations are text, and some of their names are imported for type checkers alone, so imports are
read from the source.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple


class Type(NamedTuple):
    """A type of the package: its module and name, what an alias stands for, and what is said of
    it.
    """

    module: str
    name: str
    alias: str  #: empty for a class
    about: str

    @property
    def value(self) -> Any:
        """The class, or the alias as an object."""
        return getattr(import_module(self.module), self.name)

    @property
    def names(self) -> list[str]:
        """The types that an alias names."""
        return list(dict.fromkeys(re.findall(r"\b[A-Z]\w*", re.sub(r"'[^']*'", "", self.alias))))


@cache
def found(module: str, name: str) -> Type | None:
    """The type of this name as a module of the package has it; None if it is of another package.

    >>> found("fpipe.engine.gradients", "Argnums").alias
    'Literal[0, 1] | tuple[Literal[0, 1], ...]'
    >>> found("fpipe.passes.profile.profiling", "Axes") is None
    True
    """
    source = _source(module)
    for node in _statements(module):
        if isinstance(node, ast.ImportFrom):
            there = importlib.util.resolve_name(
                "." * node.level + (node.module or ""), _package(module)
            )
            for one in node.names:
                if (one.asname or one.name) == name:
                    return found(there, one.name) if there.startswith("fpipe") else None
        elif isinstance(node, ast.ClassDef) and node.name == name:
            return Type(module, name, "", ast.get_docstring(node) or "")
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if (
                node.target.id == name
                and node.value
                and "TypeAlias" in ast.unparse(node.annotation)
            ):
                return Type(module, name, plain(ast.unparse(node.value)), _above(source, node))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            bound = [plain(ast.unparse(k.value)) for k in node.value.keywords if k.arg == "bound"]
            if bound and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
                return Type(module, name, bound[0], _above(source, node))
    return None


def plain(annotation: str) -> str:
    """An annotation without the modules of its types, and without quotes around names.

    >>> plain("'torch.Tensor' | Literal['mean']")
    "Tensor | Literal['mean']"
    """
    text = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", annotation)
    inner = re.compile(r"(Literal\[[^\]]*\])|'([^']*)'")
    return inner.sub(lambda part: part[1] or part[2], text)


@cache
def _statements(module: str) -> list[ast.stmt]:
    """Statements of a module, and those that type checkers alone read."""
    body = ast.parse(_source(module)).body
    return [one for node in body for one in (node.body if isinstance(node, ast.If) else [node])]


@cache
def _source(module: str) -> str:
    return inspect.getsource(import_module(module))


def _package(module: str) -> str:
    return import_module(module).__package__ or module


def _above(source: str, node: ast.stmt) -> str:
    """The comment ``#:`` above a statement."""
    lines = source.splitlines()[: node.lineno - 1]
    said: list[str] = []
    while lines and lines[-1].startswith("#:"):
        said.insert(0, lines.pop()[2:].strip())
    return " ".join(said)

"""Measures the structure of a checkout of fpipe from its source: sizes, imports, mutated classes,
ignores.

    python tests/helpers/structure.py          # this checkout
    python tests/helpers/structure.py ROOT     # another one, say an older commit

``tests/whole/test_layout.py`` asserts limits on the same figures. Reads source by ``ast`` and
imports nothing of it.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
LONG = 50  #: lines of a function that counts as long, beside its docstring
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}  #: tokens that are no code
CONSTRUCTORS = {"__init__", "__post_init__", "__new__"}
MUTATORS = {
    "append",
    "appendleft",
    "add",
    "update",
    "pop",
    "popitem",
    "popleft",
    "clear",
    "extend",
    "insert",
    "remove",
    "discard",
    "setdefault",
}


class Import(NamedTuple):
    """An imported dotted name, absolute, and whether only type checkers read it."""

    target: str
    line: int
    type_only: bool


@dataclass(frozen=True)
class Module:
    """One file; ``name`` is dotted, without the leading ``fpipe.``, and empty for
    ``fpipe/__init__.py``.
    """

    name: str
    path: Path
    text: str = field(repr=False)

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree."""
        return tuple(ast.walk(self.tree))

    @property
    def entry(self) -> str:
        """The package or module directly in ``fpipe/`` that holds this file."""
        return self.name.partition(".")[0]

    @property
    def lines(self) -> int:
        """All lines."""
        return self.text.count("\n")

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Every import, wherever it is in the file."""
        return tuple(self._imports())

    def _imports(self) -> Iterator[Import]:
        blocks = [node for node in self.nodes if _is_type_checking(node)]
        type_only = {
            id(node) for block in blocks for statement in block.body for node in ast.walk(statement)
        }
        package = ["fpipe", *filter(None, self.name.split("."))]
        if self.path.name != "__init__.py":
            package.pop()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from (
                    Import(alias.name, node.lineno, id(node) in type_only) for alias in node.names
                )
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                base = base + (node.module.split(".") if node.module else [])
                for alias in node.names:
                    yield Import(".".join([*base, alias.name]), node.lineno, id(node) in type_only)

    @cached_property
    def functions(self) -> tuple[Function, ...]:
        """All functions and methods."""
        return tuple(node for node in self.nodes if isinstance(node, Function))

    @cached_property
    def lines_of_code(self) -> set[int]:
        """The numbers of lines with code: no blank lines, comments or docstrings."""
        docstrings = self._docstrings()
        return {
            number
            for token in self._tokens
            for number in range(token.start[0], token.end[0] + 1)
            if number not in docstrings
        }

    @property
    def code_lines(self) -> int:
        """The number of lines with code."""
        return len(self.lines_of_code)

    @cached_property
    def tokens(self) -> int:
        """The number of tokens of code. Lines can be packed, tokens cannot."""
        docstrings = self._docstrings()
        return sum(token.start[0] not in docstrings for token in self._tokens)

    @cached_property
    def _tokens(self) -> list[tokenize.TokenInfo]:
        found = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [token for token in found if token.type not in LAYOUT]

    def _docstrings(self) -> set[int]:
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = (node.body[0] for node in self.nodes if isinstance(node, documented) and node.body)
        texts = (
            node
            for node in nodes
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        )
        return {
            line
            for node in texts
            if isinstance(node.value.value, str)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }

    @cached_property
    def ignores(self) -> int:
        """Comments that silence a type checker."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        comments = (token.string for token in tokens if token.type == tokenize.COMMENT)
        return sum("type: ignore" in text or "pyright:" in text for text in comments)

    @cached_property
    def anys(self) -> int:
        """Uses of ``Any``."""
        return sum(isinstance(node, ast.Name) and node.id == "Any" for node in self.nodes)

    @cached_property
    def group_getattrs(self) -> int:
        """Calls ``getattr(group, ...)``, also of an attribute named so."""
        return sum(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "getattr"
            and ast.unparse(node.args[0]).rpartition(".")[2].lstrip("_") == "group"
            for node in self.nodes
        )

    @cached_property
    def mutated_classes(self) -> tuple[str, ...]:
        """Classes with a method other than the constructor that changes ``self`` or a container in
        it.
        """
        classes = (node for node in self.nodes if isinstance(node, ast.ClassDef))
        return tuple(
            node.name for node in classes if any(_mutates(method) for method in _methods(node))
        )


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def _methods(node: ast.ClassDef) -> Iterator[Function]:
    return (
        part for part in node.body if isinstance(part, Function) and part.name not in CONSTRUCTORS
    )


def _mutates(method: Function) -> bool:
    for node in ast.walk(method):
        stored = isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(
            node.ctx, (ast.Store, ast.Del)
        )
        called = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in MUTATORS
        )
        if (stored and _in_self(node)) or (called and _in_self(node.func.value)):
            return True
    return False


def _in_self(node: ast.expr) -> bool:
    """Whether an expression is ``self.x``, or an attribute or item in it."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            return True
        node = node.value
    return False


def length(node: Function) -> int:
    """The lines of a function beside its docstring, which for a public name lists every
    argument.
    """
    text = node.body[0]
    docstring = (text.end_lineno or 0) - text.lineno + 1 if ast.get_docstring(node) else 0
    return (node.end_lineno or 0) - node.lineno + 1 - docstring


# ---- the package ----
@dataclass(frozen=True)
class Package:
    """All files of ``fpipe/`` in a checkout."""

    root: Path

    @cached_property
    def modules(self) -> dict[str, Module]:
        """Files by dotted name."""
        named = {}
        for path in sorted(self.root.rglob("*.py")):
            parts = path.relative_to(self.root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            named[name] = Module(name, path, path.read_text(encoding="utf-8"))
        return named

    @property
    def entries(self) -> tuple[list[str], list[str]]:
        """Python files and folders directly in the package."""
        folders = {
            path.relative_to(self.root).parts[0]
            for path in self.root.glob("*/**/*")
            if path.is_file()
        }
        return [path.name for path in sorted(self.root.glob("*.py"))], sorted(
            folders - {"__pycache__"}
        )

    def inner_imports(self, module: Module) -> Iterator[Import]:
        """The imports of files of this package, each by the name of the file."""
        for found in module.imports:
            if found.target.partition(".")[0] == "fpipe":
                parts = found.target.split(".")[1:]
                names = (".".join(parts[:count]) for count in range(len(parts), -1, -1))
                yield found._replace(target=next(name for name in names if name in self.modules))

    def file_graph(self, *, type_only: bool = True) -> dict[str, set[str]]:
        """Which file imports which; without those that only type checkers read where ``type_only``
        is false.

        The table of public names is left out: it names files for type checkers and imports none.
        """
        return {
            name: {
                found.target
                for found in self.inner_imports(module)
                if type_only or not found.type_only
            }
            - {name, ""}
            for name, module in self.modules.items()
            if name
        }

    def entry_graph(self, *, type_only: bool = True) -> dict[str, set[str]]:
        """Which package or top-level module imports which."""
        graph: dict[str, set[str]] = {}
        for name, targets in self.file_graph(type_only=type_only).items():
            entry = name.partition(".")[0]
            graph.setdefault(entry, set()).update(
                {target.partition(".")[0] for target in targets} - {entry}
            )
        return graph

    @property
    def levels(self) -> int:
        """The number of packages in the longest chain of imports; packages in a cycle count as
        one.
        """
        return _levels(self.entry_graph(type_only=False))

    @property
    def cycles(self) -> list[list[str]]:
        """Groups of files that import each other, type-only imports included."""
        return [sorted(group) for group in _components(self.file_graph()) if len(group) > 1]

    @property
    def single_importer(self) -> list[str]:
        """Modules whose only importer is in another package: parts of that importer that are stored
        elsewhere.
        """
        graph = self.file_graph(type_only=False)
        importers: dict[str, set[str]] = {}
        for name, targets in graph.items():
            for target in targets:
                importers.setdefault(target, set()).add(name)
        alone = {
            target: next(iter(names)) for target, names in importers.items() if len(names) == 1
        }
        return sorted(
            target
            for target, name in alone.items()
            if target.partition(".")[0] != name.partition(".")[0]
        )

    @property
    def long_functions(self) -> list[str]:
        """Functions over ``LONG`` lines."""
        return [
            f"{name}.{node.name}"
            for name, module in self.modules.items()
            for node in module.functions
            if length(node) > LONG
        ]

    @property
    def mutated_classes(self) -> list[str]:
        """Classes that methods change after construction."""
        return [
            f"{name}.{cls}"
            for name, module in self.modules.items()
            for cls in module.mutated_classes
        ]

    def total(self, figure: str) -> int:
        """The sum of a figure of all modules."""
        return sum(getattr(module, figure) for module in self.modules.values())


def _components(graph: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected components: groups of nodes that reach each other."""
    reach = {node: _reachable(graph, node) for node in graph}
    groups: list[set[str]] = []
    for node in graph:
        if not any(node in group for group in groups):
            groups.append({node} | {other for other in reach[node] if node in reach.get(other, ())})
    return groups


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    pending = list(graph.get(start, ()))
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += graph.get(node, ())
    return seen


def _levels(graph: dict[str, set[str]]) -> int:
    groups = _components(graph)
    of = {node: index for index, group in enumerate(groups) for node in group}
    depths: dict[int, int] = {}

    def depth(index: int) -> int:
        if index not in depths:
            below = {
                of[target] for node in groups[index] for target in graph[node] if target in of
            } - {index}
            depths[index] = 1 + max(map(depth, below), default=0)
        return depths[index]

    return max(map(depth, range(len(groups))), default=0)


def table(package: Package) -> list[tuple[str, int]]:
    """The figures, each with its description."""
    files, folders = package.entries
    return [
        ("Python files directly in fpipe/", len(files)),
        ("folders directly in fpipe/", len(folders)),
        ("import levels between packages", package.levels),
        ("cycles between files, type-only imports included", len(package.cycles)),
        ("modules whose only importer is in another package", len(package.single_importer)),
        ("getattr(group, ...)", package.total("group_getattrs")),
        ("classes that are mutated after construction", len(package.mutated_classes)),
        ("code lines, without blanks, comments and docstrings", package.total("code_lines")),
        ("tokens of code", package.total("tokens")),
        (f"functions over {LONG} lines", len(package.long_functions)),
        ("uses of Any", package.total("anys")),
        ("ignores for type checkers", package.total("ignores")),
    ]


def main(root: str = "") -> None:
    """Print the table, code lines per package, and what the counts stand for."""
    package = Package((Path(root) if root else Path(__file__).resolve().parents[2]) / "fpipe")
    for description, value in table(package):
        print(f"{value:7,}  {description}")
    per_entry: Counter[str] = Counter()
    for module in package.modules.values():
        per_entry[module.entry or "__init__"] += module.code_lines
    print(
        "\ncode lines: "
        + ", ".join(f"{entry} {count:,}" for entry, count in per_entry.most_common())
    )
    print("\ncycles: " + "; ".join(" ".join(group) for group in package.cycles))
    for label in ("single_importer", "mutated_classes", "long_functions"):
        print(f"\n{label.replace('_', ' ')}: " + ", ".join(getattr(package, label)))


if __name__ == "__main__":
    main(*sys.argv[1:])

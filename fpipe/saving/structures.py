# SPDX-License-Identifier: Apache-2.0
"""Structures of parameters of functions, as a manifest records them: of stages and parts by name,
and of numbered blocks, so that stages of another cut find theirs. This module must not know files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import optree

from .. import tree
from ..collectives.codec import Node, Special, from_node, to_node, under
from ..errors import CheckpointError
from .leaf_names import Names, StageNames, after

T = TypeVar("T")


class Described(NamedTuple):
    """The structure of a stage's parameters, of its parts by name, and of numbered blocks by name
    and number.
    """

    node: Node
    stages: dict[str, Node]
    layers: dict[str, dict[str, Node]]
    rest: list[str]  # paths of the leaves outside of all parts


def describe_stage(names: Names, stage: int, params: tree.Tree) -> Described:
    """The structure of the parameters of one stage, with names for leaves."""
    of = names.stages[stage]
    parts: dict[str, Node] = {}
    layers: dict[str, dict[str, Node]] = {}
    rest: list[str] = []

    def leaf(value: tree.Tree, path: str) -> Node:
        if tree.is_tensor(value):
            return ["leaf", names.of(stage, path)]
        if value is None or not optree.tree_is_leaf(value, namespace=tree.NAMESPACE):
            return NotImplemented
        return ["at", names.of(stage, path), to_node(value, path)]

    def special(value: tree.Tree, path: str) -> object:
        part = of.parts.get(path)
        if part is None:
            node = leaf(value, path)
            if node is not NotImplemented:
                rest.append(path)
            return node
        if part.numbers is None:
            parts[part.name] = to_node(value, path, leaf, fields=False)
            return ["part", part.name]
        if not isinstance(value, (list, tuple)) or len(value) != len(part.numbers):
            if isinstance(value, (list, tuple)):
                size = len(value)
            else:
                size = f"a {type(value).__name__}"
            raise CheckpointError(
                f"layers= of stage {stage} numbers {len(part.numbers)} blocks, "
                f"{list(part.numbers)}, and its parameters have {size} at {path or 'the top'!r}; "
                "number each block of the list"
            )
        layers.setdefault(part.name, {}).update(
            (str(n), to_node(block, under(path, i), leaf, fields=False))
            for i, (n, block) in enumerate(zip(part.numbers, value, strict=True))
        )
        return ["layers", part.name, type(value).__name__]

    return Described(to_node(params, "", special, fields=False), parts, layers, rest)


def composed(of: StageNames) -> Node:
    """The structure of a stage all of whose leaves are in parts: nested dicts, or the only part."""
    return nested(
        {
            path: ["part", name] if numbers is None else ["layers", name, "list"]
            for path, name, numbers in of.parts.values()
        }
    )


def nested(rows: Mapping[str, Node]) -> Node:
    """Nested dicts with nodes at dotted paths.

    >>> nested({"a.b": ["none"], "c": ["none"]})
    ['dict', [['a', ['dict', [['b', ['none']]]]], ['c', ['none']]]]
    """
    if "" in rows:
        return rows[""]
    return ["dict", [[head, nested(below)] for head, below in by_head(rows).items()]]


def by_head(rows: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Values by the first part of a dotted path, and by the rest of it.

    >>> by_head({"a.b": 1, "a.c.d": 2, "e": 3})
    {'a': {'b': 1, 'c.d': 2}, 'e': {'': 3}}
    """
    heads: dict[str, dict[str, T]] = {}
    for path, value in rows.items():
        head, _, rest = path.partition(".")
        heads.setdefault(head, {})[rest] = value
    return heads


def tied_parts(names: Names, stage: int) -> dict[str, Node]:
    """Structures of the parts of a stage that have tied leaves, if they have no others."""
    parts: dict[str, Node] = {}
    for head, name in names.stages[stage].heads.items():
        rows: dict[str, Node] = {}
        for path, key in names.tied_leaves(stage).items():
            rest = after(path, head)
            if rest is not None:
                rows[rest] = ["leaf", key]
        if rows:
            parts[name] = nested(rows)
    return parts


class Structures(NamedTuple):
    """Recorded structures: of stages and parts by name, and of blocks by list and number."""

    stages: Mapping[str, Node]
    layers: Mapping[str, Mapping[str, Node]]

    def expand(self, of: StageNames, leaf: Special) -> tree.Tree:
        """The parameters of a stage; ``leaf`` decides on leaves.

        The structure is recorded under the name of the stage, or composed of its parts.
        """
        numbers = {part.name: part.numbers for part in of.parts.values()}

        def special(node: Node, path: str) -> object:
            if node[0] == "part":
                return from_node(self.stage(node[1]), path, special)
            if node[0] != "layers":
                if node[0] in ("leaf", "at"):
                    return leaf(node, path)
                return NotImplemented
            name = node[1]
            if numbers.get(name) is None:
                raise CheckpointError(
                    f"stage {of.index} ({of.prefix}) has a list of blocks {name!r} at {path!r}; "
                    "number them with layers="
                )
            blocks = [
                from_node(self.block(name, n), under(path, i), special)
                for i, n in enumerate(numbers[name] or ())
            ]
            if node[2] == "tuple":
                return tuple(blocks)
            return blocks

        if of.prefix in self.stages or not of.parts:
            whole = self.stage(of.prefix)
        else:
            whole = composed(of)
        return from_node(whole, "", special)

    def stage(self, name: str) -> Node:
        """The structure of a stage or a part."""
        if name not in self.stages:
            there = ", ".join(map(repr, self.stages)) or "parameters of modules alone"
            raise CheckpointError(
                f"the checkpoint has no stage or part {name!r}; it has {there}: give stages the "
                "names they had, as in Stage(fn, name=...), name parts and number blocks with "
                "Stage(fn, layers=...), or pass like=params"
            )
        return self.stages[name]

    def block(self, name: str, number: int) -> Node:
        """The structure of a numbered block."""
        blocks = self.layers.get(name, {})
        if str(number) not in blocks:
            there = ", ".join(blocks) or "none"
            raise CheckpointError(
                f"the checkpoint has no layer {name}.{number}; it has {there}: number layers= as "
                "when it was saved"
            )
        return blocks[str(number)]

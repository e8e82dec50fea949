# SPDX-License-Identifier: Apache-2.0
"""Structures of parameters of functions, as a manifest records them: of stages and parts by name,
and of numbered blocks, so that stages of another cut find theirs. This module must not know files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import tree
from ..collectives.codec import Node, Nodes, Special, from_node, to_node, under
from ..errors import CheckpointError
from .leaf_names import Names, StageNames, StageTree, after


def describe_stage(
    of: StageNames, here: StageTree, params: tree.Tree
) -> tuple[Structures, Node | None]:
    """The structures of a stage's parts, with names for leaves; and of the stage, None where all of
    its leaves are in parts.
    """
    keys = {leaf.path: leaf.key for leaf in here.leaves}
    stages: dict[str, Node] = {}
    layers: dict[str, dict[str, Node]] = {}
    rest: list[str] = []  # paths of the leaves outside of all parts

    def leaf(value: tree.Tree, path: str) -> Node:
        if tree.is_tensor(value):
            return ["leaf", keys[path]]
        if path in keys:
            return ["at", keys[path], to_node(value, path)]
        return NotImplemented

    def special(value: tree.Tree, path: str) -> object:
        part = of.parts.get(path)
        if part is None:
            if path in keys:
                rest.append(path)
            return leaf(value, path)
        if part.numbers is None:
            stages[part.name] = to_node(value, path, leaf, fields=False)
            return ["part", part.name]
        size = len(value) if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"
        if size != len(part.numbers):
            raise CheckpointError(
                f"layers= of stage {of.index} numbers {len(part.numbers)} blocks, "
                f"{list(part.numbers)}, and its parameters have {size} at {path or 'the top'!r}; "
                "number each block of the list"
            )
        layers.setdefault(part.name, {}).update(
            (str(n), to_node(block, under(path, i), leaf, fields=False))
            for i, (n, block) in enumerate(zip(part.numbers, value, strict=True))
        )
        return ["layers", part.name, type(value).__name__]

    found = Structures(stages, layers)
    node = to_node(params, "", special, fields=False)
    if rest or not of.parts:
        return found, node
    if tree.flatten(found.expand(of, lambda node, path: 0))[1] != here.spec:
        raise CheckpointError(
            f"layers= of stage {of.index} has the paths {list(of.parts)}, and its parameters are "
            "not nested dicts with these keys, and lists of blocks; use such, so that they can "
            "be put together again"
        )
    return found, None


def nested(rows: Mapping[str, Any], *, lists: bool = False) -> tree.Tree:
    """Nested dicts with values at dotted paths; with ``lists``, those whose keys count from 0 are
    lists.

    >>> nested({"a.b": 1, "c.0": 2}), nested({"a.b": 1, "c.0": 2}, lists=True)
    ({'a': {'b': 1}, 'c': {'0': 2}}, {'a': {'b': 1}, 'c': [2]})
    """
    if "" in rows:
        return rows[""]
    heads: dict[str, dict[str, Any]] = {}
    for path, value in rows.items():
        head, _, rest = path.partition(".")
        heads.setdefault(head, {})[rest] = value
    below = {head: nested(part, lists=lists) for head, part in heads.items()}
    numbers = [str(number) for number in range(len(below))]
    if lists and below.keys() == set(numbers):
        return [below[number] for number in numbers]
    return below


def node_of(rows: Nodes) -> Node:
    """The structure of nested dicts with nodes at dotted paths.

    >>> node_of({"a.b": ["none"], "c": ["none"]})
    ['dict', [['a', ['dict', [['b', ['none']]]]], ['c', ['none']]]]
    """
    return to_node(nested(rows), "", lambda part, path: part)


def tied_parts(names: Names, stage: int) -> dict[str, Node]:
    """Structures of the parts of a stage that have tied leaves, if they have no others."""
    parts = {}
    for head, name in names.stages[stage].heads.items():
        rows = {
            rest: ["leaf", key]
            for path, key in names.tied_leaves(stage).items()
            if (rest := after(path, head)) is not None
        }
        if rows:
            parts[name] = node_of(rows)
    return parts


class Structures(NamedTuple):
    """Recorded structures: of stages and parts by name, and of blocks by list and number."""

    stages: Nodes
    layers: Mapping[str, Nodes]

    def expand(self, of: StageNames, leaf: Special) -> tree.Tree:
        """The parameters of a stage; ``leaf`` decides on leaves.

        The structure is recorded under the name of the stage, or composed of its parts.
        """
        numbers_of = {part.name: part.numbers for part in of.parts.values()}

        def special(node: Node, path: str) -> object:
            if node[0] == "part":
                return from_node(self.stage(node[1]), path, special)
            if node[0] != "layers":
                if node[0] in ("leaf", "at"):
                    return leaf(node, path)
                return NotImplemented
            name = node[1]
            numbers = numbers_of.get(name)
            if numbers is None:
                raise CheckpointError(
                    f"stage {of.index} ({of.prefix}) has a list of blocks {name!r} at {path!r}; "
                    "number them with layers="
                )
            blocks = [
                from_node(self.block(name, n), under(path, i), special)
                for i, n in enumerate(numbers)
            ]
            if node[2] == "tuple":
                return tuple(blocks)
            return blocks

        if of.prefix in self.stages or not of.parts:
            whole = self.stage(of.prefix)
        else:  # all leaves are in parts: nested dicts, or the only part
            whole = node_of(
                {
                    path: ["part", name] if numbers is None else ["layers", name, "list"]
                    for path, (name, numbers) in of.parts.items()
                }
            )
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
            raise CheckpointError(
                f"the checkpoint has no layer {name}.{number}; it has "
                f"{', '.join(blocks) or 'none'}: number layers= as when it was saved"
            )
        return blocks[str(number)]

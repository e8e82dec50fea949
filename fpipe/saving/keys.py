# SPDX-License-Identifier: Apache-2.0
"""Names of leaves in the whole model: those of a module, of a stage with a name, or of numbered
blocks.

They do not depend on the cut where modules, names or ``layers=`` define them; a stage without
either is called by its number. Tied leaves have one name. This module must not know files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import optree

from .. import tree
from ..collectives.codec import Node, Special, from_node, to_node, under
from ..errors import CheckpointError
from ..passes.copies.sharding import Layout
from ..stage import Stage
from ._pipe import Pipe


class Part(NamedTuple):
    """A subtree of the parameters of a stage: its path, its name in the model, and numbers of its
    blocks.
    """

    path: str
    name: str
    numbers: tuple[int, ...] | None = None


@dataclass(frozen=True)
class StageNames:
    """The names of the leaves of one stage."""

    index: int
    stage: Stage

    @property
    def prefix(self) -> str:
        """What the names of leaves outside of all parts begin with."""
        return self.stage.name or str(self.index)

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The parts with names or numbers, by path."""
        layers = self.stage.layers
        if layers is None:
            return {}
        if not isinstance(layers, Mapping):
            return {"": Part("", self.stage.name or "layers", tuple(layers))}
        return {
            path: Part(path, value) if isinstance(value, str) else Part(path, path, tuple(value))
            for path, value in layers.items()
        }

    def key(self, path: str) -> str:
        """The name of the leaf at a path of the stage's parameters.

        >>> StageNames(3, Stage(max, layers=range(4, 8))).key("1.w"), StageNames(3,
        ...     Stage(max)).key("w")
        ('layers.5.w', '3.w')
        >>> StageNames(0, Stage(max, layers={"in": "embed", "blocks": range(3)})).key("in.w")
        'embed.w'
        """
        if self.stage.weights is not None:
            return self.stage.weights[path].key if path in self.stage.weights else path
        for part in self.parts.values():
            rest = path if not part.path else path.removeprefix(part.path).removeprefix(".")
            if part.path and path != part.path and not path.startswith(f"{part.path}."):
                continue
            if part.numbers is None:
                return under(part.name, rest) if rest else part.name
            number, _, below = rest.partition(".")
            if number.isdigit() and int(number) < len(part.numbers):
                block = under(part.name, part.numbers[int(number)])
                return under(block, below) if below else block
        return under(self.prefix, path) if path else self.prefix


@dataclass(frozen=True)
class Names:
    """The names of all leaves of a pipeline."""

    pipe: Pipe

    @cached_property
    def stages(self) -> tuple[StageNames, ...]:
        """By stage."""
        return tuple(
            StageNames(index, stage) for index, stage in enumerate(self.pipe.config.functions)
        )

    @cached_property
    def ties(self) -> dict[tuple[int, str], tuple[str, int]]:
        """By stage and path of a tied leaf: name and stage of the first leaf of its group."""
        found: dict[tuple[int, str], tuple[str, int]] = {}
        for group in self.pipe.tied:
            members = sorted(
                (int(head), path) for head, _, path in (name.partition(".") for name in group)
            )
            first = self.stages[members[0][0]].key(members[0][1]), members[0][0]
            for member in members:
                found.setdefault(member, first)
        return found

    def of(self, stage: int, path: str) -> str:
        """The name of a leaf; that of the first leaf of its group where it is tied."""
        tied = self.ties.get((stage, path))
        return self.stages[stage].key(path) if tied is None else tied[0]

    def first(self, stage: int, path: str) -> int:
        """The stage that writes a leaf."""
        return self.ties.get((stage, path), ("", stage))[1]

    def tied_parts(self, stage: int) -> dict[str, Node]:
        """Structures of the parts of a stage that have tied leaves, if they have no others, by
        name.
        """
        of, rows = self.stages[stage], dict[str, dict[str, Node]]()
        for (member, path), (key, _) in self.ties.items():
            parts = of.parts.values() if of.parts else [Part("", of.prefix)]
            for part in parts if member == stage else ():
                inside = not part.path or path == part.path or path.startswith(f"{part.path}.")
                if part.numbers is None and inside:
                    below = path.removeprefix(part.path).removeprefix(".")
                    rows.setdefault(part.name, {})[below] = ["leaf", key]
        return {name: nested(found) for name, found in rows.items()}


class StageTree(NamedTuple):
    """The parameters of a stage here: structure, leaves and names, in the order of the leaves; and
    their layout.
    """

    stage: int
    spec: tree.Structure
    leaves: list[Any]
    paths: list[str]
    keys: list[str]
    own: list[bool]  # each copy of the pipeline has its own
    layout: Layout | None  # of parts
    state: bool = False  # it is the state that the stage carries, and not its parameters

    def span(self, index: int) -> tuple[int, int] | None:
        """Which elements of a leaf this process has; None: all."""
        if self.layout is None or self.layout.shapes[index] is None:
            return None
        rows = (row for bucket in self.layout.buckets for row in self.layout.pieces(bucket))
        return next((first, last) for leaf, first, last, _ in rows if leaf == index)

    def shape(self, index: int) -> tuple[int, ...]:
        """Of a whole leaf."""
        shape = None if self.layout is None else self.layout.shapes[index]
        return tuple(self.leaves[index].shape) if shape is None else shape


class Described(NamedTuple):
    """The structure of a stage's parameters, of its parts by name, and of numbered blocks by name
    and number.
    """

    node: Node
    parts: dict[str, Node]
    layers: dict[str, dict[str, Node]]
    rest: list[str]  # names of the leaves outside of all parts


def describe_stage(names: Names, stage: int, params: Any) -> Described:
    """The structure of the parameters of one stage, with names for leaves."""
    of = names.stages[stage]
    found = Described([], {}, {}, [])

    def special(value: Any, path: str, inside: bool = False) -> Any:
        def within(item, at):
            return to_node(
                item,
                at,
                lambda v, below: (
                    NotImplemented if below == at and v is item else special(v, below, True)
                ),
                fields=False,
            )

        part = None if inside else of.parts.get(path)
        if part is not None and part.numbers is None:
            found.parts[part.name] = _leaf(names, stage, value, path) or within(value, path)
            return ["part", part.name]
        if part is not None and part.numbers is not None:
            if not isinstance(value, (list, tuple)) or len(value) != len(part.numbers):
                raise CheckpointError(
                    f"layers= of stage {stage} numbers {len(part.numbers)} blocks, "
                    f"{list(part.numbers)}, and its "
                    f"parameters have {_size(value)} at {path or 'the top'!r}; number each block "
                    "of the list"
                )
            nodes = [
                to_node(v, under(path, i), lambda v, at: special(v, at, True), fields=False)
                for i, v in enumerate(value)
            ]
            found.layers.setdefault(part.name, {}).update(
                zip(map(str, part.numbers), nodes, strict=True)
            )
            return ["layers", part.name, type(value).__name__]
        node = _leaf(names, stage, value, path)
        if node is not None and not inside:
            found.rest.append(node[1])
        return NotImplemented if node is None else node

    return found._replace(node=to_node(params, "", special, fields=False))


def _leaf(names: Names, stage: int, value: Any, path: str) -> Node | None:
    """The node of a leaf: a tensor, or a value that stays with the structure."""
    if tree.is_tensor(value):
        return ["leaf", names.of(stage, path)]
    if value is None or not optree.tree_is_leaf(value, namespace=tree.NAMESPACE):
        return None
    return ["at", names.of(stage, path), to_node(value, path)]


def _size(value: Any) -> str:
    return f"{len(value)}" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"


def expand(
    node: Node,
    known: Mapping[str, Node],
    layers: Mapping[str, Mapping[str, Node]],
    of: StageNames,
    leaf: Special,
) -> Any:
    """The tree of a stage from its structure, with the parts and the blocks that it has; ``leaf``
    decides on leaves.
    """
    numbers = {part.name: part.numbers for part in of.parts.values() if part.numbers is not None}

    def special(node: Node, path: str) -> Any:
        if node[0] in ("leaf", "at"):
            return leaf(node, path)
        if node[0] == "part":
            return from_node(_known(known, node[1]), path, special)
        if node[0] != "layers":
            return NotImplemented
        if node[1] not in numbers:
            raise CheckpointError(
                f"stage {of.index} ({of.prefix}) has a list of blocks {node[1]!r} at {path!r}; "
                "number them with layers="
            )
        blocks = [
            from_node(block(layers, node[1], n), under(path, i), special)
            for i, n in enumerate(numbers[node[1]])
        ]
        return tuple(blocks) if node[2] == "tuple" else blocks

    return from_node(node, "", special)


def composed(of: StageNames) -> Node:
    """The structure of a stage all of whose leaves are in parts: nested dicts, or the only part."""
    rows = {
        p.path: ["part", p.name] if p.numbers is None else ["layers", p.name, "list"]
        for p in of.parts.values()
    }
    return nested(rows)


def nested(rows: Mapping[str, Node]) -> Node:
    """Nested dicts with nodes at dotted paths.

    >>> nested({"a.b": ["none"], "c": ["none"]})
    ['dict', [['c', ['none']], ['a', ['dict', [['b', ['none']]]]]]]
    """
    if "" in rows:
        return rows[""]
    heads: dict[str, dict[str, Node]] = {}
    plain: list[list[Any]] = []
    for path, node in rows.items():
        head, _, rest = path.partition(".")
        if rest:
            heads.setdefault(head, {})[rest] = node
        else:
            plain.append([head, node])
    return ["dict", plain + [[head, nested(below)] for head, below in heads.items()]]


def _known(known: Mapping[str, Node], name: str) -> Node:
    if name not in known:
        there = ", ".join(map(repr, known)) or "parameters of modules alone"
        raise CheckpointError(
            f"the checkpoint has no stage or part {name!r}; it has {there}: give stages the names "
            "they had, as in "
            "Stage(fn, name=...), name parts and number blocks with Stage(fn, layers=...), or "
            "pass like=params"
        )
    return known[name]


def structure_of(of: StageNames, known: Mapping[str, Node]) -> Node:
    """The structure of a stage: recorded under its name, or composed of its parts."""
    return composed(of) if of.parts and of.prefix not in known else _known(known, of.prefix)


def block(known: Mapping[str, Mapping[str, Node]], prefix: str, number: int) -> Node:
    """The structure of a numbered block."""
    node = known.get(prefix, {}).get(str(number))
    if node is None:
        there = ", ".join(known.get(prefix, {})) or "none"
        raise CheckpointError(
            f"the checkpoint has no layer {prefix}.{number}; it has {there}: number layers= as "
            "when it was saved"
        )
    return node


def stage_tree(
    names: Names, stage: int, params: Any, described: Described, *, whole: bool = False
) -> StageTree:
    """Leaves and names of one stage's parameters as they are on this process, ``whole`` or in
    parts.
    """
    pipe = names.pipe
    leaves, spec = tree.flatten(params)
    key_tree = expand(
        described.node,
        described.parts,
        described.layers,
        names.stages[stage],
        lambda node, _: node[1],
    )
    keys, key_spec = tree.flatten(key_tree)
    assert key_spec == spec, (key_spec, spec)
    paths = tree.names(params)
    own = [
        pipe.copies is not None and tree.matches(f"{stage}.{path}", pipe.copies.own)
        for path in paths
    ]
    layout = (
        pipe.cache.shares.check(stage, leaves)
        if pipe.parts is not None and leaves and not whole
        else None
    )
    return StageTree(stage, spec, leaves, paths, keys, own, layout)


def state_tree(names: Names, stage: int, value: Any) -> StageTree | None:
    """The state that a stage carries, with names: those of a module's buffers, or as those of other
    leaves.

    None if the value does not have the structure of the stage's initial state.
    """
    of = names.stages[stage]
    leaves, spec = tree.flatten(value)
    if not of.stage.state or spec != tree.flatten(of.stage.initial_state)[1]:
        return None
    paths = tree.names(value)
    keys = (
        paths
        if of.stage.weights is not None
        else [under(of.prefix, path) if path else of.prefix for path in paths]
    )
    return StageTree(stage, spec, leaves, paths, keys, [False] * len(leaves), None, state=True)

# SPDX-License-Identifier: Apache-2.0
"""Names of leaves in the whole model: those of a module, of a stage with a name, or of numbered
blocks.

They do not depend on the cut where modules, names or ``layers=`` define them; a stage without
either is called by its number. Tied leaves have one name. This module must not know files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from typing import NamedTuple

from .. import tree
from ..collectives.codec import under
from ..errors import CheckpointError
from ..passes.copies.sharding import Layout
from ..stage import Stage
from ._processes import Pipe


def after(path: str, head: str) -> str | None:
    """What follows a head in a dotted path; None if the path does not begin with it.

    >>> after("a.b.c", "a.b"), after("a.b", "a.b"), after("a.bc", "a.b"), after("a", "")
    ('c', '', None, 'a')
    """
    if not head or path == head:
        return path[len(head) :]
    if path.startswith(f"{head}."):
        return path[len(head) + 1 :]
    return None


def joined(head: str, path: str) -> str:
    """A dotted path of two, which may be empty."""
    return under(head, path) if path else head


class Part(NamedTuple):
    """A subtree of a stage's parameters: its name in the model, and numbers of its blocks."""

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
            return {"": Part(self.stage.name or "layers", tuple(layers))}
        return {
            path: Part(value) if isinstance(value, str) else Part(path, tuple(value))
            for path, value in layers.items()
        }

    @cached_property
    def heads(self) -> dict[str, str]:
        """The names of parts and of numbered blocks, by path; of a stage without them, its own."""
        heads = {}
        for path, (name, numbers) in self.parts.items():
            if numbers is None:
                heads[path] = name
            else:
                heads |= {under(path, i): under(name, n) for i, n in enumerate(numbers)}
        if self.parts:
            return heads
        return {"": self.prefix}

    def key(self, path: str) -> str:
        """The name of the leaf at a path of the stage's parameters.

        >>> StageNames(3, Stage(max, layers=range(4, 8))).key("1.w"), StageNames(3,
        ...     Stage(max)).key("w")
        ('layers.5.w', '3.w')
        >>> StageNames(0, Stage(max, layers={"in": "embed", "blocks": range(3)})).key("in.w")
        'embed.w'
        """
        if self.stage.weights is not None:
            if path in self.stage.weights:
                return self.stage.weights[path].key
            return path
        for head, name in self.heads.items():
            rest = after(path, head)
            if rest is not None:
                return joined(name, rest)
        return joined(self.prefix, path)


class StageLeaf(NamedTuple):
    """A leaf of a stage here: its path in the stage, its name in the model, and its value."""

    path: str
    key: str
    value: tree.Tree
    shape: tuple[int, ...] = ()  # of the whole leaf
    span: tuple[int, int] | None = None  # which of its elements are here; None: all
    own: bool = False  # whether each copy of the pipeline has its own
    home: int | None = None  # of a tied leaf: the stage that writes it


class StageTree(NamedTuple):
    """The parameters of a stage, or the state that it carries, as they are on this process."""

    stage: int
    spec: tree.Structure
    leaves: list[StageLeaf]
    layout: Layout | None = None  # of parts
    state: bool = False


def spans(layout: Layout | None) -> dict[int, tuple[int, int]]:
    """Which elements of leaves are here, by the number of the leaf; all of those that lack."""
    if layout is None:
        return {}
    rows = (row for bucket in layout.buckets for row in layout.pieces(bucket))
    return {leaf: (first, last) for leaf, first, last, _ in rows}


@dataclass(frozen=True)
class Names:
    """The names of all leaves of a pipeline."""

    pipe: Pipe

    @cached_property
    def stages(self) -> tuple[StageNames, ...]:
        """By stage."""
        return tuple(starmap(StageNames, enumerate(self.pipe.config.functions)))

    @cached_property
    def ties(self) -> dict[tuple[int, str], tuple[str, int]]:
        """By stage and path of a tied leaf: name and stage of the first leaf of its group."""
        ties = {}
        for group in self.pipe.tied:
            split = (name.partition(".") for name in group)
            members = sorted((int(stage), path) for stage, _, path in split)
            stage, path = members[0]
            for member in members:
                ties.setdefault(member, (self.stages[stage].key(path), stage))
        return ties

    def tied_leaves(self, stage: int) -> dict[str, str]:
        """The names of the tied leaves of a stage, by path."""
        return {path: key for (s, path), (key, _) in self.ties.items() if s == stage}

    # ---- trees of a stage here ----
    def tree(
        self,
        stage: int,
        params: tree.Tree,
        *,
        whole: bool = False,
        state: bool = False,
    ) -> StageTree:
        """The parameters of a stage as they are on this process, ``whole`` or in parts; or its
        ``state``, by names of a module's buffers, or as those of leaves.
        """
        pipe = self.pipe
        of = self.stages[stage]
        prefix = of.prefix if of.stage.weights is None else ""
        own = () if pipe.copies is None else pipe.copies.own
        values, spec = tree.flatten(params)
        layout: Layout | None = None
        if pipe.parts is not None and values and not whole and not state:
            layout = pipe.cache.shares.check(stage, values)
        shapes = {} if layout is None else layout.shapes
        here = spans(layout)
        leaves: dict[str, StageLeaf] = {}
        for index, (path, value) in enumerate(zip(tree.names(params), values, strict=True)):
            shape = tuple(value.shape) if tree.is_tensor(value) else ()
            if state:
                leaf = StageLeaf(path, joined(prefix, path), value, shape)
            else:
                key, home = self.ties.get((stage, path), (of.key(path), None))
                is_own = tree.matches(f"{stage}.{path}", own)
                shape = shapes.get(index, shape)
                leaf = StageLeaf(path, key, value, shape, here.get(index), is_own, home)
            if path in leaves:
                raise CheckpointError(
                    f"two leaves are called {leaf.key!r}; rename a key that contains '.', or that "
                    "is a number beside the same text"
                )
            leaves[path] = leaf
        return StageTree(stage, spec, list(leaves.values()), layout, state)

    def states(self) -> dict[int, StageTree]:
        """What the stages here carry, as it is in the beginning."""
        return {
            index: self.tree(index, stage.initial_state, state=True)
            for index, stage in enumerate(self.pipe.config.functions)
            if stage.state and index in self.pipe.here
        }

    def expected(
        self,
        like: Sequence[tree.Tree] | None,
        recorded: Callable[[int], tree.Tree] = lambda stage: None,
    ) -> list[tree.Tree]:
        """Parameters of the stages here as they should be: of ``like``, of modules, or as they were
        ``recorded``.
        """
        if like is not None:
            self.pipe.config.check_params(like)
        trees: list[tree.Tree] = [None] * self.pipe.stages
        for stage in self.pipe.here:
            weights = self.stages[stage].stage.weights
            if like is not None:
                trees[stage] = like[stage]
            elif weights is not None:
                trees[stage] = {name: weight.like for name, weight in weights.items()}
            else:
                trees[stage] = recorded(stage)
        return trees


def misfit(stage: int, key: str, found: str | None, wanted: str) -> str:
    """What is wrong with a leaf, by dtype and shape; "" if it is as it should be.

    >>> misfit(3, "w", "float32[4]", "float32[5]"), misfit(3, "w", "int8[4]", "int8[4]")
    ("'w' is float32[4], and stage 3 takes float32[5]", '')
    """
    if found is None:
        return f"{key!r}, {wanted}, of stage {stage} is missing"
    if found == wanted:
        return ""
    return f"{key!r} is {found}, and stage {stage} takes {wanted}"

# SPDX-License-Identifier: Apache-2.0
"""What a process holds of the trees that are saved: structures as JSON, and tensors with their
places in leaves.

A list with one entry per stage, each of the form of that stage's parameters, is stored by
parameter; anything else as it is, and must be equal on all processes. This module must not know
how files are written.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import prod
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from .. import tree
from ..collectives.codec import Node, dtype_name, to_bytes, to_node
from ..errors import CheckpointError
from ._processes import Pipe, is_first
from .files import Entry, plain
from .leaf_names import Names, StageLeaf, StageTree
from .structures import describe_stage

#: Names of trees that would be taken for arguments of ``load``.
RESERVED = frozenset({"strict", "like", "wait", "path", "pipe"})
#: Nested dicts of JSON, which are merged with those of other processes.
Facts: TypeAlias = dict[str, Any]


class Place(NamedTuple):
    """A tensor here: the leaf of which it is elements ``first`` to ``last``, and the part of the
    model it is in.

    ``write``: this process writes it; otherwise it is compared with what another one writes.
    """

    key: str
    tensor: Tensor
    shape: tuple[int, ...]
    first: int
    last: int
    where: str = ""
    write: bool = True
    repeated: bool = False  # there are places of the leaf in other stages or on other ranks

    @property
    def entry(self) -> Entry:
        """The tensor in a file: called by its leaf, with the elements where it is not whole."""
        name = self.key
        shape = self.shape
        if self.last - self.first < prod(shape):
            name = f"{name}[{self.first}:{self.last}]"
            shape = (self.last - self.first,)
        return Entry(name, self.tensor.dtype, shape, lambda: self.tensor)


class Holding(NamedTuple):
    """What this process holds: facts, as they are in a manifest, and tensors.

    Of a leaf, facts have its dtype, shape, whether it is on the host, and its hash if all processes
    have it. ``owners`` are the stages and paths of a parameter's name, and whether it is tied.
    """

    pipe: Pipe
    facts: Facts
    places: list[Place]


def stage_trees(
    names: Names, params: Sequence[tree.Tree] | None
) -> tuple[dict[int, StageTree], Facts]:
    """The parameters of the stages here, and the facts of them."""
    trees = dict[int, StageTree]()
    keys = "trees", "stages", "layers", "slots", "leaves", "owners"
    facts: Facts = {key: {} for key in keys}
    if params is None:
        return trees, facts
    names.pipe.config.check_params(params)
    for stage in names.pipe.here:
        of = names.stages[stage]
        here = trees[stage] = names.tree(stage, params[stage])
        for leaf in here.leaves:
            owners = facts["owners"].setdefault(leaf.key, {})
            owners[f"{leaf.path!r} of stage {stage}"] = leaf.home is not None
        if of.stage.weights is None:
            structures, node = describe_stage(of, here, params[stage])
            _merge(facts, structures._asdict())
            if node is not None:
                _merge(facts["stages"], {of.prefix: node})
    return trees, facts


def collect(
    names: Names, params: Sequence[tree.Tree] | None, more: Mapping[str, tree.Tree]
) -> Holding:
    """All that this process holds of what is saved."""
    if wrong := RESERVED & more.keys():
        raise CheckpointError(
            f"{min(wrong)!r} is an argument of load; save the tree under another name"
        )
    pipe = names.pipe
    trees, facts = stage_trees(names, params)
    holding = Holding(pipe, facts, [])
    leaves = facts["leaves"]
    templates = list[tuple[str, type, Mapping[int, StageTree]]]()
    if params is not None:  # which may have stages of other processes too
        facts["trees"]["params"] = ["stages", "params"]
        for here in trees.values():
            _by_parameter(holding, here, "params")
        templates.append(("stages", type(params), trees))
    if pipe.config.stateful:
        templates.append(("states", list, names.states()))

    def special(value: tree.Tree, path: str) -> object:
        """A tensor that all processes have, or a list by stage."""
        if tree.is_tensor(value):
            if path in leaves:
                raise _same_name(path)
            tensor = plain(value, path)
            leaves[path] = [*_kind(tensor, tensor.shape), sha256(to_bytes(tensor)).hexdigest()]
            if is_first(pipe):
                holding.places.append(Place(path, tensor, tuple(tensor.shape), 0, tensor.numel()))
            return ["leaf", path]
        for tag, kind, stages in templates:
            by_stage = _by_stage(stages, value, pipe.stages) if type(value) is kind else None
            if by_stage is not None:
                for here in by_stage:
                    _by_parameter(holding, here, path)
                return [tag, path]
        return NotImplemented

    for name, value in more.items():
        facts["trees"][name] = to_node(value, name, special)
    return holding


def _by_stage(
    templates: Mapping[int, StageTree], value: Sequence[tree.Tree], count: int
) -> list[StageTree] | None:
    """What a list by stage has at the leaves of the templates; None if it has another form."""
    if len(value) != count or any(
        part is not None for stage, part in enumerate(value) if stage not in templates
    ):
        return None
    by_stage = list[StageTree]()
    for stage, here in templates.items():
        values: list[tree.Tree] = [None] * len(here.leaves)
        if value[stage] is not None or here.state:
            try:
                values = here.spec.flatten_up_to(value[stage])
            except ValueError:
                return None
        pairs = zip(here.leaves, values, strict=True)
        leaves = [leaf._replace(value=value) for leaf, value in pairs]
        by_stage.append(here._replace(leaves=leaves))
    return by_stage


def _by_parameter(holding: Holding, here: StageTree, slot: str) -> None:
    """Describe what a list by stage has for each parameter of a stage."""
    nodes = holding.facts["slots"].setdefault(slot, {})
    for leaf in here.leaves:
        paths = set[str]()

        def special(part: object, path: str, leaf=leaf, paths=paths) -> object:
            if not tree.is_tensor(part):
                return NotImplemented
            if path in paths:
                raise _same_name(path)
            paths.add(path)
            return _part(holding, here, leaf, plain(part, path), path)

        node = to_node(leaf.value, f"{slot}/{leaf.key}", special)
        _merge(nodes, {leaf.key: node}, f"{slot}: ")


def _part(holding: Holding, here: StageTree, leaf: StageLeaf, tensor: Tensor, path: str) -> Node:
    """Describe a tensor of one stage."""
    pipe = holding.pipe
    shape = tuple(tensor.shape)
    if leaf.span is not None and shape == (leaf.span[1] - leaf.span[0],):  # a part
        shape = leaf.shape
        span = leaf.span
        ours = span[0] < span[1]
    else:
        span = 0, tensor.numel()
        ours = True
        if pipe.copies is not None and not leaf.own:  # copies share the work
            turn = zlib.crc32(path.encode()) % pipe.copies.group.size
            # of states, that of the first copy counts: copies have seen other data
            ours = pipe.copies.part == (0 if here.state else turn)
    key = own_key(path, pipe) if leaf.own else path
    kind = _kind(tensor, shape)
    other = holding.facts["leaves"].setdefault(key, [*kind, None])
    if other[:2] != kind[:2]:
        raise CheckpointError(
            f"the tied leaves {path!r} differ: {other[:2]} and {kind[:2]}; tie equal leaves"
        )
    rank = pipe.config.rank_here(here.stage)
    ranks = pipe.placement.ranks_of(here.stage)
    write = rank == ranks[0] and leaf.home in (None, here.stage)
    replicas = len(ranks) > 1 and len(pipe.group.here) < pipe.group.size
    # replicas update states of their own, and the first one counts
    repeated = not here.state and (leaf.home is not None or replicas)
    if ours and (write or repeated):
        where = f"stage {here.stage} on rank {rank}"
        holding.places.append(Place(key, tensor, shape, *span, where, write, repeated))
    return ["leaf", path]


def _same_name(path: str) -> CheckpointError:
    return CheckpointError(f"two tensors are called {path!r}; rename a key that contains '.'")


def _kind(tensor: Tensor, shape: Sequence[int]) -> list[object]:
    return [dtype_name(tensor.dtype), list(shape), tensor.device.type == "cpu"]


def own_key(key: str, pipe: Pipe) -> str:
    """The name of a leaf that each copy of a pipeline has for itself."""
    assert pipe.copies is not None
    return f"{key}@{pipe.copies.part}of{pipe.copies.group.size}"


# ---- of all processes ----
def merged(rows: Sequence[Facts]) -> Facts:
    """The facts of all processes as those of one; CheckpointError where they differ."""
    total = {}
    for facts in rows:
        _merge(total, facts)
        if facts["trees"].keys() != total["trees"].keys():
            raise CheckpointError(
                f"processes save {list(total['trees'])} and {list(facts['trees'])}; save the same "
                "on all"
            )
    for key, owners in total.pop("owners").items():
        if len(owners) > 1 and not all(owners.values()):
            raise CheckpointError(
                f"{' and '.join(list(owners)[:2])} are both called {key!r}; give stages different "
                "names, number layers= within the whole model, or tie the leaves"
            )
    return total


def _merge(total: Facts, part: Facts, what: str = "") -> None:
    """Add facts to others; those that both have must be equal."""
    for name, value in part.items():
        if isinstance(value, dict):
            _merge(total.setdefault(name, {}), value, f"{what}{name}: ")
        elif total.setdefault(name, value) != value:
            raise CheckpointError(
                f"{what}{name!r} differs between processes or stages: {_brief(value)} and "
                f"{_brief(total[name])}; save the same values on all processes, tie leaves that "
                "are treated alike, and give stages different names"
            )


def _brief(value: object) -> str:
    text = json.dumps(value)
    if len(text) < 200:
        return text
    return text[:200] + " ..."

# SPDX-License-Identifier: Apache-2.0
"""What a process holds of the trees that are saved: structures as JSON, and tensors with their
places in leaves.

A list with one entry per stage, each of the form of that stage's parameters, is stored by
parameter; anything else as it is, and must be equal on all processes. This module must not know
files.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from .. import tree
from ..collectives.codec import Node, to_bytes, to_node
from ..errors import CheckpointError
from ._pipe import Pipe, is_first
from .files import plain
from .keys import (
    Described,
    Names,
    StageNames,
    StageTree,
    composed,
    describe_stage,
    expand,
    stage_tree,
    state_tree,
)


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
    where: str
    write: bool
    repeated: bool  # there are places of the leaf in other stages or on other ranks

    @property
    def dtype(self) -> str:
        """Its dtype."""
        return str(self.tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Holding:
    """What this process holds: the facts that are merged with those of other processes, and the
    tensors.
    """

    trees: dict[str, Node] = field(default_factory=dict)
    stages: dict[str, Node] = field(default_factory=dict)
    layers: dict[str, dict[str, Node]] = field(default_factory=dict)
    slots: dict[str, dict[str, Node]] = field(default_factory=dict)
    leaves: dict[str, list[Any]] = field(
        default_factory=dict
    )  # dtype, shape, host, hash where all have the leaf
    params: list[list[Any]] = field(default_factory=list)  # stage, path, name, whether it is tied
    places: list[Place] = field(default_factory=list)

    def facts(self) -> str:
        """All but the tensors, as text."""
        return json.dumps(
            [self.trees, self.stages, self.layers, self.slots, self.leaves, self.params]
        )


def stage_trees(names: Names, params: Sequence[Any]) -> tuple[dict[int, StageTree], Holding]:
    """The parameters of the stages here, and their structures."""
    names.pipe.config.check_params(params)
    trees, holding = dict[int, StageTree](), Holding()
    for stage in names.pipe.here:
        described = describe_stage(names, stage, params[stage])
        trees[stage] = stage_tree(names, stage, params[stage], described)
        of = names.stages[stage]
        if of.stage.weights is None and (described.rest or not of.parts):
            holding.stages[of.prefix] = described.node
        elif of.stage.weights is None:
            _check_composed(of, described, trees[stage].spec)
        _unite(holding.stages, described.parts, "the structure of")
        for prefix, blocks in described.layers.items():
            holding.layers.setdefault(prefix, {}).update(blocks)
        pairs = zip(trees[stage].paths, trees[stage].keys, strict=True)
        holding.params.extend(
            [stage, path, key, (stage, path) in names.ties] for path, key in pairs
        )
    return trees, holding


def _check_composed(of: StageNames, described: Described, spec: tree.Structure) -> None:
    """Parts are found again in nested dicts, and blocks in lists."""
    again = expand(composed(of), described.parts, described.layers, of, lambda node, path: 0)
    if tree.flatten(again)[1] != spec:
        raise CheckpointError(
            f"layers= of stage {of.index} has the paths {list(of.parts)}, and its parameters are "
            "not nested dicts with "
            "these keys, and lists of blocks; use such, so that they can be put together again"
        )


def collect(names: Names, params: Sequence[Any] | None, more: Mapping[str, Any]) -> Holding:
    """All that this process holds of what is saved."""
    trees, holding = ({}, Holding()) if params is None else stage_trees(names, params)
    if params is not None:
        holding.trees["params"] = ["stages", "params"]
        _slot(names, trees, {s: t.leaves for s, t in trees.items()}, "params", holding)
    for name, value in more.items():
        holding.trees[name] = to_node(
            value, name, lambda v, path: _special(names, trees, params, holding, v, path)
        )
    return holding


def _special(
    names: Names,
    trees: Mapping[int, StageTree],
    params: Any,
    holding: Holding,
    value: Any,
    path: str,
) -> Any:
    """A tensor that all processes have, or a list by stage."""
    if tree.is_tensor(value):
        return _shared(names.pipe, holding, plain(value, path), path)
    columns = _by_stage(names.pipe, trees, params, value)
    if columns is not None:
        _slot(names, trees, columns, path, holding)
        return ["stages", path]
    states = _states(names, value)
    if states is not None:
        _slot(names, states, {s: t.leaves for s, t in states.items()}, path, holding)
        return ["states", path]
    return NotImplemented


def _states(names: Names, value: Any) -> dict[int, StageTree] | None:
    """The states that stages carry, from a list with one entry per stage; None if the value is no
    such list.
    """
    pipe = names.pipe
    if not pipe.config.stateful or not isinstance(value, list) or len(value) != pipe.stages:
        return None
    carried = [s for s in pipe.here if names.stages[s].stage.state]
    if any(value[s] is not None for s in range(pipe.stages) if s not in carried):
        return None
    found = {s: state_tree(names, s, value[s]) for s in carried}
    known = {s: here for s, here in found.items() if here is not None}
    return known if len(known) == len(found) else None


def _shared(pipe: Pipe, holding: Holding, tensor: Tensor, path: str) -> Node:
    key = _claimed(holding, path, path)
    digest = sha256(to_bytes(tensor)).hexdigest()
    holding.leaves[key] = [_dtype(tensor), list(tensor.shape), tensor.device.type == "cpu", digest]
    if is_first(pipe):
        holding.places.append(
            Place(
                key, tensor, tuple(tensor.shape), 0, tensor.numel(), "", write=True, repeated=False
            )
        )
    return ["leaf", key]


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _by_stage(
    pipe: Pipe, trees: Mapping[int, StageTree], params: Any, value: Any
) -> dict[int, list[Any]] | None:
    """What a list by stage has at the leaves of the parameters; None if the value is no such
    list.
    """
    if params is None or type(value) is not type(params) or len(value) != pipe.stages:
        return None
    if any(value[stage] is not None for stage in range(pipe.stages) if stage not in trees):
        return None
    columns: dict[int, list[Any]] = {}
    for stage, here in trees.items():
        try:
            empty = [None] * len(here.leaves)
            columns[stage] = (
                empty if value[stage] is None else here.spec.flatten_up_to(value[stage])
            )
        except ValueError:
            return None
    return columns if any(columns.values()) or not any(t.leaves for t in trees.values()) else None


def _slot(
    names: Names,
    trees: Mapping[int, StageTree],
    columns: Mapping[int, list[Any]],
    path: str,
    holding: Holding,
) -> None:
    """Describe what a list by stage has for each parameter."""
    nodes = holding.slots.setdefault(path, {})
    for stage, here in trees.items():
        for index, value in enumerate(columns[stage]):
            key = here.keys[index]

            def special(v, at, i=index, here=here):
                return _part(names, here, i, holding, v, at)

            node = to_node(value, f"{path}/{key}", special)
            if node != nodes.setdefault(key, node):
                raise CheckpointError(
                    f"{path}: the tied leaves {key!r} differ in structure, {node} and "
                    f"{nodes[key]}; tie leaves that "
                    "are treated alike"
                )


def _part(
    names: Names, here: StageTree, index: int, holding: Holding, value: Any, path: str
) -> Any:
    """A tensor of one stage."""
    if not tree.is_tensor(value):
        return NotImplemented
    pipe, tensor = names.pipe, plain(value, path)
    span, shape, key = here.span(index), tuple(tensor.shape), path
    cut = span is not None and shape == (span[1] - span[0],)
    first, last = span if cut and span is not None else (0, tensor.numel())
    shape = here.shape(index) if cut else shape
    if here.own[index] and pipe.copies is not None:
        key = own(path, pipe.copies.part, pipe.copies.group.size)
    facts = [_dtype(tensor), list(shape), tensor.device.type == "cpu", None]
    known = holding.leaves.setdefault(key, facts)
    if known[:2] != facts[:2]:
        raise CheckpointError(
            f"the tied leaves {path!r} differ: {known[:2]} and {facts[:2]}; tie equal leaves"
        )
    ranks = pipe.placement.ranks_of(here.stage)
    member = here.stage, here.paths[index]
    repeated = member in names.ties or (len(ranks) > 1 and len(pipe.group.here) < pipe.group.size)
    repeated = (
        repeated and not here.state
    )  # replicas update states of their own, and the first one counts
    home = pipe.config.rank_here(here.stage)
    write = here.stage == (here.stage if here.state else names.first(*member)) and home == ranks[0]
    if (
        (write or repeated)
        and _is_ours(pipe, here, index, path, cut, prod(shape))
        and (last > first or not cut)
    ):
        where = f"stage {here.stage} on rank {home}"
        holding.places.append(Place(key, tensor, shape, first, last, where, write, repeated))
    return ["leaf", path]


def own(path: str, copy: int, copies: int) -> str:
    """The name of a leaf that each copy of a pipeline has for itself."""
    return f"{path}@{copy}of{copies}"


def _is_ours(pipe: Pipe, here: StageTree, index: int, path: str, cut: bool, size: int) -> bool:
    """Whether this copy of the pipeline handles a leaf: copies share the work."""
    if pipe.copies is None or here.own[index] or (cut and size):
        return True
    if here.state:  # copies have seen other data: that of the first one
        return pipe.copies.part == 0
    return zlib.crc32(path.encode()) % pipe.copies.group.size == pipe.copies.part


def _claimed(holding: Holding, key: str, path: str) -> str:
    if key in holding.leaves:
        raise CheckpointError(f"two tensors are called {path!r}; rename a key that contains '.'")
    return key


# ---- of all processes ----
def merged(rows: Sequence[str]) -> Holding:
    """The facts of all processes as those of one; CheckpointError where they differ."""
    total = Holding()
    for row in rows:
        trees, stages, layers, slots, leaves, params = json.loads(row)
        _unite(total.trees, trees, "the structure of")
        if trees.keys() != total.trees.keys():
            raise CheckpointError(
                f"processes save {list(total.trees)} and {list(trees)}; save the same on all"
            )
        _unite(total.stages, stages, "the parameters of stage")
        _unite(total.leaves, leaves, "on two processes,")
        for name, nodes in layers.items():
            _unite(total.layers.setdefault(name, {}), nodes, f"in {name}, the block")
        for name, nodes in slots.items():
            _unite(total.slots.setdefault(name, {}), nodes, f"in {name}, the structure for")
        total.params.extend(params)
    _check_names(total.params)
    return total


def _unite(total: dict[str, Any], part: Mapping[str, Any], what: str) -> None:
    for name, value in part.items():
        if total.setdefault(name, value) != value:
            raise CheckpointError(
                f"{what} {name!r} differs between processes or stages: {_brief(value)} and "
                f"{_brief(total[name])}; save "
                "the same values on all processes, and give stages different names"
            )


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else text[:200] + " ..."


def _check_names(params: Sequence[Sequence[Any]]) -> None:
    """Two leaves of one name are one parameter, or a mistake."""
    seen: dict[str, tuple[int, str, bool]] = {}
    for stage, path, key, tied in params:
        other = seen.setdefault(key, (stage, path, tied))
        if other[:2] != (stage, path) and not (tied and other[2]):
            raise CheckpointError(
                f"{path!r} of stage {stage} and {other[1]!r} of stage {other[0]} are both called "
                f"{key!r}; give stages "
                "different names, number layers= within the whole model, or tie the leaves"
            )

# SPDX-License-Identifier: Apache-2.0
"""Tied parameters: leaves of several stages that are one parameter (``tied=``)."""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..collectives.codec import flat_bytes, is_dense, to_bytes
from ..engine.arguments import Call
from ..engine.config import Config
from ..engine.request import Request
from ..errors import StageError
from ..lowering.builder import sum_of
from ..lowering.value_graph import Interface, spec_of
from ..stage import Stage, patterns
from .sums import OrderedSums, Sums, by_order, steps_of


def ties(stages: Sequence[Stage], tied: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Groups of tied leaves: those that the caller names, then those that the stages carry.

    Groups with a common leaf are one group, since all their leaves are one parameter.
    """
    carried = defaultdict[str, list[str]](list)
    for index, stage in enumerate(stages):
        for leaf, group in stage.ties:
            carried[group].append(f"{index}.{leaf}")
    several = [names for names in carried.values() if len(names) > 1]
    groups: list[tuple[str, ...]] = []
    for names in (*_named_ties(tied, len(stages)), *several):
        common = [group for group in groups if not set(group).isdisjoint(names)]
        joined = tuple(dict.fromkeys(chain(*common, names)))
        groups = [*(group for group in groups if group not in common), joined]
    return tuple(groups)


def _named_ties(tied: object, stages: int) -> Iterator[tuple[str, ...]]:
    """The groups that ``tied=`` lists, checked."""
    form = "give a list of groups of names, as in tied=[('0.wte', '7.wte')]"
    if isinstance(tied, (str, Mapping)) or not isinstance(tied, Iterable):
        raise StageError(f"tied={tied!r}; {form}")
    for group in tied:
        if isinstance(group, str):
            raise StageError(
                f"tied={tied!r} has the text {group!r} in place of a group of names; {form}"
            )
        names = patterns("tied", group)
        if len(set(names)) < 2:
            raise StageError(f"tied={names!r} names fewer than two leaves; {form}")
        for name in names:
            head = name.partition(".")[0]
            if not head.isdecimal() or int(head) >= stages:
                raise StageError(
                    f"tied={names!r}: {name!r} should read 'stage.leaf', with a stage below "
                    f"{stages}"
                )
        yield names


def tied_leaves(names: Sequence[str], paths: Sequence[Sequence[str]]) -> Iterator[tuple[int, int]]:
    """Names such as ``"0.wte"`` as stages and indices of leaves; ``paths`` are those of the leaves
    of each stage.

    >>> list(tied_leaves(("0.wte", "1"), [("norm", "wte"), ("",)]))
    [(0, 1), (1, 0)]
    """
    for name in names:
        head, _, rest = name.partition(".")
        stage = int(head)
        if rest not in paths[stage]:
            there = [f"{stage}.{path}" if path else str(stage) for path in paths[stage]]
            raise StageError(
                f"tied={names!r} names {name!r}, but stage {stage} has no such leaf; it has "
                f"{', '.join(map(repr, there[:8])) or 'none'}"
            )
        yield stage, list(paths[stage]).index(rest)


def check_frozen_alike(tied: Iterable[Sequence[str]], frozen: Sequence[str]) -> None:
    """Raise StageError where some copies of a tied parameter are frozen and others are trained
    apart from them.
    """
    for names in tied:
        some = [name for name in names if tree.matches(name, frozen)]
        if some and len(some) < len(names):
            others = ", ".join(name for name in names if name not in some)
            raise StageError(
                f"{', '.join(some)} is frozen and {others} is not, but they are tied, so they are "
                "one parameter; freeze all of its copies, or none"
            )


def sums_of(config: Config, request: Request, interfaces: Sequence[Interface]) -> Sums:
    """Sums over ranks of the gradients of tied leaves and of replicated stages."""
    avals = {
        (stage, index): aval
        for stage, params in enumerate(request.params)
        if params is not None
        for index, aval in params.avals.items()
    }

    def spec(leaf):
        return spec_of(sum_of(leaf, config.accumulate))

    ranks_of = request.schedule.placement.ranks_of
    replicated = [key for key, leaf in avals.items() if leaf.grad and len(ranks_of(key[0])) > 1]
    specs = {key: spec(avals[key]) for key in replicated}
    paths = [interface.leaves for interface in interfaces]
    groups = tuple(tuple(tied_leaves(names, paths)) for names in config.tied)
    for group in groups:
        local = {key: avals[key] for key in group if key in avals}
        shapes: dict[str, str] = {}
        for (stage, _), leaf in local.items():
            shapes.setdefault(str(leaf), f"{leaf} in stage {stage}")
        if len(shapes) > 1:
            listed = ", ".join(shapes.values())
            raise StageError(
                f"tied parameters differ in shape or dtype: {listed}; tie copies of one"
            )
        for leaf in local.values():
            specs |= dict.fromkeys(group, spec(leaf))
    ordered = by_order(request.schedule.placement)
    if ordered and request.mode != "forward":
        whole = frozenset(leaf for leaf in specs if leaf[0] in ordered)
        chains = steps_of(request.schedule, ordered, late=config.group.strict)
        return OrderedSums(groups, specs, whole, chains)
    return Sums(groups, specs)


# ---- values, in the first call ----
def tensors(call: Call, request: Request) -> dict[str, list[Tensor]]:
    """The tied leaves of this process by name, each as the ordinary tensors in it; without those
    that have no data, and those of which ZeRO keeps parts.
    """
    tied = set(map(_name, chain(*call.config.tied)))
    found = {}
    for stage, (leaves, _) in call.leaves.items():
        params = request.params[stage]
        assert params is not None
        paths = tree.names(call.params[stage])
        for path, leaf, aval in zip(paths, leaves, params.tensors, strict=True):
            name = _name(f"{stage}.{path}")
            if name in tied and aval is not None and aval.device.type != "meta":
                found[name] = list(filter(is_dense, tree.parts(leaf)))
    return found


def digests(call: Call, request: Request) -> dict[str, list[str]]:
    """The tied leaves of this process by name, as digests that other processes compare."""

    def digest(tensor: Tensor) -> str:
        return f"{tree.describe([tensor])} {sha256(to_bytes(tensor)).hexdigest()}"

    return {name: list(map(digest, parts)) for name, parts in tensors(call, request).items()}


def check_equal(config: Config, reports: Sequence[Mapping[str, Sequence[Any]]]) -> None:
    """Raise StageError where tied leaves differ in a bit; ``reports`` are those of each process.

    A difference in shape or dtype of leaves in this process is left to ``sums_of``.
    """
    known = ChainMap(*map(dict, reports))
    for group in config.tied:
        first, *others = [name for name in map(_name, group) if name in known] or [""]
        for other in others:
            if not all(map(_same, known[first], known[other])):
                error = StageError(
                    f"tied parameters {first} and {other} have different values, but they are one "
                    "parameter; pass the same tensor for both, or equal copies of it"
                )
                if config.copies is not None:
                    config.copies.group.failed(error)
                raise error


def _same(one: Any, other: Any) -> bool:
    """Whether two leaves, or their digests, are the same; NaN is equal to NaN."""
    if isinstance(one, str):
        return one == other
    if one is other or (one.shape, one.dtype) != (other.shape, other.dtype):
        return True
    return torch.equal(flat_bytes(one), flat_bytes(other).to(one.device))


def _name(text: str) -> str:
    """The name of a leaf; that of a stage which is one leaf has no path."""
    return text.removesuffix(".")

# SPDX-License-Identifier: Apache-2.0
"""``fpipe.load``: trees of a checkpoint under any layout of the model; each process reads its part
alone.

The structure of parameters comes from the modules behind the stages, from ``like=``, or from the
checkpoint. All bytes that are read are compared with their hashes. This module must not know how
files are written.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..actions import progress
from ..collectives.codec import Node, dtype_name, from_bytes, from_node
from ..errors import CheckpointError
from ..tree import Tree
from ._processes import (
    AnyPath,
    Pipe,
    agree,
    and_more,
    check_unused,
    everyone,
    folder_of,
    wait_for_writers,
)
from .collect import own_key
from .leaf_names import Names, StageLeaf, StageTree, misfit
from .manifest import Leaf, Manifest
from .structures import Structures, tied_parts


def load(
    path: AnyPath,
    pipe: Pipe,
    *names: str,
    like: Sequence[Tree] | None = None,
    strict: bool = True,
) -> Any:
    """What ``fpipe.save`` wrote, for this pipeline's layout; every process calls it.

    Each process reads the leaves of its stages (with ``zero=``, the files that contain its part),
    onto the devices of their ranks. Other stages are ``None``.

    Args:
        path: the folder of the checkpoint.
        pipe: the pipeline, of the same model.
        names: what to load, such as ``"params", "state", "step"``.
        like: parameters whose structure, shapes and dtypes are loaded, one tree per stage, ``None``
            for stages elsewhere; tensors may be on the device "meta". By default those of the
            module behind each stage, and for functions those of the checkpoint.
        strict: with False, parameters that the checkpoint does not have, or has with another shape
            or dtype, keep the value that ``like`` has, and a warning names them, as those that no
            stage takes.

    Returns:
        The values in the order of ``names``; without a list, if there is one name.

    Raises:
        CheckpointError: on every process, if the checkpoint is incomplete, damaged or of another
        model.

    >>> import fpipe, tempfile
    >>> pipe = fpipe.pipeline([torch.mul] * 2, loss=torch.sum, microbatches=1, group=fpipe.local(2))
    >>> path = tempfile.mkdtemp() + "/step-7"
    >>> _ = fpipe.save(path, pipe, params=[torch.ones(1), torch.zeros(1)], step=7)
    >>> load(path, pipe, "params", "step")
    ([tensor([1.]), tensor([0.])], 7)

    """
    folder = folder_of(path, pipe)
    agree(pipe, lambda: wait_for_writers(folder))
    manifest = agree(pipe, lambda: Manifest.read(folder))
    if len(set(everyone(pipe, manifest.digest))) > 1:
        raise CheckpointError(
            f"processes read different checkpoints at {path}; all must see one file system"
        )
    reader = Reader(folder, manifest, Names(pipe), like, strict)
    agree(pipe, lambda: reader.check(names))
    check_unused(
        pipe,
        manifest.slots.get("params", {}),
        {leaf.key for here in reader.templates.values() for leaf in here.leaves},
        f"{folder} has a parameter {{}} that no stage takes",
        "load it into the whole model",
        strict,
    )
    with progress(f"loading {path}") as track:
        values = agree(pipe, lambda: [reader.value(name) for name in track(names)])
    if len(values) == 1:
        return values[0]
    return tuple(values)


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """A checkpoint whose hashes are right may have been written by another program."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what} cannot be read: {error!s:.300}; save it again") from error


@dataclass(frozen=True)
class Reader:
    """Reads the values of one checkpoint for the stages here."""

    folder: Path
    manifest: Manifest
    names: Names
    like: Sequence[Tree] | None
    strict: bool

    def check(self, wanted: Sequence[str]) -> None:
        """Raise CheckpointError unless the checkpoint has these trees, and the parameters of the
        stages here.
        """
        trees = self.manifest.trees
        for name in wanted or ["nothing"]:
            if not wanted or not isinstance(name, str) or name not in trees:
                existing = ", ".join(map(repr, trees))
                raise CheckpointError(
                    f"{self.folder} has {existing}, not {name!r:.200}; name what to load, as in "
                    'fpipe.load(path, pipe, "params")'
                )
        assert self.kept is not None  # the checks of parameters

    @cached_property
    def check_file(self) -> Callable[[str], None]:
        """Checks the header of a file, once."""
        return cache(partial(self.manifest.check_file, self.folder))

    # ---- templates ----
    @cached_property
    def templates(self) -> Mapping[int, StageTree]:
        """The parameters of the stages here as tensors without data, with their names."""
        if not self.manifest.slots:
            return {}
        names = self.names
        pipe = names.pipe
        with _readable(f"{self.folder}: the structure of its parameters"):
            trees = names.expected(self.like, self._recorded)
            if pipe.parts is not None and (self.like is None or not pipe.cache.shares.layouts):
                trees = pipe.shard(trees)  # records the layout of whole leaves
            return {stage: names.tree(stage, trees[stage]) for stage in pipe.here}

    def _recorded(self, stage: int) -> Tree:
        """Parameters of one stage without data, from the structure in the checkpoint."""

        def leaf(node: Node, path: str) -> object:
            if node[0] == "at":
                return from_node(node[2], path)
            stored = self.existing(f"params/{node[1]}")
            return torch.empty(stored.shape, dtype=stored.torch_dtype, device="meta")

        # tied parts were one in the cut that was saved
        stages = {**tied_parts(self.names, stage), **self.manifest.stages}
        return Structures(stages, self.manifest.layers).expand(self.names.stages[stage], leaf)

    @cached_property
    def kept(self) -> Mapping[str, Tensor]:
        """Parameters that keep their value because the checkpoint has no such leaf; CheckpointError
        where they must not, or have none.
        """
        kept = {}
        lost = list[str]()
        for stage, here in self.templates.items():
            for _, key, like, shape, *_ in here.leaves:
                if not tree.is_tensor(like):
                    continue
                leaf = self.leaf(f"params/{key}")
                wanted = f"{dtype_name(like.dtype)}{list(shape)}"
                fault = misfit(stage, key, None if leaf is None else str(leaf), wanted)
                if fault and (self.strict or like.is_meta):
                    lost.append(fault)
                elif fault:
                    kept[key] = like
                    warnings.warn(f"{self.folder}: skipped: {fault}", stacklevel=8)
        if lost:
            raise CheckpointError(
                f"{self.folder}: {and_more(lost)}; load the same model, or pass strict=False with "
                "like=params"
            )
        return kept

    # ---- values ----
    def leaf(self, key: str) -> Leaf | None:
        """A leaf, or this copy's of one that each copy has for itself."""
        leaves = self.manifest.leaves
        pipe = self.names.pipe
        if key in leaves or pipe.copies is None:
            return leaves.get(key)
        return leaves.get(own_key(key, pipe))

    def value(self, name: str) -> Tree:
        """One of the trees."""
        with _readable(f"{self.folder}: {name!r}"):
            return from_node(self.manifest.trees[name], name, self._special)

    def _special(self, node: Node, path: str) -> object:
        if node[0] == "leaf":
            return self._tensor(node[1])
        if node[0] not in ("stages", "states"):
            return NotImplemented
        out: list[Tree] = [None] * self.names.pipe.stages
        templates = self.templates if node[0] == "stages" else self.names.states()
        for stage, here in templates.items():
            values = [self._part(node[1], here, leaf) for leaf in here.leaves]
            out[stage] = tree.unflatten(here.spec, values)
        return out

    def _part(self, slot: str, here: StageTree, wanted: StageLeaf) -> Tree:
        """What a list by stage has for one parameter."""
        key = wanted.key
        pipe = self.names.pipe
        if slot == "params" and key in self.kept:
            return self.kept[key]
        node = self.manifest.slots[slot].get(key)
        if node is None:
            if here.state:
                raise CheckpointError(
                    f"{self.folder}: {slot!r} has no {key!r}, a state of stage {here.stage}"
                )
            if slot == "params":
                raise ValueError(f"it has no {key!r}, which has data")
            return None
        device = pipe.group.device(pipe.config.rank_here(here.stage))

        def special(node: Node, path: str) -> object:
            if node[0] != "leaf":
                return NotImplemented
            leaf = self.existing(node[1])
            if slot == "params" and str(leaf) != str(self.existing(f"params/{key}")):
                raise ValueError(f"{key!r} is {leaf}, and its data are another leaf's")
            is_number = not leaf.shape
            is_cut = leaf.shape == wanted.shape and (not is_number or node[1] == f"{slot}/{key}")
            tensor = self._tensor(node[1], wanted.span if is_cut else None)
            if is_number and leaf.host:
                return tensor
            return tensor.to(device)

        return from_node(node, f"{slot}/{key}", special)

    def existing(self, key: str) -> Leaf:
        """A leaf; CheckpointError if there is none."""
        leaf = self.leaf(key)
        if leaf is None:
            others = [name for name in self.manifest.leaves if name.startswith(f"{key}@")]
            why = f"; it was saved for each copy of the pipeline, {others}" if others else ""
            raise CheckpointError(
                f"{self.folder} has no leaf {key!r}{why}: load it with as many copies"
            )
        return leaf

    def _tensor(self, key: str, span: tuple[int, int] | None = None) -> Tensor:
        """A leaf on the host, or elements of it along one axis."""
        leaf = self.existing(key)
        for piece in leaf.pieces:
            self.check_file(piece.file)
        return read_leaf(self.folder, key, leaf, span)


def read_leaf(folder: Path, key: str, leaf: Leaf, span: tuple[int, int] | None = None) -> Tensor:
    """A leaf of a checkpoint, whole or elements of it along one axis; all pieces that it touches
    are checked.
    """
    first, last = (0, prod(leaf.shape)) if span is None else span
    raw = bytearray()
    itemsize = leaf.torch_dtype.itemsize
    for piece in leaf.pieces:
        low = max(first, piece.first)
        high = min(last, piece.last)
        if low < high:
            at = (low - piece.first) * itemsize, (high - piece.first) * itemsize
            part = piece.read(folder, key, *at)
            raw = part if not raw else raw + part
    return from_bytes(raw, leaf.torch_dtype, leaf.shape if span is None else (last - first,))

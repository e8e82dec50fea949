# SPDX-License-Identifier: Apache-2.0
"""``fpipe.load``: trees of a checkpoint under any layout of the model; each process reads its part
alone.

The structure of parameters comes from the modules behind the stages, from ``like=``, or from the
checkpoint. All bytes that are read are compared with their hashes. This module must not know how
files are written.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..actions.progress import progress
from ..collectives.codec import Node, from_bytes, from_node
from ..errors import CheckpointError
from ._pipe import Pipe, agree, everyone, folder_of, is_first, wait_for_writers
from .collect import own
from .files import checked, opened
from .keys import Names, StageTree, describe_stage, expand, stage_tree, state_tree, structure_of
from .manifest import Leaf, Manifest, damaged


def load(
    path: str | os.PathLike[str],
    pipe: Pipe,
    *names: str,
    like: Sequence[Any] | None = None,
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
    reader = agree(pipe, lambda: _reader(folder, manifest, Names(pipe), like, strict, names))
    _check_extra(reader, everyone(pipe, reader.facts()))
    with progress(f"loading {path}") as track:
        values = agree(pipe, lambda: [reader.value(name) for name in track(names)])
    return values[0] if len(values) == 1 else tuple(values)


def _reader(
    folder: Path,
    manifest: Manifest,
    names: Names,
    like: Sequence[Any] | None,
    strict: bool,
    wanted: Sequence[str],
) -> Reader:
    unknown = [name for name in wanted if name not in manifest.trees]
    if unknown or not wanted:
        there = ", ".join(map(repr, manifest.trees))
        raise CheckpointError(
            f"{folder} has {there}, not {unknown[0] if unknown else 'nothing'!r}; name what to load"
        )
    check = lru_cache(maxsize=None)(partial(manifest.check_file, folder))
    if not manifest.slots:
        return Reader(folder, manifest, names, {}, strict, {}, check)
    try:
        templates = _templates(names, manifest, like)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{folder}: the manifest has a structure that cannot be read: {error!r}"
        ) from error
    reader = Reader(folder, manifest, names, templates, strict, {}, check)
    faults = reader.faults()
    pairs = (
        (key, leaf)
        for here in templates.values()
        for key, leaf in zip(here.keys, here.leaves, strict=True)
    )
    kept = {key: leaf for key, leaf in pairs if key in faults and not strict and _has_data(leaf)}
    lost = [fault for key, fault in faults.items() if key not in kept]
    if lost:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        raise CheckpointError(
            f"{folder}: {lost[0]}{more}; load the same model, or pass strict=False with like=params"
        )
    for key in kept:
        warnings.warn(f"{folder}: skipped: {faults[key]}", stacklevel=6)
    return Reader(folder, manifest, names, templates, strict, kept, check)


def _has_data(leaf: Any) -> bool:
    return not (tree.is_tensor(leaf) and leaf.is_meta)


# ---- templates ----
def _templates(
    names: Names, manifest: Manifest, like: Sequence[Any] | None
) -> dict[int, StageTree]:
    """The parameters of the stages here as tensors without data, with their names."""
    pipe = names.pipe
    if like is not None:
        pipe.config.check_params(like)
    trees: list[Any] = [None] * pipe.stages
    for stage in pipe.here:
        trees[stage] = _template(names, manifest, stage) if like is None else like[stage]
    if like is None and pipe.parts is not None:  # records the layout of whole leaves
        trees = pipe.shard(trees)
    elif pipe.parts is not None and like is not None and not pipe.cache.shares.layouts:
        trees = pipe.shard(like)
    return {
        stage: stage_tree(names, stage, trees[stage], describe_stage(names, stage, trees[stage]))
        for stage in pipe.here
    }


def _template(names: Names, manifest: Manifest, stage: int) -> Any:
    """Parameters of one stage without data: of its module, or of the structure in the
    checkpoint.
    """
    of = names.stages[stage]
    if of.stage.weights is not None:
        return {name: weight.like for name, weight in of.stage.weights.items()}

    def leaf(node: Node, path: str) -> Any:
        if node[0] == "at":
            return from_node(node[2], path)
        stored = _leaf_of(names.pipe, manifest, f"params/{node[1]}")
        if stored is None:
            raise CheckpointError(
                f"the checkpoint has no leaf {node[1]!r}; it was saved by other copies of the "
                "pipeline"
            )
        return torch.empty(stored.shape, dtype=stored.torch_dtype, device="meta")

    known = {
        **names.tied_parts(stage),
        **manifest.stages,
    }  # saved by a cut in which tied leaves were one
    return expand(structure_of(of, known), known, manifest.layers, of, leaf)


def _leaf_of(pipe: Pipe, manifest: Manifest, key: str) -> Leaf | None:
    """A leaf, or this copy's of one that each copy has for itself."""
    if key in manifest.leaves or pipe.copies is None:
        return manifest.leaves.get(key)
    return manifest.leaves.get(own(key, pipe.copies.part, pipe.copies.group.size))


# ---- values ----
@dataclass(frozen=True)
class Reader:
    """Reads the values of one checkpoint for the stages here."""

    folder: Path
    manifest: Manifest
    names: Names
    templates: Mapping[int, StageTree]
    strict: bool
    kept: Mapping[str, Any]  # parameters that are not read, by name
    check: Callable[[str], None]  # of the header of a file, once

    def facts(self) -> str:
        """The names of the parameters here, as text."""
        return json.dumps(
            [sorted({key for here in self.templates.values() for key in here.keys}), self.strict]
        )

    def faults(self) -> dict[str, str]:
        """What is wrong with parameters here, by name."""
        found: dict[str, str] = {}
        for here in self.templates.values():
            for index, (key, like) in enumerate(zip(here.keys, here.leaves, strict=True)):
                if tree.is_tensor(like):
                    leaf = _leaf_of(self.names.pipe, self.manifest, f"params/{key}")
                    want = f"{str(like.dtype).removeprefix('torch.')}{list(here.shape(index))}"
                    if leaf is None:
                        found[key] = f"it has no leaf {key!r}, {want}, of stage {here.stage}"
                    elif str(leaf) != want:
                        found[key] = f"leaf {key!r} is {leaf}, and stage {here.stage} takes {want}"
        return found

    def value(self, name: str) -> Any:
        """One of the trees."""
        try:
            return from_node(self.manifest.trees[name], name, self._special)
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise CheckpointError(
                f"{self.folder}: {name!r} cannot be read: {error!r}; save it again"
            ) from error

    def _special(self, node: Node, path: str) -> Any:
        if node[0] == "leaf":
            return self._tensor(node[1], None)
        if node[0] not in ("stages", "states"):
            return NotImplemented
        out: list[Any] = [None] * self.names.pipe.stages
        for stage, here in (self.templates if node[0] == "stages" else self._states()).items():
            column = (self._part(node[1], here, index) for index in range(len(here.keys)))
            out[stage] = tree.unflatten(here.spec, column)
        return out

    def _states(self) -> dict[int, StageTree]:
        """What the stages here carry, as it is in the beginning."""
        stages = self.names.pipe.config.functions
        found = {
            s: state_tree(self.names, s, stages[s].initial_state) for s in self.names.pipe.here
        }
        return {stage: here for stage, here in found.items() if here is not None}

    def _part(self, slot: str, here: StageTree, index: int) -> Any:
        """What a list by stage has for one parameter."""
        key = here.keys[index]
        if slot == "params" and key in self.kept:
            return self.kept[key]
        node = self.manifest.slots[slot].get(key)
        if node is None and here.state:
            raise CheckpointError(
                f"{self.folder}: {slot!r} has no {key!r}, a state of stage {here.stage}"
            )
        if node is None:
            return None
        device = self.names.pipe.group.device(self.names.pipe.config.rank_here(here.stage))

        def special(node: Node, path: str) -> Any:
            if node[0] == "at":
                return from_node(node[2], path)
            if node[0] != "leaf":
                return NotImplemented
            leaf = _leaf_of(self.names.pipe, self.manifest, node[1])
            span = here.span(index)
            cut = span is not None and leaf is not None and leaf.shape == here.shape(index)
            nested = node[1] != f"{slot}/{key}"
            span = span if cut and not (nested and leaf is not None and not leaf.shape) else None
            tensor = self._tensor(node[1], span)
            return (
                tensor if leaf is not None and leaf.host and not leaf.shape else tensor.to(device)
            )

        return from_node(node, f"{slot}/{key}", special)

    def _tensor(self, key: str, span: tuple[int, int] | None) -> Tensor:
        """A leaf on the host, or elements of it along one axis."""
        leaf = _leaf_of(self.names.pipe, self.manifest, key)
        if leaf is None:
            others = [name for name in self.manifest.leaves if name.startswith(f"{key}@")]
            why = f"; it was saved for each copy of the pipeline, {others}" if others else ""
            raise CheckpointError(
                f"{self.folder} has no leaf {key!r}{why}: load it with as many copies"
            )
        for piece in leaf.pieces:
            self.check(piece.file)
        return read_leaf(self.folder, key, leaf, span)


def read_leaf(folder: Path, key: str, leaf: Leaf, span: tuple[int, int] | None = None) -> Tensor:
    """A leaf of a checkpoint, whole or elements of it along one axis; all pieces that it touches
    are checked.
    """
    first, last = (0, prod(leaf.shape)) if span is None else span
    raw, itemsize = bytearray(), leaf.torch_dtype.itemsize
    for piece in leaf.pieces:
        low, high = max(first, piece.first), min(last, piece.last)
        if low < high:
            with opened(folder, piece.file) as file:
                at = (low - piece.first) * itemsize, (high - piece.first) * itemsize
                part = checked(file, piece.begin, piece.end, piece.sha256, *at)
            if part is None:
                raise damaged(folder / piece.file, f"the data of {key!r}")
            raw = part if not raw else raw + part
    return from_bytes(raw, leaf.torch_dtype, leaf.shape if span is None else (last - first,))


def _check_extra(reader: Reader, rows: Sequence[str]) -> None:
    """Parameters that no stage takes are an error, or a warning."""
    taken = {key for row in rows for key in json.loads(row)[0]}
    extra = sorted(set(reader.manifest.slots.get("params", {})) - taken) if reader.templates else []
    if not extra:
        return
    more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
    text = f"{reader.folder} has a parameter {extra[0]!r}{more} that no stage takes"
    if reader.strict:
        raise CheckpointError(f"{text}; load it into the whole model, or pass strict=False")
    if is_first(reader.names.pipe):
        warnings.warn(text, stacklevel=3)

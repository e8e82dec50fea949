# SPDX-License-Identifier: Apache-2.0
"""The layout of models of Hugging Face: safetensors files of a bounded size, an index, and experts
one by one.

Files of this layout are read and written without transformers. This module must not know pipelines.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..errors import CheckpointError
from .files import Entry, grouped, stored, write
from .manifest import Manifest, Span, Track, from_entries
from .reading import read_leaf

#: Reads a tensor.
Read: TypeAlias = Callable[[], Tensor]
INDEX = "model.safetensors.index.json"
#: Parameters of all experts of a layer -> those of one expert, which are joined along axis 0 of
#: theirs.
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
#: Other names on disk of the same parameters.
_OTHER = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")


def fused(tensors: Mapping[str, Read]) -> dict[str, Read]:
    """Tensors by name, with those of the experts of a layer as one, as transformers has them in
    memory.

    >>> one = lambda: torch.ones(2, 3)
    >>> names = [f"mlp.experts.{e}.{part}" for e in range(4) for part in ("up_proj", "gate_proj")]
    >>> found = fused({f"{name}.weight": one for name in names})
    >>> {name: read().shape for name, read in found.items()}
    {'mlp.experts.gate_up_proj': torch.Size([4, 4, 3])}
    """
    found: dict[str, Read] = {}
    experts: dict[str, dict[str, dict[int, Read]]] = {}
    for name, read in tensors.items():
        plain = (
            ".".join(_OTHER.get(part, part) for part in name.split("."))
            if "block_sparse_moe" in name
            else name
        )
        match = _EXPERT.fullmatch(plain)
        if match is None or match[3] not in sum(_FUSED.values(), ()):
            found[plain] = read
        else:
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = read
    for head, rows in experts.items():
        for name, parts in _FUSED.items():
            if all(part in rows for part in parts):
                found[f"{head}.{name}"] = Experts(head, [rows[part] for part in parts])
    return found


class Experts(NamedTuple):
    """Parameters of all experts of a layer as one: each part by the number of the expert."""

    head: str
    parts: Sequence[Mapping[int, Any]]

    def __call__(self) -> Tensor:
        """Read it."""
        numbers = range(len(self.parts[0]))
        if any(set(part) != set(numbers) for part in self.parts):
            raise CheckpointError(
                f"{self.head} has the experts {sorted(self.parts[0])}; a layer has experts 0, 1, "
                "... without gaps"
            )
        rows = (torch.cat([part[number]() for part in self.parts]) for number in numbers)
        return torch.stack(list(rows))

    def entry(self, name: str) -> Entry:
        """To write it under a name."""
        one, *others = [next(iter(part.values())).header for part in self.parts]
        rows = one.shape[0] + sum(other.shape[0] for other in others)
        return Entry(name, one.dtype, (len(self.parts[0]), rows, *one.shape[1:]), self)


def model_files(path: str | os.PathLike[str]) -> dict[str, Read]:
    """Functions that read the tensors of a model's safetensors files, by name.

    Args:
        path: a file, or a folder of files. Tensors of single experts are joined as transformers has
            them in memory.

    Raises:
        CheckpointError: if there are no such files.
    """
    return fused(stored(path))


def export_model(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    tree: str = "params",
    most: int = 5 << 30,
    track: Track[list[Entry]] = iter,
) -> None:
    """Write the tensors of a checkpoint of ``fpipe.save`` as the files of a model.

    One process calls it. The model's ``config.json`` is not written.

    Args:
        checkpoint: the folder of the checkpoint.
        folder: a new or empty folder for the files.
        tree: the parameters, or what has a tensor for each of them, such as an average.
        most: bytes of a file, but for a larger tensor.
        track: goes through the files, to show progress.

    Raises:
        CheckpointError: if the tree has no tensor for a parameter, or the folder is not empty.
    """
    path = Path(checkpoint)
    _write_model(Path(folder), _entries(path, Manifest.read(path), tree), most, track)


def import_model(
    path: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str],
    most: int = 5 << 30,
    track: Track[list[Span]] = iter,
) -> None:
    """Write the files of a model as a checkpoint that has parameters alone.

    Args:
        path: a safetensors file, or a folder of them.
        checkpoint: a new or empty folder.
        most: bytes of a file, but for a larger tensor.
        track: goes through the files, to show progress.

    Raises:
        CheckpointError: if there are no such files, or the folder is not empty.
    """
    tensors: dict[str, Any] = model_files(path)
    entries = [read.entry(name) for name, read in tensors.items()]
    from_entries(Path(checkpoint), entries, most, track)


def _entries(path: Path, manifest: Manifest, tree: str) -> list[Entry]:
    """The tensors of a tree like the parameters, by the names of these."""
    if tree not in manifest.slots:
        raise CheckpointError(
            f"{path} has no tree {tree!r} like its parameters; it has {', '.join(manifest.slots)}"
        )
    keys = {name: node[1] for name, node in manifest.slots[tree].items() if node[0] == "leaf"}
    for name in sorted(manifest.slots["params"].keys() - keys.keys()):
        raise CheckpointError(
            f"{tree!r} has no tensor for {name!r}; convert the parameters, or an average of all"
        )
    for key in keys.values():
        if key not in manifest.leaves:
            raise CheckpointError(
                f"{key!r} differs between copies of the pipeline, and is no tensor of one model"
            )
    leaves = ((name, key, manifest.leaves[key]) for name, key in keys.items())
    return [
        Entry(name, leaf.torch_dtype, leaf.shape, partial(read_leaf, path, key, leaf))
        for name, key, leaf in leaves
    ]


def _write_model(
    folder: Path, entries: Iterable[Entry], most: int, track: Track[list[Entry]]
) -> None:
    """Write ``model.safetensors``, or several files and an index, into a new or empty folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise CheckpointError(f"{folder} is not empty; write the model to a new folder")
    groups = list(grouped(entries, lambda entry: entry.bytes, most))
    names = [f"model-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1)]
    names = ["model.safetensors"] if len(groups) == 1 else names
    for name, group in zip(names, track(groups), strict=True):
        write(folder / name, group, {"format": "pt"})
    if len(groups) > 1:
        files = {e.name: name for name, group in zip(names, groups, strict=True) for e in group}
        total = sum(entry.bytes for group in groups for entry in group)
        content = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / INDEX).write_text(json.dumps(content, indent=2), encoding="utf-8")

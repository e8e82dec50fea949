# SPDX-License-Identifier: Apache-2.0
"""The layout of models of Hugging Face: safetensors files of a bounded size, an index, and experts
one by one.

Files of this layout are read and written without transformers. This module must not know pipelines.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..collectives.codec import to_bytes
from ..errors import CheckpointError
from .files import Entry, grouped, write
from .load import read_leaf
from .manifest import Manifest
from .receive import Stored, stored

INDEX = "model.safetensors.index.json"
#: Parameters of all experts of a layer -> those of one expert, which are joined along axis 0 of
#: theirs.
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
#: Other names on disk of the same parameters.
_OTHER = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")


def fused(tensors: Mapping[str, Callable[[], Tensor]]) -> dict[str, Callable[[], Tensor]]:
    """Tensors by name, with those of the experts of a layer as one, as transformers has them in
    memory.

    >>> one = lambda: torch.ones(2, 3)
    >>> names = [f"mlp.experts.{e}.{part}" for e in range(4) for part in ("up_proj", "gate_proj")]
    >>> found = fused({f"{name}.weight": one for name in names})
    >>> {name: read().shape for name, read in found.items()}
    {'mlp.experts.gate_up_proj': torch.Size([4, 4, 3])}
    """
    found: dict[str, Callable[[], Tensor]] = {}
    experts: dict[str, dict[str, dict[int, Callable[[], Tensor]]]] = {}
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
                found[f"{head}.{name}"] = partial(_stacked, head, [rows[part] for part in parts])
    return found


def _stacked(head: str, parts: list[dict[int, Callable[[], Tensor]]]) -> Tensor:
    numbers = range(len(parts[0]))
    if any(set(part) != set(numbers) for part in parts):
        raise CheckpointError(
            f"{head} has the experts {sorted(parts[0])}; a layer has experts 0, 1, ... without gaps"
        )
    return torch.stack([torch.cat([part[number]() for part in parts]) for number in numbers])


def write_model(
    folder: Path,
    entries: Iterable[Entry],
    most: int = 5 << 30,
    track: Callable[[list[list[Entry]]], Iterable] = iter,
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
        places = {
            entry.name: name for name, group in zip(names, groups, strict=True) for entry in group
        }
        total = sum(entry.bytes for group in groups for entry in group)
        content = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(content, indent=2), encoding="utf-8")


def model_files(path: str | os.PathLike[str]) -> dict[str, Callable[[], Tensor]]:
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
    track: Callable[[list[list[Entry]]], Iterable] = iter,
) -> None:
    """Write the tensors of a checkpoint of ``fpipe.save`` as the files of a model.

    One process calls it. The model's ``config.json`` is not written.

    Args:
        checkpoint: the folder of the checkpoint.
        folder: a new or empty folder for the files.
        tree: the parameters, or what has a tensor for each of them, such as an average.
        most: bytes of a file.
        track: goes through the files, to show progress.

    Raises:
        CheckpointError: if the tree has no tensor for a parameter, or the folder is not empty.
    """
    path = Path(checkpoint)
    manifest = Manifest.read(path)
    if tree not in manifest.slots:
        raise CheckpointError(
            f"{path} has no tree {tree!r} like its parameters; it has {', '.join(manifest.slots)}"
        )
    keys = {name: node[1] for name, node in manifest.slots[tree].items() if node[0] == "leaf"}
    for name in sorted(manifest.slots["params"].keys() - keys.keys()):
        raise CheckpointError(
            f"{tree!r} has no tensor for {name!r}; convert the parameters, or an average of all"
        )
    missing = [key for key in keys.values() if key not in manifest.leaves]
    if missing:
        raise CheckpointError(
            f"{missing[0]!r} differs between copies of the pipeline, and is no tensor of one model"
        )
    leaves = {name: manifest.leaves[key] for name, key in keys.items()}
    rows = [
        entry_of(name, leaf.torch_dtype, leaf.shape, partial(read_leaf, path, keys[name], leaf))
        for name, leaf in leaves.items()
    ]
    write_model(Path(folder), rows, most, track)


def entries(tensors: Mapping[str, Callable[[], Tensor]]) -> list[Entry]:
    """The tensors of files, those of experts joined, to write them elsewhere."""
    return [entry_of(name, *_description(read), read) for name, read in tensors.items()]


def _description(read: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of a tensor that is not read."""
    if isinstance(read, Stored):
        return read.entry.dtype, read.entry.shape
    parts = [part[0] for part in read.args[1]]
    (dtype, first), rows = _description(parts[0]), sum(_description(part)[1][0] for part in parts)
    return dtype, (len(read.args[1][0]), rows, *first[1:])


def entry_of(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], read: Callable[[], Tensor]
) -> Entry:
    """A tensor to write that is read when it is its turn."""
    return Entry(name, dtype, shape, lambda: to_bytes(read()))

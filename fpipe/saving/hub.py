# SPDX-License-Identifier: Apache-2.0
"""The layout of models of Hugging Face: safetensors files of a bounded size, an index, and experts
one by one.

Files of this layout are read and written without transformers. This module must not know pipelines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from ..actions import progress
from ..errors import CheckpointError
from ._processes import AnyPath
from .files import Entry, grouped, stored, write
from .manifest import Manifest
from .reading import read_leaf

T = TypeVar("T")
#: Reads a tensor.
Read: TypeAlias = Callable[[], Tensor]
INDEX = "model.safetensors.index.json"
#: Parameters of all experts of a layer -> those of one expert, which are joined along axis 0 of
#: theirs.
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
#: Other names on disk of the same parameters.
_OTHER = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_EXPERT = re.compile(r"(.+\.experts)\.(0|[1-9][0-9]{0,8})\.(gate_proj|up_proj|down_proj)\.weight")


def fused(tensors: Mapping[str, Read]) -> dict[str, Read]:
    """Tensors by name, with those of the experts of a layer as one, as transformers has them in
    memory.

    >>> one = lambda: torch.ones(2, 3)
    >>> names = [f"mlp.experts.{e}.{part}" for e in range(4) for part in ("up_proj", "gate_proj")]
    >>> found = fused({f"{name}.weight": one for name in names})
    >>> {name: read().shape for name, read in found.items()}
    {'mlp.experts.gate_up_proj': torch.Size([4, 4, 3])}
    """
    found = {}
    experts: dict[str, dict[str, dict[int, Read]]] = {}
    for name, read in tensors.items():
        plain = name
        if "block_sparse_moe" in name:
            plain = ".".join(_OTHER.get(part, part) for part in name.split("."))
        match = _EXPERT.fullmatch(plain)
        if match is None:
            _put(found, plain, read, plain)
        else:
            part = experts.setdefault(match[1], {}).setdefault(match[3], {})
            _put(part, int(match[2]), read, plain)
    for head, rows in experts.items():
        for name, parts in _FUSED.items():
            if all(part in rows for part in parts):
                whole = f"{head}.{name}"
                read = partial(_read_experts, head, [rows[part] for part in parts])
                _put(found, whole, read, whole)
    return found


def _put(rows: dict[T, Read], key: T, read: Read, name: str) -> None:
    """Under a key that is new: files may have a tensor under two of its names."""
    if key in rows:
        raise CheckpointError(
            f"the files have two tensors for {name!r}, under two names; remove one"
        )
    rows[key] = read


def _read_experts(head: str, parts: Sequence[Mapping[int, Read]]) -> Tensor:
    """Parameters of all experts of a layer as one; each part is by the number of the expert."""
    numbers = range(len(parts[0]))
    if any(set(part) != set(numbers) for part in parts):
        raise CheckpointError(
            f"{head} has the experts {sorted(parts[0])}; a layer has experts 0, 1, ... without gaps"
        )
    rows = (torch.cat([part[number]() for part in parts]) for number in numbers)
    return torch.stack(list(rows))


def model_files(path: AnyPath) -> dict[str, Read]:
    """Functions that read the tensors of a model's safetensors files, by name.

    Args:
        path: a file, or a folder of files. Tensors of single experts are joined as transformers has
            them in memory.

    Raises:
        CheckpointError: if there are no such files.
    """
    return fused(stored(path))


def export_model(
    checkpoint: AnyPath,
    folder: AnyPath,
    tree: str = "params",
    most: int = 5 << 30,
) -> None:
    """Write the tensors of a checkpoint of ``fpipe.save`` as the files of a model.

    One process calls it. The model's ``config.json`` is not written.

    Args:
        checkpoint: the folder of the checkpoint.
        folder: a new or empty folder for the files.
        tree: the parameters, or what has a tensor for each of them, such as an average.
        most: bytes of a file, but for a larger tensor.

    Raises:
        CheckpointError: if the tree has no tensor for a parameter, or the folder is not empty.
    """
    entries = _entries(Path(checkpoint), tree)
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise CheckpointError(f"{folder} is not empty; write the model to a new folder")
    groups = list(grouped(entries, lambda entry: entry.bytes, most))
    names = ["model.safetensors"]
    if len(groups) > 1:
        names = [f"model-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1)]
    files: dict[str, str] = {}
    with progress(f"writing {folder}") as track:
        for name, group in zip(names, track(groups), strict=True):
            write(out / name, group, {"format": "pt"})
            files |= {entry.name: name for entry in group}
    if len(groups) > 1:
        total = sum(entry.bytes for entry in entries)
        content = {"metadata": {"total_size": total}, "weight_map": files}
        (out / INDEX).write_text(json.dumps(content, indent=2), encoding="utf-8")


def _entries(path: Path, tree: str) -> list[Entry]:
    """The tensors of a tree like the parameters, by the names of these."""
    manifest = Manifest.read(path)
    if tree not in manifest.slots:
        raise CheckpointError(
            f"{path} has no tree {tree!r} like its parameters; it has {', '.join(manifest.slots)}"
        )
    entries = []
    for name in manifest.slots["params"]:
        tag, *key = manifest.slots[tree].get(name, ["none"])
        if tag != "leaf" or key[0] not in manifest.leaves:
            raise CheckpointError(
                f"{tree!r} has no tensor for {name!r}, or one for each copy of the pipeline; "
                "convert the parameters, or an average of all"
            )
        leaf = manifest.leaves[key[0]]
        read = partial(read_leaf, path, key[0], leaf)
        entries.append(Entry(name, leaf.torch_dtype, leaf.shape, read))
    return entries

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of an engine: a folder of ``fpipe.save``, and the model in the layout of Hugging Face
beside it.

This module must not know trainers.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...saving import hub
from ...saving.load import load as load_trees
from ...saving.load import read_leaf
from ...saving.manifest import Manifest, is_complete
from ...saving.save import save as save_trees
from .weights import Weights

FOLDER = "fpipe"


def save(
    folder: str | Path,
    weights: Weights,
    optimizer: torch.optim.Optimizer | None,
    more: Mapping[str, Any],
) -> None:
    """Write parameters, and the state of an optimizer if there is one; every process calls it.

    Args:
        folder: of the checkpoint; a complete one must not be there.
        weights: the parameters.
        optimizer: of the parameters.
        more: numbers and text, alike on all processes.
    """
    path, pipe = Path(folder, FOLDER), weights.pipe
    trees: dict[str, Any] = {} if optimizer is None else {"optimizer": weights.state_of(optimizer)}
    save_trees(path, pipe, params=weights.values(), **trees, more=dict(more))


def load(
    folder: str | Path,
    weights: Weights,
    optimizer: torch.optim.Optimizer | None,
    contents: Sequence[str],
) -> dict[str, Any]:
    """Read what ``save`` wrote into parameters and optimizer; every process calls it.

    Args:
        folder: of the checkpoint.
        weights: the parameters.
        optimizer: of the parameters; None leaves its state out.
        contents: "model", "optimizer", ...: what to read.

    Returns:
        The numbers and text.
    """
    path, pipe = Path(folder, FOLDER), weights.pipe
    saved = Manifest.read(path).trees
    names = ["more", *(["params"] if "model" in contents else [])]
    if optimizer is not None and "optimizer" in contents:
        if "optimizer" not in saved:
            raise CheckpointError(
                f"{path} has no state of an optimizer; load it without 'optimizer'"
            )
        names.append("optimizer")
    found = dict(zip(names, _listed(load_trees(path, pipe, *names), len(names)), strict=True))
    if "params" in found:
        weights.load(found["params"])
    if optimizer is not None and "optimizer" in found:
        weights.load_state(optimizer, found["optimizer"])
    return found["more"]


def remove(folder: str | Path) -> None:
    """Remove the complete checkpoint in a folder, if there is one; one process calls it."""
    path = Path(folder, FOLDER)
    if is_complete(path):
        shutil.rmtree(path)


def write_model(folder: str | Path, into: str | Path) -> None:
    """The parameters of a checkpoint as the files of a model; one process calls it.

    Args:
        folder: of the checkpoint.
        into: where the files go, a folder that is replaced.
    """
    path, into = Path(folder, FOLDER), Path(into)
    shutil.rmtree(into, ignore_errors=True)
    manifest = Manifest.read(path)
    keys = {name: node[1] for name, node in manifest.slots["params"].items() if node[0] == "leaf"}
    leaves = {name: (key, manifest.leaves[key]) for name, key in keys.items()}
    hub.write_model(
        into,
        [
            hub.entry_of(name, leaf.torch_dtype, leaf.shape, partial(read_leaf, path, key, leaf))
            for name, (key, leaf) in leaves.items()
        ],
    )


def _listed(found: Any, count: int) -> Sequence[Any]:
    return [found] if count == 1 else found

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of an engine: a folder of ``fpipe.save``, and the model in the layout of Hugging Face
beside it.

This module must not know trainers.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ... import load as load_trees
from ... import save as save_trees
from ...saving import export_model
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
    names = ["more", *(["params"] if "model" in contents else [])]
    if optimizer is not None and "optimizer" in contents:
        names.append("optimizer")
    values = load_trees(Path(folder, FOLDER), weights.pipe, *names)
    trees = dict(zip(names, values if len(names) > 1 else [values], strict=True))
    if "params" in trees:
        weights.load(trees["params"])
    if optimizer is not None and "optimizer" in trees:
        weights.load_state(optimizer, trees["optimizer"])
    return trees["more"]


def remove(folder: str | Path) -> None:
    """Remove the checkpoint in a folder, if there is one; one process calls it."""
    shutil.rmtree(Path(folder, FOLDER), ignore_errors=True)


def write_model(folder: str | Path, into: str | Path) -> None:
    """Write the parameters of a checkpoint as the files of a model; one process calls it.

    Args:
        folder: of the checkpoint.
        into: where the files go, a folder that is replaced.
    """
    shutil.rmtree(into, ignore_errors=True)
    export_model(Path(folder, FOLDER), into)

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of an engine: ``fpipe.save`` and ``fpipe.load`` for parameters that a torch optimizer
changes.

This module must not know trainers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ... import load as load_trees
from ... import save as save_trees
from ...tree import Tree
from .weights import Weights


def save(
    path: Path,
    weights: Weights,
    optimizer: torch.optim.Optimizer | None,
    more: Mapping[str, object],
) -> None:
    """Write parameters, and the state of an optimizer if there is one; every process calls it.

    Args:
        path: of the checkpoint; a complete one must not be there.
        weights: the parameters.
        optimizer: of the parameters.
        more: numbers and text, alike on all processes.
    """
    trees: dict[str, Any] = {"params": weights.values(), "more": dict(more)}
    if optimizer is not None:
        trees["optimizer"] = weights.state_of(optimizer)
    save_trees(path, weights.pipe, **trees)


def load(
    path: Path,
    weights: Weights,
    optimizer: torch.optim.Optimizer | None,
    contents: Sequence[str],
) -> dict[str, Tree]:
    """Read what ``save`` wrote into parameters and optimizer; every process calls it.

    Args:
        path: of the checkpoint.
        weights: the parameters.
        optimizer: of the parameters; None leaves its state out.
        contents: "model", "optimizer", ...: what to read.

    Returns:
        The numbers and text.
    """
    if "model" in contents:
        weights.load(load_trees(path, weights.pipe, "params"))
    if optimizer is not None and "optimizer" in contents:
        weights.load_state(optimizer, load_trees(path, weights.pipe, "optimizer"))
    return load_trees(path, weights.pipe, "more")

# SPDX-License-Identifier: Apache-2.0
"""Stages that only another process has (``fpipe.Stage.elsewhere()``): each is described by a
process that has it.

Which leaves are frozen or tied, which side inputs there are, whether a stage carries state: a
pipeline needs that of every stage. The processes exchange it once, when the pipeline is built.
Knows configurations and groups; no plan.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ...engine.config import Config
from ...engine.facts import named
from ...engine.handshake import TOGETHER
from ...errors import MismatchError, StageError
from ...programs.wrappers import in_mode
from ...stage import Elsewhere, Layers, Stage, Weight

#: Fields of a Stage that other processes need, as they are.
_PLAIN = ("aux_loss", "state", "carry", "engine", "compile", "frozen", "ties", "name")


def described(config: Config) -> tuple[Stage, ...]:
    """The stages of a configuration, with descriptions in place of those that are elsewhere.

    Every process calls this if one does; a fault of one is raised on all.
    """
    functions = config.functions
    if not any(map(_is_elsewhere, functions)):
        return functions
    if config.local:
        where = next(s for s, stage in enumerate(functions) if _is_elsewhere(stage))
        raise StageError(
            f"stage {where} is elsewhere, but all ranks are in this process; give its function, or "
            "a group of several processes"
        )
    fault = next((s for s in config.here if _is_elsewhere(functions[s])), None)
    report: object = (
        {s: _as_data(stage) for s, stage in enumerate(functions) if not _is_elsewhere(stage)}
        if fault is None
        else f"stage {fault} is on this rank and cannot be elsewhere; give its function"
    )
    reports = config.group.gather_objects(("stages", report, None))
    for rank, found in enumerate(reports):
        if found[0] != "stages":
            raise MismatchError(
                f"rank {config.group.global_rank(rank)} calls a pipeline while others build one; "
                f"{TOGETHER}"
            )
        if isinstance(found[1], str):
            raise StageError(f"rank {config.group.global_rank(rank)}: {found[1]}")
    known = ChainMap(*(stages for _, stages, _ in reports))
    return tuple(_described(s, stage, known) for s, stage in enumerate(functions))


def _is_elsewhere(stage: Stage) -> bool:
    """Whether a stage is elsewhere and not described yet."""
    return isinstance(stage.fn, Elsewhere) and not stage.fn.text


def _as_data(stage: Stage) -> dict[str, object]:
    moded = in_mode(stage, True)
    weights = (
        None
        if stage.weights is None
        else {name: weight.key for name, weight in stage.weights.items()}
    )
    return {
        "text": named(stage.fn),
        "moded": "" if moded is stage else named(moded.fn),
        "layers": _numbers(stage.layers),
        "weights": weights,
        "sides": stage.sides,
        **{name: getattr(stage, name) for name in _PLAIN},
    }


def _described(index: int, stage: Stage, known: Mapping[int, Mapping[str, Any]]) -> Stage:
    if not _is_elsewhere(stage):
        return stage
    if index not in known:
        raise StageError(
            f"stage {index} is elsewhere on every rank; give its function on the rank that has it"
        )
    found = known[index]
    options = {name: found[name] for name in (*_PLAIN, "layers")}
    if found["weights"] is not None:  # names alone: checkpoints ask for shapes where the stage is
        nothing = torch.empty(0, device="meta")
        options["weights"] = {name: Weight(key, nothing) for name, key in found["weights"].items()}
    return replace(
        stage, fn=Elsewhere(found["text"], tuple(found["sides"]), found["moded"]), **options
    )


def _numbers(layers: Layers) -> object:
    """The numbers of blocks as data."""
    if not isinstance(layers, Mapping):
        if layers is None:
            return layers
        return tuple(layers)
    return {
        path: value if isinstance(value, str) else tuple(value) for path, value in layers.items()
    }

"""What a stage has of its pipeline: engine and compiler, unless it names its own, and whether it may compile at all.

Knows stages and devices; no group, schedule or plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import get_args

import torch

from .devices import distrusted
from .errors import StageError
from .stage import Engine, Stage


def settled(stage: Stage, engine: Engine, compile: str | None = None) -> Stage:
    """A stage with the pipeline's engine and compiler where it has none of its own."""
    engine = stage.engine or engine
    if engine not in get_args(Engine):
        raise StageError(f"engine={engine!r}; give one of {', '.join(map(repr, get_args(Engine)))}")
    return replace(stage, engine=engine, compile=stage.compile or (compile if engine == "trace" else None))


def trusted(stages: Sequence[Stage], devices: Iterable[torch.device], stacklevel: int) -> tuple[Stage, ...]:
    """The stages, without a compiler, and with a warning, where torch.compile is not to be trusted.

    >>> here = [torch.device("xpu", 0), torch.device("cpu")]
    >>> [stage.compile for stage in trusted([Stage(max, compile="inductor")], here, 2)]
    ['inductor']
    """
    asked = [stage.compile for stage in stages if stage.compile]
    kind = distrusted(devices) if asked else None
    if kind is None:
        return tuple(stages)
    warnings.warn(
        f"compile={asked[0]!r} is left out: where several devices of type {kind!r} are at work torch.compile is not "
        "trusted; the programs run as they were traced. Leave compile= out, or use one device",
        stacklevel=stacklevel + 1,
    )
    return tuple(replace(stage, compile=None) for stage in stages)

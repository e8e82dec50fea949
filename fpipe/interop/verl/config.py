# SPDX-License-Identifier: Apache-2.0
"""The options of the engine as verl's configurations are; ``yaml/engine/fpipe.yaml`` documents each
of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module

import torch

from ...errors import StageError

configs = import_module("verl.workers.config")
base = import_module("verl.base_config")

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


@dataclass
class FpipeEngineConfig(configs.EngineConfig):
    """The options of the engine; ``yaml/engine/fpipe.yaml`` documents each."""

    strategy: str = "fpipe"
    pipeline_parallel_size: int = -1
    schedule: str = "1F1B"
    stages: int | None = None
    cuts: list[int] | None = None
    zero: int = 0
    reduce_dtype: str | None = None
    model_dtype: str = "fp32"
    dtype: str = "bfloat16"
    attn_implementation: str = "sdpa"
    trace: bool = True
    compile: str | None = None
    logits_chunk_size: int = 1024
    export_bucket_bytes: int = 1 << 28
    override: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what verl would not."""
        super().__post_init__()
        for name in ("dtype", "model_dtype", "reduce_dtype"):
            value = getattr(self, name)
            if value not in DTYPES and not (value is None and name == "reduce_dtype"):
                raise StageError(f"engine.{name}={value!r}; give one of {', '.join(DTYPES)}")


@dataclass
class _OnFpipe(base.BaseConfig):
    """What both configurations of verl's PPO trainer have on this engine."""

    strategy: str = "fpipe"
    fpipe: FpipeEngineConfig = field(default_factory=FpipeEngineConfig)

    def __post_init__(self) -> None:
        """Pass the engine's options to where verl looks for them."""
        super().__post_init__()
        self.engine = self.fpipe


@dataclass
class FpipeActorConfig(_OnFpipe, configs.ActorConfig):
    """The actor, or the reference model, of verl's PPO trainer on this engine."""


@dataclass
class FpipeCriticConfig(_OnFpipe, configs.CriticConfig):
    """The critic of verl's PPO trainer on this engine."""

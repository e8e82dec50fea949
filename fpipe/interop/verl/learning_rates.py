# SPDX-License-Identifier: Apache-2.0
"""verl's learning rate schedulers, from its configuration of an optimizer."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ...errors import UnsupportedError

functional = import_module("verl.utils.torch_functional")


def scheduler_of(optimizer: torch.optim.Optimizer, config: Any) -> LRScheduler:
    """verl's learning rate scheduler for an optimizer."""
    total = config.total_training_steps
    warmup = config.lr_warmup_steps
    if warmup is None or warmup <= 0:
        warmup = int(config.lr_warmup_steps_ratio * total)
    kind = config.get("lr_scheduler_type", "constant")
    if kind == "constant":
        return functional.get_constant_schedule_with_warmup(
            optimizer=optimizer, num_warmup_steps=warmup
        )
    if kind == "cosine":
        return functional.get_cosine_schedule_with_warmup(
            optimizer=optimizer,
            num_warmup_steps=warmup,
            num_training_steps=total,
            min_lr_ratio=config.min_lr_ratio,
            num_cycles=config.num_cycles,
            zero_indexed_step=config.zero_indexed_step,
        )
    raise UnsupportedError(f"optim.lr_scheduler_type={kind!r}; give 'constant' or 'cosine'")

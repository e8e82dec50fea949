# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts in modules: which modules they are, and the implementation of them that can
be traced.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is the experts of a mixture, by the name of its class.

    >>> is_experts(nn.Linear(2, 2))
    False
    """
    return type(module).__name__.lower().endswith("experts")


def use_traceable_experts(clone: nn.Module) -> None:
    """Let the experts of a clone use an implementation that can be traced, by configs of their own,
    where the model has one.
    """
    weights = [p for m in clone.modules() if is_experts(m) for p in m.parameters(recurse=False)]
    if not weights or not hasattr(clone, "set_experts_implementation"):
        return
    # grouped products of other types cannot be traced
    grouped = all(p.dtype == torch.bfloat16 for p in weights)
    configs = dict[int, Any]()
    for module in clone.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config = configs.setdefault(id(config), copy.copy(config))
            config._experts_implementation = "grouped_mm" if grouped else "batched_mm"
            vars(module)["config"] = config

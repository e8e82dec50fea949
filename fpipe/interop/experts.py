# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts in modules: which modules they are, and the implementation of them that can
be traced.
"""

from __future__ import annotations

import copy

import torch
from torch import nn


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is the experts of a mixture, by the name of its class.

    >>> is_experts(nn.Linear(2, 2))
    False
    """
    return type(module).__name__.lower().endswith("experts")


def configs_of(model: nn.Module, experts: str | None) -> tuple[dict[int, object], bool]:
    """Return the configs that stages use in place of the model's, by their identity.

    They name an implementation of experts that can be traced, or the one that is asked for.

    Returns:
        The configs, and whether experts, if there are any, can be traced.
    """
    weights = [p for m in model.modules() if is_experts(m) for p in m.parameters(recurse=False)]
    if not weights or not hasattr(model, "set_experts_implementation"):
        return {}, not weights
    # grouped products of other types cannot be traced
    grouped = all(p.dtype == torch.bfloat16 for p in weights)
    chosen = experts or ("grouped_mm" if grouped else "batched_mm")
    used = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): copy.copy(config) for config in used if config is not None}
    for config in configs.values():
        config._experts_implementation = chosen
    return configs, chosen == "batched_mm" or (chosen == "grouped_mm" and grouped)

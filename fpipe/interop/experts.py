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
    """Whether a module is the experts of a mixture, by the name of its class.

    >>> is_experts(nn.Linear(2, 2))
    False
    """
    return type(module).__name__.lower().endswith("experts")


def configs_of(model: nn.Module, experts: str | None) -> tuple[dict[int, Any], bool]:
    """The configs that stages use in place of the model's, and whether experts, if any, can be
    traced under them.
    """
    weights = [p for m in model.modules() if is_experts(m) for p in m.parameters(recurse=False)]
    if not weights or not hasattr(model, "set_experts_implementation"):
        return {}, not weights
    grouped = all(
        p.dtype == torch.bfloat16 for p in weights
    )  # grouped products of other types cannot be traced
    chosen = experts or ("grouped_mm" if grouped else "batched_mm")
    configs: dict[int, Any] = {}
    for config in {
        id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None
    }.values():
        configs[id(config)] = other = copy.copy(config)
        other._experts_implementation = chosen
    return configs, chosen == "batched_mm" or (chosen == "grouped_mm" and grouped)

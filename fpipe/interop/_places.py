# SPDX-License-Identifier: Apache-2.0
"""Where modules keep their parameters and buffers, so that they are found at each use without a
walk. No stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn


class Place(NamedTuple):
    """Where a module keeps a parameter or a buffer: the value is looked up at each use, since it
    may be replaced.
    """

    owner: Mapping[str, Any]
    key: str

    @property
    def value(self) -> torch.Tensor:
        """The tensor that is there now."""
        return self.owner[self.key]


def places_of(module: nn.Module) -> dict[str, Place]:
    """Where a module keeps its parameters and buffers, by all of their names.

    >>> places_of(nn.Sequential(nn.Linear(2, 1)))["0.bias"].value.shape
    torch.Size([1])
    """
    found: dict[str, Place] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        for owner in (child._parameters, child._buffers):
            for key, value in owner.items():
                if value is not None:
                    found[f"{prefix}.{key}" if prefix else key] = Place(owner, key)
    return found


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module, under all of their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }

# SPDX-License-Identifier: Apache-2.0
"""``Copies``: how copies of a pipeline, each on other data, work together. A value; what follows
from it is in ``passes/copies``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..collectives.group import Group
from ..errors import StageError


@dataclass(frozen=True)
class Copies:
    """How the copies of a pipeline work together; the arguments ``dp=``, ``zero=``, ... of
    ``fpipe.pipeline``.
    """

    group: Group
    zero: int = 0
    dtype: torch.dtype | None = None  # in which gradients are reduced
    bucket: int = 1 << 25  # bytes, at most, but for a leaf that is larger
    unsharded: int = 2  # stages held whole at once, with zero=3
    mean: bool = True
    own: tuple[
        str, ...
    ] = ()  # names of leaves that are not copies: each copy has its own, as of experts

    def __post_init__(self) -> None:
        if self.zero not in (0, 1, 2, 3):
            raise StageError(
                f"zero={self.zero!r}; 0 keeps everything whole, 1 cuts the optimizer state, 2 the "
                "gradients too and 3 "
                "the parameters too"
            )
        if len(self.group.here) != 1:
            raise StageError(
                f"dp={self.group!r} has {len(self.group.here)} ranks in this process; a copy of "
                "the pipeline is one "
                "process or more: give the group that fpipe.init(dp=...) has as .dp"
            )
        if self.bucket < 1 or self.unsharded < 1:
            raise StageError(
                f"bucket_bytes={self.bucket}, unsharded={self.unsharded}; both must be 1 at least"
            )

    @property
    def part(self) -> int:
        """Which copy this process belongs to."""
        return self.group.here[0]

    @property
    def description(self) -> str:
        """What must be equal on every process."""
        return (
            f"{self.group.size} of them, zero={self.zero}, reduced in "
            f"{self.dtype or 'the dtype of gradients'}, "
            f"bucket_bytes={self.bucket}, unsharded={self.unsharded}, "
            f"{'mean' if self.mean else 'sum'}, own={self.own}"
        )

    @property
    def cut(self) -> bool:
        """Whether parameters come, and gradients go, in parts."""
        return self.zero > 0

    def total(self, value: Tensor) -> Tensor:
        """A number's sum over the copies, in its own dtype where the device has that."""
        device = self.group.device(self.part)
        dtype = value.dtype if device.type in ("cpu", "cuda") else torch.float32
        return self.group.all_reduce(value.to(device, dtype)).to(value.device, value.dtype)

    def average(self, value: Tensor) -> Tensor:
        """What copies' losses are together: their mean, or their sum where each has been weighed
        already.
        """
        return self.group.all_reduce(value, "mean" if self.mean else "sum")

    def divided(self, value: Tensor) -> Tensor:
        """A gradient that no other copy has a part in, as one of the mean of the copies' losses."""
        return value / self.group.size if self.mean else value

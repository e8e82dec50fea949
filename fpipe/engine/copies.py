# SPDX-License-Identifier: Apache-2.0
"""``Copies``: how copies of a pipeline, each on other data, work together. A value; what follows
from it is in ``passes/copies``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..collectives.group import Group, as_group
from ..devices import wide
from ..errors import StageError, check_floating
from ..stage import patterns


@dataclass(frozen=True)
class Copies:
    """How the copies of a pipeline work together; see :func:`copies`, which makes it."""

    group: Group
    zero: int = 0
    dtype: torch.dtype | None = None  # in which gradients are reduced
    bucket: int = 1 << 25  # bytes, at most, but for a leaf that is larger
    unsharded: int = 2  # stages held whole at once, with zero=3
    own: tuple[str, ...] = ()  # names of leaves of which each copy has another one
    reduction: Literal["mean", "sum"] | None = None  # None: that of the pipeline

    def __post_init__(self) -> None:
        check_floating("reduce_dtype", self.dtype)
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
        if self.reduction not in (None, "mean", "sum"):
            raise StageError(
                f"copies(reduction={self.reduction!r}); give 'mean' or 'sum', or leave it out"
            )
        if self.bucket < 1 or self.unsharded < 1:
            raise StageError(
                f"bucket_bytes={self.bucket}, unsharded={self.unsharded}; both must be 1 at least"
            )

    @property
    def mean(self) -> bool:
        """Whether copies are averaged, not summed."""
        return self.reduction == "mean"

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
        """A float64 number's sum over the copies, in float64 where the device has that."""
        device = self.group.device(self.part)
        return self.group.all_reduce(value.to(device, wide(device))).to(value.device, value.dtype)

    def average(self, value: Tensor) -> Tensor:
        """What copies' losses are together: their mean, or their sum where each has been weighed
        already.
        """
        return self.group.all_reduce(value, "mean" if self.mean else "sum")

    def divided(self, value: Tensor) -> Tensor:
        """A gradient that no other copy has a part in, as one of the mean of the copies' losses."""
        if self.mean:
            return value / self.group.size
        return value


def copies(
    group: Group,
    *,
    zero: Literal[0, 1, 2, 3] = 0,
    reduce_dtype: torch.dtype | None = None,
    bucket_bytes: int = 1 << 25,
    unsharded: int = 2,
    own: Sequence[str] = (),
    reduction: Literal["mean", "sum"] | None = None,
) -> Copies:
    """How copies of a pipeline, each on another part of the batch, work together: a value for
    ``fpipe.pipeline(dp=)``.

    Args:
        group: the group of the copies, as in ``fpipe.init(dp=2).dp``.
        zero: what copies share. 0: nothing. With 1, 2 or 3 the pipeline takes shards,
            ``pipe.shard(params)``, and returns gradients of shards. 1: full gradients are summed,
            then sharded; 2: no full gradient is kept; 3: in addition, at most ``unsharded`` full
            stages are in memory at once.
        reduce_dtype: the dtype in which gradients are sent between copies. None: their own.
        bucket_bytes: how many bytes of gradients are reduced over the copies at once.
        unsharded: how many stages a rank holds with full parameters, for ``zero=3``.
        own: patterns of leaves of which each copy has another one, such as experts: names as in
            ``frozen=``, or without their stage, as ``"experts.*"`` for those of every stage.
        reduction: ``"mean"`` or ``"sum"`` over copies, where it differs from that of the pipeline.
            With ``fpipe.pipeline(reduction="sum")`` and ``"mean"`` here the microbatches of a copy
            are added, and copies averaged; the weights of ``fpipe.weighted`` are then counted in
            each copy.

    Returns:
        A value for ``fpipe.pipeline(dp=)``.

    Raises:
        StageError: if an option is wrong.
        ArgumentError: if ``reduce_dtype`` is not floating.
        GroupError: if ``group`` is none.

    >>> import fpipe
    >>> copies(fpipe.local(1), zero=2).zero
    2
    """
    if group is None:
        raise StageError(
            f"copies(None, zero={zero}); zero={zero} needs copies to share with: pass the group "
            "that fpipe.init(dp=...) has as .dp"
        )
    group = as_group("dp", group)
    of_leaves = [f"*.{name}" if name[:1].isalpha() else name for name in patterns("own", own)]
    return Copies(group, zero, reduce_dtype, bucket_bytes, unsharded, tuple(of_leaves), reduction)

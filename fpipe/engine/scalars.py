# SPDX-License-Identifier: Apache-2.0
"""Sends scalars of a step, such as its losses, to other ranks as a row of bytes, and adds them.

Where one process has all losses of a step, and their weights are equal, ``parts`` adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import string_at
from functools import lru_cache, reduce
from typing import NamedTuple, TypeAlias

import torch

from ..collectives.group import Group
from ..errors import MismatchError
from ..lowering.instruction import Registers
from ..tree import Spec
from .parts import Weights, added

Tensors: TypeAlias = Sequence[torch.Tensor]


def shared(
    group: Group,
    tag: torch.Tensor,
    number: int,
    values: Sequence[torch.Tensor] | None,
    dtypes: Sequence[torch.dtype],
    rank: int,
) -> Sequence[torch.Tensor]:
    """Send the scalars of a rank to all others; returns them on every rank.

    Other ranks pass None for ``values``. The row of scalars begins with the tag of the plans, whose
    value is ``number``. Rows of different steps may have equal shapes; then their tags differ.
    """
    row_dtypes = (tag.dtype, *dtypes)
    sent = None if values is None else (packed([tag, *values]),)
    (row,) = group.share(sent, row_of(row_dtypes), rank)
    if values is not None:
        return values
    received_tag, *scalars = unpacked(row, row_dtypes)
    if int(received_tag) != number:
        raise MismatchError(
            f"rank {rank} ran another step than rank {group.here[0]} (other shapes, schedule or "
            "number of microbatches); make the same calls in the same order on every rank"
        )
    return [value.to(tag.device) for value in scalars]


def packed(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pack scalars into a row of bytes.

    >>> unpacked(packed([torch.tensor(7), torch.tensor(0.5)]), [torch.int64, torch.float32])
    [tensor(7), tensor(0.5000)]
    """
    if all(value.is_cpu for value in values):
        stored = [value.resolve_neg() for value in values]
        parts = [string_at(value.data_ptr(), value.itemsize) for value in stored]
        return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
    return torch.cat([value.reshape(1).view(torch.uint8) for value in values])


@lru_cache(maxsize=256)
def row_of(dtypes: tuple[torch.dtype, ...]) -> tuple[Spec]:
    """The specs of the message that holds a row of scalars."""
    size = sum(dtype.itemsize for dtype in dtypes)
    return (Spec((size,), (1,), torch.uint8),)


def unpacked(row: torch.Tensor, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Unpack the scalars of a row, to the CPU."""
    content = bytearray(row.tolist())
    offset = 0
    scalars = []
    for dtype in dtypes:
        scalar = torch.frombuffer(content, dtype=dtype, count=1, offset=offset)
        scalars.append(scalar.reshape(()))
        offset += dtype.itemsize
    return scalars


# ---- the total ----
class Scalars(NamedTuple):
    """The losses and auxiliary losses that a rank computes.

    ``places`` are their stages and microbatches; the stage past the last is the loss. ``slots`` is
    None if the rank is on another process.
    """

    rank: int
    places: Sequence[tuple[int, int]]
    dtypes: Sequence[torch.dtype]
    slots: Sequence[int] | None


#: Losses and auxiliary losses by (stage, microbatch); the stage past the last is the loss.
Losses: TypeAlias = Mapping[tuple[int, int], torch.Tensor]


def gather_total(
    scalars: Sequence[Scalars],
    regs: Mapping[int, Registers],
    share: Callable[[Tensors | None, Sequence[torch.dtype], int], Tensors],
    add: Callable[[Losses], torch.Tensor],
) -> torch.Tensor:
    """The total of the losses and auxiliary losses of all ranks.

    A rank that computes all of them shares only the total. Several ranks share all losses.
    """
    losses: dict[tuple[int, int], torch.Tensor] = {}
    for rank, places, dtypes, slots in scalars:
        values = None
        if slots is not None:
            values = [regs[rank].slots[slot] for slot in slots]
        if len(scalars) == 1:
            total = None
            if values is not None:
                total = [add(dict(zip(places, values, strict=True)))]
            return share(total, [reduce(torch.promote_types, dtypes)], rank)[0]
        losses |= zip(places, share(values, dtypes, rank), strict=True)
    return add(losses)


def total_of(
    losses: Losses, weights: Weights | None, with_aux: Sequence[int], stages: int
) -> torch.Tensor:
    """The weighted sum of losses; ``with_aux`` are the stages with auxiliary losses."""
    assert weights is not None
    count = sum(stage == stages for stage, _ in losses)
    if weights.common is not None and not with_aux:
        return added([losses[stages, mb] for mb in range(count)], weights.common)
    totals = []
    for mb in range(count):
        loss = losses[stages, mb]
        extras = [losses[stage, mb].to(loss.device) for stage in with_aux if (stage, mb) in losses]
        totals.append(loss + reduce(torch.add, extras) if extras else loss)
    return weighted(weights, totals)


def weighted(weights: Weights, losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Multiply each microbatch's loss by its weight, and add the products in order."""
    terms = [_weighted(weights, mb, loss) for mb, loss in enumerate(losses)]
    return reduce(lambda total, term: total + term.to(total.device), terms)


def _weighted(weights: Weights, mb: int, loss: torch.Tensor) -> torch.Tensor:
    if weights.common is not None:  # torch.func.jvp of a product with a number is float64
        return loss * torch.tensor(weights.common, dtype=loss.dtype, device=loss.device)
    weight = weights.by_microbatch[mb].to(loss.dtype)
    # The loss of a microbatch of weight 0 may be NaN: the mean of no values.
    return torch.where(weight == 0, 0, loss * weight)

# SPDX-License-Identifier: Apache-2.0
"""Scalars of a step, such as its losses: sent to other ranks as a row of bytes, and their total.

One process that has all losses of a step, with one weight, adds them in ``parts``.
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
    """The scalars of a rank on every rank. Their row begins with the tag of the plan, a tensor, of
    which ``number`` is the value here.
    """
    kinds = (tag.dtype, *dtypes)
    (row,) = group.share(None if values is None else (packed([tag, *values]),), row_of(kinds), rank)
    if values is not None:
        return values
    their_tag, *scalars = unpacked(row, kinds)
    if (
        int(their_tag) != number
    ):  # shapes may agree by chance: then the loss is that of another step
        raise MismatchError(
            f"rank {rank} ran another step than rank {group.here[0]} (other shapes, "
            "schedule or number of "
            "microbatches); make the same calls in the same order on every rank"
        )
    return [value.to(tag.device) for value in scalars]


def packed(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their bytes in a row.

    >>> unpacked(packed([torch.tensor(7), torch.tensor(0.5)]), [torch.int64, torch.float32])
    [tensor(7), tensor(0.5000)]
    """
    if all(value.is_cpu for value in values):
        plain = [value.resolve_neg() for value in values]
        row = bytearray(b"".join([string_at(value.data_ptr(), value.itemsize) for value in plain]))
        return torch.frombuffer(row, dtype=torch.uint8)
    return torch.cat([value.reshape(1).view(torch.uint8) for value in values])


@lru_cache(maxsize=256)
def row_of(dtypes: tuple[torch.dtype, ...]) -> tuple[Spec]:
    """What a row of scalars is as a message."""
    return (Spec((sum(dtype.itemsize for dtype in dtypes),), (1,), torch.uint8),)


def unpacked(row: torch.Tensor, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """The scalars of a row, on the CPU."""
    content = bytearray(row.tolist())
    at = 0
    scalars = []
    for dtype in dtypes:
        scalars.append(torch.frombuffer(content, dtype=dtype, count=1, offset=at).reshape(()))
        at += dtype.itemsize
    return scalars


# ---- the total ----
class Scalars(NamedTuple):
    """The losses and auxiliary losses that a rank computes: each (stage, microbatch), and its slot
    if the rank is here.

    The stage of a loss is one past the last.
    """

    rank: int
    places: Sequence[tuple[int, int]]
    dtypes: Sequence[torch.dtype]
    slots: Sequence[int] | None


#: Losses and auxiliary losses by (stage, microbatch), the losses under one stage past the last.
Found: TypeAlias = Mapping[tuple[int, int], torch.Tensor]


def gathered(
    scalars: Sequence[Scalars],
    regs: Mapping[int, Registers],
    share: Callable[[Sequence[torch.Tensor] | None, Sequence[torch.dtype], int], Tensors],
    add: Callable[[Found], torch.Tensor],
) -> torch.Tensor:
    """The total of losses and auxiliary losses that several ranks compute, or with a weight each.

    A rank that computes all of them shares their total.
    """
    found: dict[tuple[int, int], torch.Tensor] = {}
    for rank, places, dtypes, slots in scalars:
        if slots is None:
            values = None
        else:
            values = [regs[rank].slots[slot] for slot in slots]
        if len(scalars) == 1:
            here = None
            if values is not None:
                here = [add(dict(zip(places, values, strict=True)))]
            return share(here, [reduce(torch.promote_types, dtypes)], rank)[0]
        found |= zip(places, share(values, dtypes, rank), strict=True)
    return add(found)


def total_of(
    found: Found, weights: Weights | None, with_aux: Sequence[int], stages: int
) -> torch.Tensor:
    """Their weighted sum; ``with_aux`` are the stages with auxiliary losses."""
    assert weights is not None
    count = sum(stage == stages for stage, _ in found)
    if weights.number is not None and not with_aux:
        return added([found[stages, mb] for mb in range(count)], weights.number)
    losses = []
    for mb in range(count):
        value = found[stages, mb]
        extras = [found[s, mb].to(value.device) for s in with_aux if (s, mb) in found]
        losses.append(value + reduce(torch.add, extras) if extras else value)
    return weighted(weights, losses)


def weighted(weights: Weights, losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """The total of the microbatches' losses: each weighted, then added in order."""
    terms = [_weighted(weights, mb, loss) for mb, loss in enumerate(losses)]
    return reduce(lambda total, term: total + term.to(total.device), terms)


def _weighted(weights: Weights, mb: int, loss: torch.Tensor) -> torch.Tensor:
    if weights.number is not None:
        return loss * weights.number
    scale = weights.each[mb].to(loss.dtype)
    return torch.where(scale == 0, 0, loss * scale)  # a mean over nothing is NaN

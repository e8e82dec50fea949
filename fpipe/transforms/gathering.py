"""Gradients that several places share: means over data-parallel replicas, sums over the copies of a tied parameter.

One reduction a dtype, of all leaves laid end to end. Knows no optimizer and no schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..collectives.group import Group
from ..errors import TransformError
from ..tree import Tree, names
from ._base import State, Transform, stateless
from ._over import Over, board, board_device
from ._places import by_kind, places
from .norms import Tied


def mean_over(group: Group, *, dtype: torch.dtype | None = None) -> Transform:
    """The mean over the processes of a group, such as the data-parallel replicas of a stage.

    ``dtype`` is what travels and is added (default: each leaf's own); the result has the leaf's own again.

    >>> from fpipe.collectives.local import local
    >>> mean_over(local(1)).update([torch.ones(2), None], ())
    ([tensor([1., 1.]), None], ())
    """

    def kernel(leaves: list[Tensor]) -> list[list[Tensor]]:
        if not leaves:
            return [[]]
        flat = torch.cat([leaf.detach().reshape(-1) for leaf in leaves])
        mean = group.all_reduce(flat if dtype is None else flat.to(dtype), "mean").to(flat.dtype)
        parts = mean.split([leaf.numel() for leaf in leaves])
        return [[part.view(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]]

    def update(grads: Tree, params: Tree) -> Tree:
        at = places(grads)
        return at.tree(by_kind(kernel, at.leaves)[0])

    return stateless(update)


class TiedState(NamedTuple):
    """``sizes``: elements of each copy of each tied parameter, wherever it lives; ``double``: one is float64."""

    sizes: Tensor
    double: Tensor


def sum_tied(tied: Tied | None = None, *, over: Over | None = None) -> Transform:
    """Give each copy of a tied parameter the sum of the gradients of all its copies, wherever these live.

    For pipelines built without ``tied=``; those built with it have summed already. ``tied`` are groups of names,
    by default those of ``over``. Copies are added in the order of their group, so the sum has the same bits for any
    number of ranks. Parameters of a group must have one shape, and are not complex.

    >>> tx = sum_tied([("0.w", "1.w")])
    >>> params = [{"w": torch.zeros(1)}, {"w": torch.zeros(1)}]
    >>> tx.update([{"w": torch.ones(1)}, {"w": torch.ones(1) * 2}], tx.init(params))[0]
    [{'w': tensor([3.])}, {'w': tensor([3.])}]
    """
    if tied is None and over is None:
        raise TransformError("sum_tied needs groups of names, as in sum_tied([('0.wte', '7.wte')]), or over=pipe")
    if getattr(over, "parts", None) is not None:
        raise TransformError("sum_tied needs whole gradients, and zero= gives parts; build the pipeline with tied=")
    groups = tuple(tuple(group) for group in (tied if tied is not None else over.tied if over is not None else ()))
    copies = [name for group in groups for name in group]

    def init(params: Tree) -> State:
        here = {name: leaf for name, leaf in zip(names(params), places(params).leaves, strict=True) if name in copies}
        device = board_device(params, over)
        sizes = {copies.index(name): torch.tensor(float(leaf.numel())) for name, leaf in here.items()}
        wide = {copies.index(name): torch.tensor(float(leaf.dtype == torch.float64)) for name, leaf in here.items()}
        both = board(sizes, len(copies), device, over), board(wide, len(copies), device, over)
        state = TiedState(both[0].to("cpu", torch.int64), both[1].cpu().any())
        _check(groups, state.sizes.tolist())
        return state

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        at = places(grads)
        spots = {name: spot for spot, name in enumerate(names(grads)) if name in copies}
        here = {copies.index(name): at.leaves[spot].detach() for name, spot in spots.items()}
        dtype = torch.float64 if state.double.item() else torch.float32
        slots = _exchange(here, state.sizes.tolist(), dtype, board_device(grads, over), over)
        after = list(at.leaves)
        for group, total in zip(groups, _sums(groups, slots), strict=True):
            for name in group:
                if name in spots:
                    old = at.leaves[spots[name]]
                    after[spots[name]] = total.to(old.device, old.dtype).view(old.shape)
        return at.tree(after), state

    return Transform(init, update)


def _exchange(
    here: dict[int, Tensor], sizes: list[int], dtype: torch.dtype, device: torch.device, over: Over | None
) -> list[Tensor]:
    """Every copy's gradient, flat, on every process: a board whose slots are as long as the copies."""
    empty = [torch.zeros(size, dtype=dtype, device=device) for size in sizes]
    rows = [here[slot].reshape(-1).to(device, dtype) if slot in here else empty[slot] for slot in range(len(sizes))]
    if over is None or not rows:
        return rows
    filled = torch.tensor([float(slot in here) for slot in range(len(sizes))], dtype=dtype, device=device)
    *rows, filled = over.all_sum(torch.cat([*rows, filled])).split([*sizes, len(sizes)])
    return [row / times for row, times in zip(rows, filled.clamp(min=1), strict=True)]


def _sums(groups: Sequence[Sequence[str]], slots: list[Tensor]) -> Iterator[Tensor]:
    start = 0
    for group in groups:
        total = slots[start]
        for slot in slots[start + 1 : start + len(group)]:
            total = total + slot
        start += len(group)
        yield total


def _check(groups: Sequence[Sequence[str]], sizes: list[int]) -> None:
    start = 0
    for group in groups:
        found = dict(zip(group, sizes[start : start + len(group)], strict=True))
        start += len(group)
        if len(set(found.values())) != 1 or 0 in found.values():
            raise TransformError(
                f"these leaves cannot be tied, by their numbers of elements (0: no such leaf): {found}; "
                f"name leaves of one shape as 'stage.key.key'"
            )

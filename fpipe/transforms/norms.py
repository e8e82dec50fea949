"""The norm of all gradients of a model, wherever its stages live, and clipping by it.

Every stage's share is a function of that stage's leaves alone and has a slot of its own on a board, so stages may be
spread over ranks in any way. A parameter tied across stages counts once. Knows no optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..collectives.group import Group
from ..errors import TransformError
from ..tree import Tree, matches, names
from . import _foreach as F
from ._base import State, Transform, stateless
from ._late import LATE, Late
from ._over import Over, apart, board, board_device, board_part, board_whole, number_of_slots, stages_here
from ._places import by_kind, places, recording

#: elements that one row of an exact norm takes in; any number would do, as long as it is always the same
_ROW = 1024

Tied = Sequence[Sequence[str]]


class ClipState(NamedTuple):
    """``norm``: that of the last gradients, before they were clipped."""

    norm: Tensor


def global_norm(
    tree: Tree,
    *,
    over: Over | None = None,
    p: float = 2.0,
    exact: bool = False,
    tied: Tied | None = None,
    shards: Group | None = None,
) -> Tensor:
    """The p-norm (``p`` may be ``inf``) of all leaves as one vector, over all stages of ``over``, on every process.

    ``exact=True`` adds in an order that no number of ranks and no number of threads can change. ``tied`` names leaves
    that are one parameter (default: those of ``over``); the first of a group counts. ``shards`` is a group whose
    processes hold parts of the same leaves (default: that of ``over``). With ``zero=`` an exact norm gathers gradients,
    one stage at a time; parts of other kinds are added last, and how many these are may show in the last bit. Nothing
    waits for the device.

    >>> global_norm([torch.tensor([3.0]), {"w": torch.tensor([4.0])}]).item()
    5.0
    >>> global_norm([torch.tensor([3.0]), torch.tensor([-4.0])], p=float("inf")).item()
    4.0
    """
    if not p > 0:
        raise TransformError(f"p={p!r}; a norm needs p > 0, or float('inf')")
    skip = _copies(tied if tied is not None else over.tied if over is not None else ())
    device = board_device(tree, over)
    if shards is None and (shards := getattr(over, "parts", None)) is not None and exact and over is not None:
        shares = _gathered(tree, over, shards, skip, p, device)
    else:
        shares = _all_shares(tree, over, skip, p, exact, device, shards)
    row = board(shares, number_of_slots(tree, over), device, over)
    return torch.linalg.vector_norm(row, p)


def clip_by_global_norm(
    max_norm: float,
    *,
    over: Over | None = None,
    p: float = 2.0,
    exact: bool = False,
    tied: Tied | None = None,
    shards: Group | None = None,
) -> Transform:
    """Scale all gradients of the model down together where their norm is above ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``: times ``min(1, max_norm / (norm + 1e-6))``. The options are those of
    :func:`global_norm`; ``state.norm`` is the norm that was met.

    >>> tx = clip_by_global_norm(1.0)
    >>> grads = [torch.tensor([3.0]), torch.tensor([4.0])]
    >>> grads, state = tx.update(grads, tx.init(grads))
    >>> [round(g.item(), 4) for g in grads], state.norm.item()
    ([0.6, 0.8], 5.0)
    """
    if not max_norm > 0:
        raise TransformError(f"max_norm={max_norm!r}; clipping needs a norm above 0")

    def init(params: Tree) -> State:
        return ClipState(torch.zeros((), device=board_device(params, over)))

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        at = places(grads)
        with recording(at.leaves):
            norm = global_norm(grads, over=over, p=p, exact=exact, tied=tied, shards=shards)
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            # to ask would be to wait on a device, and under torch.func there may be many answers
            if factor.device.type == "cpu" and not F.differentiated() and factor.item() == 1:
                return grads, ClipState(norm.detach())
            return at.tree(scaled(at.leaves, factor)), ClipState(norm.detach())

    def measure(grads: Tree) -> Tensor | None:
        if shards is not None:
            return None  # takes two sums, one after the other
        skip = _copies(tied if tied is not None else over.tied if over is not None else ())
        device = board_device(grads, over)
        with torch.no_grad():
            return board_part(_shares(grads, over, skip, p, exact, device), number_of_slots(grads, over), device)

    def judge(total: Tensor, state: State) -> State:
        norm = torch.linalg.vector_norm(board_whole(total), p)
        return ClipState(norm) if (max_norm / (norm + 1e-6)).clamp(max=1.0).item() == 1 else None

    LATE[update] = Late(measure, judge, over)
    return Transform(init, update)


def clip_by_value(low: float, high: float | None = None) -> Transform:
    """Every element into ``[low, high]``, or into ``[-x, x]`` where one number is given.

    >>> clip_by_value(1.0).update([torch.tensor([-3.0, 0.5, 2.0])], ())[0]
    [tensor([-1.0000,  0.5000,  1.0000])]
    """
    low, high = (-low, low) if high is None else (low, high)
    if not low <= high:
        raise TransformError(f"nothing lies in [{low}, {high}]; give clip_by_value(x) with x >= 0, or (low, high)")

    def update(grads: Tree, params: Tree) -> Tree:
        at = places(grads)
        with recording(at.leaves):
            (clipped,) = by_kind(lambda gs: [F.clamp(gs, low, high)], at.leaves)
        return at.tree(clipped)

    return stateless(update)


def scaled(leaves: list[Tensor], factor: float | Tensor) -> list[Tensor]:
    """Every leaf times one number or one tensor of no axes, in the leaf's own dtype."""

    def kernel(xs: list[Tensor]) -> list[list[Tensor]]:
        if isinstance(factor, Tensor) and xs:
            return [F.mul(xs, factor.to(xs[0].device, xs[0].dtype))]
        return [F.mul(xs, factor)]

    return by_kind(kernel, leaves)[0]


def _copies(tied: Tied) -> frozenset[str]:
    """Names that another leaf already stands for."""
    return frozenset(name for group in tied for name in tuple(group)[1:])


def _shares(
    tree: Tree, over: Over | None, skip: frozenset[str], p: float, exact: bool, device: torch.device
) -> dict[int, Tensor]:
    """The norm of each stage that lives here."""
    stages = stages_here(_without(tree, skip) if skip else tree, over)
    picked: list[Tensor] = []
    ends: dict[int, tuple[int, int]] = {}
    for stage, part in stages.items():
        start = len(picked)
        picked += [leaf for leaf in places(part).leaves if leaf.numel()]
        ends[stage] = (start, len(picked))
    each = _exact(picked, p) if exact else by_kind(lambda xs: [F.norms(xs, p)], picked)[0]
    return {stage: _joined(each[start:end], p, device) for stage, (start, end) in ends.items()}


def _without(tree: Tree, skip: frozenset[str]) -> Tree:
    at = places(tree)
    return at.keep([name not in skip for name in names(tree)])


def _joined(norms: list[Tensor], p: float, device: torch.device) -> Tensor:
    """The norm of a whole from the norms of its parts, in their order."""
    if not norms:
        return torch.zeros((), device=device)
    dtype = norms[0].dtype
    for norm in norms:
        dtype = torch.promote_types(dtype, norm.dtype)
    return torch.linalg.vector_norm(torch.stack([norm.to(device, dtype) for norm in norms]), p)


def _exact(leaves: list[Tensor], p: float) -> list[Tensor]:
    """Norms by rows of one length: each is added up by one thread, and the order is that of the elements."""
    return [_by_rows(leaf.reshape(-1), p) for leaf in leaves]


def _by_rows(flat: Tensor, p: float) -> Tensor:
    dtype = torch.float32 if flat.dtype in (torch.float16, torch.bfloat16) else None
    while flat.numel() > _ROW:
        whole = flat.numel() // _ROW * _ROW
        rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), p, dim=1, dtype=dtype)
        if whole < flat.numel():
            tail = torch.linalg.vector_norm(flat[whole:], p, dtype=dtype)
            rows = torch.cat([rows, tail.reshape(1)])
        flat, dtype = rows, None
    return torch.linalg.vector_norm(flat, p, dtype=dtype)


def _over_shards(share: Tensor, p: float, shards: Group) -> Tensor:
    # in one dtype everywhere: where no element of a stage fell to a process, it does not know the leaves'
    share = share.to(torch.float64 if share.device.type in ("cpu", "cuda") else torch.float32)
    if math.isinf(p):
        return shards.all_reduce(share, "max")
    return shards.all_reduce(share.pow(p), "sum").pow(1 / p)


def _all_shares(
    tree: Tree, over: Over | None, skip: frozenset[str], p: float, exact: bool, device: torch.device,
    shards: Group | None,
) -> dict[int, Tensor]:  # fmt: skip
    """The norm of each stage here over those who hold parts of it, or have some of its leaves for themselves."""
    several = apart(over) if shards is None else None
    if several is None:
        shares = _shares(tree, over, skip, p, exact, device)
        return shares if shards is None else {stage: _over_shards(share, p, shards) for stage, share in shares.items()}
    group, patterns = several
    own = frozenset(name for name in names(tree) if matches(name, patterns))
    alike = _shares(tree, over, skip | own, p, exact, device)
    others = _shares(tree, over, skip | (frozenset(names(tree)) - own), p, exact, device)
    return {stage: _joined([alike[stage], _over_shards(others[stage], p, group)], p, device) for stage in alike}


def _gathered(
    tree: Tree, over: Over, shards: Group, skip: frozenset[str], p: float, device: torch.device
) -> dict[int, Tensor]:
    """The norm of each stage here as whole leaves have it, of which one stage's are held at a time."""
    shares = {}
    for stage, own in stages_here(tree, over).items():
        alone = [own if stage == other else None for other in range(over.stages)]
        whole = over.unshard(alone)  # type: ignore[attr-defined]
        parts = zip(places(alone).leaves, places(whole).leaves, strict=True)
        cut = any(part is leaf for part, leaf in parts)  # each copy's own, or beside one that has no gradient
        share = _shares(alone if cut else whole, over, skip, p, True, device)[stage]
        shares[stage] = _over_shards(share, p, shards) if cut else share
    return shares

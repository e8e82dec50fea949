"""The expected results of a case: plain autograd, one microbatch after another through the whole
model, and of each microbatch the slices in order.

Its backward is one for each slice, from the last to the first, of the slice's weighted loss and of
the carries that it returned. Gradients are added in the order in which the schedule runs them, then
over replicas, tied leaves and copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

import fpipe

from .cases import (
    LOSSES,
    Batch,
    Call,
    Case,
    is_frozen,
    stages_of,
    tied_under_autocast,
    weight,
)
from .models import tensors_of

leaves_of: Callable[[Any], list[Any]] = lambda t: optree.tree_leaves(t, namespace="fpipe")
map_leaves: Callable[..., Any] = lambda fn, *trees: optree.tree_map(fn, *trees, namespace="fpipe")
Grads = list[list[Tensor | None]]
#: The gradients that are added for each leaf: of the replicas of its stage, and of leaves that are
#: tied to it.
Parts = list[list[list[Tensor] | None]]


@dataclass(frozen=True)
class Expected:
    """What a call must return; ``limits`` are the documented reasons for which its last bits may
    differ.
    """

    value: Any
    grads: Grads | None = None
    input_grads: list[Tensor | None] | None = None
    aux: list[Any] | None = None
    state: list[Any] | None = None
    each: list[Any] | None = None
    limits: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Given:
    """The arguments of a call of one of the copies."""

    params: list[Any]
    batch: Batch
    cotangents: list[list[Tensor]] | None
    state: list[Any]

    def to(self, dtype: torch.dtype) -> Given:
        """The same numbers in another dtype."""
        cast = lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t
        every = lambda tree: map_leaves(cast, tree)
        batch = Batch(every(self.batch.xs), every(self.batch.targets), every(self.batch.scales))
        return Given(every(self.params), batch, every(self.cotangents), every(self.state))


class _Unit(NamedTuple):
    """A slice of a microbatch, or a whole one: the leaves that were given to it, the outputs of the
    last stage, and what is differentiated, with its cotangents.
    """

    live: list[Any]
    x: Tensor
    outputs: Any
    roots: list[Tensor]
    cotangents: list[Tensor]
    carried: list[Any]  # the carries that it got, by stage
    returned: list[Any]  # the carries that it returned


@dataclass
class _Run:
    """What one microbatch after another adds to."""

    state: list[Any]
    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    auxes: list[Any] = field(default_factory=list)
    each: list[Any] = field(default_factory=list)
    grads: list[Grads] = field(default_factory=list)  # by slice
    input_grads: list[Tensor] = field(default_factory=list)  # by microbatch
    limits: set[str] = field(default_factory=set)


def expected(
    case: Case, call: Call, given: Sequence[Given], schedule: fpipe.Schedule
) -> list[Expected]:
    """Run the microbatches of each copy one after another."""
    if not call.split:
        given = [replace(copy, batch=_views(copy.batch)) for copy in given]
    weights = _weights(case, [_cut(case, copy.batch.targets) for copy in given])
    limits = {"tied under autocast"} if tied_under_autocast(case, call) else set()
    if case.features.get("leaves") == "flat buffer":  # the oracle has copies
        limits.add("parameters at other places in memory")
    if call.argnums in (1, (1,)):
        limits.add("parameters without gradients")
    copies = []
    for copy, own in zip(given, weights, strict=True):
        run = _Run(list(copy.state), limits=set(limits))
        for m in range(call.microbatches):
            _microbatch(case, call, copy, own, m, run)
        value = _total(run.losses, own) if case.model.loss else run.outputs
        found = Expected(value, None, None, run.auxes, run.state, run.each, frozenset(run.limits))
        if call.kind != "forward":
            parts = _accumulated(case, run.grads, copy.params, schedule)
            grads = [[_sum(part) for part in row] for row in _with_ties(case, parts)]
            found = replace(found, grads=grads, input_grads=run.input_grads)
        copies.append(found)
    return _of_copies(case, copies) if "copies" in case.features else copies


def _views(batch: Batch) -> Batch:
    """The microbatches as a pipeline gets them: parts of one tensor, at odd places in memory, where
    kernels may add in another order.
    """
    cut = lambda tensors: list(torch.cat(tensors).split([len(t) for t in tensors]))
    with torch.autocast("cpu", enabled=False):
        return Batch(cut(batch.xs), cut(batch.targets), cut(batch.scales))


def _cut(case: Case, tensors: Iterable[Tensor]) -> list[Tensor]:
    """The slices of microbatches."""
    if case.slices == 1:
        return list(tensors)
    return [part for t in tensors for part in t.tensor_split(case.slices, 1)]


def _microbatch(
    case: Case, call: Call, given: Given, weights: Sequence[Any], m: int, run: _Run
) -> None:
    units: list[_Unit] = []
    carries: list[Any] = [None] * len(given.params)
    for k in range(case.slices):
        units.append(_slice(case, call, given, weights, (m, k), carries, run))
        carries = units[-1].returned
    if not case.model.loss:
        run.outputs.append(_joined([unit.outputs for unit in units]))
    if call.kind == "forward":
        return
    behind: list[tuple[Tensor, Tensor]] = []  # carries of a slice, with their gradients
    grads: list[Grads] = []
    dxs: list[Tensor] = []
    for k in reversed(range(case.slices)):
        unit = units[k]
        carried = [t for t in tensors_of(unit.carried) if k and t.requires_grad]
        wanted = [*(leaf for p in unit.live for leaf in leaves_of(p)), unit.x, *carried]
        ends = [*zip(unit.roots, unit.cotangents, strict=True), *behind]
        ends = [(root, cotangent) for root, cotangent in ends if root.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if ends:
            roots, cotangents = zip(*ends, strict=True)
            with torch.autocast("cpu", enabled=False):  # as torch recommends for backwards
                found = torch.autograd.grad(roots, wanted, cotangents, allow_unused=True)
        each = iter(found)
        grads.insert(0, [[next(each) for _ in leaves_of(p)] for p in unit.live])
        dx = next(each)
        dxs.insert(0, torch.zeros_like(unit.x) if dx is None else dx)
        behind = []
        if k:
            of_carries = dict(zip(map(id, carried), each, strict=True))
            pairs = zip(tensors_of(units[k - 1].returned), tensors_of(unit.carried), strict=True)
            for mine, theirs in pairs:
                grad = of_carries.get(id(theirs))
                if grad is not None:
                    behind.append((mine, grad))
    run.grads += grads
    run.input_grads.append(dxs[0] if case.slices == 1 else torch.cat(dxs, 1))


def _slice(
    case: Case,
    call: Call,
    given: Given,
    weights: Sequence[Any],
    place: tuple[int, int],
    carries: list[Any],
    run: _Run,
) -> _Unit:
    m, k = place
    part = lambda t: t if case.slices == 1 else t.tensor_split(case.slices, 1)[k]
    batch = given.batch
    live = map_leaves(lambda t: t.detach().clone().requires_grad_(), given.params)
    x = part(batch.xs[m]).detach().requires_grad_()
    carried = map_leaves(_live, carries) if k else carries
    y, extra, returned = _through(case, live, x, part(batch.scales[m]), carried, k == 0, run)
    if not case.model.loss:
        cotangents = [] if given.cotangents is None else map(part, given.cotangents[m])
        pairs = [(t, c) for t, c in zip(tensors_of(y), cotangents, strict=False) if t.requires_grad]
        return _Unit(live, x, y, [t for t, _ in pairs], [c for _, c in pairs], carried, returned)
    out = LOSSES[case.model.loss](y, part(batch.targets[m]))
    value, aux = out if case.model.loss == "aux" else (out, None)
    run.auxes += [] if aux is None else [map_leaves(_detached, aux)]
    number = f"{m}.{k}" if case.slices > 1 else str(m)
    run.each.append([number, map_leaves(_detached, y), map_leaves(_detached, out)])
    value = value if extra is None else value + extra
    run.losses.append(value.detach())
    scale = weights[m * case.slices + k] * call.features.get("loss_scale", 1)
    cotangent = torch.as_tensor(scale, dtype=value.dtype)
    return _Unit(live, x, None, [value], [cotangent], carried, returned)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _live(leaf: Any) -> Any:
    """A carry as a leaf of a graph of its own."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.is_floating_point())


def _joined(parts: list[Any]) -> Any:
    """The slices of an output as one."""
    if len(parts) == 1:
        return map_leaves(_detached, parts[0])

    def join(*leaves: Any) -> Any:
        if isinstance(leaves[0], Tensor) and leaves[0].dim() > 1:
            return torch.cat([leaf.detach() for leaf in leaves], 1)
        return leaves[0]

    return map_leaves(join, *parts)


def _through(
    case: Case,
    live: list[Any],
    x: Tensor,
    scale: Tensor,
    carries: list[Any],
    first: bool,
    run: _Run,
) -> tuple[Any, Tensor | None, list[Any]]:
    """The output of the last stage, the sum of the auxiliary losses, and the carries."""
    y: Any = x
    extra: Tensor | None = None
    returned = []
    for s, (stage, p) in enumerate(zip(stages_of(case.model, plain=True), live, strict=True)):
        side = {"scale": scale} if "scale" in stage.sides else {}
        args = [p, run.state[s]] if stage.state else [p]
        if stage.carry:
            start = stage.initial_carry
            args.append((start(y) if callable(start) else start) if first else carries[s])
        out = stage.fn(*args, y, **side)
        out = list(out) if stage.state or stage.carry or stage.aux_loss else [out]
        y = out.pop(0)
        returned.append(out.pop(0) if stage.carry else None)
        if stage.aux_loss:
            more = out.pop(0)
            extra = more if extra is None else extra + more
        if stage.state:
            run.state[s] = map_leaves(_detached, out.pop(0))
        leaves = tensors_of(y)
        kept = tensors_of(returned[-1])
        for leaf in [*leaves, *kept]:
            _note_limits(leaf, run.limits)
        if not set(map(id, leaves)).isdisjoint(map(id, kept)):
            run.limits.add("a carry that is an output")
        if "if_finite" in [step.name for step in case.model.bodies[s].steps] and len(
            set(map(id, leaves))
        ) < len(leaves):
            run.limits.add("one tensor twice by its data")
    return y, extra, returned


# ---- documented limits ----
def has_gaps(t: Tensor) -> bool:
    """Whether a tensor leaves out elements of its memory, apart from axes that repeat one
    element.
    """
    step = 1
    for stride, size in sorted(
        (s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1 and s
    ):
        if stride != step:
            return True
        step *= size
    return False


def _note_limits(leaf: Tensor, limits: set[str]) -> None:
    """Note what docs/design/limits.md lists, for the output leaf of a stage."""
    if has_gaps(leaf):
        limits.add("view with gaps")
    if leaf.requires_grad:
        strides = leaf.stride()

        def hook(grad: Tensor) -> None:
            if grad.stride() != strides:
                limits.add("strides of a cotangent")

        leaf.register_hook(hook)


# ---- sums ----
def _weights(case: Case, targets: Sequence[Sequence[Tensor]]) -> list[list[Any]]:
    """The weights of the slices of each copy."""
    if case.reduction == "weighted":
        counts = [[weight(t).to(torch.float64) for t in row] for row in targets]
        total = torch.stack([count for row in counts for count in row]).sum()
        total = torch.where(total == 0, torch.ones_like(total), total)
        return [[count / total for count in row] for row in counts]
    common = 1.0 / len(targets[0]) if case.reduction == "mean" else 1.0
    return [[common] * len(row) for row in targets]


def _total(losses: Sequence[Tensor], weights: Sequence[Any]) -> Tensor:
    """The sum of weighted losses, in their dtype; those of weight 0 do not count, though NaN."""
    parts = []
    for value, number in zip(losses, weights, strict=True):
        number = number.to(value.dtype) if isinstance(number, Tensor) else number
        parts.append(value * number if number else torch.zeros_like(value))
    return reduce(torch.add, parts)


def _order(schedule: fpipe.Schedule, stage: int) -> list[list[int]]:
    """By replica of a stage: the slices in the order in which the schedule runs their weight
    gradients. With ``replicas=`` one sum in the order of microbatches.
    """
    rows: list[list[int]] = []
    for rank in schedule.placement.ranks_of(stage):
        order = [
            part.microbatch
            for action in schedule[rank]
            for part in action.parts
            if part.stage == stage and part.op in "BW"
        ]
        rows += [order] if order else []
    if len(rows) > 1 and one_stage_a_rank(schedule):
        return [sorted(chain(*rows), key=lambda unit: unit // schedule.slices)]
    return rows


def one_stage_a_rank(schedule: fpipe.Schedule) -> bool:
    """Whether no rank has two stages, as in schedules with ``replicas=`` and unlike DualPipe."""
    return all(len(schedule.placement.stages_of(rank)) == 1 for rank in range(schedule.ranks))


def _accumulated(
    case: Case, found: list[Grads], params: list[Any], schedule: fpipe.Schedule
) -> Parts:
    """The gradients of each replica by stage and leaf; None for a leaf without a gradient."""
    return [
        [
            None
            if is_frozen(case, stage, index)
            else _of_replicas(case, found, leaf, (stage, index), schedule)
            for index, leaf in enumerate(leaves_of(p))
        ]
        for stage, p in enumerate(params)
    ]


def _of_replicas(
    case: Case, found: list[Grads], leaf: Tensor, place: tuple[int, int], schedule: fpipe.Schedule
) -> list[Tensor]:
    stage, index = place
    dtype = case.features.get("accumulate", leaf.dtype)
    parts: list[Tensor] = []
    for order in _order(schedule, stage):
        grads = (found[m][stage][index] for m in order)
        total: Tensor | None = None
        for grad in grads:
            if grad is not None:  # each sum is rounded to the dtype of accumulation
                total = grad.to(dtype, copy=True) if total is None else total.add_(grad)
        parts += [] if total is None else [total]
    return parts or [torch.zeros_like(leaf, dtype=dtype)]


def _sum(parts: list[Tensor] | None) -> Tensor | None:
    return None if parts is None else reduce(torch.add, parts)


def _with_ties(case: Case, grads: Parts) -> Parts:
    """Tied leaves have the parts of all of them, in the order in which they are added."""
    for names in case.tied:
        places = [tuple(map(int, name.split("."))) for name in names]
        parts = [grads[s][i] for s, i in places]
        if all(part is not None for part in parts):
            for s, i in places:
                grads[s][i] = [each for part in parts for each in part or ()]
    return grads


def _of_copies(case: Case, copies: Sequence[Expected]) -> list[Expected]:
    """The results of copies: losses and gradients of parameters are averaged, or added."""
    mean = case.reduction == "mean"
    divided = lambda t: t / len(copies) if mean else t
    dtype: torch.dtype | None = case.features.get("reduce_dtype")

    def reduced(*grads: Tensor) -> Tensor:
        sent = [g if dtype is None else g.to(dtype) for g in grads]
        return divided(reduce(torch.add, sent)).to(grads[0].dtype)

    changes: dict[str, Any] = {}
    if copies[0].grads is not None:
        changes["grads"] = map_leaves(reduced, *(copy.grads for copy in copies))
    if case.model.loss:
        changes["value"] = divided(reduce(torch.add, [copy.value for copy in copies]))
    limits = frozenset[str]().union(*(copy.limits for copy in copies))
    dxs = [
        None if copy.input_grads is None else [divided(dx) for dx in copy.input_grads]
        for copy in copies
    ]
    return [
        replace(copy, input_grads=dx, limits=limits, **changes)
        for copy, dx in zip(copies, dxs, strict=True)
    ]

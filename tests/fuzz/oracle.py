"""The expected results of a case: plain autograd, one microbatch after another through the whole
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import optree
import torch
from torch import Tensor

import fpipe

from .cases import LOSSES, Batch, Call, Case, stages_of, tied_under_autocast, traces_prod, weight
from .models import tensors_of

leaves_of = lambda t: optree.tree_leaves(t, namespace="fpipe")
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
    limits: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Given:
    """The arguments of a call."""

    params: list[Any]
    batch: Batch
    cotangents: list[list[Tensor]] | None
    state: list[Any]

    def to(self, dtype: torch.dtype) -> Given:
        """The same numbers in another dtype."""
        cast = lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t

        def every(tree: Any) -> Any:
            return optree.tree_map(cast, tree, namespace="fpipe")

        batch = Batch(every(self.batch.xs), every(self.batch.targets), every(self.batch.scales))
        return Given(every(self.params), batch, every(self.cotangents), every(self.state))


@dataclass
class _Run:
    """What one microbatch after another adds to."""

    losses: list[Tensor]
    outputs: list[Any]
    auxes: list[Any]
    grads: list[Grads]  # by microbatch
    input_grads: list[Tensor | None]
    state: list[Any]
    limits: set[str]


def expected(case: Case, call: Call, given: Given, schedule: fpipe.Schedule) -> Expected:
    """Run the microbatches one after another."""
    weights = _weights(case, given.batch.targets)
    run = _Run([], [], [], [], [], list(given.state), set())
    for m in range(call.microbatches):
        _microbatch(case, call, given, weights[m], m, run)
    value = _total(run.losses, weights) if case.model.loss else run.outputs
    limits = {"prod"} if traces_prod(case.model) else set()
    limits |= {"tied under autocast"} if tied_under_autocast(case) else set()
    found = Expected(value, aux=run.auxes, state=run.state, limits=frozenset(run.limits | limits))
    if call.kind == "forward":
        return found
    parts = _accumulated(case, run.grads, given.params, schedule)
    grads = [[_sum(part) for part in row] for row in _with_ties(case, parts)]
    zeros = zip(given.batch.xs, run.input_grads, strict=True)
    return replace(
        found, grads=grads, input_grads=[torch.zeros_like(x) if g is None else g for x, g in zeros]
    )


def _microbatch(case: Case, call: Call, given: Given, weight: Any, m: int, run: _Run) -> None:
    live = [
        optree.tree_map(lambda t: t.clone().requires_grad_(), p, namespace="fpipe")
        for p in given.params
    ]
    x = given.batch.xs[m].clone().requires_grad_()
    y, extra = _through(case, given, live, x, m, run)
    if case.model.loss:
        value = LOSSES[case.model.loss](y, given.batch.targets[m])
        if case.model.loss == "aux":
            value, aux = value
            run.auxes.append(aux)
        value = value if extra is None else value + extra
        roots, seeds = [value], [torch.ones_like(value) * weight * (call.scale or 1)]
        run.losses.append(value.detach())
    else:
        run.outputs.append(
            optree.tree_map(
                lambda t: t.detach() if isinstance(t, Tensor) else t, y, namespace="fpipe"
            )
        )
        pairs = zip(
            tensors_of(y), [] if given.cotangents is None else given.cotangents[m], strict=False
        )
        chosen = [(t, c) for t, c in pairs if t.requires_grad]
        roots, seeds = [t for t, _ in chosen], [c for _, c in chosen]
    if call.kind == "forward":
        return
    wanted = [*(leaf for p in live for leaf in leaves_of(p)), x]
    found: Sequence[Tensor | None] = [None] * len(wanted)
    if any(r.requires_grad for r in roots):
        found = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
    run.input_grads.append(found[-1])
    each = iter(found)
    run.grads.append([[next(each) for _ in leaves_of(p)] for p in live])


def _through(
    case: Case, given: Given, live: list[Any], x: Tensor, m: int, run: _Run
) -> tuple[Any, Tensor | None]:
    """The output of the last stage, and the sum of the auxiliary losses."""
    y, extra = x, None
    for s, (stage, p) in enumerate(zip(stages_of(case.model), live, strict=True)):
        side = {"scale": given.batch.scales[m]} if "scale" in stage.sides else {}
        out = stage.fn(p, run.state[s], y, **side) if stage.state else stage.fn(p, y, **side)
        if stage.state:
            *out, run.state[s] = out
            out = out if stage.aux_loss else out[0]
        y, more = out if stage.aux_loss else (out, None)
        if more is not None:
            extra = more if extra is None else extra + more
        leaves = tensors_of(y)
        for leaf in leaves:
            _note_limits(leaf, run.limits)
        if "if_finite" in [step.name for step in case.model.bodies[s].steps] and len(
            set(map(id, leaves))
        ) < len(leaves):
            run.limits.add("one tensor twice by its data")
    return y, extra


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
def _weights(case: Case, targets: Sequence[Tensor]) -> list[Any]:
    count = len(targets)
    if case.reduction == "weighted":
        counts = [weight(t).to(torch.float64) for t in targets]
        total = torch.stack(counts).sum()
        total = torch.where(total == 0, torch.ones_like(total), total)
        return [(c / total).to(targets[0].dtype) for c in counts]
    return [1.0 / count if case.reduction == "mean" else 1.0] * count


def _total(losses: Sequence[Tensor], weights: Sequence[Any]) -> Tensor:
    total = None
    for value, scale in zip(losses, weights, strict=True):
        part = value * scale
        total = part if total is None else total + part
    assert total is not None
    return total


def _order(schedule: fpipe.Schedule, stage: int) -> list[list[int]]:
    """By replica of a stage: the microbatches in the order in which the schedule runs their weight
    gradients.
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
    return rows


def _accumulated(
    case: Case, found: list[Grads], params: list[Any], schedule: fpipe.Schedule
) -> Parts:
    """The gradients of each replica by stage and leaf; None for a leaf without a gradient."""
    return [
        [
            None
            if str(stage) in case.frozen
            else _of_replicas(case, found, leaf, (stage, index), schedule)
            for index, leaf in enumerate(leaves_of(p))
        ]
        for stage, p in enumerate(params)
    ]


def _of_replicas(
    case: Case, found: list[Grads], leaf: Tensor, place: tuple[int, int], schedule: fpipe.Schedule
) -> list[Tensor]:
    stage, index = place
    parts: list[Tensor] = []
    for order in _order(schedule, stage):
        grads = (found[m][stage][index] for m in order)
        added = [grad.double() if case.wide else grad.clone() for grad in grads if grad is not None]
        parts += [reduce(torch.add, added)] if added else []
    return parts or [torch.zeros_like(leaf, dtype=torch.float64 if case.wide else leaf.dtype)]


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

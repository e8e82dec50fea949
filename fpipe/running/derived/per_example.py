"""Gradient norms per example over all stages, and gradients of which each example has its own share.

An example is a batch of one row. In a first step every stage gets its parameters once for each row, and the squared
norms of what these receive ride back to the first stage as the gradient of a number that came with the row. In a
second step the rows' losses are weighed, so that cotangents are scaled before any weight gradient is made. Knows
pipelines and stages; no plan and no register.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ... import tree
from ...errors import StageError
from ...stage import Stage, as_stage
from ..microbatches import Microbatches, count, split
from ..pipeline import Pipeline, value_and_grad
from .forward_mode import asking

Factors = Callable[[Tensor], Tensor]


class PerExample:
    """What :func:`per_example` makes: call it with (params, x, *targets)."""

    def __init__(self, pipe: Pipeline, scale: float | Factors | None):
        _check(pipe)
        self.pipe, self.factors = pipe, _factors(scale)
        self._probing = _variant(pipe, True)
        self._weighing = _variant(pipe, False)

    def norms(self, params: Any, x: Any, *targets: Any, seed: int | None = None, **side: Any) -> tuple[Tensor, Tensor]:
        """``(value, norms)``: the loss, and the norm of each example's gradient, in order, on every process."""
        pipe = self._probing
        parts, sizes = _with_numbers(pipe, (x, *targets), side, None)
        value, grads = value_and_grad(pipe, 1)(params, parts, *targets, seed=seed, **side)
        device = pipe.group.device(pipe.group.here[0])
        squares = torch.zeros(sum(sizes), device=device)
        if grads is not None:  # in the process of the first stage
            squares = torch.cat([part[1].float() for part in grads]).to(device)
        value = value / sum(sizes) if self.pipe.reduction == "mean" else value
        return value, pipe.group.all_reduce(squares).sqrt()

    def __call__(
        self, params: Any, x: Any, *targets: Any, seed: int | None = None, **side: Any
    ) -> tuple[Tensor, Any, Tensor]:
        """``(value, grads, norms)``: the gradients are those of the loss with each example's part scaled."""
        value, norms = self.norms(params, x, *targets, seed=seed, **side)
        factors = self.factors(norms)
        if factors.shape != norms.shape:
            raise StageError(f"scale gave {list(factors.shape)} factors for {len(norms)} examples; give one for each")
        weights = factors / len(factors) if self.pipe.reduction == "mean" else factors
        parts, _ = _with_numbers(self._weighing, (x, *targets), side, weights)
        return value, value_and_grad(self._weighing)(params, parts, *targets, seed=seed, **side)[1], norms


def per_example(pipe: Pipeline, scale: float | Factors | None = None) -> PerExample:
    """Gradients in which each example has a share that depends on its own gradient's norm over all stages.

    ``scale`` is the most that a norm may count, as differentially private training clips, or a function from norms to
    factors (default: 1). The result takes (params, x, *targets) and returns ``(value, grads, norms)``;
    ``.norms(...)`` returns ``(value, norms)`` alone.

    An example is a batch of one row: stages and loss see one at a time (through ``torch.func.vmap``), so nothing mixes
    rows, and random draws differ between them; under the reduction "mean" all examples count alike. Costs: norms are a
    step in which a stage's gradients stand once for each row of a microbatch; the scaled ones are a second, plain step.
    Frozen leaves do not count. Refused are tied parameters, state, ``dp=`` and ``fpipe.weighted``.

    >>> from fpipe import local, pipeline
    >>> loss = lambda y, t: (y - t).square().sum()
    >>> pipe = pipeline([lambda w, x: w * x] * 2, loss=loss, microbatches=1, group=local(2), reduction="sum")
    >>> params, x, t = [torch.tensor(3.0), torch.tensor(4.0)], torch.tensor([[1.0], [0.0]]), torch.ones(2, 1)
    >>> value, grads, norms = per_example(pipe, 1.0)(params, x, t)
    >>> norms.tolist(), [round(g.item(), 4) for g in grads]
    ([110.0, 0.0], [0.8, 0.6])
    """
    if not isinstance(pipe, Pipeline):
        raise StageError(f"per_example takes what fpipe.pipeline returns, not {type(pipe).__name__}")
    return PerExample(pipe, scale)


def _check(pipe: Pipeline) -> None:
    refused = {
        "tied parameters": pipe.tied, "state": any(stage.state for stage in pipe.functions),
        "dp=": pipe.copies is not None, "a weighted reduction": pipe.reduction not in ("mean", "sum"),
    }  # fmt: skip
    for what, there in refused.items():
        if there:
            raise StageError(f"norms per example of a pipeline with {what} are not defined; build one without")
    if pipe.loss is None:
        raise StageError("norms per example need a loss, one for each example; say pipeline(..., loss=)")


def _factors(scale: float | Factors | None) -> Factors:
    if scale is None:
        return torch.ones_like
    if callable(scale):
        return scale
    if not scale > 0:
        raise StageError(f"scale={scale!r}; give the most that a norm may count, above 0, or a function of the norms")
    return lambda norms: (scale / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)


def _variant(pipe: Pipeline, probing: bool) -> Pipeline:
    """The pipeline whose stages take one row at a time, and pass a number of each row on."""
    made = copy(pipe)
    made.cache, made.reduction = {}, "sum"
    made.functions = tuple(_by_row(stage, s, pipe.frozen, probing) for s, stage in enumerate(pipe.functions))
    assert pipe.loss is not None
    made.loss = _weighed(as_stage(pipe.loss), probing)
    made.__dict__.pop("sides", None)
    return made


def _with_numbers(
    pipe: Pipeline, batches: tuple[Any, ...], side: dict[str, Any], numbers: Tensor | None
) -> tuple[Microbatches, list[int]]:
    """x by microbatches, with a number for each row and nothing yet for auxiliary losses; and their rows."""
    parts = split(batches[0], count([*batches, *side.values()], pipe.microbatches), "x")
    tensors = [next((leaf for leaf in tree.leaves(part) if tree.is_tensor(leaf)), None) for part in parts]
    if any(tensor is None for tensor in tensors):
        raise StageError("x holds no tensor, and so no rows to tell examples apart")
    sizes = [len(tensor) for tensor in tensors if tensor is not None]
    numbers = torch.zeros(sum(sizes)) if numbers is None else numbers.detach()
    rows = zip(parts, numbers.cpu().split(sizes), strict=True)
    return Microbatches((part, row, None) for part, row in rows), sizes


class _Probe(torch.autograd.Function):
    """Leaves once for each row; what comes back to them goes, as squared norms by row, to the rows' numbers."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        return numbers.clone(), *(leaf.expand(len(numbers), *leaf.shape) for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        squares = grads[0]
        for grad in grads[1:]:
            squares = squares + grad.abs().square().reshape(len(grad), -1).sum(1).to(squares.dtype)
        return squares, *([None] * (len(grads) - 1))


def _by_row(stage: Stage, number: int, frozen: tuple[str, ...], probing: bool) -> Stage:
    def call(p: Any, triple: Any, **side: Any) -> Any:
        x, numbers, more = triple
        leaves, spec = tree.flatten(p)
        live = _live(p, number, frozen) if probing else []
        if live:
            numbers, *rows = _Probe.apply(numbers, *(leaves[i].detach() for i in live))  # type: ignore[misc]
            for i, leaf in zip(live, rows, strict=True):
                leaves[i] = leaf
        once = lambda given, row: stage.fn(tree.unflatten(spec, given), row[0], **row[1])
        y = _over_rows(once, leaves, frozenset(live), (x, side))
        if stage.aux_loss:
            y, aux = y
            more = aux if more is None else more + aux
        return tree.tree_map(lambda t: t.flatten(0, 1) if tree.is_tensor(t) else t, y), numbers, more

    return replace(stage, fn=asking(call, stage.fn), aux_loss=False, like=None, ties=(), name=stage.label)


def _live(p: Any, number: int, frozen: tuple[str, ...]) -> list[int]:
    """Which leaves of a stage's parameters get a gradient."""
    names = [f"{number}.{name}" if name else str(number) for name in tree.names(p)]
    leaves = zip(names, tree.leaves(p), strict=True)
    return [i for i, (name, leaf) in enumerate(leaves) if tree.is_floating(leaf) and not tree.matches(name, frozen)]


def _weighed(loss: Stage, probing: bool) -> Stage:
    def call(triple: Any, *targets: Any, **side: Any) -> Tensor:
        y, numbers, more = triple

        def once(_: Any, row: Any) -> Any:
            made = loss.fn(row[0], *row[1], **row[2])
            return made[0] if isinstance(made, tuple) else made

        each = _over_rows(once, [], frozenset(), (y, targets, side))
        each = each if more is None else each + more
        numbers = numbers.to(each.dtype)
        return each.sum() + 0 * numbers.sum() if probing else (each * numbers).sum()

    return replace(loss, fn=asking(call, loss.fn), like=None, name=loss.label)


def _over_rows(fn: Callable[..., Any], shared: list[Any], apart: frozenset[int], batch: Any) -> Any:
    """``fn(shared, row)`` for each row of a batch, itself a batch of one; leaves ``apart`` have one value a row."""
    flat, spec = tree.flatten(batch)
    every = [*shared, *flat]
    which = [i for i, leaf in enumerate(every) if tree.is_tensor(leaf)]
    form: list[Any] = []

    def one(*tensors: Tensor) -> tuple[Tensor, ...]:
        full = list(every)
        for i, leaf in zip(which, tensors, strict=True):
            full[i] = leaf if i < len(shared) else leaf.unsqueeze(0)
        made, y_spec = tree.flatten(fn(full[: len(shared)], tree.unflatten(spec, full[len(shared) :])))
        form[:] = [y_spec, made]
        return tuple(leaf for leaf in made if tree.is_tensor(leaf))

    dims = tuple(0 if i >= len(shared) or i in apart else None for i in which)
    made = iter(torch.vmap(one, dims, randomness="different")(*(every[i] for i in which)))
    y_spec, leaves = form
    return tree.unflatten(y_spec, [next(made) if tree.is_tensor(leaf) else leaf for leaf in leaves])

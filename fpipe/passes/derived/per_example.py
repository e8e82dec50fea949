# SPDX-License-Identifier: Apache-2.0
"""Gradient norms per example over all stages, and gradients to which each example contributes a
scaled part.

An example is a batch of one row. In a first step every stage receives its parameters once for each
row, and the squared norms of their gradients are returned to the first stage as the gradient of a
number that came with the row. In a second step the rows' losses are weighted, so cotangents are
scaled before any weight gradient is computed. Knows pipelines and stages; no plan and no register.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import Parameter, Signature
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ... import tree
from ...engine.config import Config
from ...engine.gradients import check_pipeline, value_and_grad
from ...engine.microbatches import Microbatches
from ...engine.parts import Parts, count
from ...engine.pipeline import Pipeline
from ...engine.signatures import P
from ...errors import StageError
from ...stage import Stage, as_stage, keyword_only
from ...tree import Tree
from .chosen import Chosen

Factors: TypeAlias = Callable[[Tensor], Tensor]


class PerExample:
    """The result of :func:`per_example`: call it with (params, x, *targets)."""

    def __init__(self, pipe: Pipeline, scale: float | Factors | None):
        _check(pipe.config)
        self.factors = _factors(scale)
        self._mean = pipe.config.reduction == "mean"
        self._probing, self._weighted = (_variant(pipe.config, flag) for flag in (True, False))

    def norms(
        self,
        params: Sequence[Tree],
        x: Tree,
        /,
        *targets: Tree,
        seed: int | None = None,
        **side: Tree,
    ) -> tuple[Tensor, Tensor]:
        """``(value, norms)``: the loss, and the norm of each example's gradient, in order, on every
        process.
        """
        pipe = self._probing
        parts, sizes = _with_numbers(pipe, (x, *targets), side, None)
        value, grads = value_and_grad(pipe, 1)(params, parts, *targets, seed=seed, **side)
        device = pipe.group.device(pipe.group.here[0])
        squares = torch.zeros(sum(sizes), device=device)
        if grads is not None:  # in the process of the first stage
            squares = torch.cat([part[1].float() for part in grads]).to(device)
        value = value / sum(sizes) if self._mean else value
        return value, pipe.group.all_reduce(squares).sqrt()

    def __call__(
        self, params: Sequence[P], x: Tree, /, *targets: Tree, seed: int | None = None, **side: Tree
    ) -> tuple[Tensor, list[P], Tensor]:
        """``(value, grads, norms)``: the gradients are those of the loss with each example's part
        scaled.
        """
        value, norms = self.norms(params, x, *targets, seed=seed, **side)
        factors = self.factors(norms)
        if factors.shape != norms.shape:
            raise StageError(
                f"scale gave {list(factors.shape)} factors for {len(norms)} examples; give one "
                "for each"
            )
        weights = factors / len(factors) if self._mean else factors
        parts, _ = _with_numbers(self._weighted, (x, *targets), side, weights)
        step = value_and_grad(self._weighted)
        _, grads = step(params, parts, *targets, seed=seed, **side)
        return value, grads, norms


def per_example(pipe: Pipeline, scale: float | Factors | None = None) -> PerExample:
    """Gradients in which each example has a share that depends on its own gradient's norm over all
    stages.

    An example is a batch of one row: stages and loss see one at a time (through
    ``torch.func.vmap``), so nothing mixes rows, and random draws differ between them; under the
    reduction "mean" all examples count alike. Costs: norms are a step in which a stage's gradients
    stand once for each row of a microbatch; the scaled ones are a second, plain step. Frozen leaves
    do not count. Refused are tied parameters, state, ``dp=`` and ``fpipe.weighted``.

    Args:
        pipe: a pipeline with a loss.
        scale: the most that a norm may count, as differentially private training clips, or a
            function from norms to factors; by default every factor is 1.

    Returns:
        A function of ``(params, x, *targets)`` that returns ``(value, grads, norms)``; its method
        ``norms`` returns ``(value, norms)`` alone.

    Raises:
        StageError: if the pipeline has no loss, or is one of those that are refused.

    >>> from fpipe import local, pipeline
    >>> loss = lambda y, t: (y - t).square().sum()
    >>> pipe = pipeline([lambda w, x: w * x] * 2, loss=loss, microbatches=1, group=local(2),
    ...     reduction="sum")
    >>> params, x, t = [torch.tensor(3.0),
    ...     torch.tensor(4.0)], torch.tensor([[1.0], [0.0]]), torch.ones(2, 1)
    >>> value, grads, norms = per_example(pipe, 1.0)(params, x, t)
    >>> norms.tolist(), [round(g.item(), 4) for g in grads]
    ([110.0, 0.0], [0.8, 0.6])
    """
    check_pipeline("per_example", pipe)
    return PerExample(pipe, scale)


def _check(config: Config) -> None:
    """Raise StageError for a pipeline whose examples have no norms of their own."""
    refused = {
        "tied parameters": config.tied,
        "state": config.stateful,
        "dp=": config.copies is not None,
        "slices": config.slices > 1,
        "carries": config.carries,
        "a weighted reduction": config.reduction not in ("mean", "sum"),
    }
    for kind, present in refused.items():
        if present:
            raise StageError(
                f"a norm per example of a pipeline with {kind} is not defined; build one without"
            )
    if config.loss is None:
        raise StageError(
            "norms per example need a loss, one for each example; say pipeline(..., loss=)"
        )


def _factors(scale: float | Factors | None) -> Factors:
    if scale is None:
        return torch.ones_like
    if callable(scale):
        return scale
    if not scale > 0:
        raise StageError(
            f"scale={scale!r}; give the most that a norm may count, above 0, or a function of the "
            "norms"
        )
    return lambda norms: (scale / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)


def _variant(config: Config, probing: bool) -> Pipeline:
    """The pipeline whose stages take one row at a time, and pass on a number for each row."""
    assert config.loss is not None
    functions = tuple(_by_row(config, s, probing) for s in range(config.stages))
    loss = _row_loss(as_stage(config.loss), probing)
    return Pipeline(replace(config, functions=functions, loss=loss, reduction="sum"))


def _with_numbers(
    pipe: Pipeline,
    batches: tuple[Tree, ...],
    side: dict[str, Tree],
    numbers: Tensor | None,
) -> tuple[Microbatches, list[int]]:
    """x by microbatches, with a number for each row and None for auxiliary losses; and how many
    rows each has.
    """
    number = count([*batches, *side.values()], pipe.config.microbatches)
    x = Parts(batches[0], number, "x")
    parts = [x.tree(mb) for mb in range(number)]
    sizes = []
    for part in parts:
        tensor = next(filter(tree.is_tensor, tree.leaves(part)), None)
        if tensor is None:
            raise StageError("x holds no tensor, and so no rows to tell examples apart")
        sizes.append(len(tensor))
    numbers = torch.zeros(sum(sizes)) if numbers is None else numbers.detach()
    rows = zip(parts, numbers.cpu().split(sizes), strict=True)
    return Microbatches((part, row, None) for part, row in rows), sizes


def _wrapped(stage: Stage, call: Any) -> Stage:
    """The stage with another function around its own, whose signature has its side inputs."""
    names = keyword_only(stage.fn)
    parameters = [Parameter("args", Parameter.VAR_POSITIONAL)]
    parameters += [Parameter(name, Parameter.KEYWORD_ONLY) for name in names]
    call.__signature__ = Signature(parameters)
    # torch.func.vmap reads sizes as numbers
    options = {"like": None, "aux_loss": False, "ties": (), "dynamic": False}
    return replace(stage, fn=call, name=stage.label, **options)


class _Probe(torch.autograd.Function):
    """Leaves once for each row; the squared norms of their gradients become the gradient of the
    rows' numbers.
    """

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        return numbers.clone(), *(leaf.expand(len(numbers), *leaf.shape) for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        squares = grads[0]
        for grad in grads[1:]:
            squares = squares + grad.abs().square().reshape(len(grad), -1).sum(1).to(squares.dtype)
        return squares, *([None] * (len(grads) - 1))


def _by_row(config: Config, number: int, probing: bool) -> Stage:
    stage = config.functions[number]

    def by_row(p: Tree, triple: Tree, /, **side: Tree) -> Tree:
        x, numbers, more = triple
        trained = zip(tree.leaves(p), config.trained(number, p), strict=True)
        probed = [probing and flag and tree.is_floating(leaf) for leaf, flag in trained]
        chosen = Chosen(p, probed)
        copies: Sequence[Tensor] = ()
        if chosen.leaves:
            leaves = (leaf.detach() for leaf in chosen.leaves)
            numbers, *copies = _Probe.apply(numbers, *leaves)  # type: ignore[misc]

        def one(leaves: Sequence[Tensor], row: Tree) -> Tree:
            x, side = row
            return stage.fn(chosen.around(leaves), x, **side)

        y = _over_rows(one, copies, (x, side))
        if stage.aux_loss:
            y, aux = y
            more = aux if more is None else more + aux
        y = tree.tree_map(lambda t: t.flatten(0, 1) if tree.is_tensor(t) else t, y)
        return y, numbers, more

    return _wrapped(stage, by_row)


def _row_loss(loss: Stage, probing: bool) -> Stage:
    """The sum of the losses of single rows, each times its number; while probing, of the losses as
    they are.
    """

    def one(_: Sequence[Tensor], row: Tree) -> Tensor:
        y, targets, side = row
        result = loss.fn(y, *targets, **side)
        return result[0] if isinstance(result, tuple) else result

    def by_row(triple: Tree, /, *targets: Tree, **side: Tree) -> Tensor:
        y, numbers, more = triple
        losses = _over_rows(one, (), (y, targets, side))
        losses = losses if more is None else losses + more
        numbers = numbers.to(losses.dtype)
        if probing:
            return losses.sum() + 0 * numbers.sum()
        return (losses * numbers).sum()

    return _wrapped(loss, by_row)


def _over_rows(
    fn: Callable[[Sequence[Tensor], Tree], Tree], values: Sequence[Tensor], batch: Tree
) -> Tree:
    """``fn(values, row)`` for each row of a batch, itself a batch of one; ``values`` has one value
    for each row.
    """
    rows = Chosen(batch, tree.is_tensor)
    result: Tree = None

    def one(*tensors: Tensor) -> tuple[Tensor, ...]:
        nonlocal result
        row = [leaf.unsqueeze(0) for leaf in tensors[len(values) :]]
        result = fn(tensors[: len(values)], rows.around(row))
        return tuple(filter(tree.is_tensor, tree.leaves(result)))

    outputs = torch.vmap(one, 0, randomness="different")(*values, *rows.leaves)
    return Chosen(result, tree.is_tensor).around(outputs)

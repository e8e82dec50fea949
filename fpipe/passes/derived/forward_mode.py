# SPDX-License-Identifier: Apache-2.0
"""Forward mode through a pipeline: every stage becomes a dual one, whose values are pairs with
their tangents.

A dual pipeline has the configuration of the one that it is derived from, so everything that can be
done with a pipeline can be done with it: its forward computes directional derivatives, its gradient
a Hessian-vector product. Knows stages and pipelines; no plan and no register.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ... import tree
from ...engine import calls
from ...engine.gradients import check_pipeline
from ...engine.microbatches import Microbatches
from ...engine.pipeline import Pipeline
from ...engine.signatures import P
from ...errors import StageError
from ...stage import Stage, as_stage
from ...tree import Tree
from .normalizations import PlainNormalizations
from .variants import Chosen, Function, first, refuse, wrapped

_DUALS: WeakKeyDictionary[Pipeline, Pipeline] = WeakKeyDictionary()


def jvp(
    pipe: Pipeline,
    primals: Sequence[Tree],
    tangents: Sequence[Tree],
    *rest: Tree,
    seed: int | None = None,
    **side: Tree,
) -> tuple[Tree, Tree]:
    """The value of the pipeline and its derivative along the tangents: one forward of its schedule,
    on pairs.

    Each activation and each message is twice as large. With a
    loss both results are on every rank; without one both are outputs, where ``outputs=`` says.
    Auxiliary losses count. Stages with state, copies of the pipeline (``dp=``) and functions
    without a rule for forward mode are refused.

    Args:
        pipe: a pipeline.
        primals: ``(params,)`` or ``(params, x)``.
        tangents: trees of the same structure, where None means zeros.
        rest: the other arguments of a call.
        seed, side: as for a call of the pipeline.

    Returns:
        ``(value, derivative)``.

    Raises:
        StageError: if the arguments do not match, or the pipeline is one of those that are refused.

    >>> from fpipe import local, pipeline
    >>> pipe = pipeline([lambda w, x: w * x] * 2, loss=lambda y: y.sum(), microbatches=1,
    ...     group=local(2))
    >>> params, along = [torch.tensor(3.0), torch.tensor(5.0)], [torch.tensor(1.0),
    ...     torch.tensor(0.0)]
    >>> [t.item() for t in jvp(pipe, (params,), (along,), torch.ones(1, 1))]
    [15.0, 5.0]
    """
    params, pairs, targets = _paired(pipe, primals, tangents, rest)
    twin = dual(pipe)
    if pipe.config.loss is None:
        return _parted(twin(params, pairs, *targets, seed=seed, **side))
    call = twin.call("forward", params, pairs, targets, side, seed=seed, has_aux=True)
    change, values = calls.forward(call, twin.cache)
    weights = call.weights()
    assert weights is not None
    return weights.sum(values), change


def hvp(
    pipe: Pipeline,
    params: Sequence[P],
    v: Sequence[P],
    x: Tree,
    *targets: Tree,
    seed: int | None = None,
    **side: Tree,
) -> list[P]:
    """The Hessian of the loss in the parameters times ``v``: the gradient, by the same schedule, of
    :func:`jvp`.

    Forward over reverse would need the backward twice; this is one step of dual stages, of about
    three times the work of a plain one.

    Args:
        pipe: a pipeline with a loss.
        params: as for a call of the pipeline.
        v: one tree for each stage, with the structure of the parameters.
        x, targets, seed, side: as for a call of the pipeline.

    Returns:
        One tree for each stage, as ``grad``: None for stages of other processes and for frozen
        leaves.

    Raises:
        StageError: if the pipeline has no loss, state or copies.

    >>> from fpipe import local, pipeline
    >>> pipe = pipeline([lambda w, x: w * x] * 2, loss=lambda y: y.sum(), microbatches=1,
    ...     group=local(2))
    >>> params, v = [torch.tensor(3.0), torch.tensor(5.0)], [torch.tensor(1.0), torch.tensor(0.0)]
    >>> hvp(pipe, params, v, torch.ones(1, 1))
    [tensor(0.), tensor(1.)]
    """
    if pipe.config.loss is None:
        raise StageError("hvp needs a loss, whose Hessian it is; say pipeline(..., loss=)")
    both, pairs, targets = _paired(pipe, (params,), (v,), (x, *targets))
    twin = dual(pipe)
    call = twin.call("grad", both, pairs, targets, side, seed=seed, has_aux=True)
    _, (grads,) = calls.value_and_grad(call, twin.cache, value=False)
    out: list[Any] = [None] * len(grads)
    for stage, grad in enumerate(grads):
        if grad is not None:
            trained = Chosen(grad[0], pipe.config.trained(stage, grad[0]))
            out[stage] = trained.around(trained.leaves, None)
    return cast(Any, tuple(out)) if isinstance(params, tuple) else out


def dual(pipe: Pipeline) -> Pipeline:
    """The pipeline of dual stages, derived once for each pipeline: params ``(p, v)``, input
    ``(x, dx, None)``.
    """
    check_pipeline("forward mode", pipe)
    _load_rules()
    twin = _DUALS.get(pipe)
    if twin is None:
        config = pipe.config
        refuse(config, "forward mode", "state", "carries", "dp=")
        twin = _DUALS[pipe] = Pipeline(
            replace(
                config,
                functions=tuple(map(_dual_stage, config.functions)),
                loss=None if config.loss is None else _dual_loss(as_stage(config.loss)),
                frozen=(),
                tied=tuple(tuple(map(_first_of_pair, group)) for group in config.tied),
            )
        )
    return twin


@lru_cache(maxsize=1)
def _load_rules() -> None:
    """Let torch load its rules of forward mode, which warn of deprecated uses inside torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.func.jvp(torch.sin, (torch.zeros(()),), (torch.zeros(()),))


def push(fn: Function, primals: tuple[Tree, ...], tangents: tuple[Tree, ...]) -> tuple[Tree, Tree]:
    """``torch.func.jvp`` on trees whose tangents have None where nothing changes or nothing can.

    >>> push(lambda x, n: (x * n, n), (torch.tensor(3.0), 2), (torch.tensor(1.0), None))
    ((tensor(6.), 2), (tensor(2.), None))
    """
    along = tree.flatten(primals)[1].flatten_up_to(tangents)  # type: ignore[arg-type]
    moving = Chosen(primals, [tangent is not None for tangent in along])
    result: Tree = None

    def outputs(*leaves: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """The floating leaves of the result, and its other tensors."""
        nonlocal result
        result = fn(*moving.around(leaves))
        flat = tree.leaves(result)
        return tuple(filter(tree.is_floating, flat)), tuple(filter(_without_tangent, flat))

    # of the fused kernels of attention none has a rule for forward mode
    with sdpa_kernel(SDPBackend.MATH), PlainNormalizations():
        if moving.leaves:
            changes = tuple(tangent for tangent in along if tangent is not None)
            ys, dys, others = cast(
                Any, torch.func.jvp(outputs, tuple(moving.leaves), changes, has_aux=True)
            )
        else:
            ys, others = outputs()
            dys = tuple(torch.zeros_like(y) for y in ys)
    floating = Chosen(result, tree.is_floating)
    return Chosen(floating.around(ys), _without_tangent).around(others), floating.around(dys, None)


def _without_tangent(leaf: Any) -> bool:
    """Whether a leaf is a tensor that cannot have a tangent."""
    return tree.is_tensor(leaf) and not tree.is_floating(leaf)


def _dual_stage(stage: Stage) -> Stage:
    def both(fn: Function) -> Function:
        def call(pair: Tree, triple: Tree, **side: Tree) -> Tree:
            (p, v), (x, dx, more) = pair, triple
            v = tree.tree_map(lambda t: t.detach(), v)
            y, dy = push(lambda p, x: fn(p, x, **side), (p, x), (v, dx))
            if stage.aux_loss:  # it is sent with the activations, and the loss at the end adds it
                (y, aux), (dy, change) = y, dy
                more = (aux, change) if more is None else (more[0] + aux, more[1] + change)
            return y, dy, more

        return call

    return replace(wrapped(stage, both), frozen=())


def _dual_loss(loss: Stage) -> Stage:
    def both(fn: Function) -> Function:
        def call(triple: Tree, *targets: Tree, **side: Tree) -> tuple[torch.Tensor, torch.Tensor]:
            y, dy, more = triple
            total, change = push(lambda y: first(fn(y, *targets, **side)), (y,), (dy,))
            return (change, total) if more is None else (change + more[1], total + more[0])

        return call

    return wrapped(loss, both)


def _first_of_pair(name: str) -> str:
    """The name of a leaf among the parameters of dual stages."""
    stage, dot, rest = name.partition(".")
    return f"{stage}.0{dot}{rest}"


def _paired(
    pipe: Pipeline, primals: Sequence[Tree], tangents: Sequence[Tree], rest: Sequence[Tree]
) -> tuple[list[Tree], Tree, tuple[Tree, ...]]:
    """The arguments of the dual pipeline: parameters, input, targets."""
    tuples = (
        isinstance(primals, tuple) and isinstance(tangents, tuple) and len(primals) == len(tangents)
    )
    if not tuples or len(primals) not in (1, 2) or len(primals) + len(rest) < 2:
        raise StageError(
            "forward mode takes tuples (params,) or (params, x) with as many tangents, and what "
            "follows in the call: jvp(pipe, (params,), (v,), x, *targets) or "
            "jvp(pipe, (params, x), (v, dx), *targets)"
        )
    params, x, *targets = *primals, *rest
    v, dx = tangents if len(tangents) == 2 else (tangents[0], None)
    dual(pipe)
    v = [None] * pipe.stages if v is None else v
    pipe.config.check_params(params)
    pipe.config.check_params(v)
    pairs: list[Tree] = [None] * pipe.stages
    for stage in pipe.here:
        what = f"the tangent of stage {stage}'s parameters"
        pairs[stage] = params[stage], _tangent(params[stage], v[stage], what)
    if not isinstance(x, Microbatches):
        return pairs, _input(x, dx), tuple(targets)
    along = dx if isinstance(dx, Microbatches) else [dx] * len(x)
    if len(along) != len(x) or (dx is not None and along is not dx):
        raise StageError(
            f"x is Microbatches of {len(x)} parts, and its tangent is not; give Microbatches of "
            "as many"
        )
    return pairs, Microbatches(map(_input, x, along)), tuple(targets)


def _input(x: Tree, dx: Tree) -> Tree:
    """The input of the first dual stage."""
    return x, _tangent(x, dx, "the tangent of x"), None


def _tangent(value: Tree, along: Tree, what: str) -> Tree:
    """A tangent for every leaf that can have one: zeros where none is passed."""
    leaves, spec = tree.flatten(value)
    try:
        tangents = [None] * len(leaves) if along is None else spec.flatten_up_to(along)
    except ValueError as error:
        raise StageError(
            f"{what} does not have its form: {str(error)[:200]}; give a tree of the same form"
        ) from error

    def one(leaf: Any, d: Any) -> torch.Tensor | None:
        if not tree.is_floating(leaf):
            return None
        d = torch.zeros_like(leaf) if d is None else d
        if not isinstance(d, torch.Tensor) or d.shape != leaf.shape or d.dtype != leaf.dtype:
            raise StageError(
                f"{what} has the leaf {tree.describe([d])} for {tree.describe([leaf])}; make them "
                "alike"
            )
        return d

    return tree.unflatten(spec, map(one, leaves, tangents))


def _parted(outputs: Tree) -> tuple[Tree, Tree]:
    """Outputs of a dual pipeline as values and tangents."""
    if isinstance(outputs, Microbatches):
        return Microbatches(part[0] for part in outputs), Microbatches(part[1] for part in outputs)
    return (None, None) if outputs is None else outputs[:2]

"""Forward mode through a pipeline: every stage becomes a dual one, whose values travel as pairs with their tangents.

A dual pipeline has the schedule, the group and the settings of the one that it is made of, so whatever can be done
with a pipeline can be done with it: its forward gives directional derivatives, its gradient is a Hessian times a
vector. Knows stages and pipelines; no plan and no register.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ... import tree
from ...errors import StageError
from ...stage import Stage, as_stage, keyword_only
from ...tree import Tree
from ..calls import Call
from ..microbatches import Microbatches
from ..pipeline import Pipeline
from .normalizations import Spelled

_DUALS: WeakKeyDictionary[Pipeline, Pipeline] = WeakKeyDictionary()


def jvp(pipe: Pipeline, primals: Sequence[Any], tangents: Sequence[Any], *rest: Any, seed: int | None = None,
        **side: Any) -> tuple[Any, Any]:  # fmt: skip
    """What the pipeline gives, and how that changes along the tangents: one forward of its schedule, on pairs.

    ``primals`` are ``(params,)`` or ``(params, x)``, ``tangents`` trees of the same form; ``None`` in one stands for
    zeros. What is left of the pipeline's arguments follows. Each activation and each message is twice as large. With a
    loss both results are on every rank; without one both are outputs, where ``outputs=`` says. Auxiliary losses count.
    Stages with state, copies of the pipeline (``dp=``) and functions without a rule for forward mode are refused.

    >>> from fpipe import local, pipeline
    >>> pipe = pipeline([lambda w, x: w * x] * 2, loss=lambda y: y.sum(), microbatches=1, group=local(2))
    >>> params, along = [torch.tensor(3.0), torch.tensor(5.0)], [torch.tensor(1.0), torch.tensor(0.0)]
    >>> [t.item() for t in jvp(pipe, (params,), (along,), torch.ones(1, 1))]
    [15.0, 5.0]
    """
    params, pairs, targets = _paired(pipe, primals, tangents, rest)
    twin = dual(pipe)
    if pipe.loss is None:
        return _parted(twin(params, pairs, *targets, seed=seed, **side))
    call = Call(twin, params, pairs, targets, side, mode="forward", seed=seed, has_aux=True)
    change, values = call.forward()
    return call.weighed(values), change


def hvp(pipe: Pipeline, params: Sequence[Any], v: Sequence[Any], x: Any, *targets: Any, seed: int | None = None,
        **side: Any) -> list[Any]:  # fmt: skip
    """The Hessian of the loss in the parameters times ``v``: the gradient, by the same schedule, of :func:`jvp`.

    Forward over reverse would need the backward twice; this is one step of dual stages, of about three times the work
    of a plain one. Has the form of ``grad``: one tree per stage that lives here, ``None`` for frozen leaves.

    >>> from fpipe import local, pipeline
    >>> pipe = pipeline([lambda w, x: w * x] * 2, loss=lambda y: y.sum(), microbatches=1, group=local(2))
    >>> params, v = [torch.tensor(3.0), torch.tensor(5.0)], [torch.tensor(1.0), torch.tensor(0.0)]
    >>> hvp(pipe, params, v, torch.ones(1, 1))
    [tensor(0.), tensor(1.)]
    """
    if pipe.loss is None:
        raise StageError("hvp needs a loss, whose Hessian it is; say pipeline(..., loss=)")
    both, pairs, targets = _paired(pipe, (params,), (v,), (x, *targets))
    call = Call(dual(pipe), both, pairs, targets, side, mode="grad", seed=seed, has_aux=True)
    (grads,) = call.value_and_grad()[1]
    own = [None if grad is None else _unfrozen(pipe, stage, grad[0]) for stage, grad in enumerate(grads)]
    return tuple(own) if isinstance(params, tuple) else own  # type: ignore[return-value]


def dual(pipe: Pipeline) -> Pipeline:
    """The pipeline of dual stages, made once for each pipeline: params ``(p, v)``, input ``(x, dx, None)``."""
    if not isinstance(pipe, Pipeline):
        raise StageError(f"forward mode takes what fpipe.pipeline returns, not {type(pipe).__name__}")
    _load_rules()
    twin = _DUALS.get(pipe)
    if twin is None:
        if any(stage.state for stage in pipe.functions):
            raise StageError("forward mode of a pipeline with state is not defined; pass the state as a side input")
        if pipe.copies is not None:
            raise StageError("forward mode of a pipeline with dp= is not defined; use one without, on the whole batch")
        twin = _DUALS[pipe] = copy(pipe)
        twin.functions = tuple(map(_dual_stage, pipe.functions))
        twin.loss = None if pipe.loss is None else _dual_loss(pipe.loss)
        twin.frozen, twin.cache = (), {}
        twin.tied = tuple(tuple(_inner(name) for name in group) for group in pipe.tied)
        twin.__dict__.pop("sides", None)
    twin.debugging = pipe.debugging
    return twin


@lru_cache(maxsize=1)
def _load_rules() -> None:
    """Let torch load its rules of forward mode, which warns of its own ways."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.func.jvp(torch.sin, (torch.zeros(()),), (torch.zeros(()),))


def push(fn: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Tree, Tree]:
    """``torch.func.jvp`` on trees whose tangents have None where nothing changes or nothing can.

    >>> push(lambda x, n: (x * n, n), (torch.tensor(3.0), 2), (torch.tensor(1.0), None))
    ((tensor(6.), 2), (tensor(2.), None))
    """
    leaves, spec = tree.flatten(primals)
    given = spec.flatten_up_to(tangents)  # type: ignore[arg-type]
    moving = [i for i, along in enumerate(given) if along is not None]
    form: list[Any] = []

    def moved(*part: Any) -> tuple[Any, Any]:
        full = list(leaves)
        for i, value in zip(moving, part, strict=True):
            full[i] = value
        made, y_spec = tree.flatten(fn(*tree.unflatten(spec, full)))
        form[:] = [y_spec, made]
        floating = tuple(leaf for leaf in made if tree.is_floating(leaf))
        return floating, tuple(leaf for leaf in made if tree.is_tensor(leaf) and not tree.is_floating(leaf))

    # of the fused kernels of attention none has a rule for forward mode
    with sdpa_kernel(SDPBackend.MATH), Spelled():
        if moving:
            chosen = tuple(leaves[i] for i in moving), tuple(given[i] for i in moving)
            made: Any = torch.func.jvp(moved, *chosen, has_aux=True)
            ys, dys, others = made
        else:
            ys, others = moved()
            dys = tuple(torch.zeros_like(y) for y in ys)
    y_spec, leaves = form
    y, dy, other = iter(ys), iter(dys), iter(others)
    kinds = [2 if tree.is_floating(leaf) else int(tree.is_tensor(leaf)) for leaf in leaves]
    values = [next(y) if kind == 2 else next(other) if kind else leaf for kind, leaf in zip(kinds, leaves, strict=True)]
    return tree.unflatten(y_spec, values), tree.unflatten(y_spec, [next(dy) if k == 2 else None for k in kinds])


def _dual_stage(stage: Stage) -> Stage:
    def both(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(pair: Any, triple: Any, **side: Any) -> Any:
            (p, v), (x, dx, more) = pair, triple
            v = tree.tree_map(lambda t: t.detach(), v)
            y, dy = push(lambda p, x: fn(p, x, **side), (p, x), (v, dx))
            if stage.aux_loss:  # it travels with the activations, for the loss at the end to add
                (y, aux), (dy, change) = y, dy
                more = (aux, change) if more is None else (more[0] + aux, more[1] + change)
            return y, dy, more

        return asking(call, fn)

    like = None if stage.like is None else both(stage.like)
    return replace(stage, fn=both(stage.fn), like=like, aux_loss=False, frozen=(), ties=(), name=stage.label)


def _dual_loss(loss: Callable[..., Any] | Stage) -> Stage:
    own = as_stage(loss)

    def both(fn: Callable[..., Any]) -> Callable[..., Any]:
        def value(y: Any, *targets: Any, **side: Any) -> Any:
            made = fn(y, *targets, **side)
            return made[0] if isinstance(made, tuple) else made

        def call(triple: Any, *targets: Any, **side: Any) -> tuple[Any, Any]:
            y, dy, more = triple
            total, change = push(lambda y: value(y, *targets, **side), (y,), (dy,))
            return (change, total) if more is None else (change + more[1], total + more[0])

        return asking(call, fn)

    return replace(own, fn=both(own.fn), like=None if own.like is None else both(own.like), name=own.label)


def asking(call: Callable[..., Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, asking for the side inputs that ``fn`` asks for."""
    names = keyword_only(fn)
    sides = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    given = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
    call.__signature__ = inspect.Signature([*given, *sides])  # type: ignore[attr-defined]
    return call


def _inner(name: str) -> str:
    """The name of a leaf among the parameters of dual stages: the first of a pair."""
    stage, dot, rest = name.partition(".")
    return f"{stage}.0{dot}{rest}"


def _paired(
    pipe: Pipeline, primals: Sequence[Any], tangents: Sequence[Any], rest: Sequence[Any]
) -> tuple[list[Any], Any, tuple[Any, ...]]:
    """Parameters and input of the dual pipeline, and what else it takes."""
    known = isinstance(primals, tuple) and isinstance(tangents, tuple) and len(primals) == len(tangents)
    if not known or len(primals) not in (1, 2) or len(primals) + len(rest) < 2:
        raise StageError(
            "forward mode takes tuples (params,) or (params, x) with as many tangents, and what follows in the call: "
            "jvp(pipe, (params,), (v,), x, *targets) or jvp(pipe, (params, x), (v, dx), *targets)"
        )
    x, targets = (primals[1], rest) if len(primals) == 2 else (rest[0], rest[1:])
    dx = tangents[1] if len(primals) == 2 else None
    params, v = primals[0], tangents[0] if tangents[0] is not None else [None] * pipe.stages
    pipe.check_params(params)
    pipe.check_params(v)
    dual(pipe)
    pairs: list[Any] = [None] * pipe.stages
    for stage in pipe.here:
        pairs[stage] = (params[stage], _tangent(params[stage], v[stage], f"the tangent of stage {stage}'s parameters"))
    if not isinstance(x, Microbatches):
        return pairs, (x, _tangent(x, dx, "the tangent of x"), None), tuple(targets)
    along = list(dx) if isinstance(dx, Microbatches) else [dx] * len(x)
    if len(along) != len(x) or (dx is not None and not isinstance(dx, Microbatches)):
        raise StageError(f"x is Microbatches of {len(x)} parts, and its tangent is not; give Microbatches of as many")
    parts = zip(x, along, strict=True)
    return pairs, Microbatches((m, _tangent(m, d, "the tangent of x"), None) for m, d in parts), tuple(targets)


def _tangent(value: Tree, along: Tree, what: str) -> Tree:
    """A tangent for every leaf that can have one: zeros where none is given."""
    leaves, spec = tree.flatten(value)
    try:
        given = [None] * len(leaves) if along is None else spec.flatten_up_to(along)
    except ValueError as error:
        raise StageError(f"{what} does not have its form: {str(error)[:200]}; give a tree of the same form") from error
    out: list[Any] = []
    for leaf, d in zip(leaves, given, strict=True):
        if not tree.is_floating(leaf):
            out.append(None)
            continue
        d = torch.zeros_like(leaf) if d is None else d
        if not isinstance(d, torch.Tensor) or d.shape != leaf.shape or d.dtype != leaf.dtype:
            raise StageError(f"{what} has the leaf {tree.describe([d])} for {tree.describe([leaf])}; make them alike")
        out.append(d)
    return tree.unflatten(spec, out)


def _unfrozen(pipe: Pipeline, stage: int, grad: Tree) -> Tree:
    if not pipe.frozen:
        return grad
    leaves, spec = tree.flatten(grad)
    names = (f"{stage}.{name}" if name else str(stage) for name in tree.names(grad))
    return tree.unflatten(
        spec, [None if tree.matches(n, pipe.frozen) else g for n, g in zip(names, leaves, strict=True)]
    )


def _parted(outputs: Any) -> tuple[Any, Any]:
    """Outputs of a dual pipeline as values and tangents."""
    if isinstance(outputs, Microbatches):
        return Microbatches(part[0] for part in outputs), Microbatches(part[1] for part in outputs)
    return (None, None) if outputs is None else outputs[:2]

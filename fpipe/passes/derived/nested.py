# SPDX-License-Identifier: Apache-2.0
"""A pipeline inside a torch.func transform, as meta-gradients through an inner step need it, or
inside a stage or loss.

No plan runs there: the value is computed by the stages' functions, one microbatch after another,
and the gradient by torch.func, so that what is around it can differentiate it again. Knows calls;
no plan and no register.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ... import tree
from ...actions.product import load_pass
from ...engine import side_inputs
from ...engine.arguments import Call
from ...engine.microbatches import Microbatches, joined
from ...engine.parts import Parts
from ...errors import ActionError, FpipeError, StageError
from ...programs.signature import (
    check_alone,
    check_aux,
    check_scalar,
    copied,
    result_of,
    stage_that_runs,
    with_aux,
)
from ...programs.tensor_state import versions
from ...stage import as_stage
from ...tree import Tree
from ..drawing import numbered, seed_of
from ..streams import drawn
from .chosen import Chosen


def forward(call: Call) -> Tree:
    """The value of a call."""
    return _value(call, _wide(call), call.x)


def value_and_grad(call: Call, x: Tree) -> tuple[Tree, tuple[Tree, ...]]:
    """The value, and gradients in the order of ``call.argnums``; ``x`` is the batch as it was
    passed.
    """
    parts = list(x) if isinstance(x, Microbatches) else x
    wide = _wide(call)
    leaves = tree.leaves((wide, parts))
    flags: list[bool] = []
    for s, part in enumerate(wide):
        flags += [0 in call.argnums and flag for flag in call.config.trained(s, part)]
    flags += [1 in call.argnums] * (len(leaves) - len(flags))
    live = [flag and tree.is_floating(leaf) for leaf, flag in zip(leaves, flags, strict=True)]
    chosen = Chosen((wide, parts), live)
    more = call.has_aux or call.each is not None
    aux: Tree = None

    def value(*tensors: Tensor) -> tuple[Tensor, Tree]:
        nonlocal aux
        params, batch = chosen.around(tensors)
        if isinstance(x, Microbatches):
            batch = Microbatches(batch)
        out = _value(call, params, Parts(batch, call.units, "x"))
        loss, aux = out if more else (out, None)
        return loss, Chosen(aux, tree.is_tensor).leaves  # torch.func takes tensors alone

    every = tuple(range(len(chosen.leaves)))
    grads, (loss, tensors) = torch.func.grad_and_value(value, every, has_aux=True)(*chosen.leaves)
    out = (loss, Chosen(aux, tree.is_tensor).around(tensors)) if more else loss
    scaled = grads if call.loss_scale is None else [grad * call.loss_scale for grad in grads]
    dp, dx = chosen.around(scaled, None)
    dx = Microbatches(dx) if isinstance(x, Microbatches) else dx
    return out, tuple((dp, dx)[n] for n in call.argnums)


def _value(call: Call, wide: Sequence[Tree], x: Parts) -> Tree:
    """The value of a call with other parameters, in the dtype of accumulation, and another
    batch.
    """
    config = call.config
    run = _runner(call)
    outputs: list[Tree] = []
    losses: list[Tensor] = []
    auxes: list[Tree] = []
    for m in range(call.units):
        y = x.tree(m)
        extra: Tensor | None = None
        for s, stage in enumerate(config.functions):
            returned = run(stage, s, m, [tree.tree_map(_narrowed, wide[s], call.params[s])], y)
            y, more, *_ = result_of(stage, returned)
            check_aux(stage, more)
            if more is not None:
                extra = more if extra is None else extra + more
        if config.loss is None:
            with _explained(f"each= after microbatch {m}"):
                outputs.append(y if call.each is None else call.each(m, y))
            continue
        returned = run(config.loss, config.stages, m, [], y, *(t.tree(m) for t in call.targets))
        first = next(filter(tree.is_tensor, tree.leaves(returned)), None)
        check_scalar(as_stage(config.loss).label, first)
        assert first is not None
        aux = with_aux(returned)[1] if call.has_aux else check_alone(returned)
        if call.each is not None:
            with _explained(f"each= after microbatch {m}"):
                aux = call.each(m, y, returned)
        losses.append(first if extra is None else first + extra)
        auxes.append(aux)
    if config.loss is None:
        if call.each is None:
            return joined(outputs, x.slices, x.uniform)
        return outputs
    weights = call.weights()
    assert weights is not None
    total, *others = weights.terms(losses)
    for term in others:
        total = total + term.to(total.device)
    if call.has_aux or call.each is not None:
        return (total, auxes)
    return total


# ---- options ----
def _runner(call: Call) -> Callable[..., Tree]:
    """What calls the function of a stage, or of the loss, for a microbatch; refuses what is not
    defined here.
    """
    config = call.config
    stage = stage_that_runs()
    where = f"a pipeline inside stage {stage}"
    if stage is None:
        where = "torch.func transforms of a pipeline"
    if not config.local:
        raise StageError(f"{where} need a local group; use fpipe.grad across processes")
    refused = {
        "dp=": config.copies is not None,
        "state": config.stateful,
        "tied=": bool(config.tied),
        "slices or carries": config.slices > 1 or config.carries,
    }
    for what, present in refused.items():
        if present:
            raise StageError(
                f"{where} with {what} are not defined; use fpipe.value_and_grad outside of them"
            )
    if stage is not None and call.seed is not None:
        raise StageError(
            f"seed= is not defined for {where}, whose draws are those of that stage; leave it out "
            "there, and give it to the pipeline around it"
        )

    def run(
        fn: Callable[..., Tree], index: int, mb: int, params: Sequence[Tree], *inputs: Tree
    ) -> Tree:
        device = config.group.device(config.placement.rank_of(min(index, config.stages - 1)))
        start = None if call.seed is None else seed_of(call.seed, index, numbered(mb), "F")
        sides = side_inputs.of_stage(config.sides[index], call.sides)
        side = {name: part.tree(mb) for name, part in sides.items()}
        kept = tree.leaves((params, side))
        before = versions(kept)
        what = "stage" if index < config.stages else "the loss"
        with _explained(f"{what} {as_stage(fn).label} on microbatch {mb}"):
            out, _ = drawn(lambda _: fn(*params, *copied(inputs), **side), [], device, start)
        if versions(kept) != before:
            raise load_pass("explain").write_error("its parameters or side inputs")
        return out

    return run


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Raise an error of a function of the user as a run of a plan does."""
    try:
        yield
    except FpipeError:
        raise
    except Exception as error:
        where = load_pass("explain").where(error)
        raise ActionError(f"{what} raised {type(error).__name__}{where}: {error}") from error


def _wide(call: Call) -> Sequence[Tree]:
    """The parameters in the dtype in which gradients are accumulated."""
    dtype = call.config.accumulate
    if dtype is None:
        return call.params

    def widened(leaf):
        if tree.is_tensor(leaf):
            return leaf.to(tree.sum_dtype(leaf.dtype, dtype))
        return leaf

    wide = [tree.tree_map(widened, part) for part in call.params]
    if isinstance(call.params, tuple):
        return tuple(wide)
    return wide


def _narrowed(value: Tree, leaf: Tree) -> Tree:
    """A parameter in its own dtype again, for one microbatch."""
    if tree.is_tensor(value):
        return value.to(leaf.dtype)
    return value

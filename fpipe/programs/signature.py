# SPDX-License-Identifier: Apache-2.0
"""Arguments and results of a stage function in abstract form, its call, and losses as stages.

A run on fake tensors gives the results. This module knows no graphs, schedules or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import tree
from ..actions.product import load_pass
from ..errors import StageError
from ..stage import Stage, as_stage, keyword_only
from ..tree import AbstractTree, Aval, Tree
from .internals import (
    PLAIN,
    Sizes,
    Steps,
    fake_inputs,
    is_fake,
    pure_on_fakes,
    setting,
    tensors_in,
    unseeded,
)

T = TypeVar("T")
#: The types that leaves of an output may have, beside tensors.
LITERALS = (int, float, bool, str, bytes, complex, torch.dtype, torch.device)


class Signature(NamedTuple):
    """What a trace depends on: the abstract arguments of a stage function."""

    params: AbstractTree
    x: AbstractTree
    side: AbstractTree
    state: AbstractTree

    @property
    def slots(self) -> list[tuple[int, int]]:
        """The argument and leaf of each tensor, in the order of the inputs of programs."""
        return [(g, i) for g, argument in enumerate(self) for i in argument.avals]

    @property
    def names(self) -> list[str]:
        """The names of the tensors in programs, in the same order."""
        return [f"{'pxkt'[g]}{i}" for g, i in self.slots]

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of leaves of each argument."""
        return tuple(len(argument.leaves) for argument in self)

    @property
    def skeleton(self) -> tuple[AbstractTree, ...]:
        """All but the sizes of input, side inputs and state."""
        return (self.params, *(argument.with_avals(without_sizes) for argument in self[1:]))

    def __str__(self) -> str:
        """Parameters and input, for messages."""
        return "(" + "; ".join(str(argument) for argument in self[:2] if argument.leaves) + ")"


def without_sizes(aval: Aval) -> Aval:
    """An abstract tensor of which only the number of axes is kept."""
    return aval._replace(shape=(0,) * len(aval.shape), stride=())


# ---- results ----
class WithExtra(NamedTuple):
    """The output of a function, and an extra value of any type."""

    y: Tree
    extra: object


class Result(NamedTuple):
    """What a stage function returned. Without ``aux`` or ``state`` these are ``None``."""

    y: Tree
    aux: Tensor | None = None
    state: Tree = None
    extra: object = None


@dataclass(frozen=True)
class Outputs:
    """The results of a stage function in abstract form.

    ``writes_input``: the function writes into its input, which is therefore copied first.
    ``unused`` are leaves of ``y`` that carry a gradient and have no cotangent: the loss does not
    depend on them.
    """

    y: AbstractTree
    aux: Aval | None
    state: AbstractTree | None
    writes_input: bool
    unused: frozenset[int] = frozenset()

    @cached_property
    def cotangents(self) -> dict[str, Aval]:
        """The avals of the cotangents, by name."""
        names = {f"dy{j}": self.y.avals[j] for j in self.y.wanted if j not in self.unused}
        return names | ({"daux": self.aux} if self.aux is not None and self.aux.grad else {})


def outputs_of(stage: Stage, signature: Signature, sizes: Sizes = PLAIN) -> Outputs:
    """Run a stage on fake tensors, without data and without effects on any tensor."""
    steps: Steps = []
    try:
        return _observed(stage, signature, sizes, steps)
    finally:
        if any(not any(map(is_fake, tensors_in(args))) for _, args, _, _ in steps):
            load_pass("tables").settle(steps)  # of a cache, for example


def _observed(stage: Stage, signature: Signature, sizes: Sizes, steps: Steps) -> Outputs:
    for writes_input in (False, True):
        with sizes.mode():
            groups = fake_inputs(signature)
            try:
                with unseeded(stage.label), pure_on_fakes(stage.label, steps=steps):
                    groups[1] = entering(signature.x, groups[1])
                    result = call(stage, signature, groups, writes_input)
            except RuntimeError as error:
                if writes_input or not writes_into_leaf(error):
                    raise
                continue
        return outputs_from(stage, result, writes_input)
    raise AssertionError("unreachable")


def writes_into_leaf(error: RuntimeError) -> bool:
    """Whether autograd refused a write into an input."""
    return "leaf Variable" in str(error)


def outputs_from(stage: Stage, result: Result, writes_input: bool) -> Outputs:
    """Check a result, and return its abstract form."""
    ys, structure = tree.flatten(result.y)
    _check_leaves(stage, ys)
    check_aux(stage, result.aux)
    y = AbstractTree.flat(
        structure, ys, [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in ys]
    )
    first: dict[int, int] = {}
    places = ((j, first.setdefault(id(ys[j]), j)) for j in y.avals)
    y = replace(y, repeats=tuple((j, i) for j, i in places if j != i))
    aux = None if result.aux is None else Aval.like(result.aux, result.aux.requires_grad)
    state = AbstractTree.of(result.state) if stage.state else None
    for leaf in () if state is None else state.leaves:
        if not isinstance(leaf, Aval):
            raise StageError(
                f"stage {stage.label} returns {leaf} in its state, whose leaves must be tensors (a "
                "number would make each microbatch another program); write torch.tensor(0) for a "
                "counter"
            )
    return Outputs(y, aux, state, writes_input)


def _check_leaves(stage: Stage, ys: Sequence[object]) -> None:
    for leaf in ys:
        what = type(leaf).__name__
        fits = isinstance(leaf, LITERALS)
        if isinstance(leaf, Tensor):
            fits = leaf.layout is torch.strided and Aval.like(leaf).kind is None
            if leaf.layout is not torch.strided:
                what = f"{leaf.layout} tensor"
        if not fits:
            raise StageError(
                f"stage {stage.label} returns a {what}, which cannot be sent to the next stage; "
                "return tensors (of a DTensor: its to_local()) and plain numbers, or register its "
                'class as a pytree (optree, namespace="fpipe")'
            )


def check_aux(stage: Stage, aux: object) -> None:
    """Raise StageError if a stage has an auxiliary loss that is not one floating number."""
    scalar = isinstance(aux, Tensor) and not aux.dim() and aux.is_floating_point()
    if stage.aux_loss and not scalar:
        raise StageError(
            f"stage {stage.label} has aux_loss=True, so it must return (y, scalar) with a floating "
            f"tensor without axes; its second value is {tree.describe([aux])}"
        )


# ---- the call ----
#: The label of the stage, or of the loss, whose function is called now.
RUNNING: ContextVar[str | None] = ContextVar("RUNNING", default=None)


def stage_that_runs() -> str | None:
    """The label of the stage, or of the loss, whose function calls this; None outside of stages."""
    return RUNNING.get()


def entering(x: AbstractTree, leaves: Sequence[Any]) -> list[Any]:
    """The leaves of x as the function gets them.

    In a run of the whole model, a value that another stage computed is no leaf of autograd. Here it
    must not be one either: autocast caches its casts of leaves. A tensor that the other stage
    returned twice must be one tensor: the order in which gradients are added depends on that.
    """
    values = list(leaves)
    if not x.computed:
        return values
    for i, leaf in enumerate(values):
        if i in x.wanted and leaf.requires_grad:
            values[i] = torch.ops.aten.alias.default(leaf)
    for i, first in x.repeats:
        values[i] = values[first]
    return values


def call(
    stage: Stage, signature: Signature, groups: Sequence[Sequence[Any]], writes_input: bool
) -> Result:
    """Call the stage function on flat leaves; ``writes_input``: on a copy of its input."""
    p, x, side, state = (
        tree.unflatten(a.structure, leaves) for a, leaves in zip(signature, groups, strict=True)
    )
    try:
        with setting(RUNNING, stage.label), torch.enable_grad():
            if writes_input:
                x = copied(x)
            out = stage.fn(p, state, x, **side) if stage.state else stage.fn(p, x, **side)
    except BaseException as error:
        load_pass("explain").leave_checkpoints(error)
        raise
    return result_of(stage, out)


def copied(x: Tree) -> Tree:
    """An input that a function may write into; a tensor that occurs twice is one tensor again."""
    clones = {id(leaf): leaf.clone() for leaf in tree.leaves(x) if isinstance(leaf, Tensor)}
    return tree.tree_map(lambda leaf: clones.get(id(leaf), leaf), x)


def result_of(stage: Stage, out: object) -> Result:
    """Split what a stage function returned into its parts."""
    if isinstance(out, WithExtra):
        return Result(out.y, extra=out.extra)
    names = ["y", *(["scalar"] if stage.aux_loss else []), *(["state"] if stage.state else [])]
    if len(names) == 1:
        return Result(out)
    if not isinstance(out, tuple) or len(out) != len(names):
        raise load_pass("explain").parts_error(stage.label, names, out)
    return Result(out[0], out[1] if stage.aux_loss else None, out[-1] if stage.state else None)


# ---- losses ----
@dataclass(frozen=True)
class LossCall:
    """A loss as a stage function of (no parameters, (output, \\*targets)).

    ``extra``: the second value of the loss is no output of the stage, and may have any type.
    """

    loss: Callable[..., Any]
    has_aux: bool
    extra: bool

    def __call__(self, _: object, x: tuple[object, ...], /, **side: object) -> object:
        result = self.loss(*x, **side)
        if not self.has_aux:
            return check_alone(result)
        scalar, aux = with_aux(result)
        aux = tree.tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, aux)
        return WithExtra(scalar, aux) if self.extra else (scalar, aux)

    def stands_for(self) -> tuple[Callable[..., Any], Hashable]:
        """The function under which traces are cached, and what else they depend on."""
        return self.loss, (self.has_aux, self.extra)


def loss_stage(loss: Callable[..., Any], has_aux: bool, each: bool) -> Stage:
    """A loss as a stage without parameters whose input is (output, *targets).

    ``each``: a function of the caller gets the second value of the loss. The eager engine then
    accepts any type.
    """
    stage = as_stage(loss)
    extra = has_aux and each and stage.engine == "eager"
    like = None if stage.like is None else LossCall(stage.like, has_aux, extra)
    return Stage(
        LossCall(stage.fn, has_aux, extra),
        name=stage.label,
        engine=stage.engine,
        like=like,
        dynamic=stage.dynamic,
    )


def loss_sides(loss: Callable[..., Any] | None) -> tuple[str, ...]:
    """The keyword-only arguments of a loss."""
    return () if loss is None else keyword_only(loss.fn if isinstance(loss, Stage) else loss)


def with_aux(result: object) -> tuple[Any, Any]:
    """The scalar and the second value that a loss with has_aux=True returned."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise StageError(
            f"with has_aux=True the loss must return (scalar, aux), not {type(result).__name__}"
        )
    return result


def check_alone(result: T) -> T:
    """Return what a loss without has_aux=True returned; StageError if it is more than a scalar."""
    if len(tree.leaves(result)) > 1:
        raise load_pass("explain").aux_error(result)
    return result


def check_scalar(label: str, first: Aval | Tensor | None) -> None:
    """Raise StageError if the first tensor that a loss returned is not one floating number."""
    if isinstance(first, Tensor):
        first = Aval.like(first)
    if first is None or first.shape != () or not first.dtype.is_floating_point:
        raise load_pass("explain").scalar_error(label, first)

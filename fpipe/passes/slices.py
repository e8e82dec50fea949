# SPDX-License-Identifier: Apache-2.0
"""Stages with a carry, whose sequences run in slices: the function that each slice runs.

A slice runs a stage function of its own. Its input is (x, carry), that of the first slice x alone;
it returns (y, carry), and for the last slice y alone. Programs then have gradients and cotangents
of carries as of any value. The leaves of a carry follow those of x and of y. Knows functions,
programs and abstract trees; no schedules or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import tree
from ..errors import StageError
from ..lowering.builder import Builder
from ..lowering.keys import Key
from ..programs.operations import Role
from ..programs.program import Programs, numbered
from ..programs.wrappers import Remat
from ..stage import MISSING, Elsewhere, Stage
from ..tree import AbstractTree, Tree
from .identity import Same

#: What of carries is copied: "values", "gradients". One does not change the other's strides.
Copied: TypeAlias = frozenset[str]


@dataclass(frozen=True)
class SliceCall:
    """A stage function with a carry as the function of a slice.

    ``copied``: what is copied of carries on their way in and out, so that none of them is another
    value that the stage gets or returns.
    """

    fn: Callable[..., Any]
    label: str
    extras: tuple[str, ...]
    initial: Same
    first: bool
    last: bool
    copied: Copied

    def stands_for(self) -> tuple[Callable[..., Any], Hashable]:
        """The function whose traces these are, and what else they depend on."""
        return self.fn, (self.extras, self.initial, self.first, self.last, self.copied)

    def __call__(self, params: Tree, /, *rest: Any, **side: Any) -> Any:
        *state, x = rest
        if self.first:
            carry = self._start(params, x)
        else:
            x, carry = x
        carry = self._copied(carry)
        out = self.fn(params, *state, carry, x, **side)
        if not isinstance(out, tuple) or len(out) != 2 + len(self.extras):
            is_tuple = isinstance(out, tuple)
            what = f"a tuple of {len(out)}" if is_tuple else f"a {type(out).__name__}"
            raise StageError(
                f"stage {self.label} has carry=True, so it must return "
                f"({', '.join(('y', 'carry', *self.extras))}); it "
                f"returned {what}"
            )
        y, carry, *extras = out
        carry = self._copied(carry)
        result = y if self.last else (y, carry)
        if extras:
            return (result, *extras)
        return result

    def _copied(self, carry: Tree) -> Tree:
        if not self.copied:
            return carry
        how = "values" in self.copied, "gradients" in self.copied
        return tree.tree_map(
            lambda leaf: _Copy.apply(leaf, *how) if tree.is_tensor(leaf) else leaf, carry
        )

    def _start(self, params: Tree, x: Tree) -> Tree:
        """The carry of the first slice."""
        initial = self.initial.value
        if callable(initial):
            return initial(x)
        device = next(
            (leaf.device for leaf in tree.leaves((x, params)) if tree.is_tensor(leaf)), None
        )
        return tree.tree_map(
            lambda leaf: leaf.to(device) if tree.is_tensor(leaf) else leaf, initial
        )


class _Copy(torch.autograd.Function):
    """The same values, as a copy or not, whose gradient is a copy or not."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, values: bool, gradients: bool) -> Tensor:
        if values:
            return x.clone()
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.copies = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].clone() if ctx.copies else grads[0], None, None


def of_slice(stage: Stage, *, first: bool, last: bool, copied: Copied = frozenset()) -> Stage:
    """The stage that a slice of a stage with a carry runs.

    >>> def total(p, carry, x):
    ...     return x + carry, carry + x.sum()
    >>> stage = Stage(total, carry=True, initial_carry=0.0)
    >>> y, carry = of_slice(stage, first=True, last=False)(None, torch.ones(2))
    >>> of_slice(stage, first=False, last=True)(None, (torch.ones(2), carry))
    tensor([3., 3.])
    """
    extras = ("scalar",) * stage.aux_loss + ("state",) * stage.state
    initial = Same(stage.initial_carry)

    def call(fn):
        return SliceCall(fn, stage.label, extras, initial, first, last, copied)

    fn = call(stage.fn)
    if stage.engine == "eager" and isinstance(stage.fn, Remat):
        fn = Remat(call(stage.fn.fn))  # the eager engine runs a stage under remat again itself
    return replace(
        stage,
        fn=fn,
        name=stage.label,
        carry=False,
        initial_carry=None,
        like=None if stage.like is None else call(stage.like),
    )


def with_carry(x: AbstractTree, carry: AbstractTree) -> AbstractTree:
    """The input of a slice behind the first one."""
    count = len(x.leaves)
    repeats = (*x.repeats, *((leaf + count, first + count) for leaf, first in carry.repeats))
    return AbstractTree(
        tree.tuple_structure([x.structure, carry.structure]), x.leaves + carry.leaves, True, repeats
    )


def parted(output: AbstractTree) -> tuple[AbstractTree, AbstractTree]:
    """What a slice before the last one passes to the next stage, and its carry."""
    y, carry = output.structure.children()
    count = y.num_leaves

    def inside(low, high):
        return tuple(
            (leaf - low, first - low)
            for leaf, first in output.repeats
            if low <= first and low <= leaf < high
        )

    return (
        replace(output, structure=y, leaves=output.leaves[:count], repeats=inside(0, count)),
        replace(
            output,
            structure=carry,
            leaves=output.leaves[count:],
            repeats=inside(count, len(output.leaves)),
        ),
    )


def traced_slice(
    stage: Stage,
    first: bool,
    last: bool,
    given: int,
    on_devices: Callable[[Stage], Mapping[Any, Programs]],
) -> tuple[Mapping[Any, Programs], AbstractTree | None]:
    """The programs of a slice of a stage by device, and its output without the carry, if it
    returns one.

    ``given`` leaves of its input are those of a carry. A carry that is another value, or whose
    gradient is one, is copied, which is known once it is traced.
    """
    copied: Copied = frozenset()
    while True:
        programs = on_devices(of_slice(stage, first=first, last=last, copied=copied))
        output = next(iter(programs.values())).outputs.y
        y = None if last else parted(output)[0]
        count = len((y or output).leaves)
        wanted = copied.union(*(_crossing(each, given, count) for each in programs.values()))
        if wanted == copied:
            return programs, y
        copied = wanted


def _crossing(programs: Programs, given: int, ys: int) -> Copied:
    """Whether a carry, or the gradient of one, is another value that the slice gets or returns.

    ``given`` leaves of its input are those of a carry, and all outputs but the first ``ys``.
    """
    xs = len(programs.dxs) - given
    crossing = []
    if _crosses(numbered("x", len(programs.dxs)), xs, programs.ys, ys):
        crossing.append("values")
    if _crosses(numbered("dy", len(programs.ys)), ys, programs.dxs, xs):
        crossing.append("gradients")
    return frozenset(crossing)


def _crosses(names: Sequence[str], plain: int, results: Sequence[str | None], others: int) -> bool:
    """Whether a result has the name of what is given, and one of both alone is part of a carry.

    The first ``plain`` names, and the first ``others`` of the results, are not.
    """
    of_carry = {name: place >= plain for place, name in enumerate(names)}
    return any(
        name in of_carry and of_carry[name] != (place >= others)
        for place, name in enumerate(results)
    )


def check_carry(what: str, stage: Stage) -> None:
    """Raise StageError for a carry without a beginning, or a beginning without a carry."""
    given = stage.initial_carry is not MISSING
    if stage.carry and not given and not isinstance(stage.fn, Elsewhere):
        raise StageError(
            f"{what} has carry=True without initial_carry=; give what its first slice gets: "
            "tensors, numbers, None, or "
            "a function of x"
        )
    if given and not stage.carry:
        raise StageError(f"{what} has initial_carry= without carry=True; give both, or neither")
    leaves = () if callable(stage.initial_carry) else tree.leaves(stage.initial_carry)
    if given and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        raise StageError(
            f"initial_carry of {what} has a tensor that requires a gradient, which it does not "
            "get; make it a "
            "parameter, and let the function begin with it where its carry is None"
        )


def carried(builder: Builder, role: Role, stage: int, mb: int, leaf: int) -> Key:
    """The key of a leaf of a slice's carry, which the slice before computes, or of its
    gradient, by the next.
    """
    other = mb + (-1 if role == "x" else 1)
    kind = builder.job.kind(other)
    programs = kind.programs[stage]
    results = "ys" if role == "x" else "dxs"
    count = len(getattr(kind.graph.interfaces[stage], results))
    name = getattr(programs, results)[count + leaf]
    assert name is not None, "no program reads a carry that is no tensor, nor its gradient"
    return builder.key(programs, stage, other, name)

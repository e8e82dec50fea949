"""The gradient of a pipeline inside a torch.func transform, as meta-gradients through an inner step need it.

There no plan is run: the value is that of the stages' functions, one microbatch after another, and the gradient is
torch.func's, so that what is outside can differentiate it again. Knows calls; no plan and no register.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ... import tree
from ..calls import Call
from ..microbatches import Microbatches

if TYPE_CHECKING:
    from ..pipeline import Pipeline


def value_and_grad(
    pipe: Pipeline, params: Any, x: Any, targets: Sequence[Any], side: dict[str, Any], *, wanted: tuple[int, ...],
    has_aux: bool, loss_scale: Any,
) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
    """What ``Call.value_and_grad`` gives: the value, and gradients in the order of ``wanted``."""
    parts = list(x) if isinstance(x, Microbatches) else x
    leaves, spec = tree.flatten((params, parts))
    live = _live(pipe, params, leaves, wanted)

    def value(*given: torch.Tensor) -> Any:
        full = list(leaves)
        for i, leaf in zip(live, given, strict=True):
            full[i] = leaf
        p, batch = tree.unflatten(spec, full)
        batch = Microbatches(batch) if isinstance(x, Microbatches) else batch
        return Call(pipe, p, batch, targets, side, mode="forward", has_aux=has_aux).plainly()

    where = tuple(range(len(live)))
    made, out = torch.func.grad_and_value(value, where, has_aux=has_aux)(*(leaves[i] for i in live))
    found: list[Any] = [None] * len(leaves)
    for i, grad in zip(live, made, strict=True):
        found[i] = grad if loss_scale is None else grad * loss_scale
    dp, dx = tree.unflatten(spec, found)
    dx = Microbatches(dx) if isinstance(x, Microbatches) else dx
    return out, tuple((dp, dx)[n] for n in wanted)


def _live(pipe: Pipeline, params: Any, leaves: Sequence[Any], wanted: tuple[int, ...]) -> list[int]:
    """Which of the leaves of parameters and input get a gradient."""
    names = [f"{s}.{name}" if name else str(s) for s, part in enumerate(params) for name in tree.names(part)]
    trained = [0 in wanted and not tree.matches(name, pipe.frozen) for name in names]
    flags = trained + [1 in wanted] * (len(leaves) - len(names))
    return [i for i, (flag, leaf) in enumerate(zip(flags, leaves, strict=True)) if flag and tree.is_floating(leaf)]

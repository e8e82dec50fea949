"""Modules under FSDP2 (``fully_shard``) as stages: their own hooks gather and reduce, the pipeline calls and updates.

The parameters of such a stage are this process's local shards, plain tensors. FSDP works on a module and on ``.grad``;
a stage is a function of its parameters. So one autograd function stands between: its forward lays given parameters into
the module and runs it, its backward runs the module's, hooks and all, and takes the gradients out. Each microbatch's
gradient is reduced by itself. Knows FSDP's public face; no schedule, rank or plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .. import tree
from ..errors import StageError
from ..stage import Stage


def from_fsdp(module: nn.Module, *, like: Callable[..., Any] = lambda p, x: x) -> tuple[Stage, dict[str, Tensor]]:
    """A module under ``fully_shard`` as a stage, and its parameters: this process's shards by name.

    Gradients are summed over FSDP's mesh, by sums alone, which every device has; give the pipeline ``dp=`` that axis
    and ``own=["*"]``, and they, and the loss, are means over it. ``like`` says of which shapes the module's output is,
    as for any stage on autograd: by default those of its input.

    .. code-block:: python

        blocks = [fully_shard(block, mesh=group.mesh["dp"]) for block in model.layers]
        stages, params = zip(*map(from_fsdp, blocks))
        pipe = fpipe.pipeline(stages, "1F1B", loss=loss, microbatches=8, group=group, dp=group.dp, own=["*"])
    """
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    if not isinstance(module, FSDPModule):
        raise StageError(f"{type(module).__name__} is not under fully_shard; shard it first, or use fpipe.from_module")
    for part in sharded:
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    held = _Held(module, sharded)
    names = list(held.own)

    def stage(p: dict[str, Tensor], x: Any) -> Any:
        leaves, spec = tree.flatten(x)
        made = _Through.apply(held, spec, len(leaves), *leaves, *(p[name] for name in names))
        return tree.unflatten(held.spec, made)  # type: ignore[arg-type]

    frozen = tuple(name for name, own in held.own.items() if not own.requires_grad)
    params = {name: _local(own).detach() for name, own in held.own.items()}
    return Stage(stage, engine="eager", like=like, frozen=frozen, name=type(module).__name__), params


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class _Held:
    """A module, its sharded parameters, and what was laid into them last."""

    def __init__(self, module: nn.Module, sharded: Sequence[FSDPModule]):
        self.module, self.sharded = module, sharded
        self.own = dict(module.named_parameters())  # FSDP hides them while they are whole
        self.spec: Any = None
        self._last: list[tuple[Tensor, int]] = []

    def reshard(self) -> None:
        """Let go of what is whole, which would not follow its shards."""
        for part in self.sharded:
            part.reshard()

    def lay(self, given: Sequence[Tensor]) -> None:
        """Let the module have these parameters."""
        if [(t.data_ptr(), t._version) for t in given] == [(t.data_ptr(), version) for t, version in self._last]:
            return
        self.reshard()
        with torch.no_grad():
            for own, value in zip(self.own.values(), given, strict=True):
                if _local(own).data_ptr() != value.data_ptr():
                    _local(own).copy_(value)
        self._last = [(t.detach(), t._version) for t in given]


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, held: _Held, spec: Any, count: int, *flat: Any) -> tuple[Tensor, ...]:
        training = any(ctx.needs_input_grad)
        held.lay(flat[count:])
        xs = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in flat[:count]]
        for leaf in xs if training else ():
            if tree.is_floating(leaf):
                leaf.requires_grad_()
        with torch.set_grad_enabled(training):
            ys, held.spec = tree.flatten(held.module(tree.unflatten(spec, xs)))
        if not training:
            held.reshard()
        ctx.told = held, xs, ys
        return tuple(y.detach() for y in ys)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        held, xs, ys = ctx.told
        ends = [(y, dy) for y, dy in zip(ys, dys, strict=True) if y.requires_grad]
        torch.autograd.backward([y for y, _ in ends], [dy for _, dy in ends])
        grads = [None if own.grad is None else _local(own.grad) for own in held.own.values()]
        for own in held.own.values():
            own.grad = None
        return None, None, None, *(x.grad if isinstance(x, Tensor) else None for x in xs), *grads

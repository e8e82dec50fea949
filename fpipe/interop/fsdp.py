# SPDX-License-Identifier: Apache-2.0
"""Modules under FSDP2 (``fully_shard``) as stages: FSDP's hooks gather and reduce, the pipeline
calls and updates.

The parameters of such a stage are this process's local shards, plain tensors. FSDP works on a
module and on ``.grad``; a stage is a function of its parameters. An autograd function connects
them: its forward writes the parameters into the module and runs it, its backward runs the module's
    backward, with all hooks, and takes the gradients out. The gradient
of each microbatch is reduced by itself. This module uses FSDP's public interface, and must not know
schedules, ranks or plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .. import tree
from ..errors import StageError
from ..stage import Stage


def from_fsdp(
    module: nn.Module, *, like: Callable[..., Any] = lambda p, x: x
) -> tuple[Stage, dict[str, Tensor]]:
    """Return a module under ``fully_shard`` as a stage, and its parameters: this process's shards
    by name.

    Gradients are summed over FSDP's mesh, by sums alone, which every device has. Pass the pipeline
    that axis as ``dp=`` and ``own=["*"]``; gradients and the loss are then means over it.

    Args:
        module: sharded by ``fully_shard``.
        like: a function of the same arguments whose result has the shapes of the module's output,
            as for any stage on autograd; by default those of its input.

    .. code-block:: python

        blocks = [fully_shard(block, mesh=group.mesh["dp"]) for block in model.layers]
        stages, params = zip(*map(from_fsdp, blocks))
        pipe = fpipe.pipeline(stages, "1F1B", loss=loss, microbatches=8, group=group, dp=group.dp,
        own=["*"])
    """
    if not isinstance(module, FSDPModule):
        raise StageError(
            f"{type(module).__name__} is not under fully_shard; shard it first, or use "
            "fpipe.from_module"
        )
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in sharded:
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    runner = _Runner(module, sharded)

    def stage(p: dict[str, Tensor], x: Any) -> Any:
        leaves, spec = tree.flatten(x)
        specs: list[tree.Structure] = []
        weights = (p[name] for name in runner.parameters)
        ys = cast(
            tuple[Tensor, ...], _Run.apply(runner, spec, specs, len(leaves), *leaves, *weights)
        )
        return tree.unflatten(specs[0], ys)

    frozen = tuple(
        name for name, parameter in runner.parameters.items() if not parameter.requires_grad
    )
    params = {name: _local(parameter).detach() for name, parameter in runner.parameters.items()}
    return Stage(
        stage, engine="eager", like=like, frozen=frozen, name=type(module).__name__
    ), params


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Runner:
    """A module, its sharded parameters, and which values they have."""

    def __init__(self, module: nn.Module, sharded: Sequence[FSDPModule]):
        self.module, self.sharded = module, sharded
        self.parameters = dict(module.named_parameters())  # FSDP hides them while they are gathered
        self._written: list[tuple[Tensor, int]] = []  # the values written last, and their versions

    def reshard(self) -> None:
        """Free gathered parameters, which would not follow their shards."""
        for part in self.sharded:
            part.reshard()

    def write(self, values: Sequence[Tensor]) -> None:
        """Give the parameters these values, unless they have them."""
        if [(t.data_ptr(), t._version) for t in values] == [
            (t.data_ptr(), version) for t, version in self._written
        ]:
            return
        self.reshard()
        with torch.no_grad():
            for parameter, value in zip(map(_local, self.parameters.values()), values, strict=True):
                if parameter.data_ptr() != value.data_ptr():
                    parameter.copy_(value)
        self._written = [(t.detach(), t._version) for t in values]


class _Run(torch.autograd.Function):
    """The module as an autograd function of the leaves of x and of the parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        runner: _Runner,
        spec: tree.Structure,
        specs: list[tree.Structure],
        count: int,
        *flat: Any,
    ) -> tuple[Tensor, ...]:
        """Run the module; the structure of its output is appended to ``specs``."""
        training = any(ctx.needs_input_grad)
        runner.write(flat[count:])
        xs = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in flat[:count]]
        for leaf in xs if training else ():
            if tree.is_floating(leaf):
                leaf.requires_grad_()
        with torch.set_grad_enabled(training):
            ys, after = tree.flatten(runner.module(tree.unflatten(spec, xs)))
        if not training:
            runner.reshard()
        specs.append(after)
        ctx.saved = runner, xs, ys
        return tuple(y.detach() for y in ys)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        """Run the module's backward; the gradients of x and of the parameters."""
        runner, xs, ys = ctx.saved
        pairs = [(y, dy) for y, dy in zip(ys, dys, strict=True) if y.requires_grad]
        torch.autograd.backward([y for y, _ in pairs], [dy for _, dy in pairs])
        grads = [None if p.grad is None else _local(p.grad) for p in runner.parameters.values()]
        for parameter in runner.parameters.values():
            parameter.grad = None
        return (
            None,
            None,
            None,
            None,
            *(x.grad if isinstance(x, Tensor) else None for x in xs),
            *grads,
        )

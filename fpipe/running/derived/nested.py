# SPDX-License-Identifier: Apache-2.0
"""A pipeline inside a torch.func transform, as meta-gradients through an inner step need it.

No plan runs there: the value is computed by the stages' functions, one microbatch after another, and the gradient by
torch.func, so that the transform around it can differentiate it again. Knows calls; no plan and no register.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ... import tree
from ...errors import StageError
from ...tree import Tree
from ..arguments import Call
from ..calls import joined
from ..microbatches import Microbatches, Parts
from .variants import Chosen


def forward(call: Call) -> Tree:
    """The value of a call."""
    config = call.config
    if not config.local:
        raise StageError("torch.func transforms of a pipeline need a local group; use fpipe.grad across processes")
    if config.copies is not None:
        raise StageError("torch.func transforms of a pipeline with dp= are not defined; use fpipe.grad")
    if config.stateful:
        raise StageError("torch.func transforms of a pipeline with state are not defined; use fpipe.value_and_grad")
    outputs: list[Tree] = []
    losses: list[torch.Tensor] = []
    auxes: list[Tree] = []
    for m in range(call.number):
        y, extra = call.x.tree(m), None
        for s, stage in enumerate(config.functions):
            y = stage.fn(call.params[s], y, **call.side_inputs(s, m))
            if stage.aux_loss:
                y, more = y
                extra = more if extra is None else extra + more
        if config.loss is None:
            outputs.append(y if call.each is None else call.each(m, y))
            continue
        loss = config.loss(y, *(t.tree(m) for t in call.targets), **call.side_inputs(config.stages, m))
        if call.has_aux:
            loss, more = loss
            auxes.append(more)
        losses.append(loss if extra is None else loss + extra)
    if config.loss is None:
        return joined(outputs, call.x.uniform) if call.each is None else outputs
    weights = call.weights()
    assert weights is not None
    total = weights.sum(losses)
    return (total, auxes) if call.has_aux else total


def value_and_grad(call: Call, x: Tree) -> tuple[Tree, tuple[Tree, ...]]:
    """The value, and gradients in the order of ``call.wanted``; ``x`` is the batch as it was passed."""
    parts = list(x) if isinstance(x, Microbatches) else x
    leaves = tree.leaves((call.params, parts))
    trained = [0 in call.wanted and flag for s, part in enumerate(call.params) for flag in call.config.trained(s, part)]
    flags = trained + [1 in call.wanted] * (len(leaves) - len(trained))
    live = [flag and tree.is_floating(leaf) for leaf, flag in zip(leaves, flags, strict=True)]
    chosen = Chosen((call.params, parts), live)

    def value(*tensors: torch.Tensor) -> Tree:
        params, batch = chosen.around(tensors)
        batch = Microbatches(batch) if isinstance(x, Microbatches) else batch
        return forward(replace(call, params=params, x=Parts(batch, call.number, "x")))

    where = tuple(range(len(chosen.leaves)))
    grads, out = torch.func.grad_and_value(value, where, has_aux=call.has_aux)(*chosen.leaves)
    scaled = grads if call.loss_scale is None else [grad * call.loss_scale for grad in grads]
    dp, dx = chosen.around(scaled, None)
    dx = Microbatches(dx) if isinstance(x, Microbatches) else dx
    return out, tuple((dp, dx)[n] for n in call.wanted)

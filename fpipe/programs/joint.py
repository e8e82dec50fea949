# SPDX-License-Identifier: Apache-2.0
"""Traces a stage's outputs and gradients as one graph over fake tensors.

The joint function is written with ``torch.autograd.grad``, so custom autograd functions, functional collectives and
torch.func inside a stage all trace. Knows functions and signatures, no schedules, ranks or microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .. import tree
from ..stage import Stage
from . import fake
from .autocast import without_autocast
from .batch_norm import spell_out
from .graphs import annotation, clean, copy_shared_outputs, name_inputs
from .marks import collecting, followed
from .signature import Outputs, Signature, call
from .simplify import simplify
from .trace_split import Joint


def joint_graph(stage: Stage, signature: Signature, outputs: Outputs) -> fx.GraphModule:
    """The graph of outputs, auxiliary scalar, new state and gradients (of params, then of x), tensors only.

    Its inputs are the tensors of the signature and the cotangents.
    """
    mode = fake.mode()
    with mode:
        groups = fake.inputs(signature)
        cotangents = [fake.empty(aval) for aval in outputs.cotangents.values()]
    slots = [(g, i) for g, argument in enumerate(signature) for i in argument.avals]

    def joint(*flat: Any) -> tuple[Any, ...]:
        arguments = [list(group) for group in groups]
        for (g, i), value in zip(slots, flat, strict=False):
            arguments[g][i] = value
        with collecting() as marks:
            result = call(stage, signature, arguments, outputs.copies)
        ends = [leaf for leaf in tree.leaves((result.y, result.aux)) if tree.is_tensor(leaf)]
        live = [end for end in ends if end.requires_grad]
        wrt = [arguments[g][i] for g in (0, 1) for i in signature[g].wanted]
        grads: Sequence[Any] = [None] * len(wrt)
        if live and wrt:
            with without_autocast(), followed(live, marks):
                grads = torch.autograd.grad(live, wrt, flat[len(slots) :], allow_unused=True)
        return (*ends, *tree.leaves(result.state), *grads)

    with mode:  # tensors that the function creates (arange, zeros, ...) must be fake, too
        graph = fake.make_graph(joint, [*(groups[g][i] for g, i in slots), *cotangents])
    name_inputs(graph, [*(f"{'pxkt'[g]}{i}" for g, i in slots), *outputs.cotangents])
    clean(graph)
    simplify(graph)
    spell_out(graph)
    copy_shared_outputs(graph)
    return graph


def joint_of(graph: fx.GraphModule, signature: Signature, outputs: Outputs) -> Joint:
    """The nodes of a joint graph by role."""
    (returned,) = next(iter(graph.graph.find_nodes(op="output"))).args
    following = iter(returned)
    take = lambda indices: {i: next(following) for i in indices}
    ys, aux = take(outputs.y.avals), take([0] if outputs.aux is not None else [])
    state = take(() if outputs.state is None else outputs.state.avals)
    dps, dxs = take(signature.params.wanted), take(signature.x.wanted)
    return Joint(
        nodes=tuple(n for n in graph.graph.nodes if n.op in ("placeholder", "call_function")),
        cotangents=frozenset(outputs.cotangents),
        ys=tuple(ys.values()),
        extras=(*aux.values(), *state.values()),
        dps=tuple(map(dps.get, range(len(signature.params.leaves)))),
        dxs=tuple(map(dxs.get, range(len(signature.x.leaves)))),
        region=lambda node: annotation(node, "fpipe_remat"),
    )

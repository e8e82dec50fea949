# SPDX-License-Identifier: Apache-2.0
"""Traces a stage over fake tensors and splits the graph into programs, once per function and signature.

What depends on data cannot be traced, since there is no data. Knows functions and signatures, no schedules, ranks or
microbatches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from ..errors import FpipeError, TraceError
from ..stage import Stage, as_stage
from ..tree import AbstractTree, Aval, Tree
from . import fake
from .autocast import ambient
from .compilation import compiled
from .eager.engine import eager_programs
from .explain import explain
from .graphs import Held, constants, dense, memory, value_of
from .joint import joint_graph, joint_of
from .program import Program, draws
from .signature import Outputs, Signature, outputs_of
from .stage_programs import Programs
from .trace_cache import cached
from .trace_split import Joint, Piece, Pieces, split


def trace(fn: Callable[..., Any] | Stage, params: Tree, x: Tree, *, state: Tree = None, **side: Tree) -> Programs:
    """Turn a pure stage function into its four programs; cached by function, shapes, dtypes and devices.

    >>> programs = trace(lambda p, x: torch.tanh(x @ p), torch.eye(2), torch.ones(1, 2))
    >>> y, saved = programs.forward(torch.eye(2), torch.ones(1, 2))
    >>> dx, dparams = programs.backward(saved, torch.ones(1, 2))
    >>> dparams.shape
    torch.Size([2, 2])
    """
    of = AbstractTree.of
    return programs_of(as_stage(fn), Signature(of(params, True), of(x, True), of(side), of(state)))


def programs_of(stage: Stage, signature: Signature) -> Programs:
    """The programs of a stage for a signature, traced at most once for every function."""
    return cached(stage, signature, ambient(), eager_programs if stage.engine == "eager" else _trace)


def _trace(stage: Stage, signature: Signature) -> Programs:
    for aval in (aval for argument in signature for aval in argument.avals.values()):
        if aval.kind is not None:
            raise TraceError(
                f"stage {stage.label} is given a {aval}, and tensors that contain tensors cannot be traced; run it "
                'with fpipe.Stage(fn, engine="eager"), or give it the local tensors'
            )
    try:
        # A trace is cached for all callers, so none of their modes may be in it.
        with fake.quiet(), torch.inference_mode(False), torch.enable_grad():
            outputs = outputs_of(stage, signature)
            graph = joint_graph(stage, signature, outputs)
    except FpipeError:
        raise
    except Exception as error:
        raise explain(error, stage.label, str(signature)) from error
    return _programs(stage, signature, outputs, joint_of(graph, signature, outputs), constants(graph))


def _programs(
    stage: Stage, signature: Signature, outputs: Outputs, joint: Joint, captured: Mapping[str, Any]
) -> Programs:
    pieces = split(joint)
    behind = memory(joint.nodes)
    ys = dict(zip(outputs.y.avals, joint.ys, strict=True))
    extras = [node.name for node in joint.extras]
    aux = extras.pop(0) if outputs.aux is not None else None
    program = partial(_program, stage=stage, signature=signature, captured=captured)
    return Programs(
        f=program("F", pieces.forward),
        b=program("B", pieces.backward),
        i=program("I", pieces.backward_input),
        w=program("W", pieces.backward_weight),
        counts=tuple(len(argument.leaves) for argument in signature),
        outputs=replace(outputs, y=_as_traced(outputs.y, ys)),
        ys=tuple(ys[j].name if j in ys else None for j in range(len(outputs.y.leaves))),
        aux=aux,
        new_state=tuple(extras),
        dps=_names(joint.dps),
        dxs=_names(joint.dxs),
        saved=pieces.saved,
        kept=pieces.kept,
        dx_avals=_avals(joint.dxs),
        dp_avals=_avals(joint.dps),
        memory=behind,
        fresh=_fresh(joint, behind, pieces),
        compiled=stage.compile is not None,
        label=stage.label,
    )


def _names(nodes: tuple[fx.Node | None, ...]) -> tuple[str | None, ...]:
    return tuple(None if node is None else node.name for node in nodes)


def _avals(nodes: tuple[fx.Node | None, ...]) -> dict[str, Aval]:
    return {n.name: Aval.like(value) for n in nodes if n is not None and (value := value_of(n)) is not None}


def _as_traced(y: AbstractTree, nodes: Mapping[int, fx.Node]) -> AbstractTree:
    """The outputs with the strides of the traced operations."""
    leaves = list(y.leaves)
    for j, aval in y.avals.items():
        value = value_of(nodes[j])
        leaves[j] = aval if value is None else Aval.like(value, aval.grad)
    return replace(y, leaves=tuple(leaves))


def _program(letter: str, piece: Piece, stage: Stage, signature: Signature, captured: Mapping[str, Any]) -> Program:
    used = {u.name for node in piece.nodes for u in node.all_input_nodes} | set(piece.outputs)
    inside = {name: value for name, value in captured.items() if name in used}
    inputs = [name for name in piece.inputs if name not in inside]
    program = Program.from_nodes(letter, piece.nodes, inputs, piece.outputs, inside)
    program = replace(program, stage=f"{stage.label} {signature}")
    return compiled(program, inside, stage.compile) if stage.compile else program


def _fresh(joint: Joint, behind: Mapping[str, Held], pieces: Pieces) -> frozenset[str]:
    """Gradients that alone use their storage, so that others may be added into them."""
    gradients = {n.name: n for n in joint.dps if n is not None}
    others = {*pieces.saved, *pieces.kept, *(n.name for n in joint.dxs if n is not None)} - set(gradients)
    users = Counter(behind[name].root for n in joint.dps if n is not None and (name := n.name) in behind)
    users.update(behind[name].root for name in others if name in behind)
    return frozenset(
        name for name, node in gradients.items()
        if node.op == "call_function" and not draws(node) and dense(node)
        and name in behind and not behind[name].given and users[behind[name].root] == 1
    )  # fmt: skip


__all__ = ["Signature", "programs_of", "trace"]

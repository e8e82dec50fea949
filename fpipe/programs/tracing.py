# SPDX-License-Identifier: Apache-2.0
"""Traces a stage over fake tensors and splits the graph into programs, for one signature.

Outputs and gradients are traced as one joint graph. The joint function is written with
``torch.autograd.grad``, so custom autograd functions, functional collectives and torch.func inside
a stage all trace. What depends on data cannot be traced, since there is no data. A signature may
have symbolic sizes. Knows functions and signatures, no schedules, ranks or microbatches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .. import tree
from ..errors import TraceError
from ..stage import Stage
from ..tree import Aval
from . import blocks, fake
from .autocast import caching, without_autocast
from .explain import EAGERLY, explained, other_parameters_error, sparse_gradient_error
from .graphs import Held, annotation, constants, dense, draws, memory, normalize, value_of
from .inlining import inline
from .marks import collecting, followed
from .operations import Operation, operations_of
from .program import Program
from .purity import pure_on_fakes
from .recording import make_graph
from .signature import Outputs, Signature, call, entering, outputs_of
from .sizes import Recorder
from .spent import timed
from .stage_programs import Programs
from .symbols import Symbols
from .trace_split import Joint, Piece, Pieces, split


def traced(
    stage: Stage,
    signature: Signature,
    unused: frozenset[int],
    symbols: Symbols | None = None,
    shown: str = "",
) -> tuple[Programs, Recorder]:
    """The programs of a stage for one signature, and the numbers that depend on its symbols.

    ``shown`` describes the signature in messages. Outputs ``unused`` have no cotangent.
    """
    for aval in (aval for argument in signature for aval in argument.avals.values()):
        if aval.kind is not None:
            raise TraceError(
                f"stage {stage.label} is given a {aval}, and tensors that contain tensors cannot "
                "be traced; give it "
                f"the local tensors, or {EAGERLY}"
            )
    shown = shown or str(signature)
    # A trace is cached for all callers, so none of their modes may be in it.
    with (
        timed("tracing"),
        explained(stage.label, shown),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        try:
            with blocks.using(stage.label, symbols) as found:
                outputs = replace(outputs_of(stage, signature, symbols), unused=unused)
                graph = _joint_graph(stage, signature, outputs, symbols)
                inline(graph, found.calls)
        except blocks.InexactError:
            outputs = replace(outputs_of(stage, signature, symbols), unused=unused)
            graph = _joint_graph(stage, signature, outputs, symbols)
        normalize(graph, [*signature.names, *outputs.cotangents])
    record = Recorder(symbols)
    return _programs(stage, f"{stage.label} {shown}", signature, outputs, graph, record), record


# ---- the joint graph ----
def _joint_graph(
    stage: Stage, signature: Signature, outputs: Outputs, symbols: Symbols | None
) -> fx.GraphModule:
    """The graph of outputs, auxiliary scalar, new state and gradients (of params, then of x),
    tensors only.

    Its inputs are the tensors of the signature and the cotangents.
    """
    mode = fake.mode(symbols)
    with fake.entered(mode):
        groups = fake.inputs(signature)
        cotangents = [fake.empty(aval) for aval in outputs.cotangents.values()]
    names = [*(f"dy{j}" for j in outputs.y.avals), *(["daux"] if outputs.aux is not None else [])]
    slots, cached = signature.slots, torch.is_autocast_cache_enabled()  # which make_fx switches off

    def joint(*flat: Any) -> tuple[Any, ...]:
        arguments = [list(group) for group in groups]
        for (g, i), value in zip(slots, flat, strict=False):
            arguments[g][i] = value
        wrt = [arguments[g][i] for g in (0, 1) for i in signature[g].wanted]
        arguments[1] = entering(signature.x, arguments[1])
        with collecting() as marks, caching(cached):
            result = call(stage, signature, arguments, outputs.copies)
        ends = [leaf for leaf in tree.leaves((result.y, result.aux)) if tree.is_tensor(leaf)]
        live = [end for name, end in zip(names, ends, strict=True) if name in outputs.cotangents]
        grads: Sequence[Any] = [None] * len(wrt)
        if live and wrt:
            # A checkpoint computes again what functional_call computed, but with the module's
            # parameters.
            with (
                without_autocast(),
                followed(live, marks),
                pure_on_fakes(stage.label, other_parameters_error),
            ):
                grads = torch.autograd.grad(live, wrt, flat[len(slots) :], allow_unused=True)
        for grad in grads:
            if grad is not None and grad.layout is not torch.strided:
                raise sparse_gradient_error(stage.label, grad.shape)
        return (*ends, *tree.leaves(result.state), *grads)

    with fake.entered(
        mode
    ):  # tensors that the function creates (arange, zeros, ...) must be fake, too
        return make_graph(joint, [*(groups[g][i] for g, i in slots), *cotangents])


def _joint_of(graph: fx.GraphModule, signature: Signature, outputs: Outputs) -> Joint:
    """The nodes of a joint graph by role."""
    (returned,) = next(iter(graph.graph.find_nodes(op="output"))).args
    following = iter(returned)

    def take(indices):
        return {i: next(following) for i in indices}

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


# ---- its programs ----
def _programs(
    stage: Stage,
    label: str,
    signature: Signature,
    outputs: Outputs,
    graph: fx.GraphModule,
    record: Recorder,
) -> Programs:
    joint, captured = _joint_of(graph, signature, outputs), constants(graph)
    pieces = split(joint)
    behind = {
        name: held._replace(nbytes=record.number(held.nbytes))
        for name, held in memory(joint.nodes).items()
    }
    records = operations_of(joint.nodes, record)
    ys = dict(zip(outputs.y.avals, joint.ys, strict=True))
    extras = [node.name for node in joint.extras]
    aux = extras.pop(0) if outputs.aux is not None else None
    programs = (
        _program(*each, records, captured, label)
        for each in zip("FBIW", pieces.pieces, strict=True)
    )
    return Programs(
        *programs,
        counts=signature.counts,
        outputs=_recorded(outputs, joint.ys, record),
        ys=tuple(ys[j].name if j in ys else None for j in range(len(outputs.y.leaves))),
        aux=aux,
        new_state=tuple(extras),
        dps=tuple(None if node is None else node.name for node in joint.dps),
        dxs=tuple(None if node is None else node.name for node in joint.dxs),
        saved=pieces.saved,
        kept=pieces.kept,
        grad_avals=_avals((*joint.dps, *joint.dxs), record),
        traced_memory=behind,
        fresh=_fresh(joint, behind, pieces),
        label=stage.label,
    )


def _program(
    letter: str,
    piece: Piece,
    records: Mapping[fx.Node, Operation],
    captured: Mapping[str, Any],
    label: str,
) -> Program:
    nodes, inputs, results = piece
    body = [records[node] for node in nodes if node in records]
    used = {name for one in body for name in one.inputs} | set(results)
    inside = {name: value for name, value in captured.items() if name in used}
    inputs = [name for name in inputs if name not in inside]
    return Program.of(letter, body, inputs, results, inside, stage=label)


def _recorded(outputs: Outputs, ys: Sequence[fx.Node], record: Recorder) -> Outputs:
    """The outputs with the strides of the traced operations and the numbers of the trace."""
    following = iter(ys)

    def computed(aval: Aval) -> Aval:
        value = value_of(next(following))
        return record.aval(aval if value is None else Aval.like(value, aval.grad))

    aux = None if outputs.aux is None else record.aval(outputs.aux)
    state = None if outputs.state is None else outputs.state.with_avals(record.aval)
    return replace(outputs, y=outputs.y.with_avals(computed), aux=aux, state=state)


def _avals(nodes: Iterable[fx.Node | None], record: Recorder) -> dict[str, Aval]:
    values = {node.name: value_of(node) for node in nodes if node is not None}
    return {
        name: record.aval(Aval.like(value)) for name, value in values.items() if value is not None
    }


def _fresh(joint: Joint, behind: Mapping[str, Held], pieces: Pieces) -> frozenset[str]:
    """Gradients that alone use their storage, so that others may be added into them."""
    gradients = {n.name: n for n in joint.dps if n is not None}
    others = {*pieces.saved, *pieces.kept, *(n.name for n in joint.dxs if n is not None)} - set(
        gradients
    )
    users = Counter(behind[n.name].root for n in joint.dps if n is not None and n.name in behind)
    users.update(behind[name].root for name in others if name in behind)
    return frozenset(
        name
        for name, node in gradients.items()
        if node.op == "call_function"
        and not draws(node)
        and dense(node)
        and name in behind
        and not behind[name].given
        and users[behind[name].root] == 1
    )

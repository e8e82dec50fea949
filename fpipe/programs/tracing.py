"""Traces a stage over fake tensors and cuts the result into programs; one trace per function and signature.

The joint function is written with ``torch.autograd.grad``, so custom autograd functions, functional collectives and
torch.func inside a stage all trace; what depends on data cannot be baked in, since there is no data. This module
knows functions and signatures, and nothing of schedules, ranks or microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .. import tree
from ..errors import FpipeError, TraceError
from ..stage import Stage, as_stage
from ..tree import AbstractTree, Aval
from . import _fake
from ._marks import collecting, followed
from ._purity import spell_out
from .autocast import ambient, without_autocast
from .compilation import compiled
from .eager.engine import eager_programs
from .program import Program, draws
from .signature import Outputs, Signature, call, outputs_of
from .simplify import shorten
from .stage_programs import Held, Programs, named
from .trace_cache import kept
from .trace_split import Joint, Piece, cut


def trace(fn: Callable[..., Any] | Stage, params: Any, x: Any, *, state: Any = None, **side: Any) -> Programs:
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
    return kept(stage, signature, ambient(), eager_programs if stage.engine == "eager" else _trace)


# ---- tracing --------------------------------------------------------------------------------------------------------


def _trace(stage: Stage, signature: Signature) -> Programs:
    wrapped = [a for argument in signature for a in argument.avals.values() if a.kind is not None]
    if wrapped:
        raise TraceError(
            f"stage {stage.label} is given a {wrapped[0]}, and a trace sees through no wrapper; run it with "
            'fpipe.Stage(fn, engine="eager"), or give it the local tensors'
        )
    try:
        # A trace is kept for all callers, so none of their modes may be in it.
        with _fake.quiet(), torch.inference_mode(False), torch.enable_grad():
            made = outputs_of(stage, signature)
            graph = _joint_graph(stage, signature, made)
    except FpipeError:
        raise
    except Exception as error:
        raise _fake.explain(error, stage.label, str(signature)) from error
    return _cut(stage, signature, made, graph)


def _joint_graph(stage: Stage, signature: Signature, made: Outputs) -> fx.GraphModule:
    """Trace outputs and gradients as one graph. Its inputs: params, x, side, state, cotangents (tensors alone)."""
    fake_mode = _fake.mode()
    with fake_mode:
        groups = _fake.inputs(signature)
        cotangents = [_fake.empty(a) for a in _cotangent_avals(made)]
    slots = [(g, i) for g, group in enumerate(groups) for i, leaf in enumerate(group) if tree.is_tensor(leaf)]
    count = len(slots)

    def joint(*flat: Any) -> tuple[Any, ...]:
        given = [list(group) for group in groups]
        for (g, i), value in zip(slots, flat[:count], strict=True):
            given[g][i] = value
        with collecting() as marks:
            y, aux, state = call(stage, signature, given, made.copies)
        ys = [leaf for leaf in tree.leaves(y) if tree.is_tensor(leaf)]
        ends = [leaf for leaf in (*ys, *([] if aux is None else [aux])) if leaf.requires_grad]
        wrt = [given[g][i] for g in (0, 1) for i in signature[g].wanted]
        if not ends or not wrt:
            return (*ys, *([] if aux is None else [aux]), *tree.leaves(state), *([None] * len(wrt)))
        with without_autocast(), followed(ends, marks):
            grads = torch.autograd.grad(ends, wrt, flat[count:], allow_unused=True)
        return (*ys, *([] if aux is None else [aux]), *tree.leaves(state), *grads)

    flat = [groups[g][i] for g, i in slots]
    with fake_mode:  # what the function itself makes (arange, zeros, ...) must be fake too
        graph = _fake.make_graph(joint, [*flat, *cotangents])
    names = [f"{'pxkt'[g]}{i}" for g, i in slots] + _cotangent_names(made)
    _fake.name_inputs(graph, names)
    _fake.clean(graph)
    shorten(graph)
    spell_out(graph)
    _fake.own_outputs(graph)
    return graph


def _cotangent_avals(made: Outputs) -> list[Aval]:
    avals = [a for a in made.y if isinstance(a, Aval) and a.grad]
    return avals + ([made.aux] if made.aux is not None and made.aux.grad else [])


def _cotangent_names(made: Outputs) -> list[str]:
    names = [f"dy{j}" for j, a in enumerate(made.y) if isinstance(a, Aval) and a.grad]
    return names + (["daux"] if made.aux is not None and made.aux.grad else [])


# ---- cutting --------------------------------------------------------------------------------------------------------


def _cut(stage: Stage, signature: Signature, made: Outputs, graph: fx.GraphModule) -> Programs:
    constants = _fake.constants(graph)
    returned = list(next(n for n in graph.graph.nodes if n.op == "output").args[0])
    y_tensors = [j for j, a in enumerate(made.y) if isinstance(a, Aval)]
    ys, rest = returned[: len(y_tensors)], returned[len(y_tensors) :]
    aux, rest = (rest[0], rest[1:]) if made.aux is not None else (None, rest)
    wanted = [(g, i) for g in (0, 1) for i in signature[g].wanted]
    new_state, grads = rest[: len(rest) - len(wanted)], rest[len(rest) - len(wanted) :]
    dps: list[fx.Node | None] = [None] * len(signature.params.leaves)
    dxs: list[fx.Node | None] = [None] * len(signature.x.leaves)
    for (g, i), node in zip(wanted, grads, strict=True):
        (dps, dxs)[g][i] = node
    nodes = tuple(n for n in graph.graph.nodes if n.op in ("placeholder", "call_function"))
    cotangents = frozenset(_cotangent_names(made))
    pieces = cut(
        Joint(
            nodes,
            cotangents,
            tuple(ys),
            (*([aux] if aux is not None else []), *new_state),
            tuple(dps),
            tuple(dxs),
            lambda node: _fake.region(node, "fpipe_remat"),
        )
    )
    f, b, i, w = (
        _program(letter, piece, constants, stage, f"{stage.label} {signature}")
        for letter, piece in zip("FBIW", (pieces.forward, pieces.backward, pieces.backward_input,
                                          pieces.backward_weight), strict=True)
    )  # fmt: skip
    memory = _fake.memory(nodes)
    y_names: list[str | None] = [None] * len(made.y)
    for j, node in zip(y_tensors, ys, strict=True):
        y_names[j] = node.name
    return Programs(
        f=f, b=b, i=i, w=w,
        counts=tuple(len(argument.leaves) for argument in signature),  # type: ignore[arg-type]
        y_spec=made.y_spec,
        y_static={j: a for j, a in enumerate(made.y) if not isinstance(a, Aval)},
        ys=tuple(y_names),
        y_avals=_strided(made.y, y_names, nodes),
        aux=None if aux is None else aux.name,
        aux_aval=made.aux,
        new_state=tuple(n.name for n in new_state),
        state_spec=made.state_spec,
        dys=tuple(f"dy{j}" if isinstance(a, Aval) and a.grad else None for j, a in enumerate(made.y)),
        daux=made.aux if made.aux is not None and made.aux.grad else None,
        dps=tuple(None if n is None else n.name for n in dps),
        dxs=tuple(None if n is None else n.name for n in dxs),
        saved=pieces.saved, kept=pieces.kept,
        dx_avals={n.name: Aval.like(n.meta["val"]) for n in dxs if n is not None},
        dp_avals={n.name: Aval.like(n.meta["val"]) for n in dps if n is not None},
        memory=memory,
        fresh=_fresh([n for n in dps if n is not None], memory, pieces.saved + pieces.kept, dxs),
        state_avals=made.state,
        compiled=stage.compile is not None,
        label=stage.label,
    )  # fmt: skip


def _strided(avals: Sequence[Any], names: Sequence[str | None], nodes: Sequence[fx.Node]) -> tuple[Aval | None, ...]:
    """The avals of the outputs with the strides that the traced operations really give."""
    value = {node.name: node.meta.get("val") for node in nodes}
    out: list[Aval | None] = []
    for aval, name in zip(avals, names, strict=True):
        traced = value.get(name) if name else None
        known = isinstance(aval, Aval) and isinstance(traced, torch.Tensor)
        out.append(Aval.like(traced, aval.grad) if known else aval if isinstance(aval, Aval) else None)  # type: ignore[arg-type]
    return tuple(out)


def _program(letter: str, piece: Piece, constants: dict[str, Any], stage: Stage, of: str) -> Program:
    used = {u.name for node in piece.nodes for u in node.all_input_nodes} | set(piece.outputs)
    inside = {name: value for name, value in constants.items() if name in used}
    inputs = [name for name in piece.inputs if name not in inside]
    program = Program.from_nodes(letter, piece.nodes, inputs, piece.outputs, inside)
    program.of = of
    return compiled(program, inside, stage.compile) if stage.compile else program


def _fresh(
    dps: Sequence[fx.Node], memory: dict[str, Held], handed: Sequence[str], dxs: Sequence[fx.Node | None]
) -> frozenset[str]:
    """Gradients that own their storage alone, so that later ones may be added into them."""
    owners: dict[str, int] = {}
    others = {n.name for n in dxs if n is not None} | set(handed)
    for name in [*(n.name for n in dps), *(o for o in others if o not in {n.name for n in dps})]:
        if name in memory:
            owners[memory[name].root] = owners.get(memory[name].root, 0) + 1
    names = {n.name: n for n in dps if n.op == "call_function" and not draws(n)}
    return frozenset(
        name for name, node in names.items()
        if name in memory and owners[memory[name].root] == 1 and _fake.dense(node) and not memory[name].given
    )  # fmt: skip


__all__ = ["Signature", "named", "programs_of", "trace"]

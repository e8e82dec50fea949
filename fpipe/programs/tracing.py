# SPDX-License-Identifier: Apache-2.0
"""Traces a stage over fake tensors and splits the graph into programs, once per function and signature.

Outputs and gradients are traced as one joint graph. The joint function is written with ``torch.autograd.grad``, so
custom autograd functions, functional collectives and torch.func inside a stage all trace. What depends on data cannot
be traced, since there is no data. Knows functions and signatures, no schedules, ranks or microbatches.

The traces of each function are cached as long as it lives, up to a limit. A Python number is a part of a signature: one
that differs in every call, such as a temperature or the number of a step, would make each call a new trace; the user is
warned of it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import fx

from .. import tree
from ..devices import exclusive
from ..errors import StageError, TraceError
from ..stage import Stage, as_stage
from ..tree import AbstractTree, Aval, Static, Tree
from . import fake
from .autocast import ambient, caching, without_autocast
from .eager.engine import eager_programs
from .explain import EAGERLY, explained, other_parameters_error, sparse_gradient_error
from .graphs import Held, annotation, constants, dense, draws, memory, normalize, value_of
from .losses import LossCall
from .marks import collecting, followed
from .program import Program, compiled
from .purity import pure_on_fakes
from .signature import Outputs, Signature, call, entering, outputs_of
from .stage_programs import Programs
from .trace_split import Joint, Pieces, split

#: How many traces of one function are cached; the oldest is dropped.
KEPT = 512
#: How many functions that cannot be referenced weakly have their traces cached.
FUNCTIONS = 256
#: The number of traces that differ in numbers alone at which the user is warned.
ALIKE = 256

Key: TypeAlias = tuple[Hashable, ...]


class _Traces(dict[Key, Programs]):
    """The traces of one function, the oldest first."""

    warned = False


_WEAK: WeakKeyDictionary[Callable[..., object], _Traces] = WeakKeyDictionary()
#: Of functions that cannot be referenced weakly, the least recently used first.
_STRONG: dict[Callable[..., object], _Traces] = {}
#: Eager programs refer to their function, so they are cached as long as they are in use.
_EAGER: WeakValueDictionary[Key, Programs] = WeakValueDictionary()


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


def programs_of(stage: Stage, signature: Signature, unused: frozenset[int] = frozenset()) -> Programs:
    """The programs of a stage for a signature and the autocast that is on, traced where they are not in the cache.

    The outputs ``unused`` have no cotangent.
    """
    autocast = ambient(), torch.is_autocast_cache_enabled()
    key: Key = (stage.aux_loss, stage.state, stage.compile, autocast, signature, unused)
    eager = stage.engine == "eager"
    if eager:
        key = (*key, stage.fn, stage.like)
    fn = stage.fn
    if isinstance(fn, LossCall):  # created for each use; the loss itself is the function that lives
        fn, key = fn.loss, (*key, fn.has_aux)
    store: MutableMapping[Key, Programs] = _EAGER if eager else _traces_of(fn)
    try:
        programs = store.get(key)
    except TypeError as error:
        raise StageError(
            f"stage {stage.label}: a leaf that is neither a tensor nor hashable came in ({error}); "
            'pass numbers, strings or None, or register its class (optree, namespace="fpipe")'
        ) from error
    if programs is None:
        with exclusive():  # torch's tracing changes state of the process
            programs = store[key] = (eager_programs if eager else _trace)(stage, signature, unused)
            if isinstance(store, _Traces):
                _limit(store, stage, key)
    return programs


# ---- the cache ------------------------------------------------------------------------------------------------------


def _traces_of(fn: Callable[..., object]) -> _Traces:
    try:
        return _WEAK.setdefault(fn, _Traces())
    except TypeError:
        store = _STRONG.pop(fn, None)
        store = _STRONG[fn] = _Traces() if store is None else store
        if len(_STRONG) > FUNCTIONS:
            _STRONG.pop(next(iter(_STRONG)), None)
        return store


def _limit(store: _Traces, stage: Stage, key: Key) -> None:
    """After one more trace: drop the oldest beyond the limit, and warn where only numbers make the difference."""
    if len(store) > KEPT:
        del store[next(iter(store))]
    if store.warned or len(store) < ALIKE:
        return
    wanted = _without_numbers(key)
    alike = [s for other in store if _without_numbers(other) == wanted for s in other if isinstance(s, Signature)]
    if len(alike) < ALIKE:
        return
    store.warned = True
    places = [(g, i) for g, t in enumerate(alike[0]) for i, leaf in enumerate(t.leaves) if isinstance(leaf, Static)]
    group, index = max(places, key=lambda place: len({other[place[0]].leaves[place[1]] for other in alike}))
    seen = ", ".join(str(other[group].leaves[index]) for other in alike[-3:])
    what = ("the parameters", "the input", "the side inputs", "the state")[group]
    warnings.warn(
        f"stage {stage.label} was traced {ALIKE} times for the same shapes, since a Python value in {what} was "
        f"another each time (last {seen}); every new one costs a trace. Give it as a tensor, torch.tensor(...), "
        "and one trace serves all",
        stacklevel=2,
    )


def _without_numbers(key: Key) -> list[object]:
    """A key with the types of the leaves that are not tensors instead of their values."""
    shapes = lambda s: [(t.spec, [a if isinstance(a, Aval) else a.type for a in t.leaves]) for t in s]
    return [shapes(part) if isinstance(part, Signature) else part for part in key]


# ---- the joint graph ------------------------------------------------------------------------------------------------


def _trace(stage: Stage, signature: Signature, unused: frozenset[int]) -> Programs:
    for aval in (aval for argument in signature for aval in argument.avals.values()):
        if aval.kind is not None:
            raise TraceError(
                f"stage {stage.label} is given a {aval}, and tensors that contain tensors cannot be traced; give it "
                f"the local tensors, or {EAGERLY}"
            )
    # A trace is cached for all callers, so none of their modes may be in it.
    with explained(stage.label, str(signature)), torch.inference_mode(False), torch.enable_grad():
        outputs = replace(outputs_of(stage, signature), unused=unused)
        graph = _joint_graph(stage, signature, outputs)
    return _programs(stage, signature, outputs, graph)


def _joint_graph(stage: Stage, signature: Signature, outputs: Outputs) -> fx.GraphModule:
    """The graph of outputs, auxiliary scalar, new state and gradients (of params, then of x), tensors only.

    Its inputs are the tensors of the signature and the cotangents.
    """
    mode = fake.mode()
    with mode:
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
            # A checkpoint computes again what functional_call computed, but with the module's parameters.
            with without_autocast(), followed(live, marks), pure_on_fakes(stage.label, other_parameters_error):
                grads = torch.autograd.grad(live, wrt, flat[len(slots) :], allow_unused=True)
        for grad in grads:
            if grad is not None and grad.layout is not torch.strided:
                raise sparse_gradient_error(stage.label, grad.shape)
        return (*ends, *tree.leaves(result.state), *grads)

    with mode:  # tensors that the function creates (arange, zeros, ...) must be fake, too
        graph = fake.make_graph(joint, [*(groups[g][i] for g, i in slots), *cotangents])
    normalize(graph, [*signature.names, *outputs.cotangents])
    return graph


def _joint_of(graph: fx.GraphModule, signature: Signature, outputs: Outputs) -> Joint:
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


# ---- its programs ---------------------------------------------------------------------------------------------------


def _programs(stage: Stage, signature: Signature, outputs: Outputs, graph: fx.GraphModule) -> Programs:
    joint, captured = _joint_of(graph, signature, outputs), constants(graph)
    pieces = split(joint)
    behind = memory(joint.nodes)
    ys = dict(zip(outputs.y.avals, joint.ys, strict=True))
    extras = [node.name for node in joint.extras]
    aux = extras.pop(0) if outputs.aux is not None else None
    following = iter(joint.ys)

    def traced(aval: Aval) -> Aval:  # with the strides of the traced operations
        value = value_of(next(following))
        return aval if value is None else Aval.like(value, aval.grad)

    def program(letter: str, nodes: Sequence[fx.Node], inputs: Sequence[str], results: Sequence[str]) -> Program:
        used = {u.name for node in nodes for u in node.all_input_nodes} | set(results)
        inside = {name: value for name, value in captured.items() if name in used}
        inputs = [name for name in inputs if name not in inside]
        label = f"{stage.label} {signature}"
        program = Program.from_nodes(letter, nodes, inputs, results, inside, stage=label)
        return compiled(program, stage.compile) if stage.compile else program

    f, b, i, w = (program(letter, *piece) for letter, piece in zip("FBIW", pieces.pieces, strict=True))
    return Programs(
        f, b, i, w,
        counts=signature.counts,
        outputs=replace(outputs, y=outputs.y.with_avals(traced)),
        ys=tuple(ys[j].name if j in ys else None for j in range(len(outputs.y.leaves))),
        aux=aux,
        new_state=tuple(extras),
        dps=tuple(None if node is None else node.name for node in joint.dps),
        dxs=tuple(None if node is None else node.name for node in joint.dxs),
        saved=pieces.saved,
        kept=pieces.kept,
        grad_avals=_avals((*joint.dps, *joint.dxs)),
        memory=behind,
        fresh=_fresh(joint, behind, pieces),
        compiled=stage.compile is not None,
        label=stage.label,
    )  # fmt: skip


def _avals(nodes: Iterable[fx.Node | None]) -> dict[str, Aval]:
    return {n.name: Aval.like(value) for n in nodes if n is not None and (value := value_of(n)) is not None}


def _fresh(joint: Joint, behind: Mapping[str, Held], pieces: Pieces) -> frozenset[str]:
    """Gradients that alone use their storage, so that others may be added into them."""
    gradients = {n.name: n for n in joint.dps if n is not None}
    others = {*pieces.saved, *pieces.kept, *(n.name for n in joint.dxs if n is not None)} - set(gradients)
    users = Counter(behind[n.name].root for n in joint.dps if n is not None and n.name in behind)
    users.update(behind[name].root for name in others if name in behind)
    return frozenset(
        name for name, node in gradients.items()
        if node.op == "call_function" and not draws(node) and dense(node)
        and name in behind and not behind[name].given and users[behind[name].root] == 1
    )  # fmt: skip


__all__ = ["Signature", "programs_of", "trace"]

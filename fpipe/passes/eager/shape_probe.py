# SPDX-License-Identifier: Apache-2.0
"""What an eager stage returns, before it runs: plans need the shapes first.

In this order: what ``Stage(like=)`` returns on fake tensors; what the function itself returns on
fake tensors; for a function that looks at its data, what it returns on invented numbers. The last
is needed because such a function has no result without numbers. It uses no data of the user's,
restores random streams, and refuses writes into tensors that existed before. Knows functions and
signatures, no plans.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ... import tree
from ...errors import ActionError, FpipeError, StageError
from ...programs.internals import (
    Args,
    Around,
    Fake,
    Kwargs,
    Steps,
    TorchOp,
    empty,
    fake_inputs,
    is_fake,
    pure_on_fakes,
    quiet,
    setting,
    storage_id,
    tensors_in,
    written,
)
from ...programs.signature import (
    Outputs,
    Result,
    Signature,
    call,
    entering,
    outputs_from,
    writes_into_leaf,
)
from ...programs.tensor_state import versions
from ...programs.wrappers import RECORDING, Remat
from ...stage import Stage
from ...tree import Aval, contiguous
from ..explain import (
    captured_gradient_error,
    captured_write_error,
    explain,
    explained,
    where,
    write_error,
)
from ..streams import restore_streams, save_streams
from ..tables import settle
from .autograd_split import Edges, all_gradients, leaf_edge, saved_tensors, survey, walk
from .meter import Meter, gradient_bytes, meter, plain_tensors

Groups: TypeAlias = list[list[Any]]


@dataclass(frozen=True)
class StageFacts:
    """What is known of a stage function.

    ``passed`` are the outputs that are inputs, by index, ``captured`` those that are captured
    tensors. ``leaves``: whether the function creates leaves of its graph. ``saved`` and ``kept``
    are the bytes held from F to I and from I to W, where known; ``dx`` the gradients of the inputs
    that have one, where known. ``during`` are the most bytes that F and B hold beyond those before,
    where known.
    """

    outputs: Outputs
    passed: Mapping[int, int] = field(default_factory=dict)
    captured: frozenset[int] = frozenset()
    leaves: bool = False
    saved: int | None = None
    kept: int | None = None
    dx: Mapping[int, Aval] | None = None
    during: Mapping[str, int] = field(default_factory=dict)


@torch.inference_mode(False)
def facts_of(stage: Stage, signature: Signature, unused: frozenset[int]) -> StageFacts:
    """Find out what ``stage`` returns; the outputs ``unused`` have no cotangent."""
    if stage.like is not None:
        like = replace(stage, fn=stage.like, like=None, name=f"{stage.label} (its like=)")
        with explained(like.label, str(signature)), Fake():
            result = call(like, signature, fake_inputs(signature), False)
            outputs = outputs_from(like, result, False)
        return _for_any_path(StageFacts(replace(outputs, unused=unused)), signature)
    errors = []
    steps: Steps = []
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(restore_streams, save_streams({torch.device("cpu"), *devices_of(signature)}))
        for create in (empty, _invented):
            try:
                try:
                    with quiet(), Fake() if create is empty else nullcontext():
                        facts = _observed(stage, signature, create, unused, steps)
                finally:
                    settle(steps)
            except FpipeError:
                raise
            except Exception as error:
                errors.append(error)
            else:
                if create is empty:
                    return facts
                return _for_any_path(facts, signature)
    raise _unknown(stage, signature, *errors) from errors[1]


def _for_any_path(facts: StageFacts, signature: Signature) -> StageFacts:
    """What holds whichever path a function takes: any floating output may carry a gradient, none is
    an input.
    """
    trained = bool(signature.params.wanted or signature.x.wanted)

    def carrying(aval):
        return aval._replace(grad=trained and aval.differentiable)

    y = replace(facts.outputs.y, repeats=()).with_avals(lambda aval: stored_in_full(carrying(aval)))
    aux = facts.outputs.aux
    outputs = replace(facts.outputs, y=y, aux=None if aux is None else carrying(aux))
    return replace(facts, outputs=outputs, passed={}, dx=None)


def _unknown(
    stage: Stage,
    signature: Signature,
    on_fakes: Exception,
    on_numbers: Exception,
) -> Exception:
    """The error for a function that runs neither on fake tensors nor on invented numbers."""
    if isinstance(explain(on_fakes, stage.label, ""), ActionError):
        return explain(on_numbers, stage.label, str(signature))
    return StageError(
        f"fpipe cannot find out what stage {stage.label} {signature} returns: it looks at its "
        f"data, and on invented numbers it raised {type(on_numbers).__name__}{where(on_numbers)}: "
        f"{on_numbers}\n"
        'declare what it returns: fpipe.Stage(fn, engine="eager", like=lambda p, x: x), with a '
        "function of the same arguments that returns something of the same structure, shapes and "
        "dtypes"
    )


def devices_of(signature: Signature) -> list[torch.device]:
    """The devices of the tensors of a signature."""
    devices = {aval.device for argument in signature for aval in argument.avals.values()}
    return sorted(devices, key=str)


# ---- one run ----
def run_recording(
    stage: Stage,
    signature: Signature,
    groups: Sequence[Sequence[object]],
    copies: bool,
) -> Result:
    """Call the function with parts under ``fpipe.remat`` as checkpoints; a stage under it as a
    whole without.
    """
    if isinstance(stage.fn, Remat):
        stage = replace(stage, fn=stage.fn.fn)
    with setting(RECORDING, True):
        return call(stage, signature, groups, copies)


def wrote_into_input(before: Sequence[Sequence[int]], groups: Groups) -> bool:
    """Whether the input has other versions than ``before``; raises where parameters or side inputs
    have.
    """
    changed = [old != new for old, new in zip(before, map(versions, groups), strict=False)]
    for argument, what in ((0, "a parameter"), (2, "a side input")):
        if changed[argument]:
            raise write_error(what)
    return changed[1]


def refuse_captured(stage: Stage, foreign: Iterable[Tensor]) -> None:
    """Raise where a function closes over a tensor that requires a gradient."""
    for leaf in foreign:
        raise captured_gradient_error(stage.label, leaf)


def _observed(
    stage: Stage,
    signature: Signature,
    create: Callable[[Aval], Tensor],
    unused: frozenset[int],
    steps: Steps,
) -> StageFacts:
    """Run the function once, and once more on copies where it writes into its input."""
    for copies in (False, True):
        count = meter()
        groups = [argument.map(create) for argument in signature]
        before = list(map(versions, groups))
        if create is empty:
            pure = pure_on_fakes(stage.label, steps=steps)
            created = is_fake
        else:
            pure, created = _pure_on_numbers(stage.label, groups)
        try:
            given = [groups[0], entering(signature.x, groups[1]), *groups[2:]]
            with pure, count.mode:
                result = run_recording(stage, signature, given, copies)
        except RuntimeError as error:
            if copies or not writes_into_leaf(error):
                raise
            continue
        if not wrote_into_input(before, groups):
            break
    outputs = replace(outputs_from(stage, result, copies), unused=unused)
    inputs = {id(leaf): i for i, leaf in reversed(list(enumerate(given[1])))}
    leaves = tree.leaves(result.y)
    ys = {j: leaves[j] for j in outputs.y.avals}
    passed = {j: inputs[id(y)] for j, y in ys.items() if id(y) in inputs}
    captured = frozenset(j for j, y in ys.items() if not created(y))
    facts = StageFacts(outputs, passed, captured, during={"F": count.peak[0]})
    used = [y for j, y in ys.items() if j not in unused]
    if result.aux is not None:
        used.append(result.aux)
    return _with_graph(stage, facts, groups, used, count, created)


def _with_graph(
    stage: Stage,
    facts: StageFacts,
    groups: Groups,
    outs: Sequence[Tensor],
    count: Meter,
    created: Callable[[Tensor], bool],
) -> StageFacts:
    """Add what the recorded graph shows: bytes and the strides of input gradients. Refuses captured
    gradients: those of leaves that the function did not create.
    """
    ends = {t: get_gradient_edge(t) for t in outs if t.requires_grad}
    if not ends:
        return replace(facts, saved=0, kept=0, dx={})
    ps, xs = map(_edges, groups[:2])
    seen = survey(ends.values(), xs, ps)
    refuse_captured(stage, (leaf for leaf in seen.foreign if not created(leaf)))
    callers = _storages(leaf for i in (0, 2, 3) for leaf in groups[i])
    if isinstance(stage.fn, Remat):
        saved = _bytes(groups[1])
    else:
        saved = _bytes(saved_tensors(walk(ends.values())[0]), callers)
    kept = saved
    if xs:
        kept = _bytes(saved_tensors(fork.node for fork in seen.forks), callers)
        kept += sum(gradient_bytes(fork.node, fork.ports) for fork in seen.forks)
    facts = replace(facts, leaves=bool(seen.foreign), saved=saved, kept=kept)
    if not is_fake(next(iter(ends))):
        return facts
    cotangents = [(edge, torch.empty_like(t)) for t, edge in ends.items()]
    try:
        count.peak[0] = before = count.now[0]
        with pure_on_fakes(stage.label, "other_parameters_error"), count.mode:
            dxs, _ = all_gradients(cotangents, xs, ps)
    except FpipeError:
        raise
    except Exception:  # a backward that looks at its data
        return facts
    forward = facts.during["F"]
    backward = count.peak[0] - before
    recorded = forward if isinstance(stage.fn, Remat) else 0  # its B records the graph first
    during = {"F": forward, "B": recorded + backward}
    dx = {i: Aval.like(g) for i, g in dxs.items() if g is not None}
    return replace(facts, dx=dx, during=during)


def _edges(leaves: Sequence[object]) -> Edges:
    """The ends of the leaves that have a gradient."""
    return {i: leaf_edge(t) for i, t in enumerate(leaves) if tree.is_tensor(t) and t.requires_grad}


def stored_in_full(aval: Aval) -> Aval:
    """With the strides on another rank, but contiguous where an axis is expanded: another run may
    store all of it.
    """
    aval = aval.arrived()
    if 0 in aval.stride:
        return aval._replace(stride=contiguous(aval.shape))
    return aval


def _bytes(leaves: Iterable[object], without: Container[int] = ()) -> int:
    return sum(nbytes for address, nbytes in _storages(leaves).items() if address not in without)


def _storages(leaves: Iterable[object]) -> dict[int, int]:
    """The sizes of the storages of the tensors among ``leaves``, by address."""
    tensors = plain_tensors(list(leaves))
    return {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


# ---- invented numbers ----
def _pure_on_numbers(label: str, groups: Groups) -> tuple[Around, Callable[[Tensor], bool]]:
    """While a function runs on real arguments under this mode, refuse writes into other tensors it
    did not create; and whether it created a tensor.
    """
    local = set(map(_storage, tensors_in(groups))) | {None}

    def run(op: TorchOp, args: Args, kwargs: Kwargs) -> object:
        for tensor in tensors_in(written(op, args, kwargs)):
            if _storage(tensor) not in local:
                raise captured_write_error(label, tensor)
        result = op(*args, **kwargs)
        inputs = set(map(_storage, tensors_in((*args, *kwargs.values()))))
        local.update(set(map(_storage, tensors_in([result]))) - inputs)
        return result

    return Around(run), lambda tensor: _storage(tensor) in local


def _storage(tensor: Tensor) -> int | None:
    """The address of a plain tensor's storage; ``None`` for another tensor."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return storage_id(tensor) if plain else None


def _invented(aval: Aval) -> Tensor:
    """Floating numbers between 0 and 1, integers 0, booleans true."""
    tensor = aval.build(_invented_plain)
    if aval.differentiable:
        return tensor.requires_grad_(aval.grad)
    return tensor


def _invented_plain(aval: Aval) -> Tensor:
    tensor = torch.empty_strided(aval.shape, aval.stride, dtype=aval.dtype, device=aval.device)
    # elements of an expanded tensor share memory, which is filled
    memory = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,))
    if not aval.differentiable:
        memory.fill_(1 if aval.dtype is torch.bool else 0)
        return tensor
    numbers = torch.Generator(aval.device).manual_seed(0)
    with torch.no_grad():
        if aval.dtype.is_complex:
            memory = torch.view_as_real(memory)
        memory.uniform_(generator=numbers)
    return tensor

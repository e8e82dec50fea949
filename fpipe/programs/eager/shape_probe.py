"""How the pipeline knows what an eager stage returns before it runs: plans need the shapes first.

In this order: what ``Stage(like=)`` returns on fake tensors; what the function itself returns on fake tensors; and for
a function that looks at its data, what it returns on made-up numbers. The last is a rehearsal: no data of the user's is
used, random streams are put back, and a write into a tensor that was there before is refused. Nothing here knows plans.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ... import tree
from ...errors import ActionError, FpipeError, StageError, TraceError
from ...stage import RECORDING, Remat, Stage
from ...tree import Aval, arriving, contiguous, parts
from .. import _fake
from .._purity import guarding, is_fake, watching
from ..signature import Outputs, Signature, call, outputs_from
from ._nodes import gradient_bytes, identity, versions
from .autograd_split import GradientEdge, all_nodes, both, get_gradient_edge, saved_tensors, survey


@dataclass(frozen=True)
class StageFacts:
    """What was learned of a function.

    ``exact``: its way does not depend on data, so it returns the very same each time. ``passed`` are the outputs that
    are inputs, passed on. ``saved`` and ``kept`` are bytes held from F to I and from I to W, where known; ``dx`` the
    input gradients, where known.
    """

    outputs: Outputs
    exact: bool = True
    passed: Mapping[int, int] = field(default_factory=dict)
    saved: int | None = None
    kept: int | None = None
    dx: Mapping[int, Aval] = field(default_factory=dict)


@torch.inference_mode(False)
def rehearse(stage: Stage, signature: Signature) -> StageFacts:
    """Learn what ``stage`` returns."""
    if stage.like is not None:
        return _by_likeness(stage, signature)
    with _random_as_before(signature):
        try:
            with _fake.quiet(), _fake.mode():
                return _learn(stage, signature, lambda: _fake.inputs(signature), lambda _: watching(stage.label))
        except FpipeError:
            raise
        except Exception as error:
            fake = error
        try:
            told = _learn(stage, signature, lambda: _made_up(signature), lambda g: guarding(stage.label, _tensors(g)))
        except FpipeError:
            raise
        except Exception as error:
            raise _unknown(stage, signature, fake, error) from error
    return _cautious(told, signature)


def _by_likeness(stage: Stage, signature: Signature) -> StageFacts:
    like = replace(stage, fn=stage.like, like=None, name=f"{stage.label} (its like=)")
    try:
        with _fake.quiet(), _fake.mode():
            groups = _fake.inputs(signature)
            made = outputs_from(like, *call(like, signature, groups, False), False)
    except FpipeError:
        raise
    except Exception as error:
        raise _fake.explain(error, like.label, str(signature)) from error
    return _cautious(StageFacts(made), signature)


def _cautious(told: StageFacts, signature: Signature) -> StageFacts:
    """What holds whichever way a function takes: every floating output may carry a gradient, none is an input."""
    trained = bool(signature.params.wanted or signature.x.wanted)
    made = told.outputs
    y = tuple(_wanting(a, trained) if isinstance(a, Aval) else a for a in made.y)
    aux = None if made.aux is None else _wanting(made.aux, trained)
    return replace(told, outputs=replace(made, y=y, aux=aux), exact=False, passed={})


def _wanting(aval: Aval, trained: bool) -> Aval:
    return aval._replace(grad=trained and aval.differentiable)


def _unknown(stage: Stage, signature: Signature, fake: Exception, real: Exception) -> Exception:
    """A function that runs neither on fake tensors nor on made-up numbers: wrong, or in need of ``like=``."""
    if isinstance(_fake.explain(fake, stage.label, ""), ActionError):
        return _fake.explain(real, stage.label, str(signature))
    return StageError(
        f"what stage {stage.label} {signature} returns cannot be found out: it looks at its data, and on "
        f"made-up numbers it raised {type(real).__name__}{_fake.where(real)}: {real}\n"
        'say what it returns: fpipe.Stage(fn, engine="eager", like=lambda p, x: x), with a function of the same '
        "arguments that returns something of the same structure, shapes and dtypes"
    )


# ---- one run --------------------------------------------------------------------------------------------------------


def _learn(
    stage: Stage, signature: Signature, inputs: Callable[[], list[list[Any]]],
    guard: Callable[[list[list[Any]]], AbstractContextManager[Any]],
) -> StageFacts:  # fmt: skip
    """Run the function once, and once more on copies where it writes into its input."""
    for copies in (False, True):
        groups = inputs()
        before = [versions(group) for group in groups]
        try:
            with guard(groups):
                y, aux, state = record(stage, signature, groups, copies)
        except RuntimeError as error:
            if copies or "leaf Variable" not in str(error):
                raise
            continue
        changed = [versions(group) != old for group, old in zip(groups, before, strict=True)]
        refuse_writes(changed)
        if not changed[1]:
            break
    made = outputs_from(stage, y, aux, state, copies)
    inside = {id(leaf): i for i, leaf in enumerate(groups[1])}
    tensors = ((j, leaf) for j, leaf in enumerate(tree.leaves(y)) if tree.is_tensor(leaf))
    told = StageFacts(made, passed={j: inside[id(leaf)] for j, leaf in tensors if id(leaf) in inside})
    return _weigh(stage, told, groups, [t for t in (*tree.leaves(y), aux) if tree.is_tensor(t)])


def refuse_writes(changed: Sequence[bool]) -> None:
    """Raise where parameters or side inputs, the first and third of the groups, were changed."""
    for group, what in ((0, "a parameter"), (2, "a side input")):
        if changed[group]:
            raise TraceError(
                f"a stage writes into {what} in place; stages are pure functions: return what changes "
                "(fpipe.Stage(fn, state=True) carries running statistics)"
            )


def record(stage: Stage, signature: Signature, groups: Sequence[Sequence[Any]], copies: bool) -> tuple[Any, Any, Any]:
    """Call the function as the eager engine does: (y, aux, state). Parts under ``fpipe.remat`` are checkpoints."""
    if isinstance(stage.fn, Remat):
        stage = replace(stage, fn=stage.fn.fn)
    token = RECORDING.set(True)
    try:
        return call(stage, signature, groups, copies)
    finally:
        RECORDING.reset(token)


def _weigh(stage: Stage, told: StageFacts, groups: Sequence[Sequence[Any]], outs: Sequence[torch.Tensor]) -> StageFacts:
    """Add what the graph tells: captured tensors that want a gradient, bytes, and the layout of input gradients."""
    ends = [get_gradient_edge(t) for t in outs if t.requires_grad]
    xs, ps = ({i: get_gradient_edge(t) for i, t in enumerate(group) if tree.is_tensor(t) and t.requires_grad}
              for group in groups[:2][::-1])  # fmt: skip
    if not ends:
        return replace(told, saved=0, kept=0)
    seen = survey(ends, xs.values(), ps)
    refuse_captured(stage, seen.foreign)
    callers = {identity(s) for i in (0, 2, 3) for s in _storages(groups[i])}
    saved = _bytes(saved_tensors(all_nodes(ends)), callers)
    if isinstance(stage.fn, Remat):
        saved = sum({identity(s): s.nbytes() for s in _storages(groups[1])}.values())
    forks = [fork.node for fork in seen.forks]
    kept = _bytes(saved_tensors(forks), callers) + sum(gradient_bytes(f.node, f.ports) for f in seen.forks)
    told = replace(told, saved=saved, kept=kept if xs else saved)
    if not is_fake(outs[0]) or not xs:
        return told
    cotangents = [torch.empty_like(t) for t in outs if t.requires_grad]
    try:
        dxs, _ = both(list(zip(ends, cotangents, strict=True)), xs, ps)
    except Exception:  # a backward that looks at its data
        return told
    return replace(told, dx={i: _landed(Aval.like(g)) for i, g in dxs.items() if g is not None})


def _landed(aval: Aval) -> Aval:
    """As it arrives elsewhere. Where it is one number all over, a run may store that once or in full: in full, then."""
    stride = arriving(aval.shape, aval.stride)
    return aval._replace(stride=contiguous(aval.shape) if 0 in stride else stride)


def _bytes(tensors: Iterable[torch.Tensor], callers: set[int]) -> int:
    storages = {identity(storage): storage.nbytes() for storage in _storages(tensors)}
    return sum(nbytes for cdata, nbytes in storages.items() if cdata not in callers)


def _storages(leaves: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    return (part.untyped_storage() for leaf in leaves if tree.is_tensor(leaf) for part in parts(leaf))


def refuse_captured(stage: Stage, foreign: Sequence[torch.Tensor]) -> None:
    """Raise where a function closes over a tensor that wants a gradient."""
    if foreign:
        raise TraceError(
            f"stage {stage.label} closes over a tensor of shape {list(foreign[0].shape)} that requires a gradient, "
            "which it would silently not get; pass it in the stage's parameters, or close over tensor.detach()"
        )


# ---- made-up numbers ------------------------------------------------------------------------------------------------


def _tensors(groups: Sequence[Sequence[Any]]) -> Iterator[torch.Tensor]:
    return (leaf for group in groups for leaf in group if tree.is_tensor(leaf))


def _made_up(signature: Signature) -> list[list[Any]]:
    """Floating numbers between 0 and 1, integers 0, masks true; leaves that are no tensors as they are."""
    return [argument.map(_numbers) for argument in signature]


def _numbers(aval: Aval) -> torch.Tensor:
    tensor = aval.build(_plain_numbers)
    return tensor.requires_grad_(aval.grad) if aval.differentiable else tensor


def _plain_numbers(aval: Aval) -> torch.Tensor:
    tensor = torch.empty_strided(aval.shape, aval.stride, dtype=aval.dtype, device=aval.device)
    if aval.differentiable:
        with torch.no_grad():
            parts = torch.view_as_real(tensor) if aval.dtype.is_complex else tensor
            parts.uniform_(generator=torch.Generator(aval.device).manual_seed(0))
        return tensor
    return tensor.fill_(1 if aval.dtype is torch.bool else 0)


@contextmanager
def _random_as_before(signature: Signature) -> Iterator[None]:
    """Put Python's and torch's random streams back."""
    before = random.getstate()
    devices = {a.device for argument in signature for a in argument.avals.values()}
    kinds = {d.type for d in devices} - {"cpu", "meta"}
    fork = nullcontext()
    if kinds:
        kind = kinds.pop()
        fork = torch.random.fork_rng([d.index or 0 for d in devices if d.type == kind], device_type=kind)
    else:
        fork = torch.random.fork_rng([])
    try:
        with fork:
            yield
    finally:
        random.setstate(before)


__all__ = ["GradientEdge", "StageFacts", "record", "refuse_captured", "refuse_writes", "rehearse"]

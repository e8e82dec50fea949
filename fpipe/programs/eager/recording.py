# SPDX-License-Identifier: Apache-2.0
"""Runs a stage function on autograd: keeps its graph, checks what it returns, and detaches it.

The function may take another path with each microbatch, but its results must be as the plan expects them. Knows
functions and signatures, no programs, schedules or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ... import tree
from ...errors import StageError
from ...stage import RECORDING, Remat, Stage
from ...tree import AbstractLeaf, Aval, arriving
from ..autocast import Ambient, under
from ..explain import captured_gradient_error, write_error
from ..internals import versions
from ..signature import Outputs, Result, Signature, call


@dataclass(frozen=True)
class Tape:
    """A recorded graph: its ends by cotangent, its leaves by index, and whether the function set hooks on tensors."""

    ends: Mapping[str, GradientEdge]
    xs: Mapping[int, GradientEdge]
    ps: Mapping[int, GradientEdge]
    hooked: bool


def run_recording(stage: Stage, signature: Signature, groups: Sequence[Sequence[Any]], copies: bool) -> Result:
    """Call the function with parts under ``fpipe.remat`` as checkpoints; a stage under it as a whole without."""
    if isinstance(stage.fn, Remat):
        stage = replace(stage, fn=stage.fn.fn)
    token = RECORDING.set(True)
    try:
        return call(stage, signature, groups, copies)
    finally:
        RECORDING.reset(token)


def refuse_writes(changed: Sequence[bool]) -> None:
    """Raise where parameters or side inputs, the first and third of the arguments, were changed."""
    for argument, what in ((0, "a parameter"), (2, "a side input")):
        if changed[argument]:
            raise write_error(what)


def refuse_captured(stage: Stage, foreign: Sequence[torch.Tensor]) -> None:
    """Raise where a function closes over a tensor that requires a gradient."""
    if foreign:
        raise captured_gradient_error(stage.label, foreign[0])


def until_passed(check: Callable[..., None]) -> Callable[..., None]:
    """A check that is not repeated once it has passed."""
    pending = [check]

    def run(*args: object) -> None:
        for each in pending:
            each(*args)
        pending.clear()

    return run


@dataclass(frozen=True, eq=False)
class Recorder:
    """Runs one stage function. ``passed``: the outputs that are inputs, by index; ``autocast``: that of the plan."""

    stage: Stage
    signature: Signature
    outputs: Outputs
    passed: Mapping[int, int]
    autocast: Ambient
    check_captured: Callable[..., None]

    @torch.inference_mode(False)
    def record(self, groups: Sequence[Sequence[Any]], grad: bool) -> tuple[tuple[Any, ...], Tape]:
        """Outputs that are not inputs, auxiliary scalar and new state, and the graph; ``grad``: whether to record."""
        before = list(map(versions, groups[:3]))  # not of the state, which is copied
        arguments = [
            [_leaf(value, leaf, grad) for value, leaf in zip(group, abstract.leaves, strict=True)]
            for group, abstract in zip(groups[:3], self.signature, strict=False)
        ]
        state = [t.clone() if isinstance(t, torch.Tensor) else t for t in groups[3]]
        hooks = RemovableHandle.next_id
        with under(self.autocast):
            result = run_recording(self.stage, self.signature, [*arguments, state], self.outputs.copies)
        hooked = RemovableHandle.next_id != hooks
        self._check_writes(before, list(map(versions, groups[:3])))
        ys, new_state = self._check(result, arguments[1])
        live = {f"dy{j}": ys[j] for j in self.outputs.y.avals} | {"daux": result.aux}
        ends = {name: get_gradient_edge(t) for name, t in live.items() if t is not None and t.requires_grad}
        ps, xs = (
            {i: get_gradient_edge(argument[i]) for i in abstract.wanted} if grad else {}
            for argument, abstract in zip(arguments, self.signature[:2], strict=False)
        )
        if ends:
            self.check_captured(ends, xs, ps)
        callers = _storages(groups)
        fresh = [_detached(ys[j], callers) for j in self.outputs.y.avals if j not in self.passed]
        aux = [] if result.aux is None else [_detached(result.aux, callers)]
        return (*fresh, *aux, *(t.detach() for t in new_state)), Tape(ends, xs, ps, hooked)

    def _check_writes(self, before: list[list[int]], after: list[list[int]]) -> None:
        changed = [old != new for old, new in zip(before, after, strict=True)]
        refuse_writes(changed)
        if changed[1]:
            raise StageError(
                f"stage {self.stage.label} wrote into its input in place, which it did not do when the plan was made; "
                "write x = x.clone() first"
            )

    def _check(self, result: Result, xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The leaves of output and state, which must be as the plan expects them."""
        expected = self.outputs
        ys, spec = tree.flatten(result.y)
        if spec != expected.y.spec:
            raise self._differs("a pytree of another structure", spec, expected.y.spec)
        for j, (value, leaf) in enumerate(zip(ys, expected.y.leaves, strict=True)):
            if not isinstance(leaf, Aval):
                if value is not leaf.value and (type(value) is not leaf.type or value != leaf.value):
                    raise self._differs(f"output {j}", value, leaf)
                continue
            if not _fits(value, leaf):
                raise self._differs(f"output {j}", tree.describe([value]), leaf)
            if value.requires_grad and not leaf.grad:
                raise self._differs(f"output {j}", "one that carries a gradient", "none that does")
            if j in self.passed and value is not xs[self.passed[j]]:
                raise self._differs(f"output {j}", "a new tensor", f"its input {self.passed[j]}, unchanged,")
        if expected.aux is not None and not _fits(result.aux, expected.aux):
            raise self._differs("its auxiliary loss", tree.describe([result.aux]), expected.aux)
        if expected.state is None:
            return ys, []
        states, spec = tree.flatten(result.state)
        if spec != expected.state.spec or not all(map(_fits, states, expected.state.leaves)):
            raise self._differs("its state", tree.describe(states), expected.state)
        return ys, states

    def _differs(self, what: str, value: object, expected: object) -> StageError:
        return StageError(
            f"stage {self.stage.label} returned {what} otherwise than the plan was made for: {value}, where {expected} "
            "was expected. Shapes, dtypes, structure and numbers that leave a stage may not depend on data; if fpipe "
            "found out the wrong ones, declare the right ones: fpipe.Stage(fn, like=lambda p, x: x)"
        )


def _leaf(value: Any, leaf: AbstractLeaf, grad: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    tensor = value.clone() if value.is_inference() else value.detach()  # a graph holds no inference tensors
    return tensor.requires_grad_() if grad and isinstance(leaf, Aval) and leaf.grad else tensor


def _storages(groups: Sequence[Sequence[Any]]) -> set[int]:
    """Addresses of the caller's memory: parameters, side inputs, state."""
    tensors = (t for g in (0, 2, 3) for t in groups[g] if type(t) in (torch.Tensor, torch.nn.Parameter))
    return {t.untyped_storage().data_ptr() for t in tensors}


def _detached(tensor: torch.Tensor, callers: set[int]) -> torch.Tensor:
    """An output without its graph, copied where it is the caller's memory or has gaps."""
    tensor = tensor.detach()
    if tensor.untyped_storage().data_ptr() in callers and tensor.numel():
        return tensor.clone(memory_format=torch.contiguous_format)
    return without_gaps(tensor)


def without_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the strides with which it arrives on another rank."""
    if tensor.is_contiguous() or tensor.stride() == arriving(tensor.shape, tensor.stride()):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _fits(value: object, leaf: AbstractLeaf) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and isinstance(leaf, Aval)
        and (tuple(value.shape), value.dtype, value.device) == (leaf.shape, leaf.dtype, leaf.device)
    )

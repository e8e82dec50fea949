# SPDX-License-Identifier: Apache-2.0
"""``bind``: modules as stages whose gradients go into ``.grad``, for torch's optimizers and
learning rate schedulers.

A pipeline takes parameters and returns gradients. Trainers keep parameters in modules and gradients
in ``.grad``. This module connects both, and must not know schedules or ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .. import tree
from ..engine.steps import add_each
from ..errors import StageError
from ..stage import Stage, keyword_only
from ._places import Place, places_of, tensors_of
from ._pure import InMode, running, signature
from ._replaced import replaced, replacements
from .modules import from_module

#: By stage, tensors by name; None for a stage that this process does not have.
ByStage: TypeAlias = list[dict[str, Tensor] | None]


class ModuleCall:
    """A module as a pure function of its parameters and buffers; a tuple is passed as several
    arguments.
    """

    def __init__(self, module: nn.Module, state: Sequence[str] = (), sides: Sequence[str] = ()):
        self.module, self.state = module, tuple(state)
        self.__qualname__, self.replacements = type(module).__name__, replacements(module)
        self.__signature__ = signature("params", *(["state"] if state else []), "x", sides=sides)

    def __call__(self, params: Mapping[str, Tensor], *rest: Any, **side: Any) -> Any:
        state, x = rest if self.state else ({}, *rest)
        tensors = {
            **params,
            **{name: value.clone() for name, value in state.items()},
        }  # norms update theirs in place
        y = self.call(
            tensors,
            x if isinstance(x, tuple) else (x,),
            {k: v for k, v in side.items() if v is not None},
        )
        return (y, {name: tensors[name] for name in self.state}) if self.state else y

    def call(self, tensors: dict[str, Tensor], x: tuple[Any, ...], side: Mapping[str, Any]) -> Any:
        """Run the module with these parameters and buffers."""
        with replaced(self.replacements):
            return functional_call(self.module, tensors, x, dict(side))

    def in_mode(self, training: bool) -> InMode:
        """The same function with the module in training or in evaluation."""
        return InMode(self, training)


class Bound:
    """Modules bound to the stages of a pipeline; :func:`bind` returns it. ``stages`` are for
    ``fpipe.pipeline``.

    >>> from fpipe import local, pipeline, value_and_grad
    >>> layers = [nn.Linear(2, 2), nn.Linear(2, 1)]
    >>> bound = bind(layers)
    >>> pipe = pipeline(bound.stages, loss=lambda y: y.square().mean(), microbatches=2,
    ...     group=local(2))
    >>> optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    >>> loss, grads = value_and_grad(pipe)(bound.params, torch.ones(4, 2))
    >>> bound.add_grads(grads)
    >>> optimizer.step()
    >>> bool(pipe(bound.params, torch.ones(4, 2)) < loss)
    True
    """

    def __init__(
        self,
        modules: Sequence[nn.Module | None],
        stages: Sequence[Stage],
        names: Sequence[Sequence[str]],
    ):
        places = {module: places_of(module) for module in modules if module is not None}
        self.modules, self.stages = tuple(modules), list(stages)
        self._leaves: list[dict[str, Place] | None] = [
            None if module is None else {name: places[module][name] for name in row}
            for module, row in zip(modules, names, strict=True)
        ]
        self._frozen = [
            row[name]
            for row, stage in zip(self._leaves, stages, strict=True)
            if row is not None
            for name in stage.frozen
        ]
        self._state: list[dict[str, Place] | None] = [
            None
            if module is None or not stage.state
            else {n: places[module][n] for n in stage.initial_state}
            for module, stage in zip(modules, stages, strict=True)
        ]

    @property
    def params(self) -> ByStage:
        """The parameters and buffers of each stage, as they are now: they share memory with the
        modules.
        """
        return [
            None if row is None else {n: place.value.detach() for n, place in row.items()}
            for row in self._leaves
        ]

    @property
    def tensors(self) -> ByStage:
        """The same as ``params``, but the modules' own tensors, which may require gradients."""
        return [
            None if row is None else {n: owner[key] for n, (owner, key) in row.items()}
            for row in self._leaves
        ]

    @property
    def state(self) -> ByStage:
        """The buffers that forward changes, as they are now; for ``state=`` of a call."""
        return [
            None if row is None else {n: place.value.detach() for n, place in row.items()}
            for row in self._state
        ]

    def unfrozen(self) -> bool:
        """Whether a parameter requires a gradient that did not when the stages were built, which
        have none for it.

        Returns:
            True if stages must be bound again.

        >>> bound = bind([nn.Linear(1, 1, bias=False)])
        >>> bound.unfrozen()
        False
        """
        return any(place.value.requires_grad for place in self._frozen)

    def add_grads(self, grads: Sequence[Mapping[str, Tensor | None] | None]) -> None:
        """Add gradients, as ``fpipe.value_and_grad`` returns them, to ``.grad`` of the modules'
        parameters.

        A parameter of several stages gets its gradient once: tied leaves have the sum of all stages
        each. Frozen parameters have none, and those that were frozen since get none.

        Args:
            grads: one entry for each stage.

        Raises:
            StageError: if there is not one entry per stage, or a gradient has the shape of no
            parameter of that name.

        >>> layer = nn.Linear(1, 1, bias=False)
        >>> bind([layer]).add_grads([{"weight": torch.ones(1, 1)}])
        >>> layer.weight.grad
        tensor([[1.]])
        """
        if len(grads) != len(self.stages):
            raise StageError(
                f"{len(grads)} entries of gradients for {len(self.stages)} stages; give one per "
                "stage"
            )
        seen: set[int] = set()
        totals: list[Tensor] = []
        addends: list[Tensor] = []
        for stage, (row, found) in enumerate(zip(self._leaves, grads, strict=True)):
            for name, grad in () if row is None or found is None else found.items():
                if grad is None:
                    continue
                parameter = self._place(row, name, stage).value
                if id(parameter) in seen or not parameter.requires_grad:
                    continue
                seen.add(id(parameter))
                if grad.shape != parameter.shape:
                    raise StageError(
                        f"the gradient of {name!r} in stage {stage} has shape {list(grad.shape)}, "
                        "the parameter "
                        f"{list(parameter.shape)}; with zero= pass pipe.unshard(grads)"
                    )
                if grad.dtype != parameter.dtype or grad.device != parameter.device:
                    grad = grad.to(parameter.device, parameter.dtype)
                if parameter.grad is None:
                    parameter.grad = grad
                else:
                    totals.append(parameter.grad)
                    addends.append(grad)
        if totals:
            add_each(totals, addends)

    def _place(self, row: Mapping[str, Place] | None, name: str, stage: int) -> Place:
        if row is None or name not in row:
            raise StageError(
                f"stage {stage} has no parameter {name!r}; pass the gradients of this pipeline"
            )
        return row[name]

    def write_state(self, state: Sequence[Mapping[str, Tensor] | None]) -> None:
        """Write the state that a call returned into the buffers of the modules.

        Args:
            state: one entry for each stage, None for stages of other processes.

        Raises:
            StageError: if there is not one entry for each stage, or a buffer is missing.

        >>> norm = nn.BatchNorm1d(1)
        >>> bound = bind([norm])
        >>> bound.write_state([{**bound.state[0], "running_mean": torch.ones(1)}])
        >>> norm.running_mean
        tensor([1.])
        """
        if len(state) != len(self._state):
            raise StageError(
                f"{len(state)} states for {len(self._state)} stages; give one for each, None for "
                "others'"
            )
        for stage, (row, found) in enumerate(zip(self._state, state, strict=True)):
            missing = (
                [] if row is None or found is None else [name for name in row if name not in found]
            )
            if missing:
                what = f"the state of stage {stage} has no {', '.join(map(repr, missing))}"
                raise StageError(f"{what}; pass the state that the call returned")
        with torch.no_grad():
            for row, found in zip(self._state, state, strict=True):
                if row is not None and found is not None:
                    for name, place in row.items():
                        place.value.copy_(found[name])


def bind(
    modules: nn.Module | Sequence[nn.Module | None],
    *,
    cuts: Sequence[str] = (),
    side: Sequence[str] = (),
    state: Sequence[str] = (),
) -> Bound:
    """Modules as stages; gradients of a pipeline over them go into ``.grad``, so any torch
    optimizer updates them.

    ``bound.stages`` are for ``fpipe.pipeline``; ``bound.params`` (and ``bound.state``, where there
    are running statistics) for its calls; ``bound.add_grads(grads)`` adds to ``.grad``, and
    ``bound.write_state(state)`` writes statistics back. Nothing is copied: parameters are read from
    the modules at each access, so a module on "meta" may be materialized in between. Parameters
    with ``requires_grad=False`` are frozen, one parameter in several stages is tied. Buffers are
    leaves without gradient.

    Args:
        modules: one per stage, ``None`` for a stage of another process; or one whole module.
        cuts: of a whole module: names of submodules that begin stages, as for
            ``fpipe.from_module``.
        side: arguments of forward that are side inputs, beside keyword-only ones.
        state: patterns of names of buffers that forward changes, beside the statistics of norms in
            training.

    Returns:
        the modules with their stages.

    Raises:
        StageError: if there is no module, or a module cannot be cut.

    >>> bind([nn.Linear(2, 1)]).params[0]["weight"].shape
    torch.Size([1, 2])
    """
    if isinstance(modules, nn.Module):
        stages, params = from_module(modules, cuts, side=side, state=state)
        return Bound([modules] * len(stages), stages, [tuple(row) for row in params])
    listed = not isinstance(modules, (str, Mapping)) and isinstance(modules, Iterable) and not cuts
    if (
        not listed
        or not modules
        or not all(module is None or isinstance(module, nn.Module) for module in modules)
    ):
        raise StageError(
            "bind takes one module (with cuts=), or a list with a module, or None, for each stage"
        )
    rows = [_stage(module, side, state) for module in modules]
    return Bound(
        modules, with_ties(modules, [stage for stage, _ in rows]), [names for _, names in rows]
    )


def _stage(
    module: nn.Module | None, side: Sequence[str], state: Sequence[str]
) -> tuple[Stage, list[str]]:
    """The stage of a module, and the names of its leaves."""
    if module is None:
        return Stage.elsewhere(), []
    buffers = dict(module.named_buffers())
    patterns = [p for p in state if any(tree.matches(name, [p]) for name in buffers)]
    changing = running(module, patterns)
    leaves = [
        *(name for name, _ in module.named_parameters()),
        *(name for name in buffers if name not in changing),
    ]
    named = tensors_of(module)
    frozen = tuple(name for name in leaves if not named[name].requires_grad)
    sides = list(dict.fromkeys([*keyword_only(module.forward), *side]))
    return stage_of(ModuleCall(module, changing, sides), frozen), leaves


def stage_of(call: ModuleCall, frozen: Sequence[str]) -> Stage:
    """A module call as a stage."""
    initial = {
        name: dict(call.module.named_buffers())[name].detach() for name in call.state
    } or None
    return Stage(
        call,
        state=bool(call.state),
        initial_state=initial,
        frozen=tuple(frozen),
        name=type(call.module).__name__,
    )


def with_ties(modules: Sequence[nn.Module | None], stages: Sequence[Stage]) -> list[Stage]:
    """The stages, with those of their parameters that another stage has too named as tied."""
    places: dict[int, list[tuple[int, str]]] = {}
    for stage, module in enumerate(modules):
        for name, parameter in () if module is None else module.named_parameters():
            places.setdefault(id(parameter), []).append((stage, name))
    out = list(stages)
    for shared in places.values():
        for stage, name in shared if len(shared) > 1 else ():
            group = f"{shared[0][0]}.{shared[0][1]}"
            out[stage] = replace(out[stage], ties=(*out[stage].ties, (name, group)))
    return out

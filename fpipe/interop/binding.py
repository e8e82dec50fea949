# SPDX-License-Identifier: Apache-2.0
"""``bind``: modules as stages whose gradients go into ``.grad``, for torch's optimizers.

A pipeline takes parameters and returns gradients. Trainers keep parameters in modules and gradients
in ``.grad``. This module connects both, and must not know schedules or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor, nn
from torch.func import functional_call

from ..errors import StageError, checked
from ..stage import Stage, keyword_only
from ..tree import Tree
from .module_function import ModuleFunction, changing_buffers, claims, refuse_hooks, tensors_of
from .modules import Results, from_module
from .replacements import replaced, replacements

#: By stage, tensors by name; None for a stage that this process does not have.
ByStage: TypeAlias = list[dict[str, Tensor] | None]


class BoundFunction(ModuleFunction):
    """A module that keeps its tensors, as a function of parameters and buffers.

    A tuple is passed to the module as several arguments.
    """

    def __init__(
        self,
        module: nn.Module,
        aliases: Mapping[str, str],
        state: Sequence[str],
        side: Sequence[str],
    ):
        super().__init__(module, aliases, sides=side, state=state, name=type(module).__name__)
        self.replacements = replacements(module)

    def call(self, tensors: dict[str, Tensor], x: Tree, side: dict[str, Tree]) -> Tree:
        """Run the module with these parameters and buffers."""
        x = x if isinstance(x, tuple) else (x,)
        with replaced(self.replacements):
            return functional_call(self.module, tensors, x, side, tie_weights=False)


class Bound:
    """Modules bound to the stages of a pipeline; :func:`bind` returns it.

    ``stages`` are for ``fpipe.pipeline``.

    >>> import torch
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
        leaves: Sequence[Iterable[str]],
    ):
        self.modules = tuple(modules)
        self.stages = list(stages)
        self._leaves = [tuple(row) for row in leaves]

    def _tensors(self, names: Sequence[Iterable[str]]) -> ByStage:
        """Return the modules' tensors of these names, by stage, as they are now."""
        bound = {module for module in self.modules if module is not None}
        held = {module: tensors_of(module) for module in bound}
        return [
            None if module is None else {name: held[module][name] for name in row}
            for module, row in zip(self.modules, names, strict=True)
        ]

    @property
    def params(self) -> ByStage:
        """The parameters and buffers of each stage, which share memory with the modules."""
        return _detached(self._tensors(self._leaves))

    @property
    def state(self) -> ByStage:
        """The buffers that forward changes, as they are now; for ``state=`` of a call."""
        rows = _detached(self._tensors([stage.initial_state or () for stage in self.stages]))
        return [row or None for row in rows]

    def unfrozen(self) -> bool:
        """Return whether a parameter requires a gradient now that did not when the stages were
        built.

        Returns:
            True if stages must be bound again.

        >>> bound = bind([nn.Linear(1, 1, bias=False)])
        >>> bound.unfrozen()
        False
        """
        rows = self._tensors([stage.frozen for stage in self.stages])
        return any(tensor.requires_grad for row in rows for tensor in (row or {}).values())

    def _check_length(self, rows: Results, what: str) -> None:
        if len(rows) != len(self.stages):
            raise StageError(
                f"{len(rows)} {what} for {len(self.stages)} stages; give one for each, None for "
                "those of other processes"
            )

    @checked
    def add_grads(self, grads: Results) -> None:
        """Add gradients, as ``fpipe.value_and_grad`` returns them, to ``.grad`` of the parameters.

        A parameter of several stages gets its gradient once: tied leaves have the sum of all stages
        each. Frozen parameters have none, and those that were frozen since get none.

        Args:
            grads: one entry for each stage.

        Raises:
            StageError: if there is not one entry per stage, a gradient has the shape of no
            parameter of that name, or a parameter has hooks.

        >>> import torch
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> bind([layer]).add_grads([{"weight": torch.ones(1, 1)}])
        >>> layer.weight.grad
        tensor([[1.]])
        """
        self._check_length(grads, "entries of gradients")
        added = set[Tensor]()
        rows = self._tensors(self._leaves)
        for name, parameter in (pair for row in rows for pair in (row or {}).items()):
            hooks = {
                "hooks": parameter._backward_hooks,
                "hooks after its gradient was accumulated": parameter._post_accumulate_grad_hooks,
            }
            refuse_hooks(f"parameter {name!r}", hooks)
        for stage, (row, results) in enumerate(zip(rows, grads, strict=True)):
            for name, grad in (results or {}).items():
                if grad is None or row is None:
                    continue
                parameter = row.get(name)
                if parameter is None or grad.shape != parameter.shape:
                    shape = "no such parameter" if parameter is None else list(parameter.shape)
                    raise StageError(
                        f"the gradient of {name!r} in stage {stage} has shape {list(grad.shape)}, "
                        f"the module {shape}; pass the gradients of this pipeline, with zero= "
                        "pipe.unshard(grads)"
                    )
                if parameter not in added and parameter.requires_grad:
                    added.add(parameter)
                    grad = grad.to(parameter.device, parameter.dtype)
                    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)

    def write_state(self, state: Results) -> None:
        """Write the state that a call returned into the buffers of the modules.

        Args:
            state: one entry for each stage, None for stages of other processes.

        Raises:
            StageError: if there is not one entry for each stage, or a buffer is missing.

        >>> import torch
        >>> norm = nn.BatchNorm1d(1)
        >>> bound = bind([norm])
        >>> bound.write_state([{**bound.state[0], "running_mean": torch.ones(1)}])
        >>> norm.running_mean
        tensor([1.])
        """
        self._check_length(state, "states")
        pairs = list[tuple[Tensor, Tensor]]()
        for stage, (row, values) in enumerate(zip(self.state, state, strict=True)):
            if row is None or values is None:
                continue
            for name, buffer in row.items():
                value = values.get(name)
                if value is None:
                    raise StageError(
                        f"the state of stage {stage} has no {name!r}; pass the state that the call "
                        "returned"
                    )
                pairs.append((buffer, value))
        for buffer, value in pairs:
            buffer.copy_(value)


def _detached(rows: ByStage) -> ByStage:
    return [None if row is None else {n: t.detach() for n, t in row.items()} for row in rows]


@checked
def bind(
    modules: nn.Module | Sequence[nn.Module | None],
    *,
    cuts: Sequence[str] = (),
    side: Sequence[str] = (),
    state: Sequence[str] = (),
) -> Bound:
    """Modules as stages; gradients of a pipeline over them go into ``.grad``.

    So any torch optimizer updates them. ``bound.stages`` are for ``fpipe.pipeline``;
    ``bound.params`` (and ``bound.state``, where there are running statistics) for its calls;
    ``bound.add_grads(grads)`` adds to ``.grad``, and ``bound.write_state(state)`` writes statistics
    back. Nothing is copied: parameters are read from the modules at each access, so a module on
    "meta" may be materialized in between. Parameters with ``requires_grad=False`` are frozen, one
    parameter in several stages is tied. Buffers are leaves without gradient.

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
        return Bound([modules] * len(stages), stages, params)
    listed = isinstance(modules, Iterable) and not cuts
    if not listed or not modules or not all(isinstance(m, nn.Module | None) for m in modules):
        raise StageError(
            "bind takes one module (with cuts=), or a list with a module, or None, for each stage"
        )

    states = [[] if module is None else changing_buffers(module, state) for module in modules]
    return bound_to(
        modules,
        states,
        lambda module, aliases, state: BoundFunction(
            module, aliases, state, list(dict.fromkeys([*keyword_only(module.forward), *side]))
        ),
    )


def bound_to(
    modules: Sequence[nn.Module | None],
    states: Sequence[Sequence[str]],
    build: Callable[[nn.Module, Mapping[str, str], Sequence[str]], BoundFunction],
    others: Sequence[Stage] = (),
    **options: str | None,
) -> Bound:
    """Return modules as stages, which know their frozen leaves and those that other stages have
    too.

    Args:
        modules: one per stage, None for a stage of another process.
        states: names of buffers that are state, by stage. All others are leaves of the parameters.
        build: returns the function of a module, the keys of its leaves, and its state.
        others: all stages, as they were described when an earlier pipeline was built.
        options: of the stages of this process.
    """
    rows = [
        {}
        if module is None
        else {name: t for name, t in tensors_of(module).items() if name not in state}
        for module, state in zip(modules, states, strict=True)
    ]
    whole = {f"{number}.{n}": t for number, row in enumerate(rows) for n, t in row.items()}
    owned = claims(rows, whole)
    stages = list[Stage]()
    for number, (module, claim) in enumerate(zip(modules, owned, strict=True)):
        if module is None:
            stages.append(others[number] if others else Stage.elsewhere())
        else:
            function = build(module, claim.aliases, states[number])
            stages.append(function.stage(claim._replace(weights=None), **options))
    return Bound(modules, stages, [claim.params for claim in owned])

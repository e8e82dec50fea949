# SPDX-License-Identifier: Apache-2.0
"""A module without its weights, run with weights that are passed in: the base of every stage made
from a module.

``clone`` copies the tree of modules (not the tensors), ``claims`` says which stage has which
parameter under which name, and ``Pure`` runs a clone as a pure function. This module must not know
how a model was cut.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes

from .. import tree
from ..errors import StageError
from ..stage import Engine, Stage, Weight

#: The attributes in which a module holds its tensors and submodules.
REGISTERED = ("_parameters", "_buffers", "_modules")


def clone(
    module: nn.Module, replacements: Mapping[nn.Module, nn.Module] | None = None
) -> nn.Module:
    """The same tree of modules with parameters that hold no data, and with some modules replaced.

    Buffers are shared, not copied; so is every other attribute.

    >>> clone(nn.Linear(2, 3)).weight.device
    device(type='meta')
    """
    clones, empty = dict(replacements or {}), dict[int, nn.Parameter]()

    def without_data(parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in empty:
            meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            empty[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
        return empty[id(parameter)]

    def copy(module: nn.Module) -> nn.Module:
        if module not in clones:
            clones[module] = object.__new__(type(module))
            hooks = {
                name: v.copy()
                for name, v in vars(module).items()
                if "hooks" in name and isinstance(v, dict)
            }
            clones[module].__dict__.update(
                vars(module) | hooks,
                _buffers=dict(module._buffers),
                _parameters={
                    name: p if p is None else without_data(p)
                    for name, p in module._parameters.items()
                },
                _modules={name: m if m is None else copy(m) for name, m in module._modules.items()},
            )
        return clones[module]

    return copy(module)


def without_buffers(module: nn.Module) -> None:
    """Remove the buffers and hooks of a clone that does not run.

    >>> module = clone(nn.BatchNorm1d(2))
    >>> without_buffers(module)
    >>> list(module.buffers())
    []
    """
    module._buffers.clear()
    for name, held in vars(module).items():
        if "hooks" in name and isinstance(held, dict):
            held.clear()


@dataclass(frozen=True)
class Claim:
    """The parameters of one stage."""

    params: dict[str, torch.Tensor]
    aliases: dict[str, str]  # every name that the stage's module uses -> the key in params
    frozen: tuple[str, ...]
    ties: tuple[tuple[str, str], ...]
    groups: tuple[str, ...]  # for each parameter, its first name in the whole model


def claims(model: nn.Module, used: Sequence[Iterable[str]]) -> list[Claim]:
    """Parameters for each stage from the names that it uses; the same parameter in two stages
    becomes a tie.

    Buffers on "meta" have no values and cannot be constants: they are parameters without gradients.

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> b.weight = a.weight
    >>> first, second = claims(nn.Sequential(a, b),
    ...     [["0.weight", "0.bias"], ["1.weight", "1.bias"]])
    >>> first.ties, second.ties
    ((('0.weight', '0.weight'),), (('1.weight', '0.weight'),))
    """
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    empty = {
        name: buffer
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if buffer.is_meta
    }
    parameters |= empty
    first: dict[int, str] = {}
    group = {name: first.setdefault(id(parameter), name) for name, parameter in parameters.items()}
    names = [[name for name in stage if name in parameters] for stage in used]
    stages = Counter(shared for stage in names for shared in {group[name] for name in stage})
    result: list[Claim] = []
    for stage in names:
        key: dict[str, str] = {}  # by group, the first name that this stage uses
        aliases = {name: key.setdefault(group[name], name) for name in stage}
        params = {name: parameters[name].detach() for name in key.values()}
        frozen = tuple(name for name in params if not parameters[name].requires_grad)
        ties = tuple(
            (name, shared)
            for shared, name in key.items()
            if stages[shared] > 1 and shared not in empty
        )
        result.append(Claim(params, aliases, frozen, ties, groups=tuple(key)))
    return result


def running(module: nn.Module, patterns: Sequence[str] = (), always: bool = False) -> list[str]:
    """The buffers that a forward changes: the statistics of norms in training, and those that the
    patterns name.

    ``always``: those of norms in evaluation too.

    >>> running(nn.Sequential(nn.BatchNorm1d(2)))
    ['0.running_mean', '0.running_var', '0.num_batches_tracked']
    >>> running(nn.Sequential(nn.BatchNorm1d(2)).eval())
    []
    """
    statistics = {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules(remove_duplicate=False)
        if (child.training or always) and getattr(child, "track_running_stats", False)
        for name, _ in child.named_buffers(recurse=False)
    }
    buffers = [name for name, _ in module.named_buffers(remove_duplicate=False)]
    fault = tree.unmatched(patterns, buffers)
    if fault:
        raise StageError(f"state={fault.replace('leaf', 'buffer')}")
    return [name for name in buffers if name in statistics or tree.matches(name, patterns)]


def _weights(claim: Claim) -> dict[str, Weight]:
    """The parameters of a stage by name, without data, with their first names in the whole
    model.
    """
    pairs = zip(claim.params.items(), claim.groups, strict=True)
    return {
        n: Weight(key, torch.empty(p.shape, dtype=p.dtype, device="meta")) for (n, p), key in pairs
    }


def signature(*names: str, sides: Sequence[str]) -> inspect.Signature:
    """The signature of a stage function: positional arguments, and side inputs that may be left
    out.

    >>> signature("params", "x", sides=["mask"])
    <Signature (params, x, /, *, mask=None)>
    """
    positional = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names]
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in sides
    ]
    return inspect.Signature([*positional, *keywords])


class Moded(Protocol):
    """A function that runs a module."""

    module: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        ...


class InMode:
    """Runs a function of a module in one of its two modes, and leaves the module as it was.

    >>> module = nn.Dropout(1.0)
    >>> y = InMode(Pure(module, claims(module, [[]])[0], sides=[], state=[], name=""), False)({},
    ...     torch.ones(1))
    >>> y, module.training
    (tensor([1.]), True)
    """

    def __init__(self, fn: Moded, training: bool):
        self.fn, self.training = fn, training
        self.__wrapped__ = fn
        self.__qualname__ = type(fn).__qualname__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = {module: module.training for module in self.fn.module.modules()}
        self.fn.module.train(self.training)
        try:
            return self.fn(*args, **kwargs)
        finally:
            for module, training in before.items():
                module.training = training

    def in_mode(self, training: bool) -> InMode:
        """The function in a mode."""
        return self if training == self.training else InMode(self.fn, training)


class Pure:
    """Runs a clone with parameters and state passed in; the base of stage functions.

    Subclasses may define ``call``. Buffers that are not state are constants: they are moved to
    where the parameters are (once per device), and a forward that replaces one is refused.
    """

    def __init__(
        self,
        module: nn.Module,
        claim: Claim,
        *,
        sides: Sequence[str],
        state: Sequence[str],
        name: str,
    ):
        self.module, self.aliases, self.name = (
            module,
            claim.aliases,
            name,
        )  # and not the claim, which holds weights
        buffers = dict(module.named_buffers(remove_duplicate=False))
        self.initial_state = {name: buffers[name].detach().clone() for name in state} or None
        given = {
            *state,
            *claim.aliases,
        }  # a buffer without values is a parameter that the caller fills
        self.constants = {name: value for name, value in buffers.items() if name not in given}
        self._moved: dict[torch.device, dict[str, torch.Tensor]] = {}
        self.__qualname__ = name
        self.__signature__ = signature("params", *(["state"] if state else []), "x", sides=sides)

    def stage(self, claim: Claim, *, engine: Engine | None = None, aux_loss: bool = False) -> Stage:
        """This function as a Stage with the frozen and tied parameters of the claim."""
        return Stage(
            self,
            state=self.initial_state is not None,
            initial_state=self.initial_state,
            frozen=claim.frozen,
            ties=claim.ties,
            name=self.name,
            engine=engine,
            aux_loss=aux_loss,
            weights=_weights(claim),
        )

    def __call__(self, params: Mapping[str, torch.Tensor], *rest: Any, **side: Any) -> Any:
        state, x = rest if self.initial_state is not None else ({}, *rest)
        leaves = (
            leaf for leaf in (*params.values(), *tree.leaves(x)) if isinstance(leaf, torch.Tensor)
        )
        constants = self.constants_on(next((leaf.device for leaf in leaves), None))
        tensors = {name: params[key] for name, key in self.aliases.items()} | constants
        tensors |= {
            name: value.clone() for name, value in state.items()
        }  # norms update their statistics in place
        y = self.call(tensors, x, side)
        for name, value in constants.items():
            if tensors[name] is not value:
                raise StageError(
                    f"{self.name} replaces its buffer {name!r} in forward, so it is no constant; "
                    f"carry it as state: from_module(..., state=[{name!r}])"
                )
        return (y, {name: tensors[name] for name in state}) if self.initial_state is not None else y

    def call(self, tensors: dict[str, torch.Tensor], x: Any, side: Mapping[str, Any]) -> Any:
        """Run the module on x with these parameters and buffers."""
        return functional_call(self.module, tensors, (x,), dict(side), tie_weights=False)

    def in_mode(self, training: bool) -> InMode:
        """The same function with its module in training or in evaluation."""
        return InMode(self, training)

    def constants_on(self, device: torch.device | None) -> dict[str, torch.Tensor]:
        """The constant buffers on a device."""
        if device is None or all(value.device == device for value in self.constants.values()):
            return self.constants
        if device not in self._moved:
            with (
                _disable_current_modes()
            ):  # real copies, also if the first call is a trace with fake tensors
                self._moved[device] = {
                    name: value.to(device) for name, value in self.constants.items()
                }
        return self._moved[device]

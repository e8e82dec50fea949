"""A module without its weights, run with weights that are passed in: what every interop stage is made of.

``clone`` copies the tree of modules (not the tensors), ``claims`` says which stage owns which parameter under which
name, and ``Pure`` runs a clone as a pure function. This file knows modules, and nothing of how a model was cut.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import tree
from ..errors import StageError
from ..stage import Stage
from ._modes import without_modes

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


def clone(module: nn.Module, instead: Mapping[nn.Module, nn.Module] | None = None) -> nn.Module:
    """The same tree of modules with parameters that hold no data; ``instead`` puts stand-ins in the place of some.

    Buffers are shared, not copied; so is every other attribute.

    >>> clone(nn.Linear(2, 3)).weight.device
    device(type='meta')
    """
    return _clone(module, dict(instead or {}), {})


def _clone(module: nn.Module, done: dict[nn.Module, nn.Module], hollow: dict[int, nn.Parameter]) -> nn.Module:
    if module in done:
        return done[module]
    made = done[module] = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    for hooks in _HOOKS:
        if hooks in made.__dict__:
            made.__dict__[hooks] = type(made.__dict__[hooks])(made.__dict__[hooks])
    made.__dict__["_buffers"] = dict(module._buffers)
    made.__dict__["_parameters"] = {name: _hollow(p, hollow) for name, p in module._parameters.items()}
    made.__dict__["_modules"] = {
        name: None if child is None else _clone(child, done, hollow) for name, child in module._modules.items()
    }
    return made


def _hollow(parameter: nn.Parameter | None, hollow: dict[int, nn.Parameter]) -> nn.Parameter | None:
    if parameter is None:
        return None
    if id(parameter) not in hollow:
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        hollow[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    return hollow[id(parameter)]


def is_experts(module: nn.Module) -> bool:
    """Whether a module is the experts of a mixture, by what such classes are called.

    >>> is_experts(nn.Linear(2, 2))
    False
    """
    return type(module).__name__.lower().endswith("experts")


@dataclass(frozen=True)
class Claim:
    """What one stage owns: its parameters by name, other names for them, and what the Stage should carry."""

    params: dict[str, torch.Tensor]
    aliases: dict[str, str]  # every name that the stage's module uses -> the key in params
    frozen: tuple[str, ...]
    ties: tuple[tuple[str, str], ...]
    groups: tuple[str, ...]  # for each parameter, the first name that it has in the whole model


def claims(model: nn.Module, used: Sequence[Iterable[str]]) -> list[Claim]:
    """Parameters for each stage out of the names that it uses; the same parameter in two stages becomes a tie.

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> b.weight = a.weight
    >>> first, second = claims(nn.Sequential(a, b), [["0.weight", "0.bias"], ["1.weight", "1.bias"]])
    >>> first.ties, second.ties
    ((('0.weight', '0.weight'),), (('1.weight', '0.weight'),))
    """
    every = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, parameter in every.items():
        first.setdefault(id(parameter), name)
    group = {name: first[id(parameter)] for name, parameter in every.items()}
    wanted = [[name for name in names if name in every] for names in used]
    homes: dict[str, int] = {}
    for names in wanted:
        for shared in {group[name] for name in names}:
            homes[shared] = homes.get(shared, 0) + 1
    return [_claim(names, every, group, homes) for names in wanted]


def _claim(
    names: Sequence[str], every: Mapping[str, nn.Parameter], group: Mapping[str, str], homes: Mapping[str, int]
) -> Claim:
    leader: dict[str, str] = {}
    for name in names:
        leader.setdefault(group[name], name)
    own = list(leader.values())
    return Claim(
        params={name: every[name].detach() for name in own},
        aliases={name: leader[group[name]] for name in names},
        frozen=tuple(name for name in own if not every[name].requires_grad),
        ties=tuple((name, group[name]) for name in own if homes[group[name]] > 1),
        groups=tuple(leader),
    )


def running(module: nn.Module, patterns: Sequence[str] = ()) -> list[str]:
    """The buffers that a forward changes: the statistics of norms in training, and those that the patterns name.

    >>> running(nn.Sequential(nn.BatchNorm1d(2)))
    ['0.running_mean', '0.running_var', '0.num_batches_tracked']
    >>> running(nn.Sequential(nn.BatchNorm1d(2)).eval())
    []
    """
    moving = {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules(remove_duplicate=False)
        if child.training and getattr(child, "track_running_stats", False)
        for name, _ in child.named_buffers(recurse=False)
    }
    every = [name for name, _ in module.named_buffers(remove_duplicate=False)]
    return [name for name in every if name in moving or tree.matches(name, patterns)]


class Pure:
    """Runs a clone with parameters and state passed in; the base of stage functions.

    Subclasses say in ``call`` what a stage's arguments mean. Buffers that are not state are constants: they are moved
    to where the parameters live (once a device) and a forward that replaces one is refused.
    """

    def __init__(self, module: nn.Module, claim: Claim, *, sides: Sequence[str], state: Sequence[str], name: str):
        self.module, self.aliases, self.name = module, claim.aliases, name
        buffers = dict(module.named_buffers(remove_duplicate=False))
        self.initial_state = {name: buffers[name].detach().clone() for name in state} or None
        self.constants = {name: value for name, value in buffers.items() if name not in set(state)}
        self.moved: dict[torch.device, dict[str, torch.Tensor]] = {}
        self.__qualname__ = name
        self.__signature__ = _signature(bool(state), sides)

    def stage(self, claim: Claim, **keywords: Any) -> Stage:
        """This function as a Stage that carries what the module said about its parameters."""
        return Stage(
            self, state=self.initial_state is not None, initial_state=self.initial_state,
            frozen=claim.frozen, ties=claim.ties, name=self.name, **keywords,
        )  # fmt: skip

    def __call__(self, params: Mapping[str, torch.Tensor], *rest: Any, **side: Any) -> Any:
        state, x = rest if self.initial_state is not None else ({}, *rest)
        constants = self.constants_on(_device(params, x))
        given = {name: params[leaf] for name, leaf in self.aliases.items()} | constants
        given |= {name: value.clone() for name, value in state.items()}  # norms update their statistics in place
        y = self.call(given, x, side)
        for name, value in constants.items():
            if given[name] is not value:
                raise StageError(
                    f"{self.name} replaces its buffer {name!r} in forward, so it is no constant; "
                    f"carry it as state: from_module(..., state=[{name!r}])"
                )
        return (y, {name: given[name] for name in state}) if self.initial_state is not None else y

    def call(self, given: dict[str, torch.Tensor], x: Any, side: Mapping[str, Any]) -> Any:
        """Run the module on x with these parameters and buffers."""
        raise NotImplementedError

    def constants_on(self, device: torch.device | None) -> dict[str, torch.Tensor]:
        """The constant buffers on a device; copied there once, outside of any trace that may be going on."""
        if device is None or all(value.device == device for value in self.constants.values()):
            return self.constants
        if device not in self.moved:
            with without_modes():
                self.moved[device] = {name: value.to(device) for name, value in self.constants.items()}
        return self.moved[device]


def _device(params: Mapping[str, torch.Tensor], x: Any) -> torch.device | None:
    for leaf in (*params.values(), *tree.leaves(x)):
        if isinstance(leaf, torch.Tensor):
            return leaf.device
    return None


def _signature(state: bool, sides: Sequence[str]) -> inspect.Signature:
    plain, keyword = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.KEYWORD_ONLY
    names = ("params", "state", "x") if state else ("params", "x")
    parameters = [inspect.Parameter(name, plain) for name in names]
    return inspect.Signature([*parameters, *(inspect.Parameter(name, keyword, default=None) for name in sides)])

# SPDX-License-Identifier: Apache-2.0
"""A module as a pure function of its parameters and state: the base of every stage of a module.

``clone`` copies the tree of modules, not the tensors. ``claims`` says which stage has which
parameter under which name. ``ModuleFunction`` runs a module with tensors that are passed in. This
module must not know how a model was cut.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes

from .. import tree
from ..errors import StageError
from ..stage import Engine, Stage, Weight
from ..tree import Tree

#: The attributes in which a module holds its tensors and submodules.
REGISTERED = ("_parameters", "_buffers", "_modules")


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module, under all of their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def clone(module: nn.Module) -> nn.Module:
    """Return the same tree of modules, with parameters that hold no data.

    Buffers and all other attributes are shared, not copied.

    >>> clone(nn.Linear(2, 3)).weight.device
    device(type='meta')
    """
    clones = dict[nn.Module, nn.Module]()
    empty = dict[int, nn.Parameter]()

    def without_data(parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in empty:
            meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            empty[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
        return empty[id(parameter)]

    def copy(module: nn.Module) -> nn.Module:
        if module not in clones:
            clones[module] = new = object.__new__(type(module))
            hooks = {name: hooks.copy() for name, hooks in hooks_of(module).items()}
            vars(new).update(
                vars(module) | hooks,
                _buffers=dict(module._buffers),
                _parameters={
                    name: None if p is None else without_data(p)
                    for name, p in module._parameters.items()
                },
                _modules={
                    name: None if m is None else copy(m) for name, m in module._modules.items()
                },
            )
        return clones[module]

    return copy(module)


def hooks_of(module: nn.Module) -> dict[str, dict]:
    """Return the containers of a module's hooks, by the names of its attributes."""
    return {n: v for n, v in vars(module).items() if "hooks" in n and isinstance(v, dict)}


def without_buffers(module: nn.Module) -> None:
    """Remove the buffers and hooks of a clone that does not run.

    >>> without_buffers(module := clone(nn.BatchNorm1d(2)))
    >>> list(module.buffers())
    []
    """
    module._buffers.clear()
    for hooks in hooks_of(module).values():
        hooks.clear()


class Claim(NamedTuple):
    """The parameters of one stage."""

    params: dict[str, Tensor]
    aliases: dict[str, str]  #: every name that the stage's module uses -> the key in params
    frozen: tuple[str, ...]
    ties: tuple[tuple[str, str], ...]
    weights: dict[str, Weight]  #: by key, the first name in the whole model


def claims(model: nn.Module, used: Sequence[Sequence[str]]) -> list[Claim]:
    """Return parameters for each stage from the names that it uses.

    The same parameter in two stages becomes a tie. Buffers on "meta" have no values and cannot be
    constants: they are parameters without gradients.

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> b.weight = a.weight
    >>> first, second = claims(nn.Sequential(a, b),
    ...     [["0.weight", "0.bias"], ["1.weight", "1.bias"]])
    >>> first.ties, second.ties
    ((('0.weight', '0.weight'),), (('1.weight', '0.weight'),))
    """
    named = {
        name: tensor
        for name, tensor in tensors_of(model).items()
        if isinstance(tensor, nn.Parameter) or tensor.is_meta
    }
    by_identity = dict[int, str]()
    first = {name: by_identity.setdefault(id(tensor), name) for name, tensor in named.items()}
    rows = [[name for name in names if name in named] for names in used]
    stages = Counter(shared for row in rows for shared in {first[name] for name in row})
    result = []
    for row in rows:
        key_of = dict[str, str]()
        aliases = {name: key_of.setdefault(first[name], name) for name in row}
        params = {key: named[key].detach() for key in key_of.values()}
        frozen = tuple(key for key in params if not named[key].requires_grad)
        ties = tuple(
            (key, shared)
            for shared, key in key_of.items()
            if stages[shared] > 1 and isinstance(named[key], nn.Parameter)
        )
        weights = {
            key: Weight(
                shared, torch.empty(named[key].shape, dtype=named[key].dtype, device="meta")
            )
            for shared, key in key_of.items()
        }
        result.append(Claim(params, aliases, frozen, ties, weights))
    return result


def changing_buffers(
    module: nn.Module, patterns: Sequence[str] = (), always: bool = False
) -> list[str]:
    """Return the buffers that a forward changes: statistics of norms in training, and those named.

    Args:
        module: the module.
        patterns: of names of further buffers.
        always: whether the statistics of norms in evaluation count too.

    >>> changing_buffers(nn.Sequential(nn.BatchNorm1d(2)))
    ['0.running_mean', '0.running_var', '0.num_batches_tracked']
    >>> changing_buffers(nn.Sequential(nn.BatchNorm1d(2)).eval())
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


class ModuleFunction:
    """Runs a module with parameters and state that are passed in; the base of stage functions.

    Buffers that are neither are constants. They are moved to where the parameters are, once per
    device, and a forward that replaces one is refused.

    Args:
        module: the module; its own tensors are not used, but for constants.
        aliases: names in the module -> the keys of the parameters that are passed.
        sides: names of side inputs.
        state: names of the buffers that are state.
        name: of the stage.
    """

    def __init__(
        self,
        module: nn.Module,
        aliases: Mapping[str, str],
        *,
        sides: Sequence[str] = (),
        state: Sequence[str] = (),
        name: str = "",
    ):
        self.module, self.aliases, self.name = module, dict(aliases), name
        buffers = dict(module.named_buffers(remove_duplicate=False))
        self.initial_state = {name: buffers[name].detach().clone() for name in state} or None
        self.constants = {
            name: value
            for name, value in buffers.items()
            if name not in state and name not in aliases
        }
        self._moved: dict[torch.device, dict[str, Tensor]] = {}
        self.__qualname__ = name
        positional = ["params", *(["state"] if state else []), "x"]
        self.__signature__ = inspect.Signature(
            [
                *(inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in positional),
                *(
                    inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None)
                    for n in sides
                ),
            ]
        )

    def stage(
        self,
        frozen: Sequence[str],
        ties: Sequence[tuple[str, str]] = (),
        weights: Mapping[str, Weight] | None = None,
        *,
        engine: Engine | None = None,
        aux_loss: bool = False,
    ) -> Stage:
        """Return this function as a Stage."""
        return Stage(
            self,
            state=self.initial_state is not None,
            initial_state=self.initial_state,
            frozen=tuple(frozen),
            ties=tuple(ties),
            name=self.name,
            engine=engine,
            aux_loss=aux_loss,
            weights=weights,
        )

    def __call__(self, params: Mapping[str, Tensor], *rest: Tree, **side: Tree) -> Tree:
        state, x = rest if self.initial_state is not None else ({}, *rest)
        leaves = (leaf for leaf in tree.leaves((params, x)) if isinstance(leaf, Tensor))
        constants = self.constants_on(next((leaf.device for leaf in leaves), None))
        tensors = {name: params[key] for name, key in self.aliases.items()} | constants
        # norms update their statistics in place
        tensors |= {name: value.clone() for name, value in state.items()}
        y = self.call(tensors, x, {name: v for name, v in side.items() if v is not None})
        for name, value in constants.items():
            if tensors[name] is not value:
                raise StageError(
                    f"{self.name} replaces its buffer {name!r} in forward, so it is no constant; "
                    f"carry it as state: from_module(..., state=[{name!r}])"
                )
        return y if self.initial_state is None else (y, {name: tensors[name] for name in state})

    def call(self, tensors: dict[str, Tensor], x: Tree, side: dict[str, Tree]) -> Tree:
        """Run the module on x with these parameters and buffers."""
        return functional_call(self.module, tensors, (x,), side, tie_weights=False)

    def in_mode(self, training: bool) -> InMode:
        """Return the same function with its module in training or in evaluation."""
        return InMode(self, training)

    def constants_on(self, device: torch.device | None) -> dict[str, Tensor]:
        """Return the constant buffers on a device."""
        if device is None or all(value.device == device for value in self.constants.values()):
            return self.constants
        if device not in self._moved:
            # real copies, also if the first call is a trace with fake tensors
            with _disable_current_modes():
                self._moved[device] = {n: value.to(device) for n, value in self.constants.items()}
        return self._moved[device]


class InMode:
    """Runs a function of a module in one of its two modes, and leaves the module as it was.

    >>> module = nn.Dropout(1.0)
    >>> y = InMode(ModuleFunction(module, {}), False)({}, torch.ones(1))
    >>> y, module.training
    (tensor([1.]), True)
    """

    def __init__(self, fn: ModuleFunction, training: bool):
        self.fn, self.training = fn, training
        self.__wrapped__ = fn
        self.__qualname__ = type(fn).__qualname__

    def __call__(self, *args: Tree, **side: Tree) -> Tree:
        before = {module: module.training for module in self.fn.module.modules()}
        self.fn.module.train(self.training)
        try:
            return self.fn(*args, **side)
        finally:
            for module, training in before.items():
                module.training = training

    def in_mode(self, training: bool) -> InMode:
        """Return the function in a mode."""
        return InMode(self.fn, training)


def as_node(cls: type[dict]) -> None:
    """Make a subclass of dict a node of trees, with its values as children, if it is none.

    >>> class Output(dict): ...
    >>> as_node(Output), tree.leaves(Output(y=2))
    (None, [2])
    """

    def parts(node: Tree) -> Tree:
        return tuple(node.values()), tuple(node), tuple(node)

    def rebuild(keys: Tree, children: Tree) -> Tree:
        node = cls.__new__(cls)  # and not __init__, which may look at the values
        for key, child in zip(keys, children, strict=True):
            node[key] = child
        return node

    if not optree.register_pytree_node.get(cls, namespace=tree.NAMESPACE):
        optree.register_pytree_node(cls, parts, rebuild, namespace=tree.NAMESPACE)

# SPDX-License-Identifier: Apache-2.0
"""A module as a pure function of its parameters and state: the base of every stage of a module.

``clone`` copies the tree of modules, not the tensors. ``claims`` says which stage has which
parameter under which name. ``ModuleFunction`` runs a module with tensors that are passed in. This
module must not know how a model was cut.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from inspect import Parameter, Signature
from typing import NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes

from .. import tree
from ..errors import StageError
from ..stage import Stage, Weight
from ..tree import Tree

#: The attributes in which a module holds its tensors and submodules.
REGISTERED = ("_parameters", "_buffers", "_modules")


#: Parameters or buffers by name.
ByName: TypeAlias = dict[str, Tensor]


def tensors_of(module: nn.Module) -> ByName:
    """Return the parameters and buffers of a module, under all of their names."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return parameters | dict(module.named_buffers(remove_duplicate=False))


def clone(module: nn.Module) -> nn.Module:
    """Return the same tree of modules, with parameters that hold no data.

    Buffers and all other attributes are shared, not copied.

    >>> clone(nn.Linear(2, 3)).weight.device
    device(type='meta')
    """
    empty: dict[nn.Parameter | None, nn.Parameter] = {
        p: nn.Parameter(_without_data(p), p.requires_grad) for p in module.parameters()
    }
    clones: dict[nn.Module | None, nn.Module] = {
        child: object.__new__(type(child)) for child in module.modules()
    }
    for child in module.modules():
        hooks = {name: hooks.copy() for name, hooks in hooks_of(child).items()}
        vars(clones[child]).update(
            vars(child) | hooks,
            _buffers=dict(child._buffers),
            _parameters={name: empty.get(p) for name, p in child._parameters.items()},
            _modules={name: clones.get(m) for name, m in child._modules.items()},
        )
    return clones[module]


def hooks_of(module: nn.Module) -> dict[str, dict]:
    """Return the containers of a module's hooks, by the names of its attributes."""
    return {n: v for n, v in vars(module).items() if "hooks" in n and isinstance(v, dict)}


def refuse_hooks(name: str, hooks: Mapping[str, object]) -> None:
    """Raise StageError where a model or a parameter has hooks that would not run."""
    for kind, found in hooks.items():
        if found and "state_dict" not in kind:
            raise StageError(
                f"{name} has {kind.strip('_').replace('_', ' ')}, which do not run in a pipeline: "
                "those of submodules do. Remove them, and change outputs, or the gradients after "
                "add_grads, yourself"
            )


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

    params: ByName
    aliases: dict[str, str]  #: every name that the stage's module uses -> the key in params
    frozen: tuple[str, ...]
    ties: tuple[tuple[str, str], ...]
    weights: dict[str, Weight] | None  #: by key, the first name in the whole model


def claims(rows: Sequence[Mapping[str, Tensor]], whole: ByName) -> list[Claim]:
    """Return what each stage has of the tensors of its module.

    The same parameter in two stages becomes a tie. Buffers are parameters without gradients.

    Args:
        rows: tensors by name, for each stage.
        whole: all of them by their names in the whole model.
    """
    first_name = {tensor: name for name, tensor in reversed(whole.items())}
    stages = Counter(tensor for row in rows for tensor in set(row.values()))
    result = []
    for row in rows:
        key_of = dict[Tensor, str]()
        aliases = {name: key_of.setdefault(tensor, name) for name, tensor in row.items()}
        held = key_of.items()
        claim = Claim(
            {key: tensor.detach() for tensor, key in held},
            aliases,
            frozen=tuple(key for tensor, key in held if not tensor.requires_grad),
            ties=tuple(
                (key, first_name[tensor])
                for tensor, key in held
                if stages[tensor] > 1 and isinstance(tensor, nn.Parameter)
            ),
            weights={key: Weight(first_name[t], _without_data(t)) for t, key in held},
        )
        result.append(claim)
    return result


def claims_of_parts(model: nn.Module, used: Sequence[Sequence[str]]) -> list[Claim]:
    """Return the parameters of each stage from the names in the model that it uses.

    Buffers are constants, but for those on "meta", which have no values.

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> b.weight = a.weight
    >>> first, second = claims_of_parts(nn.Sequential(a, b),
    ...     [["0.weight", "0.bias"], ["1.weight", "1.bias"]])
    >>> first.ties, second.ties
    ((('0.weight', '0.weight'),), (('1.weight', '0.weight'),))
    """
    tensors = tensors_of(model)
    named = {n: t for n, t in tensors.items() if isinstance(t, nn.Parameter) or t.is_meta}
    rows = [{name: named[name] for name in names if name in named} for names in used]
    return claims(rows, named)


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


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
    norms = [
        child
        for child in module.modules()
        if getattr(child, "track_running_stats", False) and (child.training or always)
    ]
    statistics = {buffer for norm in norms for buffer in norm.buffers(recurse=False)}
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return [n for n, value in buffers.items() if value in statistics or tree.matches(n, patterns)]


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
        self.module = module
        self.aliases = dict(aliases)
        self.name = name
        buffers = dict(module.named_buffers(remove_duplicate=False))
        self.initial_state = {name: buffers[name].detach().clone() for name in state} or None
        self.constants = {
            name: value
            for name, value in buffers.items()
            if name not in state and name not in aliases
        }
        self.training: bool | None = None
        #: The constant buffers on a device, which are copied there once.
        self.constants_on = cache(partial(_moved, self.constants))
        self.__qualname__ = name
        positional = ["params", "x"]
        if state:
            positional.insert(1, "state")
        parameters = [Parameter(name, Parameter.POSITIONAL_ONLY) for name in positional]
        parameters += [Parameter(side, Parameter.KEYWORD_ONLY, default=None) for side in sides]
        self.__signature__ = Signature(parameters)

    def stage(self, claim: Claim, **options: str | None) -> Stage:
        """Return this function as a Stage with what it has of a model."""
        stage = Stage(
            self,
            state=self.initial_state is not None,
            initial_state=self.initial_state,
            frozen=claim.frozen,
            ties=claim.ties,
            name=self.name,
            weights=claim.weights,
        )
        return replace(stage, **options)

    def __call__(self, params: Mapping[str, Tensor], /, *rest: Tree, **side: Tree) -> Tree:
        state, x = rest if self.initial_state is not None else ({}, *rest)
        leaves = tree.leaves((params, x))
        devices = (leaf.device for leaf in leaves if isinstance(leaf, Tensor))
        constants = self.constants_on(next(devices, None))
        tensors = {name: params[key] for name, key in self.aliases.items()} | constants
        # norms update their statistics in place
        tensors |= {name: value.clone() for name, value in state.items()}
        given = {name: value for name, value in side.items() if value is not None}
        with _in_mode(self.module, self.training):
            y = self.call(tensors, x, given)
        for name, value in constants.items():
            if tensors[name] is not value:
                raise StageError(
                    f"{self.name} replaces its buffer {name!r} in forward, so it is no constant; "
                    f"carry it as state: from_module(..., state=[{name!r}])"
                )
        if self.initial_state is None:
            return y
        return (y, {name: tensors[name] for name in state})

    def call(self, tensors: ByName, x: Tree, side: dict[str, Tree]) -> Tree:
        """Run the module on x with these parameters and buffers."""
        return functional_call(self.module, tensors, (x,), side, tie_weights=False)

    def in_mode(self, training: bool) -> ModuleFunction:
        """Return the same function with its module in training or in evaluation."""
        function = copy.copy(self)
        function.training = training
        return function


def _moved(buffers: ByName, device: torch.device | None) -> ByName:
    """Return buffers on a device; None: where they are.

    They are real ones, also if the first call is a trace with fake tensors.
    """
    if device is None or all(value.device == device for value in buffers.values()):
        return buffers
    with _disable_current_modes():
        return {name: value.to(device) for name, value in buffers.items()}


@contextmanager
def _in_mode(module: nn.Module, training: bool | None) -> Iterator[None]:
    """Return a context in which a module trains or not; its modes are as before afterwards.

    >>> module = nn.Dropout(1.0)
    >>> with _in_mode(module, False):
    ...     module(torch.ones(1))
    tensor([1.])
    >>> module.training
    True
    """
    before = [(child, child.training) for child in module.modules()]
    if training is not None:
        module.train(training)
    try:
        yield
    finally:
        for child, mode in before:
            child.training = mode


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

# SPDX-License-Identifier: Apache-2.0
"""A part of a model of the transformers package as a stage function.

Between its layers each family has code of its own (scales, position embeddings, masks, soft caps).
A stage therefore runs the model's forward, in which the units of other stages return the values
that the stage received, or blanks of their shape where no unit of this stage or a later one depends
on them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ... import tree
from ...errors import StageError
from ...stage import remat
from ...tree import Tree
from ..layer_blocks import make_block
from ..module_function import Claim, ModuleFunction, clone, tensors_of, without_buffers
from .crossing import Flow, Part
from .recording import INPUT, Value, called, dicts_in, restored
from .router import Router, Totals
from .units import Units, outside


class Split(NamedTuple):
    """What the stages of a model have in common."""

    flow: Flow
    inputs: tuple[str, ...]  #: names of the arguments that the first stage gets
    sides: tuple[str, ...]  #: names of side inputs
    always: tuple[str, ...]  #: those that every call has
    keywords: Mapping[str, Tree]  #: further arguments
    router: Router | None
    collector: str  #: the module that collects the routers' logits


def result_of(out: Tree) -> Tensor:
    """Return the tensor that the last stage returns: logits, or the last hidden state."""
    named = (getattr(out, name, None) for name in ("logits", "last_hidden_state"))
    for leaf in (*named, *tree.leaves(out)):
        if isinstance(leaf, Tensor):
            return leaf
    raise StageError(f"its forward returns {type(out).__name__}, which holds no logits")


def is_rotary(module: nn.Module) -> bool:
    """Return whether a module computes rotary embeddings, by the name of its class.

    >>> is_rotary(nn.Linear(1, 1))
    False
    """
    return "rotary" in type(module).__name__.lower()


# ---- one call of a stage ----
class _DoneError(BaseException):
    """The calls of a stage have run: leaves the model's forward."""


class _Run:
    """One call of a stage: the values that it has, and the side inputs."""

    def __init__(self, part: ModelPart, values: dict[Value, Tensor], side: Mapping[str, Tree]):
        self.part, self.values, self.side = part, values, side
        self.numbers = count()
        self.router_logits = list[Tensor]()
        self.known = [*sorted(values), *part.split.always]

    def value(self, value: Value) -> Tensor:
        """Return a value that is known, or a blank: not a number, so that a use of it shows."""
        if value in self.values:
            return self.values[value]
        flow = self.part.split.flow
        sizes, dtype = flow.blank_sizes(value, self.known), flow.dtypes[value]
        assert sizes is not None, "values without known sizes cross the cut"
        shape = [
            size if isinstance(size, int) else self._source(size[0]).shape[size[1]]
            for size in sizes
        ]
        like = next(iter(self.values.values()))
        for other, tensor in self.values.items():
            if flow.dtypes.get(other) == dtype:
                dtype = tensor.dtype
                break
        filling = float("nan") if dtype.is_floating_point else 0
        return torch.full(shape, filling, dtype=dtype, device=like.device)

    def _source(self, source: Value | str) -> Tensor:
        return self.side[source] if isinstance(source, str) else self.values[source]


_RUN: ContextVar[_Run | None] = ContextVar("_RUN", default=None)


def _visit(name: str, forward: Callable[..., Tree], *args: Tree, **kwargs: Tree) -> Tree:
    """Run a call of a unit, or return the values that another stage sent in its place."""
    run = _RUN.get()
    if run is None:  # within another unit
        return forward(*args, **kwargs)
    number, stage = next(run.numbers), run.part
    visits, part = stage.split.flow.visits, stage.part
    if number >= len(visits) or visits[number].unit != name:
        raise StageError(
            f"{stage.name} runs {name!r} where the model did not when it was cut; which modules "
            "run must not depend on the inputs"
        )
    visit = visits[number]
    if not part.first <= number < part.stop:
        leaves = [run.value(leaf) if isinstance(leaf, Value) else leaf for leaf in visit.leaves]
        return restored(visit.structure, leaves, dicts_in(args, kwargs))
    token = _RUN.set(None)
    try:
        out, leaves, _ = called(forward, args, kwargs)
    finally:
        _RUN.reset(token)
    sent = set(visit.values).intersection(part.sends)
    if sent:
        run.values |= {v: leaf for v, leaf in zip(visit.leaves, leaves, strict=True) if v in sent}
    if number + 1 == part.stop < len(visits) and stage.split.router is None:
        raise _DoneError
    return out


def _rotary(forward: Callable[..., Tree], *args: Tree, **kwargs: Tree) -> Tree:
    """Rotary embeddings: those passed as a side input, if any."""
    run = _RUN.get()
    embeddings = None if run is None else run.side.get("position_embeddings")
    if embeddings is None:
        return forward(*args, **kwargs)
    kind = kwargs.get("layer_type", next((arg for arg in args if isinstance(arg, str)), None))
    return embeddings if kind is None else embeddings[kind]


def _with_router_logits(forward: Callable[..., Tree], *args: Tree, **kwargs: Tree) -> Tree:
    """Notes the logits of routers, whatever the model around asks for."""
    out, run = forward(*args, **kwargs | {"output_router_logits": True}), _RUN.get()
    if run is not None:
        run.router_logits[:] = out.router_logits or ()
    return out


# ---- the module of a stage ----
class _NoLayerDrop:
    """In place of a probability of 0 to drop a layer: no random number is smaller."""

    def __gt__(self, other: object) -> bool:
        return False


def with_configs(model: nn.Module, configs: Mapping[int, object]) -> nn.Module:
    """Clone a model with other configs in place of some, which are given by identity."""
    new = clone(model)
    for old_part, part in zip(list(model.modules()), list(new.modules()), strict=True):
        if getattr(old_part, "layerdrop", None) == 0:
            vars(part)["layerdrop"] = _NoLayerDrop()
        config = getattr(old_part, "config", None)
        if id(config) in configs:
            vars(part)["config"] = configs[id(config)]
    return new


def part_module(
    model: nn.Module, units: Units, split: Split, part: Part, configs: Mapping[int, object]
) -> tuple[nn.Module, list[str]]:
    """Clone the model such that its units know that they run in a stage.

    Returns:
        The clone, and the names of the parameters (and of the buffers without values) it uses.
    """
    new = with_configs(model, configs)
    mine = {visit.unit for visit in split.flow.visits[part.first : part.stop]}
    writing = {visit.unit for visit in split.flow.visits if visit.writes}
    for old_part, child in zip(list(model.modules()), list(new.modules()), strict=True):
        if getattr(child, "gradient_checkpointing", False):
            vars(child)["gradient_checkpointing"] = False
        unit = units.names.get(old_part)
        if unit is None:
            if is_rotary(child):
                _fill(child)
                child.forward = partial(_rotary, child.forward)
            continue
        if unit in mine and unit in units.layers:
            # the hooks with which a model collects routers' logits are not part of a block
            if split.router is None and unit not in writing:
                make_block(child)
            if old_part.training and _is_checkpointed(model, unit):
                child.forward = _checkpointed(child)
        child.forward = partial(_visit, unit, child.forward)
    run = {new.get_submodule(unit) for unit in mine}
    others = {new.get_submodule(unit) for unit in units.names.values()} - run
    needed = {child for _, child in outside(new, others)}
    for child in {child for unit in others for child in unit.modules()} - needed:
        without_buffers(child)
    tensors = tensors_of(new)
    read = {id(tensors[name]) for name in part.parameters}
    names = [
        f"{prefix}.{name}"
        for prefix, child in new.named_modules(remove_duplicate=False)
        if child in run
        for name in tensors_of(child)
    ]
    names += [name for name, tensor in tensors.items() if id(tensor) in read]
    for prefix, child in outside(new, others | run):
        names += [f"{prefix}{name}" for name, b in child.named_buffers(recurse=False) if b.is_meta]
    return new, list(dict.fromkeys(names))


def _fill(rotary: nn.Module) -> None:
    """Compute the buffers of a module for rotary embeddings on "meta", which no checkpoint has."""
    if any(buffer.is_meta for buffer in rotary.buffers()) and hasattr(rotary, "config"):
        with torch.device("cpu"):
            filled = dict(type(rotary)(config=rotary.config).named_buffers())
        for name, buffer in list(rotary.named_buffers(recurse=False)):
            if name in filled and filled[name].shape == buffer.shape:
                setattr(rotary, name, filled[name].to(buffer.dtype))


def _is_checkpointed(model: nn.Module, unit: str) -> bool:
    """Return whether a layer, or what contains it, checkpoints."""
    names = [unit.rsplit(".", up)[0] for up in range(unit.count(".") + 1)]
    modules = map(model.get_submodule, names)
    return any(getattr(module, "gradient_checkpointing", False) for module in modules)


def _checkpointed(layer: nn.Module) -> Callable[..., Tree]:
    """Return the forward of a layer that is computed again in the backward.

    It is computed with the parameters of this call, not with those that the module has then.
    """
    plain = copy.copy(layer)

    def forward(*args: Tree, **kwargs: Tree) -> Tree:
        tensors = tensors_of(layer)

        def run(*args, **kwargs):
            return functional_call(plain, tensors, args, kwargs, tie_weights=False)

        return remat(run)(*args, **kwargs)

    return forward


# ---- a stage ----
class ModelPart(ModuleFunction):
    """Some layers of a model as a stage function.

    The first stage also embeds, the last one also computes logits.
    """

    def __init__(self, module: nn.Module, claim: Claim, split: Split, part: Part, name: str):
        super().__init__(module, claim.aliases, sides=split.sides, name=name)
        self.split, self.part = split, part
        self.first, self.last = part.first == 0, part.stop == len(split.flow.visits)
        self.unused = {
            name: parameter
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if name in split.flow.parameters and name not in self.aliases
        }
        if split.router is not None:
            collector = module.get_submodule(split.collector)
            collector.forward = partial(_with_router_logits, collector.forward)

    def call(self, tensors: dict[str, Tensor], x: Tree, side: dict[str, Tree]) -> Tree:
        """Run the layers on token ids, or on the output of the stage before."""
        split, router = self.split, self.split.router
        values, totals = self._received(x)
        device = next(iter(values.values())).device
        # what code between units of other stages computes with these is not used
        for name, like in self.unused.items():
            blank = torch.full((), float("nan"), dtype=like.dtype, device=device)
            tensors[name] = blank.expand(like.shape)
        run = _Run(self, values, side)
        arguments: dict[str, Tree] = {
            name: run.value(Value(INPUT, leaf)) for leaf, name in enumerate(split.inputs)
        }
        arguments |= {n: value for n, value in side.items() if n != "position_embeddings"}
        arguments |= split.keywords
        if router is not None:
            arguments["output_router_logits"] = False  # no loss of a few layers alone
        y, token = None, _RUN.set(run)
        try:
            out = functional_call(self.module, tensors, (), arguments, tie_weights=False)
            y = result_of(out)
        except _DoneError:
            pass
        finally:
            _RUN.reset(token)
        if router is not None:
            mask = side.get("attention_mask")
            mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
            totals = router.add(totals or router.start(device), run.router_logits, mask)
            if self.last:
                return y, router.loss(totals)
        if self.last:
            return y
        sent = (*(values[value] for value in self.part.sends), *(totals or ()))
        return sent[0] if len(sent) == 1 else sent

    def _received(self, x: Tree) -> tuple[dict[Value, Tensor], Totals | None]:
        """Return the values that a stage gets, and the totals of its routers."""
        inputs = self.split.inputs
        if self.first:
            arguments = x if isinstance(x, Mapping) else {inputs[0]: x}
            if set(arguments) != set(inputs):
                raise StageError(
                    f"{self.name} takes {', '.join(inputs)}, and gets {', '.join(arguments)}"
                )
            return {Value(INPUT, leaf): arguments[name] for leaf, name in enumerate(inputs)}, None
        leaves: Sequence[Tensor] = x if isinstance(x, tuple) else (x,)
        number = len(self.part.receives)
        values = dict(zip(self.part.receives, leaves[:number], strict=True))
        return values, None if self.split.router is None else Totals(*leaves[number:])

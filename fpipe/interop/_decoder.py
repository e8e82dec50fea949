# SPDX-License-Identifier: Apache-2.0
"""A part of a model of the transformers package as a stage function, by what its families share: a
list of layers.

Between its layers each family has code of its own (scales, position embeddings, masks, soft caps).
A stage therefore runs the model's forward, in which the units of other stages return the values
that the stage received, or blanks of their shape where no unit of this stage or a later one depends
on them. This module must not know any family.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from .. import tree
from ..errors import StageError
from ..stage import remat
from ._flow import Flow, Part, blank_sizes
from ._recorder import Value, dicts_in, restored, returned, writes
from ._router import Router, Totals
from ._structure import Structure, is_rotary, outside
from .layer_blocks import make_block
from .module_function import Claim, ModuleFunction, clone, without_buffers

#: Arguments of forward that are side inputs of all stages.
SIDES = (
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "decoder_input_ids",
    "decoder_attention_mask",
)


def takes(model: nn.Module, name: str) -> bool:
    """Whether the model's forward takes an argument of that name."""
    arguments = inspect.signature(model.forward).parameters
    return name in arguments or any(p.kind is p.VAR_KEYWORD for p in arguments.values())


def sides_of(model: nn.Module) -> tuple[str, ...]:
    """The side inputs of a model's stages."""
    named = inspect.signature(model.forward).parameters
    common = [name for name in SIDES[:2] if takes(model, name)]
    return (*common, *(name for name in SIDES[2:] if name in named), "position_embeddings")


def keywords_of(model: nn.Module) -> dict[str, Any]:
    """Arguments that every call of the model gets."""
    return {
        name: value
        for name, value in {"use_cache": False, "return_dict": True}.items()
        if takes(model, name)
    }


def result_of(out: Any) -> torch.Tensor:
    """The tensor that the last stage returns: logits, or the last hidden state."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(found := getattr(out, name, None), torch.Tensor):
            return found
    found = next((leaf for leaf in tree.leaves(out) if isinstance(leaf, torch.Tensor)), None)
    if found is None:
        raise StageError(f"its forward returns {type(out).__name__}, which holds no logits")
    return found


# ---- one call of a stage ----
class _Done(BaseException):
    """The calls of a stage have run: leaves the model's forward."""


class _Run:
    """One call of a stage: the values that it has, and the side inputs."""

    def __init__(
        self, part: DecoderPart, values: dict[Value, torch.Tensor], side: Mapping[str, Any]
    ):
        self.part, self.values, self.side = part, values, side
        self.numbers = count()
        self.router_logits: list[torch.Tensor] = []
        self.blanks: dict[Any, torch.Tensor] = {}

    def value(self, value: Value) -> torch.Tensor:
        """A value that was received, or a blank: not a number, so that a use of it shows."""
        if value in self.values:
            return self.values[value]
        sizes, flow = self.part.blanks[value], self.part.flow
        like, dtype = next(iter(self.values.values())), flow.dtypes[value]
        for known, tensor in self.values.items():
            if flow.dtypes.get(known) == dtype:
                like, dtype = tensor, tensor.dtype
                break
        key, blanks = (*sizes, dtype), self.blanks  # the sizes themselves may be symbols
        if key not in blanks:
            shape = [size if isinstance(size, int) else self._size(*size) for size in sizes]
            filling = float("nan") if dtype.is_floating_point else 0
            blanks[key] = torch.full(shape, filling, dtype=dtype, device=like.device)
        return blanks[key]

    def _size(self, source: Value | str, axis: int) -> int:
        return (self.side[source] if isinstance(source, str) else self.values[source]).shape[axis]


_RUN: ContextVar[_Run | None] = ContextVar("_RUN", default=None)


def _visit(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of a unit: run by this stage, or in its place the values of another one."""
    run = _RUN.get()
    if run is None:
        return forward(*args, **kwargs)
    number, stage, dicts = next(run.numbers), run.part, dicts_in(args, kwargs)
    visits = stage.flow.visits
    if number >= len(visits) or visits[number].unit != name:
        raise StageError(
            f"{stage.name} runs {name!r} where the model did not when it was cut; which modules "
            "run must not depend on "
            "the inputs"
        )
    visit = visits[number]
    if not stage.part.first <= number < stage.part.stop:
        leaves = [run.value(leaf) if isinstance(leaf, Value) else leaf for leaf in visit.leaves]
        return restored(visit.structure, leaves, dicts)
    before = {key: dict(value) for key, value in dicts.items()}
    out = _alone(forward, args, kwargs)
    given = [index for index, leaf in enumerate(visit.leaves) if leaf in stage.gives]
    if given:
        leaves, _ = returned(out, dicts, before)
        for index in given:
            run.values.setdefault(visit.leaves[index], leaves[index])
    if number + 1 == stage.part.stop < len(visits) and stage.router is None:
        raise _Done
    return out


def _alone(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Units inside a unit run as they are."""
    token = _RUN.set(None)
    try:
        return forward(*args, **kwargs)
    finally:
        _RUN.reset(token)


def _rotary(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward of a module for rotary embeddings: returns those passed as a side input, if
    any.
    """
    run = _RUN.get()
    embeddings = None if run is None else run.side.get("position_embeddings")
    if embeddings is None:
        return forward(*args, **kwargs)
    kind = kwargs.get("layer_type", next((each for each in args if isinstance(each, str)), None))
    return embeddings if kind is None else embeddings[kind]


def _with_router_logits(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward of a decoder that keeps its routers' logits, whatever the model around it asks
    for.
    """
    out, run = forward(*args, **kwargs | {"output_router_logits": True}), _RUN.get()
    if run is not None:
        run.router_logits[:] = out.router_logits or ()
    return out


# ---- the module of a stage ----
class _Zero:
    """In place of a probability of 0 to drop a layer: the comparison of a random number with it is
    known.
    """

    def __gt__(self, other: object) -> bool:
        return False


def with_configs(model: nn.Module, copy: nn.Module, configs: Mapping[int, Any]) -> nn.Module:
    """A clone of a model with other configs in place of some, which are given by their identity."""
    for old, new in zip(model.modules(), copy.modules(), strict=True):
        if getattr(old, "layerdrop", None) == 0:
            new.__dict__["layerdrop"] = _Zero()
        if id(getattr(old, "config", None)) in configs:
            new.__dict__["config"] = configs[id(old.config)]
    return copy


def part_module(
    model: nn.Module,
    structure: Structure,
    flow: Flow,
    part: Part,
    configs: Mapping[int, Any],
    as_blocks: bool,
) -> nn.Module:
    """A clone of the model whose units know that they run in a stage.

    ``configs`` are those that replace others, by their identity; ``as_blocks``: equal layers are
    traced once.
    """
    copy = with_configs(model, clone(model), configs)
    mine = {flow.visits[number].unit for number in range(part.first, part.stop)}
    writing = {visit.unit for visit in flow.visits if writes(visit)}
    for old, new in zip(list(model.modules()), list(copy.modules()), strict=True):
        if getattr(old, "gradient_checkpointing", False):
            new.__dict__["gradient_checkpointing"] = False
        if old not in structure.units:
            if is_rotary(old):
                _fill(new)
                new.forward = partial(_rotary, new.forward)
            continue
        unit = structure.units[old]
        if unit in mine and unit in structure.layers:
            if as_blocks and unit not in writing:
                make_block(new)
            if old.training and _is_checkpointed(model, unit):
                new.forward = _checkpointed(new)
        new.forward = partial(_visit, unit, new.forward)
    _strip(copy, {copy.get_submodule(unit) for unit in set(structure.units.values()) - mine})
    return copy


def _fill(rotary: nn.Module) -> None:
    """Compute the buffers of a module for rotary embeddings on the device "meta", which no
    checkpoint holds.
    """
    if any(buffer.is_meta for buffer in rotary.buffers()) and hasattr(rotary, "config"):
        with torch.device("cpu"):
            filled = dict(type(rotary)(config=rotary.config).named_buffers())
        for name, buffer in list(rotary.named_buffers(recurse=False)):
            if name in filled and filled[name].shape == buffer.shape:
                setattr(rotary, name, filled[name].to(buffer.dtype))


def _strip(copy: nn.Module, unused: Collection[nn.Module]) -> None:
    """Remove the buffers and hooks of units that other stages run; their parameters have no
    data.
    """
    inside = {child for unit in unused for child in unit.modules()}
    for child in inside - {child for _, child in outside(copy, unused)}:
        without_buffers(child)


def _is_checkpointed(model: nn.Module, unit: str) -> bool:
    """Whether a layer, or what contains it, checkpoints."""
    names = [unit.rsplit(".", up)[0] for up in range(unit.count(".") + 1)]
    return any(
        getattr(model.get_submodule(name), "gradient_checkpointing", False) for name in names
    )


def _checkpointed(layer: nn.Module) -> Callable[..., Any]:
    """The forward of a layer that is computed again in the backward, then with the parameters of
    this call.
    """
    plain = object.__new__(type(layer))
    plain.__dict__.update(layer.__dict__)

    def forward(*args: Any, **kwargs: Any) -> Any:
        tensors = dict(layer.named_parameters(remove_duplicate=False))
        tensors |= dict(layer.named_buffers(remove_duplicate=False))

        def run(*args, **kwargs):
            return functional_call(plain, tensors, args, kwargs, tie_weights=False)

        return remat(run)(*args, **kwargs)

    return forward


def names_of(module: nn.Module, structure: Structure, flow: Flow, part: Part) -> list[str]:
    """The names of the parameters that a stage uses, in a clone for it, and of the buffers that
    have no values.
    """
    mine = {
        module.get_submodule(flow.visits[number].unit) for number in range(part.first, part.stop)
    }
    units = {module.get_submodule(name) for name in structure.units.values()}
    names: list[str] = []
    for prefix, child in module.named_modules(remove_duplicate=False):
        if child in mine:
            names += [
                f"{prefix}.{name}" for name, _ in child.named_parameters(remove_duplicate=False)
            ]
            names += [
                f"{prefix}.{name}" for name, buffer in child.named_buffers() if buffer.is_meta
            ]
    everything = dict(module.named_parameters(remove_duplicate=False))
    shared = {id(everything[name]) for name in part.parameters}
    names += [name for name, parameter in everything.items() if id(parameter) in shared]
    for prefix, child in outside(module, units):
        names += [
            f"{prefix}{name}"
            for name, buffer in child.named_buffers(recurse=False)
            if buffer.is_meta
        ]
    return list(dict.fromkeys(names))


# ---- a stage ----
class DecoderPart(ModuleFunction):
    """Some layers of a model as a stage function; the first also embeds, the last also computes
    logits.

    ``inputs`` are the names of the arguments of forward that the first stage gets; ``owner`` is the
    name of the module that collects the routers' logits.
    """

    def __init__(
        self,
        module: nn.Module,
        claim: Claim,
        *,
        structure: Structure,
        flow: Flow,
        part: Part,
        inputs: Sequence[str],
        sides: Sequence[str],
        always: Sequence[str],
        router: Router | None,
        owner: str,
        name: str,
    ):
        self.flow, self.part, self.inputs, self.router = flow, part, tuple(inputs), router
        self.first, self.last = part.first == 0, part.stop == len(flow.visits)
        self.gives = frozenset(part.gives)
        self.forwarded = [side for side in sides if side != "position_embeddings"]
        super().__init__(module, claim.aliases, sides=sides, name=name)
        self.keywords = keywords_of(module)
        self.blanks: dict[Value, Any] = {}
        if not self.first or router is not None:
            known = [*part.takes] or [Value(-1, leaf) for leaf in range(len(inputs))]
            leaves = [
                leaf for visit in flow.visits for leaf in visit.leaves if isinstance(leaf, Value)
            ]
            for value in [*(Value(-1, leaf) for leaf in range(len(inputs))), *leaves]:
                self.blanks[value] = blank_sizes(flow, value, known, always)
        read = flow.parameters - set(self.aliases)
        self.unused = {
            name: p for name, p in module.named_parameters(remove_duplicate=False) if name in read
        }
        if router is not None:
            inner = module.get_submodule(owner)
            inner.forward = partial(_with_router_logits, inner.forward)

    def call(self, tensors: dict[str, torch.Tensor], x: Any, side: Mapping[str, Any]) -> Any:
        """Run the layers on token ids, or on the output of the stage before."""
        values, totals = self._received(x)
        run = _Run(self, values, side)
        keywords = {name: side[name] for name in self.forwarded if side.get(name) is not None}
        keywords |= (
            {} if self.router is None else {"output_router_logits": False}
        )  # no loss of a few layers alone
        given = {name: run.value(Value(-1, leaf)) for leaf, name in enumerate(self.inputs)}
        device = next(iter(values.values())).device
        for (
            name,
            like,
        ) in (
            self.unused.items()
        ):  # what code between units of other stages computes with them is not used
            tensors[name] = torch.full((), float("nan"), dtype=like.dtype, device=device).expand(
                like.shape
            )
        token, y = _RUN.set(run), None
        try:
            y = result_of(
                functional_call(
                    self.module, tensors, (), given | keywords | self.keywords, tie_weights=False
                )
            )
        except _Done:
            pass
        finally:
            _RUN.reset(token)
        if self.router is not None:
            mask = side.get("attention_mask")
            mask = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
            totals = self.router.add(totals or self.router.start(device), run.router_logits, mask)
        if self.last:
            return y if self.router is None or totals is None else (y, self.router.loss(totals))
        out = (*(run.values[value] for value in self.part.gives), *(totals or ()))
        return out[0] if len(out) == 1 else out

    def _received(self, x: Any) -> tuple[dict[Value, torch.Tensor], Totals | None]:
        """The values that a stage gets, and the totals of its routers."""
        if self.first:
            given: Mapping[str, Any] = x if isinstance(x, Mapping) else {self.inputs[0]: x}
            if set(given) != set(self.inputs):
                raise StageError(
                    f"{self.name} takes {', '.join(self.inputs)}, and gets {', '.join(given)}"
                )
            return {Value(-1, leaf): given[name] for leaf, name in enumerate(self.inputs)}, None
        leaves = x if isinstance(x, tuple) else (x,)
        count = len(self.part.takes)
        values = dict(zip(self.part.takes, leaves[:count], strict=True))
        return values, None if self.router is None else Totals(*leaves[count:])

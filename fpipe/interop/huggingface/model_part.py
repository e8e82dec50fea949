# SPDX-License-Identifier: Apache-2.0
"""A part of a model of the transformers package as a stage function.

Between its layers each family has code of its own (scales, position embeddings, masks, soft caps).
A stage therefore runs the model's forward, in which the units of other stages return the values
that the stage received, or blanks of their shape where no unit of this stage or a later one depends
on them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ... import tree
from ...errors import StageError
from ...programs import remat, setting
from ...tree import Tree
from ..layer_blocks import make_block
from ..module_function import Claim, ModuleFunction, clone, tensors_of, without_buffers
from .crossing import Flow, Part, Sizes
from .recording import INPUT, OBSERVER, Call, Forward, Value, observe, result_of
from .units import Units


# ---- one call of a stage ----
class _DoneError(BaseException):
    """The calls of a stage have run: leaves the model's forward, with the values that it sends."""


def _received(
    flow: Flow, values: Mapping[Value, Tensor], side: Mapping[str, Tree]
) -> Callable[[Value], Tensor]:
    """Return a function of a value that returns it, if a stage received it in one call, or else a
    blank: not a number, so that a use of it shows.
    """
    device = next(iter(values.values())).device
    dtypes = {flow.dtypes[value]: tensor.dtype for value, tensor in values.items()}
    sizes = dict[Sizes, int]()
    for source, tensor in {**side, **values}.items():
        if isinstance(tensor, Tensor):
            sizes.update(zip(flow.sizes.get(source, ()), tensor.shape, strict=False))

    def value_or_blank(value: Value) -> Tensor:
        if value in values:
            return values[value]
        shape = [axis[0] if axis[0] == axis[1] else sizes[axis] for axis in flow.sizes[value]]
        dtype = flow.dtypes[value]
        filling = float("nan") if dtype.is_floating_point else 0
        return torch.full(shape, filling, dtype=dtypes.get(dtype, dtype), device=device)

    return value_or_blank


# ---- the module of a stage ----
def part_module(
    whole: nn.Module,
    units: Units,
    flow: Flow,
    part: Part,
) -> tuple[nn.Module, list[str]]:
    """Clone a model such that its units know that they run in a stage.

    Args:
        whole: the clone of the model that can be traced.
        units: those of the model.
        flow: the flow of its values.
        part: what the stage runs.

    Returns:
        The clone, and the names of the parameters (and of the buffers without values) it uses.
    """
    new = clone(whole)
    mine = {visit.unit for visit in flow.visits[part.first : part.stop]}
    checkpointing = [m for m in new.modules() if getattr(m, "gradient_checkpointing", False)]
    recomputed = {child for module in checkpointing for child in module.modules()}
    for module in checkpointing:
        vars(module)["gradient_checkpointing"] = False
    for module in new.modules():
        _fill_rotary(module)
    run = {child for unit in mine for child in new.get_submodule(unit).modules()}
    in_units = {child for unit in units.names for child in new.get_submodule(unit).modules()}
    for child in in_units - run:
        without_buffers(child)
    tensors = tensors_of(new)
    read = {tensors[name] for name in flow.parameters}
    names = list[str]()
    for prefix, child in new.named_modules(remove_duplicate=False):
        if child in run:
            parameters = child.named_parameters(recurse=False, remove_duplicate=False)
            names += [f"{prefix}.{name}" for name, _ in parameters]
    names += [name for name, tensor in tensors.items() if tensor in read]
    names += [name for name, b in new.named_buffers(remove_duplicate=False) if b.is_meta]
    for unit in units.names:
        child = new.get_submodule(unit)
        if unit in mine and unit in units.layers:
            make_block(child)
            if child.training and child in recomputed:
                child.forward = _checkpointed(child)
        observe(child, unit)
    return new, list(dict.fromkeys(names))


def _fill_rotary(module: nn.Module) -> None:
    """Compute the buffers of rotary embeddings on "meta", which no checkpoint has."""
    if "rotary" not in type(module).__name__.lower() or not hasattr(module, "config"):
        return
    if empty := {n: b for n, b in module.named_buffers(recurse=False) if b.is_meta}:
        with torch.device("cpu"):
            filled = dict(type(module)(config=module.config).named_buffers())
        for name, buffer in empty.items():
            if name in filled and filled[name].shape == buffer.shape:
                setattr(module, name, filled[name].to(buffer.dtype))


def _checkpointed(layer: nn.Module) -> Forward:
    """Return the forward of a layer that is computed again in the backward.

    It is computed with the parameters of this call, not with those that the module has then.
    """
    plain = copy.copy(layer)

    def forward(*args: Tree, **kwargs: Tree) -> Tree:
        run = partial(functional_call, plain, tensors_of(layer), tie_weights=False)
        return remat(run)(args, kwargs)

    return forward


# ---- a stage ----
class ModelPart(ModuleFunction):
    """Some layers of a model as a stage function.

    The first stage also embeds, the last one also computes logits.
    """

    def __init__(self, module: nn.Module, claim: Claim, flow: Flow, part: Part, name: str):
        super().__init__(module, claim.aliases, sides=flow.sides, name=name)
        self.flow = flow
        self.part = part

    def call(self, tensors: dict[str, Tensor], x: Tree, side: dict[str, Tree]) -> Tree:
        """Run the layers on token ids, or on the output of the stage before."""
        if "decoder_input_ids" in self.flow.sizes and "decoder_input_ids" not in side:
            raise StageError(
                f"{self.name} decodes behind an encoder, and later stages do not have the token "
                "ids of the first; give decoder_input_ids="
            )
        values = self._values(x)
        received = _received(self.flow, values, side)
        inputs = {name: received(Value(INPUT, i)) for i, name in enumerate(self.flow.inputs)}
        arguments = {**inputs, **side, **self.flow.keywords}
        visits = self._visits(dict(values), received)
        next(visits)
        try:
            with setting(OBSERVER, visits.send):
                out = functional_call(self.module, tensors, (), arguments, tie_weights=False)
        except _DoneError as done:
            if len(done.args) == 1:
                return done.args[0]
            return done.args
        return result_of(out)

    def _visits(
        self, values: dict[Value, Tensor], received: Callable[[Value], Tensor]
    ) -> Generator[Tree, Call]:
        """Take the calls of units, in their order, and yield what each returns: run those of this
        stage, and look up the values of those before.
        """
        part = self.part
        visits = self.flow.visits
        call = yield None
        for number, visit in enumerate(visits):
            if visit.unit != call.unit:
                break
            if number < part.first:
                out = tree.unflatten(visit.structure, list(map(received, visit.values)))
            else:
                out = call.forward(*call.args, **call.kwargs)
                results = zip(visit.values, tree.leaves(out), strict=True)
                values.update((value, leaf) for value, leaf in results if value in part.sends)
                if number + 1 == part.stop < len(visits):
                    raise _DoneError(*(values[value] for value in part.sends))
            call = yield out
        raise StageError(
            f"{self.name} runs {call.unit!r} where the model did not when it was cut; which "
            "modules run must not depend on the inputs"
        )

    def _values(self, x: Tree) -> dict[Value, Tensor]:
        """Return the values that a stage gets."""
        if self.part.first:
            if not isinstance(x, tuple):
                x = (x,)
            return dict(zip(self.part.receives, x, strict=True))
        inputs = self.flow.inputs
        if not isinstance(x, Mapping):
            x = {inputs[0]: x}
        if set(x) != set(inputs):
            raise StageError(f"{self.name} takes {', '.join(inputs)}, and gets {', '.join(x)}")
        return {Value(INPUT, leaf): x[name] for leaf, name in enumerate(inputs)}

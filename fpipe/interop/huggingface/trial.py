# SPDX-License-Identifier: Apache-2.0
"""Runs a model on a few tokens when it is cut, and compares its stages with it.

The model runs twice, with other sizes and once with a mask; and once without values, in its modes.
Families differ in what they do between layers, and a cut that misses it would give wrong numbers
without an error.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from ... import tree
from ...errors import StageError
from ...programs import fake_tensors
from ...tree import Tree
from ..module_function import tensors_of
from .crossing import Flow, flow_of
from .model_part import ModelPart, Split, result_of, with_configs
from .recording import Recording, record
from .router import Router
from .units import Units

#: Arguments of forward that are side inputs of all stages.
_SIDES = (
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "decoder_input_ids",
    "decoder_attention_mask",
)
#: Rows and tokens of the larger forward, and tokens for a decoder behind an encoder. The smaller
#: one has one row, and two tokens less.
_ROWS, _TOKENS, _DECODED, _PADDED = 2, 6, 5, 2
#: The largest relative difference by dtype. Stages run the operations of the model, so they differ
#: in rounding at most.
_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-3}


def try_forward(
    model: nn.Module,
    units: Units,
    configs: Mapping[int, object],
    example: Mapping[str, Tensor] | None,
    router: Router | None,
) -> tuple[Split, tuple[Recording, Recording], bool]:
    """Run a model a few times.

    Returns:
        What its stages have in common, the recordings of two forwards, and whether it runs without
        values.

    Raises:
        StageError: if the model fails, or runs other modules the second time.
    """
    parameters = inspect.signature(model.forward).parameters
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    sides = [name for name in _SIDES[:2] if any_name or name in parameters]
    sides += [name for name in _SIDES[2:] if name in parameters]
    keywords = {"use_cache": False, "return_dict": True}
    keywords = {n: value for n, value in keywords.items() if any_name or n in parameters}

    def run(arguments: Mapping[str, Tensor], real: bool = True) -> Recording:
        return _recorded(model, units, configs, router, arguments, keywords, real)

    large = _example(model, "decoder_input_ids" in sides) if example is None else example
    large = {name: value.to(_device(model)) for name, value in large.items()}
    if any(len(value) < 2 for value in large.values()):
        raise StageError("example= needs two rows of each argument")
    small = {
        name: value[:1, :-2] if value.dim() == 2 and not value.is_floating_point() else value[:1]
        for name, value in large.items()
    }
    first = run(small)
    try:
        without_values = run(small, real=False)
    except StageError:
        without_values = None
    training = [without_values] if model.training and without_values is not None else []
    large = {name: value[:_ROWS] for name, value in large.items()}

    def compared(arguments: dict[str, Tensor]) -> tuple[Recording, Flow]:
        second = run(arguments)
        return second, flow_of(model, [first, second, *training])

    outcome = None
    ids = next(value for name, value in large.items() if name not in _SIDES)
    maskable = ids.dim() == 2 and not ids.is_floating_point()
    if maskable and "attention_mask" in sides and "attention_mask" not in large:
        mask = torch.ones_like(ids)
        mask[1, :_PADDED] = 0
        try:
            outcome = compared({**large, "attention_mask": mask})
        except StageError:
            sides.remove("attention_mask")
    second, flow = outcome or compared(large)
    always = tuple(name for name in first.side if name in second.side)
    names = (*sides, "position_embeddings")
    collector = next(visit.unit for visit in flow.visits if visit.unit in units.layers)
    collector = ".".join(collector.split(".")[:-2])
    split = Split(flow, tuple(first.inputs), names, always, keywords, router, collector)
    return split, (first, second), without_values is not None


def _recorded(
    model: nn.Module,
    units: Units,
    configs: Mapping[int, object],
    router: Router | None,
    arguments: Mapping[str, Tensor],
    keywords: Mapping[str, object],
    real: bool,
) -> Recording:
    """Record a forward in eval mode; or, if not ``real``, in the model's modes without values."""
    whole = with_configs(model, configs)
    pairs = zip(list(model.modules()), list(whole.modules()), strict=True)
    named = {new: units.names[old] for old, new in pairs if old in units.names}
    for child in whole.modules():
        child.training = child.training and not real
    without = not real or any(p.is_meta for p in model.parameters())
    routed = router if not without else None
    if router is not None:
        keywords = {**keywords, "output_router_logits": routed is not None}

    def finish(out: Tree) -> tuple[Tensor, ...]:
        loss = () if routed is None else (out.aux_loss * routed.coefficient,)
        return result_of(out), *loss

    tensors = tensors_of(model)
    try:
        with fake_tensors() if without else _same_draws_afterwards(model):
            if without:
                tensors, arguments = _empty(tensors), _empty(arguments)
            inputs = {name: value for name, value in arguments.items() if name not in _SIDES}
            side = {name: value for name, value in arguments.items() if name in _SIDES}
            return record(whole, tensors, named, inputs, side, keywords, finish)
    except Exception as error:
        what = "without values it does not run" if without else "its own forward fails"
        raise StageError(
            f"fpipe cannot split {type(model).__name__}: {what} on {_brief_inputs(arguments)} "
            f"({_brief(error)}), so the stages cannot be compared with it; write its stages as "
            "functions"
        ) from error


def _empty(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of the same shapes on the host, one for all names of a tensor."""
    empty = {id(t): torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in tensors.values()}
    return {name: empty[id(t)] for name, t in tensors.items()}


def _example(model: nn.Module, has_decoder: bool) -> dict[str, Tensor]:
    """Return token ids for a model."""
    name = getattr(model, "main_input_name", "input_ids")
    if name != "input_ids":
        raise StageError(
            f"{type(model).__name__} takes {name!r} in place of token ids; give an example of it"
        )
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    vocabulary = getattr(embedding, "num_embeddings", None)
    vocabulary = vocabulary or getattr(model.config, "vocab_size", None) or _TOKENS
    lengths = {"input_ids": _TOKENS}
    if has_decoder and getattr(model.config, "is_encoder_decoder", False):
        lengths["decoder_input_ids"] = _DECODED
    return {
        name: (torch.arange(1, _ROWS * length + 1) % vocabulary).view(_ROWS, length)
        for name, length in lengths.items()
    }


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


# ---- the comparison ----
def compare(
    model: nn.Module,
    parts: Sequence[ModelPart],
    params: Sequence[Mapping[str, Tensor]],
    recordings: Sequence[Recording],
) -> None:
    """Raise StageError unless the stages give what the model gave; warn if there are no values."""
    name = type(model).__name__
    if any(p.is_meta for p in model.parameters()):
        warnings.warn(
            f"the stages of {name} were not compared with the model, because its parameters are on "
            "the device 'meta'; cut a small model of the same configuration with values to check "
            "the family",
            stacklevel=3,
        )
        return
    for want in recordings:
        x = want.inputs if len(want.inputs) > 1 else next(iter(want.inputs.values()))
        for index, (part, own) in enumerate(zip(parts, params, strict=True)):
            label = f"stage {index} ({part.name})"
            here = next((p.device for p in own.values()), _device(model))
            x = tree.tree_map(lambda t, here=here: t.to(here) if isinstance(t, Tensor) else t, x)
            try:
                with torch.no_grad(), _same_draws_afterwards(model), _in_eval(part.module):
                    x = part(own, x, **want.side)
            except Exception as error:
                raise StageError(
                    f"fpipe cannot split {name}: {label} fails on {_brief_inputs(want.inputs)}, "
                    f"and the whole model does not ({_brief(error)}); write its stages as functions"
                ) from error
            sent = [want.tensors[value] for value in part.part.sends]
            expected = want.result if part.last else sent
            for one, other in zip(x if isinstance(x, tuple) else (x,), expected, strict=False):
                fault = _difference(one, other)
                if fault:
                    raise StageError(
                        f"fpipe cannot split {name}: {label} does not return what the model "
                        f"computes there ({fault}): the model does more between its layers than "
                        "stages repeat; write its stages as functions"
                    )


def _difference(one: Tree, want: Tensor) -> str:
    """Return how two tensors differ, for a message; "" if they agree."""
    if not isinstance(one, Tensor) or one.shape != want.shape:
        shape = list(one.shape) if isinstance(one, Tensor) else type(one).__name__
        return f"{shape} in place of shape {list(want.shape)}"
    one = one.to(want.device)
    if not want.is_floating_point():
        return "" if torch.equal(one, want) else "other integers"
    finite = want.isfinite()
    if not torch.equal(one.isfinite(), finite):
        return "values that are not finite in other places"
    norm = want[finite].double().norm().clamp(min=1e-30)
    relative = float((one[finite].double() - want[finite].double()).norm() / norm)
    wrong = relative > _TOLERANCE.get(want.dtype, 1e-5)
    return f"a relative difference of {relative:.0e}" if wrong else ""


@contextmanager
def _in_eval(module: nn.Module) -> Iterator[None]:
    """Switch dropout off; afterwards all attributes are those from before."""
    before = [(child, dict(vars(child))) for child in module.modules()]
    try:
        for child, _ in before:
            child.training = False
        yield
    finally:
        for child, held in before:
            vars(child).clear()
            vars(child).update(held)


def _same_draws_afterwards(model: nn.Module) -> AbstractContextManager[object]:
    device = _device(model)
    if device.type in ("cpu", "meta"):
        return torch.random.fork_rng(devices=[])
    if not hasattr(torch.get_device_module(device), "get_rng_state"):
        return nullcontext()
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def _brief_inputs(inputs: Mapping[str, Tensor]) -> str:
    name, first = next(iter(inputs.items()))
    return name if first.is_floating_point() else f"{first.numel()} tokens"


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"

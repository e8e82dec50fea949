# SPDX-License-Identifier: Apache-2.0
"""Runs a model on a few tokens when it is cut, and compares its stages with it.

The model runs twice, with other sizes and once with a mask; and once without values, in its modes.
Families differ in what they do between layers, and a cut that misses it would give wrong numbers
without an error.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from ... import tree
from ...errors import StageError
from ...programs import Fake
from ...tree import Tree
from ..module_function import clone, tensors_of
from .crossing import Flow, flow_of
from .model_part import ModelPart
from .recording import Recording, Tensors, observe
from .units import Units

#: Arguments of forward that are side inputs of all stages.
_SIDES = (
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "decoder_input_ids",
    "decoder_attention_mask",
)
#: The larger forward: its rows, its tokens, those of a decoder behind an encoder, and those that a
#: mask hides in the last row. The smaller one has one row, and two tokens less.
_ROWS = 2
_TOKENS = 6
_DECODED = 5
_PADDED = 2
#: The largest relative difference by dtype. Stages run the operations of the model, so they differ
#: in rounding at most.
_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-3}


def try_forward(
    model: nn.Module,
    whole: nn.Module,
    units: Units,
    example: Tensors | None,
) -> tuple[Flow, list[Recording], bool]:
    """Run a model a few times.

    Args:
        model, units: the model and its units.
        whole: its clone that can be traced.
        example: its arguments, if they are not token ids.

    Returns:
        The flow of its values, the recordings, and whether it runs without values.

    Raises:
        StageError: if the model fails, or runs other modules the second time.
    """
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    sides = [name for name in _SIDES if name in parameters or (takes_any and name in _SIDES[:2])]
    keywords = {"use_cache": False, "return_dict": True}
    keywords = {n: value for n, value in keywords.items() if takes_any or n in parameters}
    run = partial(_recorded, model, whole, units, keywords)
    given = _example(model, sides) if example is None else example
    large = {name: value[:_ROWS].to(_device(model)) for name, value in given.items()}
    if any(len(value) < _ROWS for value in large.values()):
        raise StageError("example= needs two rows of each argument")
    small = {name: value[:1] for name, value in large.items()}
    for name, value in small.items():
        if value.dim() == 2 and not value.is_floating_point():
            small[name] = value[:, :-2]
    if example is None:
        small.pop("attention_mask", None)
    real = [run(small), run(large)]
    try:
        without_values = [run(small, real=False)]
    except StageError:
        without_values = []
    training = without_values if model.training else []
    return flow_of(model, [*real, *training], sides, keywords), real, bool(without_values)


def _recorded(
    model: nn.Module,
    whole: nn.Module,
    units: Units,
    keywords: Mapping[str, bool],
    arguments: Tensors,
    real: bool = True,
) -> Recording:
    """Record a forward in eval mode; or, if not ``real``, in the model's modes without values."""
    new = clone(whole)
    tensors = tensors_of(model)
    for unit in units.names:
        observe(new.get_submodule(unit), unit)
    for child in new.modules():
        child.training = child.training and not real
    without = not real or _is_on_meta(model)
    try:
        with Fake() if without else _same_draws_afterwards(model):
            if without:
                tensors = _empty(tensors)
                arguments = _empty(arguments)
            inputs = {name: value for name, value in arguments.items() if name not in _SIDES}
            side = {name: value for name, value in arguments.items() if name in _SIDES}
            parameters = {n: tensors[n] for n, _ in new.named_parameters(remove_duplicate=False)}
            return Recording(parameters, inputs, side).run(new, tensors, keywords)
    except Exception as error:
        what = "without values it does not run" if without else "its own forward fails"
        raise StageError(
            f"fpipe cannot split {type(model).__name__}: {what} on {_brief_inputs(arguments)} "
            f"({_brief(error)}), so the stages cannot be compared with it; write its stages as "
            "functions"
        ) from error


def _empty(tensors: Tensors) -> dict[str, Tensor]:
    """Return tensors of the same shapes on the host, one for all names of a tensor."""
    empty = {t: torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in tensors.values()}
    return {name: empty[tensor] for name, tensor in tensors.items()}


def _example(model: nn.Module, sides: Sequence[str]) -> dict[str, Tensor]:
    """Return token ids for a model, and a mask that hides the first ones of the last row."""
    name = getattr(model, "main_input_name", "input_ids")
    if name != "input_ids":
        raise StageError(
            f"{type(model).__name__} takes {name!r} in place of token ids; give an example of it"
        )
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    in_config = getattr(model.config, "vocab_size", None)
    vocabulary = getattr(embedding, "num_embeddings", in_config) or _TOKENS
    lengths = {"input_ids": _TOKENS}
    if "decoder_input_ids" in sides and getattr(model.config, "is_encoder_decoder", False):
        lengths["decoder_input_ids"] = _DECODED
    example = {
        name: (torch.arange(1, _ROWS * length + 1) % vocabulary).view(_ROWS, length)
        for name, length in lengths.items()
    }
    if "attention_mask" in sides:
        example["attention_mask"] = torch.ones_like(example["input_ids"])
        example["attention_mask"][-1, :_PADDED] = 0
    return example


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _is_on_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())


# ---- the comparison ----
def compare(
    model: nn.Module,
    parts: Sequence[ModelPart],
    params: Sequence[Tensors],
    recordings: Sequence[Recording],
) -> None:
    """Raise StageError unless the stages give what the model gave; warn if there are no values."""
    name = type(model).__name__
    if _is_on_meta(model):
        warnings.warn(
            f"the stages of {name} were not compared with the model, because its parameters are on "
            "the device 'meta'; cut a small model of the same configuration with values to check "
            "the family",
            stacklevel=3,
        )
        return
    for want in recordings:
        x: Tree = dict(want.inputs)
        for index, (part, tensors) in enumerate(zip(parts, params, strict=True)):
            device = next((p.device for p in tensors.values()), _device(model))
            x = tree.tree_map(
                lambda t, device=device: t.to(device) if isinstance(t, Tensor) else t, x
            )
            try:
                with torch.no_grad(), _same_draws_afterwards(model):
                    x = part.in_mode(False)(tensors, x, **want.side)
            except Exception as error:
                raise StageError(
                    f"fpipe cannot split {name}: stage {index} ({part.name}) fails on "
                    f"{_brief_inputs(want.inputs)}, and the whole model does not "
                    f"({_brief(error)}); write its stages as functions"
                ) from error
        tolerance = _TOLERANCE.get(want.result.dtype, 1e-5)
        largest = want.result[want.result.isfinite()].abs().max()
        try:
            torch.testing.assert_close(
                x, want.result, rtol=tolerance, atol=float(tolerance * largest), check_device=False
            )
        except AssertionError as error:
            raise StageError(
                f"fpipe cannot split {name}: the stages do not return what the model computes "
                f"({_brief(error)}): the model does more between its layers than stages repeat; "
                "write its stages as functions"
            ) from error


def _same_draws_afterwards(model: nn.Module) -> AbstractContextManager[object]:
    device = _device(model)
    if device.type in ("cpu", "meta"):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def _brief_inputs(inputs: Tensors) -> str:
    name, first = next(iter(inputs.items()))
    if first.is_floating_point():
        return name
    return f"{first.numel()} tokens"


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"

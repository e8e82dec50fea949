# SPDX-License-Identifier: Apache-2.0
"""Whether the stages of a causal model compute what the model computes: both run on a few tokens
when it is cut.

Families differ in what they do between layers, and a cut that misses it gives wrong numbers without
an error. This module must not know any family, nor how a model was cut.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn

from ..errors import StageError
from ..stage import Stage
from ._decoder import DecoderPart
from ._recorder import Recording

#: The largest relative difference by dtype. Stages run the operations of the model, so they differ
#: in rounding at most.
_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-3}
_REMEDY = "write its stages as functions"


def compare(
    model: nn.Module,
    stages: Sequence[Stage],
    params: Sequence[Mapping[str, torch.Tensor]],
    recordings: Sequence[Recording],
) -> None:
    """Raise StageError unless the stages give what the model gave; warn where there are no
    values.
    """
    if any(p.is_meta for p in model.parameters()):
        warnings.warn(
            f"the stages of {type(model).__name__} were not compared with the model, because its "
            "parameters are on the "
            "device 'meta'; cut a small model of the same configuration with values to check the "
            "family",
            stacklevel=3,
        )
        return
    for recording in recordings:
        _verify(model, stages, params, recording)


def _verify(
    model: nn.Module,
    stages: Sequence[Stage],
    params: Sequence[Mapping[str, torch.Tensor]],
    want: Recording,
) -> None:
    """Raise StageError, naming the first stage that differs, unless the stages in turn give what
    the model gave.

    Args:
        model: the whole model.
        stages: of it; their functions are DecoderParts.
        params: of the stages.
        want: what the model computed.
    """
    parts = [cast(DecoderPart, stage.fn) for stage in stages]
    device = next(model.parameters()).device
    inputs = want.inputs
    x: Any = inputs if len(inputs) > 1 else next(iter(inputs.values()))
    with torch.no_grad(), forked(device), _in_eval([part.module for part in parts]):
        for index, (part, own) in enumerate(zip(parts, params, strict=True)):
            label = f"stage {index} ({part.name})"
            try:
                x = part(own, _on(x, next((p.device for p in own.values()), device)), **want.side)
            except Exception as error:
                raise StageError(
                    f"fpipe cannot split {type(model).__name__}: {label} fails on "
                    f"{count(inputs)}, and the whole model "
                    f"does not ({brief(error)}); {_REMEDY}"
                ) from error
            found = x if isinstance(x, tuple) else (x,)
            expected = (
                want.result if part.last else [want.tensors[value] for value in part.part.gives]
            )
            for one, other in zip(found, expected, strict=False):
                fault = _difference(one, other)
                if fault:
                    raise StageError(
                        f"fpipe cannot split {type(model).__name__}: {label} does not return what "
                        "the model computes "
                        f"there ({fault}): the model does more between its layers than stages "
                        f"repeat; {_REMEDY}"
                    )


def count(inputs: Mapping[str, torch.Tensor]) -> str:
    """What the model was run on, for a message."""
    first = next(iter(inputs.values()))
    return f"{first.numel()} tokens" if not first.is_floating_point() else f"{next(iter(inputs))}"


def _difference(found: Any, want: torch.Tensor) -> str:
    """How two tensors differ, for a message; "" if they agree."""
    if not isinstance(found, torch.Tensor) or found.shape != want.shape:
        shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        return f"{shape} in place of shape {list(want.shape)}"
    if not want.is_floating_point():
        return "" if torch.equal(found.to(want.device), want) else "other integers"
    finite = want.isfinite()
    if not torch.equal(found.isfinite().to(want.device), finite):
        return "values that are not finite in other places"
    error = (found.to(want.device)[finite].double() - want[finite].double()).norm()
    relative = float(error / want[finite].double().norm().clamp(min=1e-30))
    return (
        f"a relative difference of {relative:.0e}"
        if relative > _TOLERANCE.get(want.dtype, 1e-5)
        else ""
    )


# ---- surroundings ----
@contextmanager
def _in_eval(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Without dropout; every module has its mode again afterwards, and all else that a forward may
    change.
    """
    before = [(child, dict(vars(child))) for module in modules for child in module.modules()]
    try:
        for child, _ in before:
            child.training = False
        yield
    finally:
        for child, held in before:
            vars(child).clear()
            vars(child).update(held)


def forked(device: torch.device) -> Any:
    """The state of the random generators is the same afterwards."""
    if device.type in ("cpu", "meta"):
        return torch.random.fork_rng(devices=[])
    module = torch.get_device_module(device)
    if not hasattr(module, "get_rng_state"):
        return nullcontext()
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def _on(x: Any, device: torch.device) -> Any:
    return (
        tuple(_on(part, device) for part in x)
        if isinstance(x, tuple)
        else x.to(device)
        if hasattr(x, "to")
        else x
    )


def brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"

# SPDX-License-Identifier: Apache-2.0
"""Whether the stages of a causal model compute what the model computes: both run on a few tokens when it is cut.

Families differ in what they do between layers, and a cut that misses it gives wrong numbers without an error. This
module must not know any family, nor how a model was cut.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.func import functional_call

from ..errors import StageError
from ..stage import Stage
from ._decoder import DecoderPart, decoder_of
from ._pure import clone

_TOKENS = 4
#: The largest relative difference by dtype. Stages run the operations of the model, so they differ in rounding at most.
_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-3}
_REMEDY = "write its stages as functions"


def verify(
    model: nn.Module, stages: Sequence[Stage], params: Sequence[Mapping[str, torch.Tensor]],
    ends: Sequence[int], config: Any,
) -> None:  # fmt: skip
    """Raise StageError, naming the first stage that differs, unless the stages in turn give what the model gives.

    Args:
        model: the whole model.
        stages: of it; their functions are DecoderParts.
        params: of the stages.
        ends: for each stage, the index of the first layer behind it.
        config: the config of the stages, which may choose another implementation of experts than the model's.
    """
    parts = [cast(DecoderPart, stage.fn) for stage in stages]
    known = not any(p.is_meta for p in model.parameters())
    device = next(model.parameters()).device
    ids = (torch.arange(1, _TOKENS + 1) % _vocabulary(model)).unsqueeze(0).to(device)
    with torch.no_grad(), _forked(device), _in_eval([part.module for part in parts]):
        try:
            want = _expected(model, ids, ends, config, parts[-1].router)
            _compare(model, parts, params, ids, want, known)
        except Exception as error:
            if not known:
                _warn(model, f"without values it does not run ({_brief(error)})")
            elif isinstance(error, StageError):
                raise
            else:
                raise StageError(
                    f"fpipe cannot split {type(model).__name__}: its own forward fails on {_TOKENS} tokens "
                    f"({_brief(error)}), so the stages cannot be compared with it; {_REMEDY}"
                ) from error
            return
    if not known:
        _warn(model, "its parameters are on the device 'meta'")


def _warn(model: nn.Module, why: str) -> None:
    warnings.warn(
        f"the stages of {type(model).__name__} were not compared with the model, because {why}; cut a small model of "
        "the same configuration with values to check the family",
        stacklevel=4,
    )


def _compare(
    model: nn.Module, parts: Sequence[DecoderPart], params: Sequence[Mapping[str, torch.Tensor]], ids: torch.Tensor,
    want: Sequence[Any], known: bool,
) -> None:  # fmt: skip
    x: Any = ids
    for index, (part, own, expected) in enumerate(zip(parts, params, want, strict=True)):
        label = f"stage {index} ({part.name})"
        try:
            x = part(own, _on(x, next((p.device for p in own.values()), ids.device)))
        except Exception as error:
            raise StageError(
                f"fpipe cannot split {type(model).__name__}: {label} fails on {_TOKENS} tokens, and the whole model "
                f"does not ({_brief(error)}); {_REMEDY}"
            ) from error
        found = x if isinstance(x, tuple) else (x,)
        for one, other in zip(found, expected, strict=False):
            fault = _difference(one, other, known)
            if fault:
                raise StageError(
                    f"fpipe cannot split {type(model).__name__}: {label} does not return what the model computes there "
                    f"({fault}): the model does more between its layers than stages repeat; {_REMEDY}"
                )


def _expected(model: nn.Module, ids: torch.Tensor, ends: Sequence[int], config: Any, router: Any) -> list[tuple]:
    """What the model computes where each stage ends; an empty tuple where that is not known."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    whole = clone(model)  # which gets hooks, also from the transformers package
    for child in whole.modules():
        child.training = False
        if getattr(child, "config", None) is model.config:
            child.__dict__["config"] = config
    layers, entered = decoder_of(whole)[1], dict[int, torch.Tensor]()
    for end in set(ends[:-1]) & set(range(len(layers))):

        def note(layer: nn.Module, args: tuple, kwargs: dict[str, Any], end: int = end) -> None:
            value = args[0] if args else kwargs.get("hidden_states")
            if isinstance(value, torch.Tensor):
                entered.setdefault(end, value.clone())

        layers[end].register_forward_pre_hook(note, with_kwargs=True)
    more = {} if router is None else {"output_router_logits": True}
    keywords = {"input_ids": ids, "use_cache": False, "return_dict": True, **more}
    out = functional_call(whole, tensors, (), keywords, tie_weights=False)
    final = (out.logits,) if hasattr(out, "logits") else (out.last_hidden_state,)
    if router is not None:
        final = (*final, out.aux_loss * router.coefficient)
    return [*((entered[end],) if end in entered else () for end in ends[:-1]), final]


def _difference(found: Any, want: torch.Tensor, known: bool) -> str:
    """How two tensors differ, for a message; "" if they agree."""
    if not isinstance(found, torch.Tensor) or found.shape != want.shape:
        shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        return f"{shape} in place of shape {list(want.shape)}"
    if not known:
        return ""
    finite = want.isfinite()
    if not torch.equal(found.isfinite().to(want.device), finite):
        return "values that are not finite in other places"
    error = (found.to(want.device)[finite].double() - want[finite].double()).norm()
    relative = float(error / want[finite].double().norm().clamp(min=1e-30))
    return f"a relative difference of {relative:.0e}" if relative > _TOLERANCE.get(want.dtype, 1e-5) else ""


# ---- surroundings ----------------------------------------------------------------------------------------------------


@contextmanager
def _in_eval(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Without dropout; every module has its mode again afterwards."""
    before = [(child, child.training) for module in modules for child in module.modules()]
    try:
        for child, _ in before:
            child.training = False
        yield
    finally:
        for child, training in before:
            child.training = training


def _forked(device: torch.device) -> Any:
    """The state of the random generators is the same afterwards."""
    if device.type in ("cpu", "meta"):
        return torch.random.fork_rng(devices=[])
    module = torch.get_device_module(device)
    if not hasattr(module, "get_rng_state"):
        return nullcontext()
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def _vocabulary(model: nn.Module) -> int:
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    return getattr(embedding, "num_embeddings", None) or getattr(model.config, "vocab_size", None) or _TOKENS


def _on(x: Any, device: torch.device) -> Any:
    return tuple(_on(part, device) for part in x) if isinstance(x, tuple) else x.to(device) if hasattr(x, "to") else x


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"

# SPDX-License-Identifier: Apache-2.0
"""Normalizations as plain operations, for second derivatives by forward mode.

torch's rules for layer, batch and instance norms treat the statistics as constants when the tangent
of such a norm is differentiated again: the results are wrong, without an error. Those of mean,
square and root are right. Knows no stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LAYER = ("input", "normalized_shape", "weight", "bias", "eps")
_FIRST = ("input", "running_mean", "running_var", "weight", "bias")
_LAST = ("input", "weight", "bias", "running_mean", "running_var")
#: The arguments of each norm; torch.nn.functional has another order than torch, and calls its
#: functions where the mode does not intercept it.
_ARGUMENTS: dict[Callable[..., Tensor], Sequence[str]] = {
    F.layer_norm: _LAYER,
    torch.layer_norm: _LAYER,
    F.batch_norm: (*_FIRST, "training", "momentum", "eps"),
    torch.batch_norm: (*_LAST, "training", "momentum", "eps"),
    F.instance_norm: (*_FIRST, "use_input_stats", "momentum", "eps"),
    torch.instance_norm: (*_LAST, "use_input_stats", "momentum", "eps"),
}


class PlainNormalizations(TorchFunctionMode):
    """Within it, these norms are computed by means and roots."""

    def __torch_function__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if func in _ARGUMENTS:
            names = _ARGUMENTS[func]
            plain = _norm(dict.fromkeys(names) | dict(zip(names, args, strict=False)) | named)
            if plain is not None:
                return plain
        return func(*args, **named)


def _norm(named: Mapping[str, Any]) -> Tensor | None:
    """A norm by its arguments, of which those that were not passed are None; None where the
    statistics are not those of the input.
    """
    x, weight, bias = named["input"], named["weight"], named["bias"]
    if "normalized_shape" in named:
        axes = range(-len(named["normalized_shape"]), 0)
    else:
        batch = "training" in named
        own = named["training"] if batch else named["use_input_stats"] in (None, True)
        if not own or named["running_mean"] is not None:
            return None  # passed statistics are constants, and running ones are updated by torch
        axes = [*([0] if batch else []), *range(2, x.dim())]
        shape = 1, -1, *[1] * (x.dim() - 2)
        weight, bias = (t if t is None else t.view(shape) for t in (weight, bias))
    eps = 1e-5 if named["eps"] is None else named["eps"]
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    centred = wide - wide.mean(tuple(axes), keepdim=True)
    x = (centred * (centred.square().mean(tuple(axes), keepdim=True) + eps).rsqrt()).to(x.dtype)
    x = x if weight is None else x * weight
    return x if bias is None else x + bias

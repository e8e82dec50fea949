# SPDX-License-Identifier: Apache-2.0
"""Normalizations as plain operations, for second derivatives by forward mode.

torch's rules for layer, batch and instance norms treat the statistics as constants when the tangent of such a norm is
differentiated again: the results are wrong, without an error. Those of mean, square and root are right. Knows no stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class PlainNormalizations(TorchFunctionMode):
    """Within it, these norms are computed by means and roots."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = _PLAIN.get(func)
        result = None if plain is None else plain(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is None else result


def _normal(x: Tensor, over: Sequence[int], eps: float) -> Tensor:
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    centred = wide - wide.mean(tuple(over), keepdim=True)
    return (centred * (centred.square().mean(tuple(over), keepdim=True) + eps).rsqrt()).to(x.dtype)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _by_channel(x: Tensor, leaf: Tensor | None) -> Tensor | None:
    return None if leaf is None else leaf.view(1, -1, *[1] * (x.dim() - 2))


def _layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, *_: Any, **__: Any,
) -> Tensor:  # fmt: skip
    return _affine(_normal(input, range(-len(normalized_shape), 0), eps), weight, bias)


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, training: bool,
    momentum: float, eps: float, *_: Any, **__: Any,
) -> Tensor | None:  # fmt: skip
    if not training or mean is not None:
        return None  # passed statistics are constants, and running ones are updated by torch
    return _affine(_normal(x, [0, *range(2, x.dim())], eps), _by_channel(x, weight), _by_channel(x, bias))


def _instance_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None,
    use_input_stats: bool, momentum: float, eps: float, *_: Any, **__: Any,
) -> Tensor | None:  # fmt: skip
    if not use_input_stats or mean is not None:
        return None
    return _affine(_normal(x, range(2, x.dim()), eps), _by_channel(x, weight), _by_channel(x, bias))


def _named_batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor | None:  # fmt: skip
    return _batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)


def _named_instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor | None:  # fmt: skip
    return _instance_norm(input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps)


_PLAIN: dict[Any, Callable[..., Tensor | None]] = {
    F.layer_norm: _layer_norm,  # it calls torch.layer_norm where the mode does not intercept it
    F.batch_norm: _named_batch_norm,
    F.instance_norm: _named_instance_norm,
    torch.layer_norm: _layer_norm,
    torch.batch_norm: _batch_norm,
    torch.instance_norm: _instance_norm,
}

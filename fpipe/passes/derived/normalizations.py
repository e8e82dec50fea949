# SPDX-License-Identifier: Apache-2.0
"""Normalizations as plain operations, for second derivatives by forward mode.

torch's rules for layer, batch and instance norms treat the statistics as constants when the tangent
of such a norm is differentiated again: the results are wrong, without an error. Those of mean,
square and root are right. Knows no stage.
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


def _normal(
    x: Tensor, over: Sequence[int], eps: float, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    centred = wide - wide.mean(tuple(over), keepdim=True)
    x = (centred * (centred.square().mean(tuple(over), keepdim=True) + eps).rsqrt()).to(x.dtype)
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
    **__: Any,
) -> Tensor:
    return _normal(input, range(-len(normalized_shape), 0), eps, weight, bias)


def _by_channel(rows: bool) -> Callable[..., Tensor | None]:
    """A batch norm, over all ``rows``, or an instance norm."""

    def norm(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        var: Tensor | None,
        own: bool,
        momentum: float,
        eps: float,
        *_: Any,
    ) -> Tensor | None:
        if not own or mean is not None:
            return None  # passed statistics are constants, and running ones are updated by torch
        weight, bias = (
            t if t is None else t.view(1, -1, *[1] * (x.dim() - 2)) for t in (weight, bias)
        )
        return _normal(x, [0, *range(2, x.dim())] if rows else range(2, x.dim()), eps, weight, bias)

    return norm


def _functional(rows: bool) -> Callable[..., Tensor | None]:
    """The same with the signature in ``torch.nn.functional``; ``own``: whether x's own statistics
    count.
    """

    def norm(
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        own: bool = not rows,
        momentum: float = 0.1,
        eps: float = 1e-5,
        **named: bool,
    ) -> Tensor | None:
        own = next(iter(named.values()), own)  # as training= or use_input_stats=
        return _by_channel(rows)(input, weight, bias, running_mean, running_var, own, momentum, eps)

    return norm


_PLAIN: dict[Any, Callable[..., Tensor | None]] = {
    F.layer_norm: _layer_norm,  # it calls torch.layer_norm where the mode does not intercept it
    F.batch_norm: _functional(rows=True),
    F.instance_norm: _functional(rows=False),
    torch.layer_norm: _layer_norm,
    torch.batch_norm: _by_channel(rows=True),
    torch.instance_norm: _by_channel(rows=False),
}

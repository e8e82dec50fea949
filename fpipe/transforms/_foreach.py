"""Lists of tensors through one call: torch's foreach and fused kernels behind plain names.

These kernels are private by name in torch, so this is the one file of the transforms that touches them. Lists may be
empty. ``own=True`` says that the memory of the first list may be written to; it is not where autograd records, unless
its values are given away (``donate``). Where derivatives are taken, each tensor goes through torch's plain function:
the kernels for lists have no rules for forward mode and for vmap, and wrong ones backwards for some lists of several.
Nothing here knows trees, ranks or optimizers.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = list[Tensor]
#: devices on which the fused kernels are taken without being asked for
FUSED_DEVICES = ("cpu", "cuda")
_TRANSFORMED: ContextVar[bool] = ContextVar("_TRANSFORMED", default=False)


def differentiated() -> bool:
    """Whether somebody may take a derivative of what is computed here, or runs it for many at once.

    >>> differentiated()
    True
    >>> with torch.no_grad():
    ...     differentiated()
    False
    """
    return torch.is_grad_enabled() or _TRANSFORMED.get()


@contextmanager
def transformed() -> Iterator[None]:
    """Within it tensors are in the hands of torch.func, whatever the mode of autograd."""
    before = _TRANSFORMED.set(True)
    try:
        yield
    finally:
        _TRANSFORMED.reset(before)


def _run(
    fresh: Callable[..., Any], into: Callable[..., Any], one: Callable[..., Tensor], own: bool, xs: Tensors, *args: Any,
) -> Tensors:  # fmt: skip
    """A function of lists; ``one`` is the same of a tensor, with an argument of each list."""
    if not xs:
        return []
    if differentiated():
        rows = [arg if isinstance(arg, (list, tuple)) else [arg] * len(xs) for arg in args]
        return [one(*row) for row in zip(xs, *rows, strict=True)]
    if own:
        into(xs, *args)
        return xs
    return list(fresh(xs, *args))


def mul(xs: Tensors, factor: float | Tensor | Sequence[float], *, own: bool = False) -> Tensors:
    """``x * factor``: one for all, or one for each."""
    return _run(torch._foreach_mul, torch._foreach_mul_, torch.mul, own, xs, factor)


def div(xs: Tensors, divisor: float, *, own: bool = False) -> Tensors:
    """``x / divisor``."""
    return _run(torch._foreach_div, torch._foreach_div_, torch.div, own, xs, divisor)


def add(xs: Tensors, ys: Tensors, alpha: float = 1, *, own: bool = False) -> Tensors:
    """``x + alpha * y``."""
    if not xs:
        return []
    if differentiated():
        return [torch.add(x, y, alpha=alpha) for x, y in zip(xs, ys, strict=True)]
    if own:
        torch._foreach_add_(xs, ys, alpha=alpha)
        return xs
    return list(torch._foreach_add(xs, ys, alpha=alpha))


def shift(xs: Tensors, number: float, *, own: bool = False) -> Tensors:
    """``x + number``."""
    return _run(torch._foreach_add, torch._foreach_add_, torch.add, own, xs, number)


def lerp(xs: Tensors, ys: Tensors, weight: float, *, own: bool = False) -> Tensors:
    """``x + weight * (y - x)``."""
    return _run(torch._foreach_lerp, torch._foreach_lerp_, torch.lerp, own, xs, ys, weight)


def addcmul(xs: Tensors, ys: Tensors, zs: Tensors, value: float, *, own: bool = False) -> Tensors:
    """``x + value * y * z``."""
    one = lambda x, y, z, value: torch.addcmul(x, y, z, value=value)
    return _run(torch._foreach_addcmul, torch._foreach_addcmul_, one, own, xs, ys, zs, value)


def addcdiv(xs: Tensors, ys: Tensors, zs: Tensors, value: float, *, own: bool = False) -> Tensors:
    """``x + value * y / z``."""
    one = lambda x, y, z, value: torch.addcdiv(x, y, z, value=value)
    return _run(torch._foreach_addcdiv, torch._foreach_addcdiv_, one, own, xs, ys, zs, value)


def sqrt(xs: Tensors) -> Tensors:
    """Square roots."""
    return _each(torch._foreach_sqrt, torch.sqrt, xs)


def sign(xs: Tensors) -> Tensors:
    """-1, 0 or 1."""
    return _each(torch._foreach_sign, torch.sign, xs)


def _each(fresh: Callable[..., Any], one: Callable[[Tensor], Tensor], xs: Tensors) -> Tensors:
    return _run(fresh, fresh, one, False, xs)


def clamp(xs: Tensors, low: float, high: float) -> Tensors:
    """Into ``[low, high]``."""
    both = lambda xs: torch._foreach_clamp_max(torch._foreach_clamp_min(xs, low), high)
    return _each(both, lambda x: x.clamp(low, high), xs)


def norms(xs: Tensors, p: float) -> Tensors:
    """The p-norm of each, in float32 at least. None of them may be empty."""
    dtype = torch.float32 if xs and xs[0].dtype in (torch.float16, torch.bfloat16) else None
    return _each(
        lambda xs: torch._foreach_norm(xs, p, dtype=dtype), lambda x: torch.linalg.vector_norm(x, p, dtype=dtype), xs
    )


def cast(xs: Tensors, dtype: torch.dtype) -> Tensors:
    """In another dtype; those that have it already are handed on."""
    return [x if x.dtype == dtype else x.to(dtype) for x in xs]


def cast_like(xs: Tensors, others: Tensors) -> Tensors:
    """Each in the dtype of its partner."""
    return [x.to(y.dtype) for x, y in zip(xs, others, strict=True)]


def copies(xs: Tensors, *, like: Tensors | None = None, into: Tensors | None = None) -> Tensors:
    """The same values in memory of our own, laid out as ``like``, or in that of the caller."""
    if differentiated():
        return [x.clone() for x in xs]
    into = [torch.empty_like(x) for x in like or xs] if into is None else into
    if xs:
        torch._foreach_copy_(into, xs)
    return into


def laid_out(xs: Tensors, others: Tensors) -> Tensors:
    """Each with the strides of its partner: the fused kernels walk memory, and never ask."""
    return [x if x.stride() == y.stride() else torch.empty_like(y).copy_(x) for x, y in zip(xs, others, strict=True)]


def fused_adam(
    us: Tensors, gs: Tensors, ms: Tensors, vs: Tensors, step: Tensor, lr: float, betas: Sequence[float], eps: float
) -> None:
    """One pass of Adam without weight decay. Changes us, ms and vs."""
    steps = [step.to(us[0].device, torch.float32)] * len(us)
    how: dict[str, Any] = {"lr": lr, "beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": 0.0}
    torch._fused_adam_(us, gs, ms, vs, [], steps, amsgrad=False, maximize=False, **how)

# SPDX-License-Identifier: Apache-2.0
"""Functions of lists of tensors: torch's foreach and fused kernels under plain names.

torch's names for these kernels begin with an underscore, so this is the only file of the transforms
that calls them. Lists may be empty. ``inplace=True`` allows a function to write into the memory of
its first list; it never does so where derivatives are taken. There, each tensor goes through
torch's ordinary function: the kernels for lists have no rules for forward mode and vmap, and wrong
backwards for some lists of several tensors. This module must not know trees, ranks or optimizers.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch import Tensor

Fn: TypeAlias = Callable[..., Any]
Tensors: TypeAlias = list[Tensor]
#: Devices on which the fused kernels are the default.
FUSED_DEVICES = ("cpu", "cuda")
_TRANSFORMED: ContextVar[bool] = ContextVar("_TRANSFORMED", default=False)


def differentiated() -> bool:
    """Whether autograd or a torch.func transform may follow what is computed now.

    >>> differentiated()
    True
    >>> with torch.no_grad():
    ...     differentiated()
    False
    """
    return torch.is_grad_enabled() or _TRANSFORMED.get()


@contextmanager
def transformed() -> Iterator[None]:
    """Within this context ``differentiated()`` is true: tensors belong to torch.func, whatever
    autograd's mode is.
    """
    before = _TRANSFORMED.set(True)
    try:
        yield
    finally:
        _TRANSFORMED.reset(before)


def _run(
    fresh: Fn, into: Fn, one: Fn, inplace: bool, xs: Tensors, *args: Any, **options: Any
) -> Tensors:
    """A function of lists, as new tensors or in place; ``one`` is the same function of one tensor
    of each list.
    """
    if not xs:
        return []
    if differentiated():
        rows = [arg if isinstance(arg, (list, tuple)) else [arg] * len(xs) for arg in args]
        return [one(*row, **options) for row in zip(xs, *rows, strict=True)]
    if inplace:
        into(xs, *args, **options)
        return xs
    return list(fresh(xs, *args, **options))


def mul(xs: Tensors, factor: float | Tensor | Sequence[float], *, inplace: bool = False) -> Tensors:
    """``x * factor``: one factor for all, or one for each."""
    if isinstance(factor, float) and xs and xs[0].device.type == "cpu" and all(x.ndim for x in xs):
        # A number becomes a tensor once for each leaf. Beside a leaf without axes the tensor would
        # decide the dtype.
        factor = factor if differentiated() else torch.tensor(factor, dtype=torch.float64)
    return _run(torch._foreach_mul, torch._foreach_mul_, torch.mul, inplace, xs, factor)


def div(xs: Tensors, divisor: float, *, inplace: bool = False) -> Tensors:
    """``x / divisor``."""
    return _run(torch._foreach_div, torch._foreach_div_, torch.div, inplace, xs, divisor)


def add(xs: Tensors, ys: Tensors, alpha: float = 1, *, inplace: bool = False) -> Tensors:
    """``x + alpha * y``."""
    return _run(torch._foreach_add, torch._foreach_add_, torch.add, inplace, xs, ys, alpha=alpha)


def shift(xs: Tensors, number: float, *, inplace: bool = False) -> Tensors:
    """``x + number``."""
    return _run(torch._foreach_add, torch._foreach_add_, torch.add, inplace, xs, number)


def lerp(xs: Tensors, ys: Tensors, weight: float, *, inplace: bool = False) -> Tensors:
    """``x + weight * (y - x)``."""
    return _run(torch._foreach_lerp, torch._foreach_lerp_, torch.lerp, inplace, xs, ys, weight)


def addcmul(
    xs: Tensors, ys: Tensors, zs: Tensors, value: float, *, inplace: bool = False
) -> Tensors:
    """``x + value * y * z``."""
    return _run(
        torch._foreach_addcmul,
        torch._foreach_addcmul_,
        torch.addcmul,
        inplace,
        xs,
        ys,
        zs,
        value=value,
    )


def addcdiv(
    xs: Tensors, ys: Tensors, zs: Tensors, value: float, *, inplace: bool = False
) -> Tensors:
    """``x + value * y / z``."""
    return _run(
        torch._foreach_addcdiv,
        torch._foreach_addcdiv_,
        torch.addcdiv,
        inplace,
        xs,
        ys,
        zs,
        value=value,
    )


def sqrt(xs: Tensors) -> Tensors:
    """Square roots."""
    return _each(torch._foreach_sqrt, torch.sqrt, xs)


def sign(xs: Tensors, *, inplace: bool = False) -> Tensors:
    """-1, 0 or 1."""
    return _run(torch._foreach_sign, torch._foreach_sign_, torch.sign, inplace, xs)


def _each(fresh: Fn, one: Fn, xs: Tensors) -> Tensors:
    return _run(fresh, fresh, one, False, xs)


def clamp(xs: Tensors, low: float, high: float) -> Tensors:
    """Into ``[low, high]``."""

    def both(xs):
        return torch._foreach_clamp_max(torch._foreach_clamp_min(xs, low), high)

    return _each(both, lambda x: x.clamp(low, high), xs)


def norms(xs: Tensors, p: float) -> Tensors:
    """The p-norm of each, in float32 at least. None of them may be empty."""
    how = {"dtype": norm_dtype(xs[0]) if xs else None}
    return _each(
        lambda xs: torch._foreach_norm(xs, p, **how),
        lambda x: torch.linalg.vector_norm(x, p, **how),
        xs,
    )


def norm_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which a norm accumulates: float32 for half precision, and None for the tensor's
    own dtype.
    """
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else None


def cast(xs: Tensors, dtype: torch.dtype) -> Tensors:
    """In another dtype; tensors of that dtype are returned as they are."""
    return [x if x.dtype == dtype else x.to(dtype) for x in xs]


def cast_like(xs: Tensors, others: Tensors) -> Tensors:
    """Each in the dtype of the tensor at the same index of ``others``."""
    return [x if x.dtype == y.dtype else x.to(y.dtype) for x, y in zip(xs, others, strict=True)]


def copies(xs: Tensors, *, like: Tensors | None = None, into: Tensors | None = None) -> Tensors:
    """The same values in new memory with the strides of ``like``, or in the memory of ``into``."""
    if differentiated():
        return [x.clone() for x in xs]
    into = [torch.empty_like(x) for x in like or xs] if into is None else into
    if xs:
        torch._foreach_copy_(into, xs)
    return into


def laid_out(xs: Tensors, others: Tensors) -> Tensors:
    """Each with the strides of the tensor at the same index of ``others``: the fused kernels ignore
    strides.
    """
    return [
        x if x.stride() == y.stride() else torch.empty_like(y).copy_(x)
        for x, y in zip(xs, others, strict=True)
    ]


def writable(xs: Tensors, given: bool) -> Tensors:
    """Contiguous tensors to write: those of ``xs`` that are ``given`` and contiguous, and copies of
    all others.
    """
    if given or not all(x.is_contiguous() for x in xs):
        return [
            x if given and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
            for x in xs
        ]
    return list(
        torch._foreach_mul(xs, torch.ones((), dtype=xs[0].dtype, device=xs[0].device))
    )  # allocates faster than empty_like


def written(work: Tensors, xs: Tensors, given: bool) -> Tensors:
    """The result of a kernel that wrote into ``writable(xs, given)``, in the layouts of ``xs``."""
    pairs = zip(work, xs, strict=True)
    return [
        w if x.is_contiguous() else (x if given else torch.empty_like(x)).copy_(w) for w, x in pairs
    ]


def fused_adamw(
    ps: Tensors,
    gs: Tensors,
    ms: Tensors,
    vs: Tensors,
    step: Tensor,
    lr: float,
    betas: Sequence[float],
    eps: float,
    decay: float,
) -> None:
    """One pass of AdamW over contiguous tensors of one dtype. Changes ps, ms and vs."""
    steps = [step.to(ps[0].device, torch.float32)] * len(ps)
    torch._fused_adamw_(
        ps,
        gs,
        ms,
        vs,
        [],
        steps,
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=decay,
        amsgrad=False,
        maximize=False,
    )


def fused_adam(
    us: Tensors,
    gs: Tensors,
    ms: Tensors,
    vs: Tensors,
    step: Tensor,
    lr: float,
    betas: Sequence[float],
    eps: float,
) -> None:
    """One pass of Adam without weight decay. Changes us, ms and vs."""
    steps = [step.to(us[0].device, torch.float32)] * len(us)
    torch._fused_adam_(
        us,
        gs,
        ms,
        vs,
        [],
        steps,
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=0.0,
        amsgrad=False,
        maximize=False,
    )

# SPDX-License-Identifier: Apache-2.0
"""Functions of lists of tensors: torch's foreach and fused kernels under plain names.

torch's names for these kernels begin with an underscore, so this is the only file of the transforms
that calls them. No list is empty. ``inplace=True`` allows a function to write into the memory of
its first list; it never does so where derivatives are taken. There, each tensor goes through
torch's ordinary function: the kernels for lists have no rules for forward mode and vmap, and wrong
backwards for some lists of several tensors. This module must not know trees, ranks or optimizers.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = list[Tensor]
#: Devices on which the fused kernels are the default.
FUSED_DEVICES = ("cpu", "cuda")
#: Whether tensors belong to a transform of torch.func, whatever autograd's mode is.
TRANSFORMED: ContextVar[bool] = ContextVar("TRANSFORMED", default=False)


def differentiated() -> bool:
    """Whether autograd or a torch.func transform may follow what is computed now.

    >>> differentiated()
    True
    >>> with torch.no_grad():
    ...     differentiated()
    False
    """
    return torch.is_grad_enabled() or TRANSFORMED.get()


def _each(
    name: str, xs: Tensors, *args: object, inplace: bool = False, **options: object
) -> Tensors:
    """torch's function ``name`` of each tensor; an argument is one for all or a list of one for
    each.
    """
    # for DTensors torch 2.11 lacks the kernels of lerp, and of norms in another dtype
    if differentiated() or (name == "lerp" and mesh_of(xs[0])):
        rows = [arg if isinstance(arg, (list, tuple)) else [arg] * len(xs) for arg in args]
        return [getattr(torch, name)(*row, **options) for row in zip(xs, *rows, strict=True)]
    after = getattr(torch, f"_foreach_{name}{'_' * inplace}")(xs, *args, **options)
    return xs if inplace else list(after)


def mesh_of(x: Tensor) -> Hashable:
    """The mesh of a DTensor; None for another tensor."""
    return getattr(x, "device_mesh", None)


add = partial(_each, "add")  #: ``x + alpha * y``
addcdiv = partial(_each, "addcdiv")  #: ``x + value * y / z``
addcmul = partial(_each, "addcmul")  #: ``x + value * y * z``
div = partial(_each, "div")  #: ``x / y``
lerp = partial(_each, "lerp")  #: ``x + weight * (y - x)``
mul = partial(_each, "mul")  #: ``x * y``
sqrt = partial(_each, "sqrt")


def norms(xs: Tensors, p: float) -> Tensors:
    """The p-norm of each, in float32 at least. None of them may be empty."""
    dtype = norm_dtype(xs[0])
    if differentiated() or mesh_of(xs[0]):
        return whole([torch.linalg.vector_norm(x, p, dtype=dtype) for x in xs])
    return list(torch._foreach_norm(xs, p, dtype=dtype))


def whole(xs: Tensors) -> Tensors:
    """The values of tensors without axes, which all are DTensors of one mesh, or none is."""
    if mesh_of(xs[0]):
        return list(torch.stack(xs).full_tensor().unbind())  # type: ignore[attr-defined]
    return xs


def norm_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which a norm accumulates: float32 for half precision, and None for the tensor's
    own dtype.
    """
    if x.dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return None


def cast(xs: Tensors, dtype: torch.dtype) -> Tensors:
    """In another dtype; tensors of that dtype are returned as they are."""
    return [x if x.dtype == dtype else x.to(dtype) for x in xs]


def fused_adamw(
    columns: Sequence[tuple[Tensors, bool]],
    gs: Tensors,
    step: Tensor,
    lr: float,
    betas: Sequence[float],
    eps: float,
    decay: float,
) -> tuple[Tensors, ...]:
    """Parameters and both moments after one pass of AdamW.

    ``columns`` are those from before, each with whether its memory may be written. The kernel walks
    memory, so it runs on contiguous tensors of one dtype.
    """
    ps, ms, vs = [_contiguous(*column) for column in columns]
    torch._fused_adamw_(
        ps,
        [g.contiguous() for g in gs],
        ms,
        vs,
        [],
        [step.to(ps[0].device, torch.float32)] * len(ps),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=decay,
        amsgrad=False,
        maximize=False,
    )
    # the kernel does not count its writes, by which checks see that a tensor was changed
    torch.autograd.graph.increment_version(ps + ms + vs)
    return tuple(
        _as_before(written, *column) for written, column in zip((ps, ms, vs), columns, strict=True)
    )


def _contiguous(xs: Tensors, given: bool) -> Tensors:
    """Contiguous tensors to write: those of ``xs`` that are given and contiguous, and copies of all
    others.
    """
    if not given and all(x.is_contiguous() for x in xs):
        return list(torch._foreach_mul(xs, xs[0].new_ones(())))  # allocates faster than clone
    plain = torch.contiguous_format
    return [x if given and x.is_contiguous() else x.clone(memory_format=plain) for x in xs]


def _as_before(written: Tensors, xs: Tensors, given: bool) -> Tensors:
    """What was written, with the strides of the tensors from before, or in their memory."""
    return [
        new if old.is_contiguous() else (old if given else torch.empty_like(old)).copy_(new)
        for new, old in zip(written, xs, strict=True)
    ]

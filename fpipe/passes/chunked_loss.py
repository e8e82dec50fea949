# SPDX-License-Identifier: Apache-2.0
"""``chunked_cross_entropy``: the loss of a head with a large vocabulary, without whole logits.

Logits are tokens x vocabulary. They are computed for a part of the vocabulary at a time, in the
forward and again in the backward. The gradients of ``hidden`` and of ``weight`` are two operations,
so that a stage's I and W each have one, and no logits are held between them. This module knows
tensors alone; it must not know stages, schedules or ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.library import custom_op

from ..errors import StageError
from ..tree import brief

Reduction: TypeAlias = Literal["mean", "sum", "none"]


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk: int = 4096,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """The cross entropy of ``hidden @ weight.T``, which is never computed as a whole.

    The same as ``F.cross_entropy(hidden @ weight.T, targets)`` to rounding. It holds ``chunk``
    columns of the logits at a time; the backward computes each of them again. Sums are in float32
    or wider. It runs in traced and eager stages, under ``torch.autocast``, ``torch.func.grad`` and
    ``vmap``. Derivatives of its gradient are refused.

    Args:
        hidden: what enters the head, ``(..., width)``.
        weight: the rows of the vocabulary, ``(vocabulary, width)``.
        targets: the row that is right for each token, integers ``(...)``.
        chunk: columns of the logits, of the ``vocabulary``, that are computed at a time. The logits
            in memory are tokens x chunk x 4 bytes.
        ignore_index: tokens with this target do not count.
        reduction: "mean" over the tokens that count, which is 0 where none does (torch returns
            NaN), "sum", or "none": the loss of each token.

    Returns:
        The loss, in float32 or wider.

    Raises:
        StageError: for tensors that do not fit together, and on a CPU for a target that is no row
            of ``weight``. On other devices the loss of such a token is NaN.

    >>> hidden, weight = torch.eye(2), torch.tensor([[2.0, 0], [0, 1], [0, 0]])
    >>> chunked_cross_entropy(hidden, weight, torch.tensor([0, -100]), chunk=2)
    tensor(0.2395)
    """
    _check(hidden, weight, targets, chunk, reduction)
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    else:
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
    rows = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    labels = targets.reshape(-1).long()
    losses, _ = _Losses.apply(rows, weight.to(dtype), labels, chunk, ignore_index)
    if reduction == "none":
        return losses.reshape(targets.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (labels != ignore_index).sum().clamp(min=1)


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, reduction: str) -> None:
    """Raise StageError for arguments that do not fit together."""
    for name, value in (("hidden", hidden), ("weight", weight), ("targets", targets)):
        if not isinstance(value, Tensor):
            raise StageError(
                f"chunked_cross_entropy got {name}={value!r:.200}; give a tensor: "
                "chunked_cross_entropy(hidden, weight, targets)"
            )
    shapes = f"hidden {brief(hidden)}, weight {brief(weight)}, targets {brief(targets)}"
    fits = hidden.ndim >= 1 and weight.ndim == 2 and hidden.shape[-1] == weight.shape[1]
    if not fits or hidden.shape[:-1] != targets.shape:
        raise StageError(
            f"chunked_cross_entropy got {shapes}; give hidden (..., width), weight (vocabulary, "
            "width) and targets (...). A weight of (width, vocabulary) is passed as weight.T"
        )
    floating = hidden.is_floating_point() and weight.is_floating_point()
    if not floating or targets.is_floating_point() or targets.is_complex():
        raise StageError(
            f"chunked_cross_entropy got {shapes}; give floating hidden and weight, and targets "
            "that are integers: the row of the vocabulary of each token"
        )
    if type(chunk) is not int or chunk < 1:
        raise StageError(f"chunk={chunk!r}; give the columns of the logits at a time, such as 4096")
    if reduction not in get_args(Reduction):
        raise StageError(f"reduction={reduction!r}; give 'mean', 'sum' or 'none'")


# ---- operations: opaque to traces and compilers ----
@custom_op("fpipe::chunked_losses", mutates_args=())
def chunked_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    ignored: int,
) -> tuple[Tensor, Tensor]:
    """The loss of each token, and the logarithm of the sum of its exponentials."""
    counted = targets != ignored
    known = (targets >= 0) & (targets < weight.shape[0])
    if targets.device.type == "cpu" and not bool((known | ~counted).all()):
        wrong = int(targets[counted & ~known][0])
        raise StageError(
            f"chunked_cross_entropy got the target {wrong}, and weight has {weight.shape[0]} rows; "
            f"give targets from 0 to {weight.shape[0] - 1}, or {ignored} for tokens that do not "
            "count"
        )
    picked = hidden.new_full(targets.shape, float("nan"), dtype=_wide(hidden))
    norms = torch.full_like(picked, float("-inf"))
    for _, logits, place, inside in _parts(hidden, weight, targets, chunk):
        picked = torch.where(inside, logits.gather(1, place)[:, 0], picked)
        top = logits.amax(1)
        norms = torch.logaddexp(norms, logits.sub_(top[:, None]).exp_().sum(1).log_() + top)
    return torch.where(counted, norms - picked, 0.0), norms


@custom_op("fpipe::chunked_gradient", mutates_args=())
def chunked_gradient(
    of_weight: bool,
    dlosses: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    norms: Tensor,
    chunk: int,
    ignored: int,
) -> Tensor:
    """The gradient of ``weight``, or that of ``hidden``, for the gradient of each loss."""
    scale = torch.where(targets == ignored, 0.0, dlosses)
    like, dtype = (weight, weight.dtype) if of_weight else (hidden, _wide(hidden))
    gradient = torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    for part, logits, place, inside in _parts(hidden, weight, targets, chunk):
        dlogits = logits.sub_(norms[:, None]).exp_()  # in the memory of the logits
        dlogits.scatter_add_(1, place, -inside[:, None].to(logits.dtype))
        dlogits.mul_(scale[:, None])
        if of_weight:
            torch.mm(dlogits.to(hidden.dtype).T, hidden, out=gradient[part])
        else:
            gradient += dlogits.to(weight.dtype) @ weight[part]
    return gradient.to(like.dtype)


def _parts(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Parts of the vocabulary: the rows, their logits, the column of each target there, and whether
    the target is in this part.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, weight.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = (hidden @ weight[part].T).to(_wide(hidden))
            place = targets - start
            inside = (place >= 0) & (place < logits.shape[1])
            yield part, logits, torch.where(inside, place, 0)[:, None], inside


def _wide(tensor: Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _by_element(op: Any) -> None:
    """Let ``vmap`` call an operation for each element of the batch."""

    def batched(info: Any, axes: tuple[int | None, ...], *args: Any) -> Any:
        def element(index: int) -> Any:
            pairs = zip(args, axes, strict=True)
            return op(*(arg if axis is None else arg.select(axis, index) for arg, axis in pairs))

        found = [element(index) for index in range(info.batch_size)]
        if isinstance(found[0], Tensor):
            return torch.stack(found), 0
        return tuple(map(torch.stack, zip(*found, strict=True))), (0,) * len(found[0])

    op.register_vmap(batched)


@chunked_losses.register_fake
def _(hidden: Tensor, weight: Tensor, targets: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    losses = hidden.new_empty(targets.shape, dtype=_wide(hidden))
    return losses, torch.empty_like(losses)


@chunked_gradient.register_fake
def _(of_weight: bool, dlosses: Tensor, hidden: Tensor, weight: Tensor, *rest: object) -> Tensor:
    like = weight if of_weight else hidden
    return torch.empty_like(like, memory_format=torch.contiguous_format)


for _operation in (chunked_losses, chunked_gradient):
    _by_element(_operation)


# ---- derivatives ----
class _Losses(torch.autograd.Function):
    """The loss of each token, and the logarithm of the sum of its exponentials."""

    generate_vmap_rule = True

    forward = staticmethod(chunked_losses)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.chunk, ctx.ignored = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        args = (grads[0], *ctx.saved_tensors, ctx.chunk, ctx.ignored)
        wanted = ctx.needs_input_grad
        dhidden = _Gradient.apply(False, *args) if wanted[0] else None
        dweight = _Gradient.apply(True, *args) if wanted[1] else None
        return dhidden, dweight, None, None, None


class _Gradient(torch.autograd.Function):
    """The gradient of ``weight``, or that of ``hidden``."""

    generate_vmap_rule = True

    forward = staticmethod(chunked_gradient)

    @staticmethod
    def setup_context(ctx: object, inputs: tuple[object, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise StageError(
            "the gradient of chunked_cross_entropy is differentiated, which is not defined; use "
            "F.cross_entropy(hidden @ weight.T, targets) for derivatives of a gradient"
        )

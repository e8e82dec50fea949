"""The operations of random stages.

Each takes the working tensors of a stage, all of shape ``[rows, WIDTH]``, and returns one more. An
operation that needs parameters names their shapes; the generator creates them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe

WIDTH = 6

#: (a, b, parameters) -> one tensor of the same shape
Apply = Callable[[Tensor, Tensor, Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Operation:
    """One operation: how it is applied, the shapes of its parameters, and where it may be used."""

    name: str
    apply: Apply
    shapes: tuple[tuple[int, ...], ...] = ()
    random: bool = False  # draws random numbers
    traceable: bool = True
    only32: bool = False  # depends on float32 inputs
    traced: Apply | None = None  # the same for plain autograd, with the gradient of a trace


class SavesInput(torch.autograd.Function):
    """A custom function with one input and one output, which saves its input."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)


class Sine(SavesInput):
    """A sine, with another gradient than plain autograd's."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * x.cos() * 2


class Product(SavesInput):
    """The product of a row, with the gradient of a trace, which cannot look for zeros and divide by
    the others: the products of what is before each factor and of what is behind it.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.prod(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        before = lambda t: torch.cat([torch.ones_like(t[:, :1]), t[:, :-1]], -1).cumprod(-1)
        return grad * (before(x) * before(x.flip(-1)).flip(-1))


class Pair(torch.autograd.Function):
    """Two outputs, without materialised gradients: an unused output has the gradient None."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:  # type: ignore[override]
        parts = [g * k for g, k in ((first, 2), (second, 5)) if g is not None]
        return sum(parts[1:], parts[0]) if parts else None


def _in_place(a: Tensor, b: Tensor, p: Sequence[Tensor]) -> Tensor:
    t = a.clone()
    t.mul_(0.5).add_(b)
    return t


def _write_slice(a: Tensor, b: Tensor, p: Sequence[Tensor]) -> Tensor:
    t = a * 1.5
    t[:, 0] = b[:, 1]
    return t


def _autocast(a: Tensor, b: Tensor, p: Sequence[Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (a @ p[0]).to(a.dtype)


def _autocast_twice(a: Tensor, b: Tensor, p: Sequence[Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return ((a @ p[0]).tanh() @ p[0]).to(a.dtype)


def _inner_grad(a: Tensor, b: Tensor, p: Sequence[Tensor]) -> Tensor:
    return torch.func.grad(lambda t: (t.sin() * b).sum())(a)


def _inner_vmap(a: Tensor, b: Tensor, p: Sequence[Tensor]) -> Tensor:
    return torch.func.vmap(lambda row, other: row * other.sum() + p[0])(a, b)


def _attention(a: Tensor, b: Tensor, p: Sequence[Tensor]) -> Tensor:
    q, k, v = (a @ p[0]).chunk(3, -1)
    return F.scaled_dot_product_attention(q[None], k[None], v[None])[0] + b


def _complex(a: Tensor, b: Tensor, p: Sequence[Tensor]) -> Tensor:
    wide = a if a.dtype in (torch.float32, torch.float64) else a.float()
    return torch.view_as_real(torch.complex(wide, b.to(wide.dtype)).conj() * 1j).sum(-1).to(a.dtype)


def _remat(a: Tensor, b: Tensor, p: Sequence[Tensor]) -> Tensor:
    return fpipe.remat(lambda w, t: (t @ w).tanh().exp() - 1)(p[0], a)


def _sort(a: Tensor, b: Tensor, p: Sequence[Tensor]) -> Tensor:
    return a.sort(-1).values * b


def _gaps(a: Tensor, b: Tensor, p: Sequence[Tensor]) -> Tensor:
    return torch.cat([a, b], 1)[:, ::2]


def _mixed(a: Tensor, b: Tensor, p: Sequence[Tensor]) -> Tensor:
    return (a.double() * p[0].double()).to(a.dtype)


def _half(a: Tensor, b: Tensor, p: Sequence[Tensor]) -> Tensor:
    return (a.bfloat16() * b.bfloat16()).to(a.dtype)


def _traced_product(a: Tensor, b: Tensor, p: Sequence[Tensor]) -> Tensor:
    x = 1 + 0.1 * a
    half = torch.is_autocast_enabled("cpu") and x.dtype in (torch.bfloat16, torch.float16)
    return Product.apply(x.float() if half else x) * b  # autocast computes products in float32


W, V = (WIDTH, WIDTH), (WIDTH,)

OPERATIONS = [
    Operation("linear", lambda a, b, p: torch.tanh(a @ p[0]), (W,)),
    Operation("affine", lambda a, b, p: torch.addmm(p[1], a, p[0]) * 0.5, (W, V)),
    Operation("scale", lambda a, b, p: a * p[0], (V,)),
    Operation("shared", lambda a, b, p: (a @ p[0]).sin() @ p[0].T, (W,)),
    Operation("norm", lambda a, b, p: F.layer_norm(a, (WIDTH,), p[0], p[1]), (V, V)),
    Operation("skip", lambda a, b, p: a + b),
    Operation("gelu", lambda a, b, p: F.gelu(a) - b),
    Operation("softmax", lambda a, b, p: a.softmax(-1) * b),
    Operation("relu", lambda a, b, p: a.relu() + b.abs()),
    Operation("in_place", _in_place),
    Operation("write_slice", _write_slice),
    Operation(
        "transpose", lambda a, b, p: a.view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(a.shape) + b
    ),
    Operation("transposed_view", lambda a, b, p: a.T.contiguous().T),
    Operation("gaps", _gaps),
    Operation("expand", lambda a, b, p: (a * b).mean(1, keepdim=True).expand(a.shape)),
    Operation("sine", lambda a, b, p: Sine.apply(a)),
    Operation("pair", lambda a, b, p: Pair.apply(a)[1]),
    Operation("pairs", lambda a, b, p: Pair.apply(a)[0] + Pair.apply(b)[1]),
    Operation("inner_grad", _inner_grad),
    Operation("inner_vmap", _inner_vmap, (V,)),
    Operation("remat", _remat, (W,)),
    Operation("autocast", _autocast, (W,), only32=True),
    Operation("autocast_twice", _autocast_twice, (W,), only32=True),
    Operation("mixed", _mixed, (V,)),
    Operation("half", _half),
    Operation("detached", lambda a, b, p: a.detach() * b),
    Operation(
        "where_root",
        lambda a, b, p: torch.where(a > 0, (a * p[0].abs()).clamp_min(1e-3).sqrt(), b),
        (V,),
    ),
    Operation("cumsum", lambda a, b, p: a.cumsum(-1) / WIDTH + b),
    Operation(
        "prod",
        lambda a, b, p: (1 + 0.1 * a).prod(-1, keepdim=True) * b,
        traced=_traced_product,
    ),
    Operation("maximum", lambda a, b, p: torch.maximum(a, b) - a.amax(-1, keepdim=True)),
    Operation("sort", _sort),
    Operation("gather", lambda a, b, p: a.gather(1, b.argsort(-1))),
    Operation("roll", lambda a, b, p: a.roll(1, -1) * b),
    Operation("attention", _attention, ((WIDTH, 3 * WIDTH),)),
    Operation("complex", _complex),
    Operation("dropout", lambda a, b, p: F.dropout(a, 0.3) + b, random=True),
    Operation("noise", lambda a, b, p: a + torch.rand_like(a) * b, random=True),
    Operation("power", lambda a, b, p: (a.abs() + 0.5).pow(1.5) / (1 + math.pi * b.square())),
    Operation("if_finite", lambda a, b, p: a if bool(a.isfinite().all()) else b, traceable=False),
]
BY_NAME = {operation.name: operation for operation in OPERATIONS}

"""Comparison of results: bit for bit, or by their errors where the documentation allows other last
bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .cases import Call, Case
from .oracle import Expected, leaves_of

PARTS = ("value", "aux", "grads", "input_grads", "state", "each")
#: How many times the error of plain autograd an error may be, where bits may differ.
FACTOR = 16


def difference(result: Expected, wanted: Expected, leaf: Callable[[Any, Any], str]) -> str:
    """The first difference of two results, or "". ``leaf`` compares two tensors of one shape and
    dtype.
    """
    for name in PARTS:
        one, other = getattr(result, name), getattr(wanted, name)
        if one is None or other is None:
            continue
        found = _trees(one, other, leaf)
        if found:
            return f"{name}: {found}"
    for s, (row, others) in enumerate(zip(result.grads or (), wanted.grads or (), strict=False)):
        if [g is None for g in row] != [g is None for g in others]:
            return f"grads: stage {s} has None at other leaves than expected"
    return ""


def _trees(a: Any, b: Any, leaf: Callable[[Any, Any], str]) -> str:
    one, other = leaves_of(a), leaves_of(b)
    if len(one) != len(other):
        return f"{len(one)} leaves where {len(other)} are expected"
    for n, (x, y) in enumerate(zip(one, other, strict=True)):
        if not isinstance(y, Tensor):
            if x != y:
                return f"leaf {n} is {x!r}, expected {y!r}"
            continue
        if not isinstance(x, Tensor) or x.shape != y.shape or x.dtype != y.dtype:
            got = f"{x.dtype}{list(x.shape)}" if isinstance(x, Tensor) else repr(x)
            return f"leaf {n} is {got}, expected {y.dtype}{list(y.shape)}"
        found = leaf(x, y)
        if found:
            return f"leaf {n} {found}"
    return ""


def same_bits(x: Tensor, y: Tensor) -> str:
    """ "" for tensors of equal numbers; NaNs are equal, and so are zeros of either sign."""
    if torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num()):
        return ""
    apart = float((x.double() - y.double()).abs().nan_to_num(float("inf")).max())
    size = float(y.double().abs().nan_to_num().max())
    return f"differs by {apart:.3g} at most, of {size:.3g}"


def nearly(x: Tensor, y: Tensor) -> str:
    """ "" for tensors that another order of sums may explain."""
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}.get(x.dtype, 1e-2)
    size = float(y.abs().nan_to_num().max()) if y.numel() else 0.0
    close = torch.allclose(x, y, rtol=tolerance, atol=tolerance * max(size, 1.0), equal_nan=True)
    return "" if close else same_bits(x, y)


def within_error(
    case: Case, call: Call, plain: Expected, low: Expected, reference: Expected
) -> Callable[[Any, Any], str]:
    """A comparison of leaves by their error against ``reference``, which is float64.

    The error allowed is ``FACTOR`` times that of plain autograd. Where the case itself is float64,
    that is the error of ``low``, a run in float32, times the ratio of the precisions.
    """
    known: dict[int, tuple[Tensor, Tensor]] = {}
    for name in PARTS:
        every = [leaves_of(getattr(run, name)) for run in (plain, low, reference)]
        known |= {
            id(p): (lo, ref) for p, lo, ref in zip(*every, strict=True) if isinstance(p, Tensor)
        }
    half = call.features.get("setting", "").startswith("autocast") or any(
        step.name in ("half", "autocast", "autocast_twice")
        for b in case.model.bodies
        for step in b.steps
    )
    ratio = 2.0**-29 if case.model.dtype is torch.float64 else 1.0
    step = 2.0**-8 if half and ratio == 1.0 else torch.finfo(case.model.dtype).eps

    def leaf(x: Tensor, y: Tensor) -> str:
        if not same_bits(x, y):
            return ""
        lo, ref = known[id(y)]
        if not x.is_floating_point() or not torch.equal(x.isfinite(), y.isfinite()):
            return same_bits(x, y)
        worst = lambda a: float((a.double() - ref.double()).abs().nan_to_num().max())
        size = max(
            1.0, float(ref.double().abs().nan_to_num().max())
        )  # a small value is a sum of numbers of about 1
        allowed = FACTOR * (ratio * worst(lo) + step * size)
        return (
            ""
            if worst(x) <= allowed
            else f"has the error {worst(x):.3g}, where {allowed:.3g} is allowed"
        )

    return leaf

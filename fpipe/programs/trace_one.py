# SPDX-License-Identifier: Apache-2.0
"""``fpipe.trace``: one stage function, traced for example arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import StageError
from ..stage import Stage, as_stage
from ..tree import AbstractTree, Tree
from .cache import programs_of
from .program import Programs
from .signature import Signature


def trace(
    fn: Callable[..., Any] | Stage, params: Tree, x: Tree, /, *, state: Tree = None, **side: Tree
) -> Programs:
    """Turn a pure stage function into its four programs; cached by function, shapes, dtypes and
    devices.

    Args:
        fn: a function as for ``fpipe.pipeline``, or a ``Stage``.
        params, x: example arguments; their values do not matter.
        state: the state of a stage that carries one.
        side: its side inputs.

    Returns:
        ``Programs``: ``forward``, ``backward``, ``backward_input`` and ``backward_weight`` are
        functions, whose ``.code`` is their source.

    Raises:
        TraceError: if the function cannot be traced, with the line and a remedy.
        StageError: if the stage has ``carry=True``.

    >>> import torch
    >>> programs = trace(lambda p, x: torch.tanh(x @ p), torch.eye(2), torch.ones(1, 2))
    >>> y, saved = programs.forward(torch.eye(2), torch.ones(1, 2))
    >>> dx, dparams = programs.backward(saved, torch.ones(1, 2))
    >>> dparams.shape
    torch.Size([2, 2])
    """
    of = AbstractTree.of
    stage = as_stage(fn)
    if stage.carry:
        raise StageError(
            f"stage {stage.label} has a carry, and a trace has none; trace lambda p, x: fn(p, *x) "
            "for an input (carry, x)"
        )
    return programs_of(stage, Signature(of(params, True), of(x, True), of(side), of(state)))

# SPDX-License-Identifier: Apache-2.0
"""Functions around others: ``remat`` computes again instead of saving, a ``block`` is traced once
for many calls, and a function of modules has modes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

from torch.fx.traceback import annotate
from torch.utils.checkpoint import checkpoint

from ..stage import Elsewhere, F, Stage, check_function

#: Whether the eager engine is recording a graph, in which a part under ``remat`` must be a
#: checkpoint.
RECORDING: ContextVar[bool] = ContextVar("RECORDING", default=False)
#: Called for each call of a block while a stage is traced.
BLOCKS: ContextVar[Callable[[Block, tuple[Any, ...], dict[str, Any]], Any] | None] = ContextVar(
    "BLOCKS", default=None
)


class _Wrapper:
    """A function that calls another function in a special way."""

    def __init__(self, fn: Callable[..., Any]):
        check_function(f"what {type(self).__name__.lower()} takes", "(...)", fn)
        self.fn = fn
        self.__wrapped__ = fn
        self.__qualname__ = getattr(fn, "__qualname__", type(fn).__name__)

    def __repr__(self) -> str:
        return f"fpipe.{type(self).__name__.lower()}({self.__qualname__})"


class Remat(_Wrapper):
    """A function whose inner values are computed again in the backward instead of saved; see
    ``remat``.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if RECORDING.get():
            return checkpoint(partial(self.fn, **kwargs), *args, use_reentrant=False)
        with annotate({"fpipe_remat": object()}):
            return self.fn(*args, **kwargs)


def remat(fn: F) -> F:
    """Recompute ``fn`` in the backward: the forward saves its inputs and its random draws only.

    One recompute serves input and weight gradients. Works for a whole stage and for a part of one.

    Args:
        fn: a stage function, or a part of one.

    Returns:
        A function with the arguments and the result of ``fn``.

    >>> import torch
    >>> from fpipe import trace
    >>> programs = trace(remat(lambda p, x: torch.tanh(x @ p).exp()), torch.eye(2),
    ...     torch.ones(1, 2))
    >>> programs.saved
    ('x0', 'p0')
    """
    return cast(F, Remat(fn))


class Block(_Wrapper):
    """A function that is traced once for all its calls with equal shapes; see ``block``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handler = BLOCKS.get()
        if handler is None:
            return self.fn(*args, **kwargs)
        return handler(self, args, kwargs)


def block(fn: F) -> F:
    """Trace ``fn`` once for all its calls with arguments of equal shapes, as for the equal layers
    of a stage.

    The first trace of a stage of many layers then takes about as long as that of one layer.
    Programs and results are the same as without it. Hugging Face layers and equal modules in an
    ``nn.Sequential`` or ``nn.ModuleList`` are blocks without being named.

    Args:
        fn: a pure function whose result depends on its arguments alone, as that of a stage does. It
            may take and return any pytrees.

    Returns:
        A function with the arguments and the result of ``fn``.

    >>> import torch
    >>> from fpipe import trace
    >>> layer = block(lambda p, x: torch.tanh(x @ p))
    >>> def stage(params, x):
    ...     for p in params:
    ...         x = layer(p, x)
    ...     return x
    >>> trace(stage, [torch.eye(2)] * 3, torch.ones(1, 2)).forward.code.count("tanh(")
    3
    """
    return cast(F, Block(fn))


# ---- modes of modules ----
#: The end of the name of a stage in a mode.
_MODES = {True: " in training", False: " in evaluation"}


@runtime_checkable
class HasModes(Protocol):
    """A function that computes something else in training than in evaluation, as a module with
    dropout does.
    """

    def in_mode(self, training: bool) -> Callable[..., Any]:
        """The function in one of the two modes."""
        ...


def in_mode(stage: Stage, training: bool) -> Stage:
    """A stage in training or in evaluation. It is unchanged if its function has no modes."""
    fn = stage.fn
    inner = fn.fn if isinstance(fn, Remat) else fn
    if isinstance(inner, HasModes):
        moded = inner.in_mode(training)
        fn = Remat(moded) if inner is not fn else moded
    elif isinstance(fn, Elsewhere) and fn.moded:
        fn = replace(fn, text=fn.moded)
    else:
        return stage
    name = stage.label.removesuffix(_MODES[True]).removesuffix(_MODES[False])
    return replace(stage, fn=fn, name=name + _MODES[training])  # ranks compare names

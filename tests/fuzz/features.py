"""Features that a case composes, as rows: how often each is drawn, and its values.

``PIPELINE`` has what a whole case has, ``CALL`` what one of its calls has, and ``SETTINGS`` the
global states of torch under which a call runs. A new feature is a row here, what it does in
``session`` and, where it changes results, what it means in ``oracle``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

#: The value of each feature that a case or a call has.
Features = Mapping[str, Any]
Table = Mapping[str, tuple[float, Sequence[Any]]]

PIPELINE: Table = {
    # slices= of a model with tokens
    "slices": (0.7, (2, 4)),
    # two copies with dp=, each on other data: the value of zero=, and other options
    "copies": (0.25, (0, 1, 2, 3)),
    "reduce_dtype": (0.25, (torch.float64, torch.bfloat16)),
    "bucket_bytes": (0.3, (1, 64)),
    "unsharded": (0.3, (1,)),
    # each rank is a process of its own: fake ranks, with messages in this order
    "fakes": (0.15, ("buffered", "lockstep")),
    "outputs": (0.3, ("everywhere", "last")),
    # how gradients of microbatches are added
    "accumulate": (0.15, (torch.float64, torch.float32, torch.bfloat16)),
    "overlap": (0.15, ("sequential",)),
    "order": (0.25, ("ready", ("ready", 2), ("ready", 5))),
    # stages on several ranks: their numbers of ranks, in turns
    "replicas": (0.3, ((2, 1), (1, 3), (3, 1, 2), (2,))),
    # what parameters are
    "leaves": (0.3, ("requires a gradient", "parameter", "transposed", "flat buffer", "tuple")),
    # how stages get their first state
    "initial_state": (0.5, (True,)),
    # single leaves are frozen by a pattern, or by their stage
    "frozen_leaf": (0.15, ("pattern", "stage")),
    "tied_by_stage": (0.3, (True,)),
}

CALL: Table = {
    "argnums": (0.5, (1, (0,), (1,), (0, 1), (1, 0))),
    "without_value": (0.15, (True,)),  # fpipe.grad
    "loss_scale": (0.3, (4.0, 3.0, 2.0**15, torch.tensor(8.0))),
    "each": (0.2, (True,)),
    "seed": (0.3, (1, -1)),
    # between the call before and this one
    "before": (0.45, ("save", "move", "step", "donate", "resume state", "stream")),
    "twice": (0.15, (True,)),  # a pullback with retain=
}


def drawn(draw: random.Random, table: Table) -> dict[str, Any]:
    """Some features of a table."""
    return {
        name: draw.choice(values)
        for name, (chance, values) in table.items()
        if draw.random() < chance
    }


# ---- global state of torch ----
Context = Callable[[], AbstractContextManager[object]]


class Setting(NamedTuple):
    """A global state under which a call runs, and that under which plain autograd does."""

    call: Context
    plain: Context


@contextmanager
def _restored(
    set_value: Callable[[Any], object], get: Callable[[], Any], value: Any
) -> Iterator[None]:
    before = get()
    set_value(value)
    try:
        yield
    finally:
        set_value(before)


def _both(context: Context) -> Setting:
    return Setting(context, context)


def _default_dtype(dtype: torch.dtype) -> Setting:
    return _both(lambda: _restored(torch.set_default_dtype, torch.get_default_dtype, dtype))


_autocast = lambda dtype, **how: _both(lambda: torch.autocast("cpu", dtype, **how))

SETTINGS: dict[str, Setting] = {
    "": _both(nullcontext),
    "default float64": _default_dtype(torch.float64),
    "default bfloat16": _default_dtype(torch.bfloat16),
    "autocast bfloat16": _autocast(torch.bfloat16),
    "autocast float16": _autocast(torch.float16),
    "autocast without its cache": _autocast(torch.bfloat16, cache_enabled=False),
    "no_grad": Setting(torch.no_grad, nullcontext),
    "inference_mode": Setting(torch.inference_mode, nullcontext),
    "deterministic": _both(
        lambda: _restored(
            torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled, True
        )
    ),
    "medium precision": _both(
        lambda: _restored(
            torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, "medium"
        )
    ),
    "attention by hand": _both(
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    ),
    "device cpu": _both(lambda: torch.device("cpu")),
    "without mkldnn": _both(lambda: torch.backends.mkldnn.flags(enabled=False)),
}
#: Those of a thread; others are those of the whole process, in which fake ranks are threads.
OF_THREADS = {"", "no_grad", "inference_mode", "device cpu"}
OF_THREADS |= {name for name in SETTINGS if name.startswith("autocast")}
CALL = {**CALL, "setting": (0.3, tuple(SETTINGS))}
# microbatches of one size come from iterators
CALL = {**CALL, "late": (0.4, (True,))}

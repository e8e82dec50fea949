# SPDX-License-Identifier: Apache-2.0
"""Activation checkpoints of torch inside modules become ``fpipe.remat``.

A checkpoint runs its function again in the backward, when a module no longer has the parameters that a stage function
was called with. ``remat`` marks the function for fpipe, which plans the recomputation. Knows modules, no stages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from ..stage import RECORDING, remat

_CHECKPOINT = torch_checkpoint.checkpoint
#: Arguments of torch's function that are not its function's.
_OPTIONS = ("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state")


def places(module: nn.Module) -> list[tuple[Any, str]]:
    """Where the code of a module finds torch's ``checkpoint``: names in Python modules, and in wrappers of modules.

    >>> [name for _, name in places(nn.Linear(1, 1))]
    ['checkpoint']
    """
    homes = {cls.__module__ for part in module.modules() for cls in type(part).__mro__}
    found = [vars(torch_checkpoint)]
    found += [vars(sys.modules[home]) for home in sorted(homes) if home in sys.modules]
    out = [(names, name) for names in found for name, value in names.items() if value is _CHECKPOINT]
    wrappers = (vars(part) for part in module.modules() if type(part).__name__ == "CheckpointWrapper")
    return out + [(names, "checkpoint_fn") for names in wrappers]


@contextmanager
def as_remat(where: Sequence[tuple[Any, str]]) -> Iterator[None]:
    """Inside, the places have ``remat`` in place of ``checkpoint``."""
    before = [names[name] for names, name in where]
    for names, name in where:
        names[name] = _recomputed
    try:
        yield
    finally:
        for (names, name), value in zip(where, before, strict=True):
            names[name] = value


def _recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What torch's ``checkpoint`` returns; on autograd without recomputation, which would use other parameters."""
    keywords = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
    run = partial(function, **keywords)
    return run(*args) if RECORDING.get() else remat(run)(*args)

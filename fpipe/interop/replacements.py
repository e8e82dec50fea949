# SPDX-License-Identifier: Apache-2.0
"""Replaces what of torch's is in a module while it runs as a stage: checkpoints, compiled code.

A checkpoint runs its function again in the backward, when a module no longer has the parameters
that a stage function was called with. ``remat`` marks the function for fpipe, which plans the
recomputation. Compiled code cannot be traced: the code that was compiled runs, and the programs of
the stage may be compiled instead. Knows modules, no stages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from ..programs import RECORDING, remat
from ..tree import Tree

_CHECKPOINT = torch_checkpoint.checkpoint
#: Arguments of torch's function that are not its function's.
_OPTIONS = (
    "use_reentrant",
    "context_fn",
    "determinism_check",
    "debug",
    "early_stop",
    "preserve_rng_state",
)
#: The attribute of a module that ``module.compile()`` sets.
_COMPILED = "_compiled_call_impl"


class Replacement(NamedTuple):
    """A name in the namespace of a Python module or of a torch module, and what it stands for."""

    namespace: dict[str, Any]
    name: str
    value: object


def replacements(module: nn.Module) -> list[Replacement]:
    """Return what is replaced in a module: torch's ``checkpoint``, its wrapper, and compiled
    modules.

    >>> [replacement.name for replacement in replacements(nn.Linear(1, 1))]
    ['checkpoint']
    """
    homes = {cls.__module__ for part in module.modules() for cls in type(part).__mro__}
    spaces = [sys.modules[home].__dict__ for home in sorted(homes) if home in sys.modules]
    result = [
        Replacement(names, name, _recomputed)
        for names in (torch_checkpoint.__dict__, *spaces)
        for name, value in names.items()
        if value is _CHECKPOINT
    ]
    for part in module.modules():
        if type(part).__name__ == "CheckpointWrapper":
            result.append(Replacement(vars(part), "checkpoint_fn", _recomputed))
        if type(part).__name__ == "OptimizedModule":
            result.append(Replacement(vars(part), "forward", next(part.children())))
        if vars(part).get(_COMPILED) is not None:
            result.append(Replacement(vars(part), _COMPILED, None))
    return result


def has_compiled(replacements: Sequence[Replacement]) -> bool:
    """Return whether a compiled module is among them."""
    return any(name in ("forward", _COMPILED) for _, name, _ in replacements)


@contextmanager
def replaced(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Return a context in which the names stand for their replacements."""
    before = [namespace[name] for namespace, name, _ in replacements]
    for namespace, name, value in replacements:
        namespace[name] = value
    try:
        yield
    finally:
        for (namespace, name, _), value in zip(replacements, before, strict=True):
            namespace[name] = value


def _recomputed(function: Callable[..., Tree], *args: Tree, **kwargs: Tree) -> Tree:
    """Run what torch's ``checkpoint`` is given.

    On autograd nothing is recomputed: it would be with other parameters.
    """
    keywords = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
    run = partial(function, **keywords)
    if RECORDING.get():
        return run(*args)
    return remat(run)(*args)

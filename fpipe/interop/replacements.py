# SPDX-License-Identifier: Apache-2.0
"""What of torch's inside modules is replaced while a module runs as a stage: checkpoints and
compiled code.

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

from ..stage import RECORDING, remat

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
    """A name in the namespace of a Python module, or of the instance of a torch module, and what it
    stands for.
    """

    names: Any
    name: str
    value: Any


def replacements(module: nn.Module) -> list[Replacement]:
    """What is replaced in a module: names for torch's ``checkpoint``, wrappers of modules, and
    compiled modules.

    >>> [found.name for found in replacements(nn.Linear(1, 1))]
    ['checkpoint']
    """
    homes = {cls.__module__ for part in module.modules() for cls in type(part).__mro__}
    spaces = [
        vars(torch_checkpoint),
        *(vars(sys.modules[home]) for home in sorted(homes) if home in sys.modules),
    ]
    out = [
        Replacement(names, name, _recomputed)
        for names in spaces
        for name, value in names.items()
        if value is _CHECKPOINT
    ]
    for part in module.modules():
        if type(part).__name__ == "CheckpointWrapper":
            out.append(Replacement(vars(part), "checkpoint_fn", _recomputed))
        if type(part).__name__ == "OptimizedModule":
            out.append(Replacement(vars(part), "forward", next(part.children())))
        if vars(part).get(_COMPILED) is not None:
            out.append(Replacement(vars(part), _COMPILED, None))
    return out


def has_compiled(found: Sequence[Replacement]) -> bool:
    """Whether a compiled module is among them."""
    return any(name in ("forward", _COMPILED) for _, name, _ in found)


@contextmanager
def replaced(found: Sequence[Replacement]) -> Iterator[None]:
    """Inside, the names stand for their replacements."""
    before = [names[name] for names, name, _ in found]
    for names, name, value in found:
        names[name] = value
    try:
        yield
    finally:
        for (names, name, _), value in zip(found, before, strict=True):
            names[name] = value


def _recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What torch's ``checkpoint`` returns; on autograd without recomputation, which would use other
    parameters.
    """
    keywords = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
    run = partial(function, **keywords)
    return run(*args) if RECORDING.get() else remat(run)(*args)

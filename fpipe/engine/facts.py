# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a pipeline must agree on for a call, as text by name.

Functions are compared by their names and code. The values in their closures and defaults are not
compared: they may be tensors or differ legitimately. Parameters, batches and side inputs are
compared by shape, where every rank has them. Knows configurations and requests; no group and no
plan.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType
from typing import Any

import torch

from .. import __version__
from ..collectives.group import Facts
from ..programs.internals import STATE, ambient
from ..stage import Elsewhere, Stage
from ..tree import AbstractTree, Aval, Static
from .config import Config
from .microbatches import Absent
from .request import Request

#: Facts that are compared only where a rank has no plans and another has: ranks may differ in them
#: from the start.
_UNSHARED = ("the strides of x", "plans")


def facts(config: Config, request: Request) -> dict[str, str | None]:
    """What depends on the pipeline and on the signature of the call."""
    schedule = request.schedule
    stages = config.functions
    loss = config.loss
    python = ".".join(map(str, sys.version_info[:2]))
    xs = [kind.x for kind in request.kinds]
    targets = [target for kind in request.kinds for target in kind.targets]
    strides = [[leaf.stride for leaf in x.leaves if isinstance(leaf, Aval)] for x in xs]
    kinds = str(request.kind_of) if len(request.kinds) > 1 else "(one)"
    reduction = config.reduction
    if not isinstance(reduction, str):
        reduction = f"weighted by {named(reduction.fn)}"
    elsewhere = any(isinstance(stage.fn, Elsewhere) for stage in stages)
    return {
        "versions": f"Python {python}, fpipe {__version__}, torch {torch.__version__}",
        "call": f"{request.mode}, argnums {'0 and 1' if request.wants_dx else '0'}, "
        f"has_aux={request.has_aux}" + (", each=" if request.each else ""),
        "microbatches": str(schedule.microbatches),
        "slices": str(schedule.slices),
        "schedule": f"{schedule.name or 'a schedule'} of {schedule.stages} stages "
        f"({schedule.digest})",
        "the kinds of microbatches": None if any(map(_unknown, (*xs, *targets))) else kinds,
        "the shape of x": _shapes(xs),
        "the shapes of the targets": _shapes(targets),
        "the loss function": "none" if loss is None else named(loss),
        "the stage functions": _parts([named(stage) for stage in stages]),
        "the reduction": reduction,
        "tied parameters": str(config.tied),
        "frozen parameters": None if elsewhere else str(config.frozen),
        "the dtype of accumulation": str(config.accumulate),
        "the engine of the stages": _parts([str(stage.engine) for stage in stages]),
        "the engine of the loss": str(loss.engine) if isinstance(loss, Stage) else "trace",
        "compile=": _parts([str(stage.compile) for stage in stages]),
        "outputs=": config.outputs,
        "options of passes": str(list(config.more)),
        "copies": "none" if config.copies is None else config.copies.description,
        "overlap": config.overlap,
        "autocast": ", ".join(f"{device}: {dtype}" for device, dtype in ambient()) or "off",
        # ranks may have devices of other numbers
        "the state of torch": "; ".join(
            f"{get.__name__}() is {str(get()).partition(':')[0]}" for get in STATE
        ),
        "debug()": "on" if request.debug else "off",
        "the strides of x": "; ".join(map(str, strides)),
    }


def of_call(
    known: Facts, seed: int | None, loss_scale: float | None, plans: str
) -> dict[str, str | None]:
    """The facts of one call: those of its signature, its seed and loss scale, and which plans it
    runs.
    """
    return {**known, "the seed": str(seed), "loss_scale=": str(loss_scale), "plans": plans}


def shared(call: Facts) -> dict[str, str | None]:
    """The facts that must be equal also before any rank has plans."""
    return {name: text for name, text in call.items() if name not in _UNSHARED}


def named(function: Callable[..., Any]) -> str:
    """A function as text that is the same in every process: its name, and a digest of its code.

    >>> named(lambda x: x + 1) == named(lambda x: x + 1), named(lambda x: x + 1) == named(
    ...     lambda x: x + 2)
    (True, False)
    """
    if isinstance(function, Elsewhere):
        return function.text
    if isinstance(function, Stage):
        options = [name for name in ("aux_loss", "state", "carry") if getattr(function, name)]
        return " ".join([function.name, named(function.fn), *options]).lstrip()
    if isinstance(function, partial):
        return f"partial of {named(function.func)}"
    named_by = function
    code = _code(function)
    if code is None:
        named_by = type(function)
        method = "forward" if isinstance(function, torch.nn.Module) else "__call__"
        code = _code(getattr(named_by, method))
    text = named_by.__qualname__.rpartition("<locals>.")[2]
    if code is not None:
        text += f" ({hashlib.sha256(_text(code).encode()).hexdigest()[:8]})"
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return text
    return f"{text} of {named(inner)}"


def _code(function: Any) -> CodeType | None:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if isinstance(code, CodeType):
        return code
    return None


def _text(value: object) -> str:
    """A constant of a function as text without addresses; sets have no order."""
    if isinstance(value, CodeType):
        return (
            f"{value.co_code.hex()} {value.co_names} {value.co_freevars} "
            f"{[_text(v) for v in value.co_consts]}"
        )
    if isinstance(value, frozenset):
        return str(sorted(map(repr, value)))
    return repr(value)


def _unknown(tree: AbstractTree) -> bool:
    """Whether it stands for an argument that is elsewhere and that no process has described yet."""
    return any(isinstance(leaf, Static) and leaf.type is Absent for leaf in tree.leaves)


def _parts(texts: Sequence[str]) -> str:
    """One part per stage, of which an error names the first that differs."""
    return "; ".join(f"stage {stage}: {text}" for stage, text in enumerate(texts))


def _shapes(trees: Sequence[AbstractTree]) -> str | None:
    rows = [[leaf for leaf in tree.leaves if isinstance(leaf, Aval)] for tree in trees]
    if not any(rows) or any(map(_unknown, trees)):
        return None
    return "; ".join(", ".join(map(str, row)) for row in rows)

# SPDX-License-Identifier: Apache-2.0
"""The outputs of stages, found before the stages are traced, so that all processes trace at once.

A stage is traced for the output of the stage before it, which may be in another process. A run on
tensors without data finds the output in a tenth of the time of a trace, so processes take turns for
this alone. Knows no plan.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..errors import MismatchError
from ..lowering.value_graph import Interface
from ..programs.internals import PLAIN
from ..programs.signature import Signature
from ..programs.tracing import returned
from .config import Config
from .kinds import Traced, TracedKind, exchange, trace_stage


def previewed(config: Config, kinds: Traced, note: Callable[[str], None]) -> Traced:
    """The kinds with an interface for each stage, which may have nothing but the output."""
    with PLAIN.mode():
        pass  # the first time it imports what tracing needs, which takes a process a second
    while (known := min(len(kind.interfaces) for kind in kinds)) < config.stages:
        kinds, changed = exchange(config, partial(_next_outputs, note), kinds)
        if not changed:
            raise MismatchError(
                f"no process reported what stage {known} returns; every process must run the same "
                "pipeline"
            )
    return kinds


def _next_outputs(note: Callable[[str], None], known: Traced) -> Traced:
    """Find the outputs of the next stages, up to the first that is on another process."""
    found: Traced = []
    for kind in known:
        previous = found[-1] if kind.slice else None
        stages = kind.config.stages
        for stage in range(len(kind.interfaces), stages):
            if not kind.ranks_here(stage):
                break
            note(f"the output of stage {stage + 1} of {stages}")
            kind = _with_output(kind, previous, stage)
        found.append(kind)
    return found


def _with_output(kind: TracedKind, previous: TracedKind | None, stage: int) -> TracedKind:
    """The kind with the output of a stage. The stage is traced where there is no other way."""
    function = kind.config.functions[stage]
    params = kind.request.params[stage]
    y = None
    if params is not None and function.engine == "trace" and not function.carry:
        device = kind.config.group.device(kind.ranks_here(stage)[0])
        trees = (params, kind.input_of(stage), *kind.sides_and_state(stage))
        y = returned(function, Signature(*(tree.on(device) for tree in trees)))
    if y is None:
        return trace_stage(kind, previous, stage)
    return kind.updated({stage: Interface(y, (), (), (), (), ())})

# SPDX-License-Identifier: Apache-2.0
"""Programs compiled by a backend of torch.compile, for ``compile=``."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from ..devices import kind
from ..programs.operations import fill
from ..programs.program import Program, Programs
from ..stage import Stage


def compiled(programs: Programs, backend: str) -> Programs:
    """The same programs, compiled by ``backend`` ("inductor", "aot_eager", ...) at their first
    calls.
    """
    by_letter = programs.f, programs.b, programs.i, programs.w
    f, b, i, w = (_compiled(program, backend) for program in by_letter)
    return replace(programs, f=f, b=b, i=i, w=w, compiled=True, origin=None)


def _compiled(program: Program, backend: str) -> Program:
    if not program.operations:
        return program
    graph = fx.Graph()
    env = {name: graph.placeholder(name) for name in program.inputs}
    env |= {name: graph.get_attr(name) for name in program.constants}
    for operation in program.operations:
        args = fill(operation.args, env)
        kwargs = fill(operation.kwargs, env)
        env[operation.name] = graph.call_function(operation.target, args, kwargs)
    graph.output(tuple(env[name] for name in program.outputs))
    # Some compilers cache by code object, so every program has one of its own.
    module = fx.GraphModule(dict(program.constants), graph)
    inner = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)

    def run(inputs: list[Any]) -> tuple[object, ...]:
        args = tuple(inputs)
        inputs.clear()
        out = inner(*args)
        assert len(out) == len(program.outputs)
        return tuple(out)

    return replace(program, run=run)


def without_unsafe_compilers(
    stages: Sequence[Stage], devices: Iterable[torch.device], stacklevel: int
) -> tuple[Stage, ...]:
    """The stages, without a compiler and with a warning where torch.compile is known to fail on the
    devices.

    >>> devices = [torch.device("xpu", 0), torch.device("cpu")]
    >>> [stage.compile for stage in without_unsafe_compilers([Stage(max, compile="inductor")],
    ...     devices, 2)]
    ['inductor']
    """
    compilers = [stage.compile for stage in stages if stage.compile]
    type = _distrusted(devices) if compilers else None
    if type is None:
        return tuple(stages)
    warnings.warn(
        f"compile={compilers[0]!r} is left out: where several devices of type {type!r} are at "
        "work torch.compile is "
        "not trusted; the programs run as they were traced. Leave compile= out, or use one device",
        stacklevel=stacklevel + 1,
    )
    return tuple(replace(stage, compile=None) for stage in stages)


def _distrusted(devices: Iterable[torch.device]) -> str | None:
    """The type of the given devices on which torch.compile is not trusted, since several are used,
    here or elsewhere.
    """
    others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    counts = Counter(device.type for device in set(devices))
    return next(
        (type for type, n in counts.items() if (others or n > 1) and not kind(type).compile_many),
        None,
    )

# SPDX-License-Identifier: Apache-2.0
"""Programs compiled by a backend of torch.compile, for ``compile=``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..programs.operations import fill
from ..programs.program import Program, Programs


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

# SPDX-License-Identifier: Apache-2.0
"""Programs compiled by a backend of torch.compile, for ``compile=``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..programs.program import Program, Programs, fill


def compiled(programs: Programs, backend: str) -> Programs:
    """The same programs, compiled by ``backend`` ("inductor", "aot_eager", ...) at their first
    calls.
    """
    f, b, i, w = (
        _compiled(each, backend) for each in (programs.f, programs.b, programs.i, programs.w)
    )
    return replace(programs, f=f, b=b, i=i, w=w, compiled=True, origin=None)


def _compiled(program: Program, backend: str) -> Program:
    if not program.operations:
        return program
    graph = fx.Graph()
    env = {name: graph.placeholder(name) for name in program.inputs}
    env |= {name: graph.get_attr(name) for name in program.constants}
    for one in program.operations:
        env[one.name] = graph.call_function(one.target, fill(one.args, env), fill(one.kwargs, env))
    graph.output(tuple(env[name] for name in program.outputs))
    # Some compilers cache by code object, so every program has one of its own.
    module = fx.GraphModule(dict(program.constants), graph)
    inner = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)

    def run(box: list[Any]) -> tuple[Any, ...]:
        args = tuple(box)
        box.clear()
        out = inner(*args)
        assert len(out) == len(program.outputs)
        return tuple(out)

    return replace(program, run=run)

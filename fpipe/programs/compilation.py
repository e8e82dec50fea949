# SPDX-License-Identifier: Apache-2.0
"""Compiles a program with one of torch's compilers; inputs, outputs and names stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..errors import StageError
from .program import Program


def compiled(program: Program, constants: Mapping[str, Any], backend: str) -> Program:
    """The same program, compiled by ``backend`` ("inductor", "aot_eager", ...) at its first call."""
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise StageError(f"compile={backend!r} is no compiler that torch knows; choose from {known}")
    if not program.nodes:
        return program
    # Some compilers cache by code object, so every program has one of its own.
    inner = torch.compile(_module(program, constants), backend=backend, fullgraph=True, dynamic=False)

    def run(box: list[Any]) -> tuple[Any, ...]:
        args = tuple(box)
        box.clear()
        out = inner(*args)
        assert len(out) == len(program.outputs)
        return tuple(out)

    return replace(program, run=run)


def _module(program: Program, constants: Mapping[str, Any]) -> Callable[..., Any]:
    graph = fx.Graph()
    env: dict[str, fx.Node] = {name: graph.placeholder(name) for name in program.inputs}
    root = torch.nn.Module()
    for name, value in constants.items():
        if isinstance(value, torch.Tensor):
            root.register_buffer(name, value, persistent=False)
        else:
            setattr(root, name, value)
        env[name] = graph.get_attr(name)
    for node in program.nodes:
        env[node.name] = graph.node_copy(node, lambda used: env[used.name])
    graph.output(tuple(env[name] for name in program.outputs))
    return fx.GraphModule(root, graph)

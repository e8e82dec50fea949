# SPDX-License-Identifier: Apache-2.0
"""The forward of a module as a ``torch.fx`` graph whose nodes are its submodules and what happens between them.

A submodule without a cut inside is one node, whatever it computes. This module must not know parameters or stages.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Iterator, Sequence
from types import FrameType

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError

from ..errors import StageError

#: Functions that make a tensor out of sizes: by itself fx does not record a call of them with proxies.
_FACTORIES = (torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.zeros)
_TRACE_ERRORS = (TraceError, TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError)
_STRAIGHT = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)


def forward_graph(module: nn.Module, cuts: Sequence[str], side: Sequence[str]) -> fx.Graph:
    """Record a forward; its placeholders are the first argument and those that ``side`` names or have no default."""
    inputs = [
        p
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    unknown = set(side) - {p.name for p in inputs[1:]}
    if unknown or not inputs:
        raise StageError(
            f"side={sorted(unknown)} are no arguments of {type(module).__name__}.forward beyond its first one; "
            f"it has {', '.join(p.name for p in inputs[1:]) or 'none'}"
        )
    fixed = {p.name: p.default for p in inputs[1:] if p.default is not p.empty and p.name not in side}
    try:
        graph = _Tracer(cuts).trace(module, concrete_args=fixed)
    except _TRACE_ERRORS as error:
        raise StageError(
            f"the forward of {type(module).__name__} cannot be read as a chain of its submodules ({error}); keep what "
            "depends on values inside submodules, or write the stages as functions "
            "(fpipe.interop.huggingface.stages cuts transformers models)"
        ) from error
    for node in graph.nodes:
        if node.target in _FACTORIES:  # a graph's code finds functions of torch without torch.fx.wrap
            node.meta.pop("is_wrapped", None)
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        if str(node.target).lstrip("*") in fixed or str(node.target).startswith("*"):
            _remove(graph, node)
    return graph


def _remove(graph: fx.Graph, node: fx.Node) -> None:
    """Remove an argument that has its default value, and fx's checks that it still has it."""
    for user in list(node.users):
        _remove(graph, user)
    graph.erase_node(node)


class _Tracer(fx.Tracer):
    """Traces the modules that contain a cut, and takes every other one as a single node."""

    proxy_buffer_attributes = True

    def __init__(self, cuts: Sequence[str]):
        super().__init__(autowrap_functions=_FACTORIES)
        self._autowrap_search.append(torch)  # where fx looks for them, beside the globals of the forward
        self.traced = {cut.rsplit(".", up)[0] for cut in cuts for up in range(1, cut.count(".") + 1)}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self.traced

    def to_bool(self, obj: fx.Proxy) -> bool:
        frame = inspect.currentframe()
        while frame is not None and frame.f_globals.get("__name__", "").startswith(("torch.fx", __name__)):
            frame = frame.f_back
        value = None if frame is None else _passing_value(frame)
        return super().to_bool(obj) if value is None else value


# ---- checks in a forward ---------------------------------------------------------------------------------------------


def _passing_value(frame: FrameType) -> bool | None:
    """The value with which the test that a frame evaluates does not raise; None if it decides anything else.

    An assertion about sizes, or ``if ...: raise``, is no choice between two computations, so it may be assumed to pass.
    """
    span = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    blocks = (getattr(node, name, None) for node in ast.walk(tree) for name in ("body", "orelse", "finalbody"))
    for block in (block for block in blocks if isinstance(block, list)):
        for index, statement in enumerate(block):
            # Python 3.11 reports the span of the statement, later versions that of the test
            conditions = _conditions(statement, block[index + 1 :])
            values = {value for test, value in conditions if span in (_span(test), _span(statement))}
            if len(values) == 1:
                return values.pop()
    return None


def _conditions(statement: ast.stmt, following: Sequence[ast.stmt]) -> Iterator[tuple[ast.expr, bool]]:
    """The conditions of a statement that does nothing but raise for some, each with the value that does not raise."""
    if isinstance(statement, ast.Assert):
        yield from _tests(statement.test, True)
    elif isinstance(statement, ast.If) and _raises(statement.body):
        yield from _tests(statement.test, False)
    elif isinstance(statement, ast.If) and _raises(statement.orelse or following):
        yield from _tests(statement.test, True)


def _raises(block: Sequence[ast.stmt]) -> bool:
    return isinstance(next((s for s in block if not isinstance(s, _STRAIGHT)), None), ast.Raise)


def _tests(test: ast.expr, value: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The conditions that a test combines, each with the value that lets the whole have its value."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _tests(test.operand, not value)
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _tests(part, value)
    else:
        yield test, value


def _span(node: ast.stmt | ast.expr) -> tuple[int, int | None, int, int | None]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset

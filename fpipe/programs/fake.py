# SPDX-License-Identifier: Apache-2.0
"""Fake tensors, ``make_fx`` and functionalization: everything that fpipe uses of torch's private tracing.

Works on torch 2.11 to 2.15 (``tests/programs/test_fake.py``). Knows abstract tensors and graphs, no stages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.traceback import preserve_node_meta

from ..tree import AbstractTree, Aval
from .internals import mutates, operator_of

#: Errors of operations on fake tensors whose result depends on data.
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
#: The error of an operation that has no implementation for fake tensors.
NO_FAKE = UnsupportedOperatorException


def mode() -> FakeTensorMode:
    """A mode in which tensors have no data. Captured real tensors may enter it as constants."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(value: object) -> TypeGuard[FakeTensor]:
    """Whether a value is a tensor without data."""
    return isinstance(value, FakeTensor)


@contextmanager
def quiet() -> Iterator[None]:
    """Disable torch's log of operations that fail on fake tensors: the exception has the same text."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def empty(aval: Aval) -> torch.Tensor:
    """A fake tensor of an aval; call inside ``mode()``."""
    tensor = aval.build(lambda a: torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device=a.device))
    return tensor.requires_grad_(aval.grad and aval.differentiable)


def inputs(trees: Iterable[AbstractTree]) -> list[list[Any]]:
    """The flat leaves of abstract trees, with fake tensors; call inside ``mode()``."""
    return [abstract.map(empty) for abstract in trees]


def make_graph(fn: Callable[..., Any], flat: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Record what ``fn`` does to tensors as a graph without mutations; one placeholder for each tensor."""
    for tensor in flat:
        tensor.grad = None
    with preserve_node_meta():
        graph = make_fx(fn, _allow_non_fake_inputs=True)(*flat)
    if any(op is not None and mutates(op) for op in map(operator_of, graph.graph.nodes)):
        annotated = any("custom" in node.meta for node in graph.graph.nodes)
        # Run node by node, the graph passes annotations on to the nodes recorded from them.
        again = (lambda *args: fx.Interpreter(graph).run(*args)) if annotated else graph
        functional = torch.func.functionalize(again, remove="mutations")
        with torch.no_grad(), preserve_node_meta():
            graph = make_fx(functional, _allow_non_fake_inputs=True)(*(t.detach() for t in flat))
    return graph

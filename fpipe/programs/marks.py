# SPDX-License-Identifier: Apache-2.0
"""Names for parts of a function that its backward carries too.

A forward operation is annotated by torch. The backward runs later, from autograd's nodes, whose
sequence numbers ascend in the order of their creation: the numbers between begin and end of a part
are that part's. Knows no stages or graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch
from torch.autograd.graph import Node
from torch.fx import traceback

MARK = "fpipe_segment"
Marks = list[
    tuple[int, int, str]
]  # first number, the one after the last, name; inner marks before outer ones

_MARKS: ContextVar[Marks | None] = ContextVar("_MARKS", default=None)


@contextmanager
def collecting() -> Iterator[Marks]:
    """Collect the marks set inside."""
    marks: Marks = []
    token = _MARKS.set(marks)
    try:
        yield marks
    finally:
        _MARKS.reset(token)


@contextmanager
def marked(name: str) -> Iterator[None]:
    """Mark what is computed inside."""
    marks = _MARKS.get()
    first = _next_number()
    with traceback.annotate({MARK: name}):
        yield
    if marks is not None:
        marks.append((first, _next_number(), name))


def _next_number() -> int:
    """The sequence number of the next of autograd's nodes."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def followed(ends: Sequence[torch.Tensor], marks: Marks) -> Iterator[None]:
    """While the gradients of ``ends`` are traced, mark every backward operation like its forward
    operation.
    """
    if not marks:
        yield
        return
    seen: set[Node] = set()
    stack = [end.grad_fn for end in ends]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        number = node._sequence_nr()
        node.register_prehook(
            partial(_annotate, next((name for a, b, name in marks if a <= number < b), None))
        )
        stack += [upper for upper, _ in node.next_functions]
    try:
        yield
    finally:
        _annotate(None)


def _annotate(name: str | None, *grads: object) -> None:
    if name is None:
        traceback.current_meta.pop("custom", None)
    else:
        traceback.current_meta["custom"] = {MARK: name}

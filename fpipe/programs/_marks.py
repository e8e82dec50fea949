"""Marks on parts of a function that its backward carries too.

A forward operation is marked by torch's own annotation. The backward runs later, from autograd's nodes, which are
numbered in the order in which they were made: what a mark's numbers enclose is its own. Knows no stage and no graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.fx import traceback

MARK = "fpipe_segment"
Marks = list[tuple[int, int, str]]  # first number, the one after the last, name; inner marks before outer ones

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
    first = _number()
    with traceback.annotate({MARK: name}):
        yield
    if marks is not None:
        marks.append((first, _number(), name))


def _number() -> int:
    """That of the next of autograd's nodes."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def followed(ends: Sequence[torch.Tensor], marks: Marks) -> Iterator[None]:
    """While the gradients of ``ends`` are traced, mark every backward operation as its forward was."""
    if not marks:
        yield
        return
    seen: set[Any] = set()
    stack = [end.grad_fn for end in ends]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        number = node._sequence_nr()
        name = next((name for first, stop, name in marks if first <= number < stop), None)
        node.register_prehook(_setter(name))
        stack += [upper for upper, _ in node.next_functions]
    try:
        yield
    finally:
        traceback.current_meta.pop("custom", None)


def _setter(name: str | None) -> Any:
    def hook(grads: Any) -> None:
        if name is None:
            traceback.current_meta.pop("custom", None)
        else:
            traceback.current_meta["custom"] = {MARK: name}

    return hook

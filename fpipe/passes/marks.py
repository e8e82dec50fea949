# SPDX-License-Identifier: Apache-2.0
"""Names for parts of a function that its backward carries too.

A forward operation is annotated by torch. The backward runs later, from autograd's nodes, whose
sequence numbers ascend in the order of their creation: the numbers between begin and end of a part
are that part's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.autograd.graph import Node
from torch.fx import traceback

from ..programs.signature import RUNNING
from ..programs.tracing import MARK


@contextmanager
def marked(name: str) -> Iterator[None]:
    """Mark what a stage computes inside."""
    first = _next_number()
    now = RUNNING.get()
    with traceback.annotate({MARK: name}):
        yield
    if now is not None:
        now.marks.append((first, _next_number(), name))


def _next_number() -> int:
    """The sequence number of the next of autograd's nodes."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def followed(ends: Sequence[torch.Tensor], marks: Sequence[tuple[int, int, str]]) -> Iterator[None]:
    """While the gradients of ``ends`` are traced, mark every backward operation like its forward
    operation.
    """
    seen: set[Node] = set()
    stack = [end.grad_fn for end in ends]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        number = node._sequence_nr()
        name = next((name for first, end, name in marks if first <= number < end), None)
        node.register_prehook(partial(_annotate, name))
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

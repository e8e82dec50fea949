# SPDX-License-Identifier: Apache-2.0
"""The interfaces of all stages for new sizes, as the sizes of earlier calls let expect them.

A new length then needs no exchange of interfaces, stage after stage: every rank traces its stages
for the expected interfaces, and the ranks confirm them in one message. An expectation may be wrong;
whoever uses it checks it. Knows numbers and interfaces; no groups or programs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

from ...collectives.codec import encode
from ...engine.config import Config
from ...engine.interfaces import as_data
from ...engine.kinds import TracedKind, trace_stage, with_loss
from ...engine.prepare import Prepared
from ...engine.request import MicrobatchKind, Request
from ...errors import FpipeError
from ...lowering.value_graph import Interface
from ...programs.signature import without_sizes
from ...tree import AbstractTree, Aval, contiguous
from .replacing import replaced

#: The inputs of a pipeline for one kind of microbatch, and the interfaces of its stages.
Seen: TypeAlias = tuple[Sequence[AbstractTree], tuple[Interface, ...]]
#: How many earlier kinds are looked at.
SEEN = 6


class UnexpectedError(Exception):
    """Earlier calls do not say what to expect, or a stage has another interface."""


def expected(inputs: Sequence[AbstractTree], seen: Sequence[Seen]) -> tuple[Interface, ...]:
    """The interfaces to expect for inputs, where two kinds are known that differ in sizes alone.

    Each number is that of an axis of the inputs, or grows evenly with one.

    >>> import torch
    >>> x = lambda n: [AbstractTree.of(torch.ones(n, 3))]
    >>> y = lambda n: (Interface(AbstractTree.of(torch.ones(2 * n + 1)), (None,), (None,), (True,),
    ...     (True,), (True,)),)
    >>> expected(x(9), [(x(4), y(4)), (x(6), y(6))])[0].y.leaves[0].shape
    (19,)
    """
    wanted = _skeleton((inputs, seen[-1][1]))
    alike = [each for each in seen[-SEEN:] if _skeleton(each) == wanted]
    if len(alike) < 2:
        raise UnexpectedError
    columns = zip(*(_numbers(each) for each, _ in alike), _numbers(inputs), strict=True)
    varying = sorted({column for column in columns if len(set(column[:-1])) > 1})
    rows = zip(*(_avals(interfaces) for _, interfaces in alike), strict=True)
    following = iter([_aval(row, varying) for row in rows])
    return replaced(alike[-1][1], Aval, lambda _: next(following))


def _aval(row: Sequence[Aval], columns: Sequence[tuple[int, ...]]) -> Aval:
    """The abstract tensor that follows those of earlier kinds."""
    shapes = zip(*(aval.shape for aval in row), strict=True)
    shape = tuple(_number(sizes, columns) for sizes in shapes)
    stride = contiguous(shape)
    if any(aval.stride != contiguous(aval.shape) for aval in row):
        strides = zip(*(aval.stride for aval in row), strict=True)
        stride = tuple(_number(steps, columns) for steps in strides)
    return row[-1]._replace(shape=shape, stride=stride)


def _number(before: Sequence[int], columns: Sequence[tuple[int, ...]]) -> int:
    """The number that follows earlier ones; each column has the sizes of an axis for these, and the
    new one.
    """
    if len(set(before)) == 1:
        return before[0]
    for *sizes, new in columns:
        if list(before) == sizes:
            return new
    for *sizes, new in columns:
        one = sizes.index(next(size for size in sizes if size != sizes[-1]))
        rise = before[-1] - before[one]
        run = sizes[-1] - sizes[one]
        even = all(
            (number - before[-1]) * run == rise * (size - sizes[-1])
            for number, size in zip(before, sizes, strict=True)
        )
        step, rest = divmod(rise * (new - sizes[-1]), run)
        if even and not rest:
            return before[-1] + step
    raise UnexpectedError


# ---- the numbers of trees and interfaces ----
def _numbers(trees: Sequence[AbstractTree]) -> list[int]:
    return [number for aval in _avals(trees) for number in (*aval.shape, *aval.stride)]


def _avals(value: object) -> list[Aval]:
    """The abstract tensors of trees and interfaces."""
    avals: list[Aval] = []

    def collected(aval: Aval) -> Aval:
        avals.append(aval)
        return aval

    replaced(value, Aval, collected)
    return avals


def _skeleton(each: Seen) -> object:
    """Everything but the numbers."""
    return replaced(each, Aval, without_sizes)


# ---- stages for expected interfaces ----
def digest(kinds: list[TracedKind] | None) -> str | None:
    """A digest of predicted interfaces. The prediction holds if every rank has the same one."""
    if kinds is None:
        return None
    data = as_data([kind.interfaces for kind in kinds])
    return hashlib.sha256(encode(data)).hexdigest()


def predict(
    config: Config, request: Request, before: Sequence[Prepared]
) -> list[TracedKind] | None:
    """Trace the stages of this process for the interfaces that earlier calls let expect.

    Returns None where they let expect nothing.
    """
    seen = [
        ((kind.x, *kind.targets), found)
        for each in before
        if each.request.mode == request.mode
        for kind, found in zip(each.request.kinds, each.interfaces, strict=True)
    ]
    if len(seen) < 2 or request.chain > 1:
        return None
    try:
        return [_expected(config, request, kind, seen) for kind in request.kinds]
    except (FpipeError, UnexpectedError):
        return None  # the exchange of interfaces, which follows, raises what is a mistake


def _expected(
    config: Config, request: Request, kind: MicrobatchKind, seen: Sequence[Seen]
) -> TracedKind:
    """A kind of microbatch with the interfaces that are expected, and with the stages of this
    process.
    """
    interfaces = expected((kind.x, *kind.targets), seen)
    traced = TracedKind(config, request, kind, interfaces)
    for stage, interface in enumerate(interfaces):
        if traced.ranks_here(stage):
            unused = frozenset(j for j in interface.y.wanted if not interface.dys[j])
            traced = trace_stage(traced, None, stage, unused)
    if config.loss is not None:
        traced = with_loss(traced)
    lacking = request.mode != "forward" and traced.graph.lacks_cotangents()
    if traced.interfaces != interfaces or lacking:
        raise UnexpectedError
    return traced

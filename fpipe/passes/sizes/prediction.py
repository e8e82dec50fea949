# SPDX-License-Identifier: Apache-2.0
"""The interfaces of all stages for new sizes, as the sizes of earlier calls let expect them.

A new length then needs no exchange of interfaces, stage after stage: every rank traces its stages
for the expected interfaces, and the ranks confirm them in one message. An expectation may be wrong;
whoever uses it checks it. Knows numbers and interfaces; no groups or programs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

from ...collectives.codec import encode
from ...engine import interfaces
from ...engine.config import Config
from ...engine.kinds import TracedKind, loss_programs, ranks_here, with_stage
from ...engine.prepare import Prepared
from ...engine.request import Kind, Request
from ...errors import FpipeError
from ...lowering.value_graph import Interface, Leaf
from ...programs.signature import without_sizes
from ...tree import AbstractTree, Aval, contiguous

#: The inputs of a pipeline for one kind of microbatch, and the interfaces of its stages.
Seen: TypeAlias = tuple[Sequence[AbstractTree], Sequence[Interface]]
#: How many earlier kinds are looked at.
SEEN = 6


def expected(inputs: Sequence[AbstractTree], seen: Sequence[Seen]) -> tuple[Interface, ...] | None:
    """The interfaces to expect for inputs; ``None`` where fewer than two kinds are known that
    differ in sizes alone.

    Each number is that of an axis of the inputs, or grows evenly with one.

    >>> import torch
    >>> x = lambda n: [AbstractTree.of(torch.ones(n, 3))]
    >>> y = lambda n: [Interface(AbstractTree.of(torch.ones(2 * n + 1)), (None,), (None,), (True,),
    ...     (True,), (True,))]
    >>> expected(x(9), [(x(4), y(4)), (x(6), y(6))])[0].y.leaves[0].shape
    (19,)
    """
    alike = list(islice(_alike(inputs, seen), SEEN))[::-1]
    if len(alike) < 2:
        return None
    columns = list(zip(*(_numbers(each) for each, _ in alike), _numbers(inputs), strict=True))
    varying = sorted({column for column in columns if len(set(column[:-1])) > 1})
    rows = zip(
        *(
            [aval for interface in interfaces for aval in _avals(interface)]
            for _, interfaces in alike
        ),
        strict=True,
    )
    avals = [_aval(row, varying) for row in rows]
    if None in avals:
        return None
    following = iter(avals)
    return tuple(
        _with_avals(interface, lambda _: next(following) or _) for interface in alike[-1][1]
    )


def _aval(row: Sequence[Aval], columns: Sequence[tuple[int, ...]]) -> Aval | None:
    """The abstract tensor that follows those of earlier kinds."""
    shape = [_number(sizes, columns) for sizes in zip(*(aval.shape for aval in row), strict=True)]
    known = tuple(size for size in shape if size is not None)
    if len(known) < len(shape):
        return None
    if all(aval.stride == contiguous(aval.shape) for aval in row):
        return row[-1]._replace(shape=known, stride=contiguous(known))
    stride = [_number(steps, columns) for steps in zip(*(aval.stride for aval in row), strict=True)]
    steps = tuple(step for step in stride if step is not None)
    return None if len(steps) < len(stride) else row[-1]._replace(shape=known, stride=steps)


def _number(before: Sequence[int], columns: Sequence[tuple[int, ...]]) -> int | None:
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
        rise, run = before[-1] - before[one], sizes[-1] - sizes[one]
        even = all(
            (n - before[-1]) * run == rise * (size - sizes[-1])
            for n, size in zip(before, sizes, strict=True)
        )
        step, rest = divmod(rise * (new - sizes[-1]), run)
        if even and not rest:
            return before[-1] + step
    return None


# ---- the numbers of trees and interfaces ----
def _numbers(trees: Sequence[AbstractTree]) -> list[int]:
    return [
        number
        for each in trees
        for aval in each.avals.values()
        for number in (*aval.shape, *aval.stride)
    ]


def _avals(interface: Interface) -> Iterator[Aval]:
    found: list[Aval] = []
    _with_avals(interface, lambda aval: found.append(aval) or aval)
    yield from found


def _with_avals(interface: Interface, fn: Callable[[Aval], Aval]) -> Interface:
    """An interface with ``fn`` of each abstract tensor."""

    def leaf(each: Leaf) -> Leaf:
        return (each[0], fn(each[1])) if isinstance(each, tuple) else each

    return replace(
        interface,
        y=interface.y.with_avals(fn),
        ys=tuple(map(leaf, interface.ys)),
        dxs=tuple(map(leaf, interface.dxs)),
        aux=None if interface.aux is None else fn(interface.aux),
        state=None if interface.state is None else interface.state.with_avals(fn),
    )


def _alike(inputs: Sequence[AbstractTree], seen: Sequence[Seen]) -> Iterator[Seen]:
    """The kinds that differ from these inputs, and from the last kind's interfaces, in numbers
    alone; last first.
    """
    wanted = _skeleton(inputs, seen[-1][1]) if seen else ()
    return (each for each in reversed(seen) if _skeleton(*each) == wanted)


def _skeleton(
    inputs: Sequence[AbstractTree], interfaces: Sequence[Interface]
) -> tuple[object, ...]:
    """Everything but the numbers."""
    plain = [each.with_avals(without_sizes) for each in inputs]
    return *plain, *(_with_avals(each, without_sizes) for each in interfaces)


# ---- stages for expected interfaces ----
@dataclass(frozen=True)
class Ready:
    """The stages of this process, traced for the interfaces that are expected of all stages."""

    traced: list[TracedKind]

    @property
    def word(self) -> str:
        """The interfaces, as a digest: the expectation holds if that of every rank is the same."""
        data = [[interfaces.as_data(each) for each in kind.interfaces] for kind in self.traced]
        return hashlib.sha256(encode(data)).hexdigest()


def ready(config: Config, request: Request, before: Sequence[Prepared]) -> Ready | None:
    """The stages of this process, traced for the interfaces to expect after earlier calls;
    ``None``: expect nothing.
    """
    seen = [
        ((x, *targets), found)
        for each in before
        if each.request.mode == request.mode
        for (x, targets, _), found in zip(each.request.kinds, each.interfaces, strict=True)
    ]
    if len(seen) < 2 or request.chain > 1:
        return None
    try:
        return Ready([_expected(config, request, kind, seen) for kind in request.kinds])
    except (FpipeError, _UnexpectedError):
        return None  # the exchange of interfaces, which follows, raises what is a mistake


class _UnexpectedError(Exception):
    """A stage has another interface than the one that was expected."""


def _expected(config: Config, request: Request, kind: Kind, seen: Sequence[Seen]) -> TracedKind:
    """A kind of microbatch with the interfaces that are expected, and with the stages of this
    process.
    """
    found = expected((kind[0], *kind[1]), seen)
    if found is None:
        raise _UnexpectedError
    traced = TracedKind(kind, found, each=request.each)
    for stage, interface in enumerate(found):
        if ranks_here(config, request, stage):
            unused = frozenset(j for j in interface.y.wanted if not interface.dys[j])
            traced = with_stage(config, request, traced, None, stage, unused)
    traced = replace(
        traced, loss=loss_programs(config, request, traced) if config.loss is not None else None
    )
    lacking = request.mode != "forward" and traced.value_graph().lacking()
    if traced.interfaces != found or lacking:
        raise _UnexpectedError
    return traced

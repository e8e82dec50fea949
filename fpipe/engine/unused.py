# SPDX-License-Identifier: Apache-2.0
"""Outputs of stages that nothing uses: they have no cotangent, so their stages are traced again.

Zeros would not do: in a backward, zero times infinity is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..lowering.value_graph import Interface
from .config import Config
from .kinds import TracedKind, ranks_here, trace_stage
from .request import Request


def cut(
    config: Config, request: Request, known: Sequence[TracedKind]
) -> tuple[list[TracedKind], list[Mapping[int, Interface]]]:
    """Trace again, from the last stage down, the stages of this process of which an output has no
    cotangent; also returns the interfaces that are new.
    """
    traced = _recut(config, request, known)
    news: list[Mapping[int, Interface]] = []
    for before, after in zip(known, traced, strict=True):
        pairs = zip(before.interfaces, after.interfaces, strict=True)
        news.append({stage: new for stage, (old, new) in enumerate(pairs) if new is not old})
    return traced, news


def _recut(config: Config, request: Request, known: Sequence[TracedKind]) -> list[TracedKind]:
    """The same as far as the stages that lack a cotangent are on this process."""
    traced = list(known)
    while True:
        before = list(traced)
        for number in reversed(range(len(traced))):
            kind = traced[number]
            first = not kind.slice
            if kind.slice == kind.slices - 1:
                after = None
            else:
                after = traced[number + 1]
            while (found := lacking(kind, after)) and ranks_here(config, request, found[0]):
                kind = traced[number] = trace_stage(
                    config, request, kind, None if first else traced[number - 1], *found
                )
        if all(one is other for one, other in zip(before, traced, strict=True)):
            return traced


def lacking(kind: TracedKind, after: TracedKind | None) -> tuple[int, frozenset[int]] | None:
    """The last stage whose programs have a cotangent for an output that has none, and all its
    outputs without.

    Carries are outputs of the stages of this process, whose gradients the slice ``after``
    computes.
    """
    graph = kind.value_graph()
    for stage in reversed(range(len(kind.interfaces))):
        unused = graph.unused(stage)
        carries = _unused_carries(kind, stage, after)
        programs = kind.local(stage)
        if programs is None:
            known = frozenset[int]()
        else:
            known = programs.outputs.unused
        if any(kind.interfaces[stage].dys[j] for j in unused) or not carries <= known:
            return stage, unused | carries
    return None


def _unused_carries(kind: TracedKind, stage: int, after: TracedKind | None) -> frozenset[int]:
    mine = kind.local(stage)
    theirs = None if after is None else after.local(stage)
    if after is None or mine is None or theirs is None:
        return frozenset()
    count = len(kind.interfaces[stage].ys)
    inputs = len(after.interfaces[stage].dxs)
    return frozenset(
        j for j in mine.outputs.y.wanted if j >= count and theirs.dxs[inputs + j - count] is None
    )

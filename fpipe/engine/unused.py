# SPDX-License-Identifier: Apache-2.0
"""Outputs of stages that nothing uses: they have no cotangent, so their stages are traced again.

Zeros would not do: in a backward, zero times infinity is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

from .kinds import TracedKind, trace_stage


def cut(known: Sequence[TracedKind]) -> list[TracedKind]:
    """Trace again, from the last stage down, the stages of which an output has no cotangent, as far
    as they are on this process.
    """
    kinds = list(known)
    changed = True
    while changed:
        changed = False
        for number, kind in reversed(list(enumerate(kinds))):
            previous = kinds[number - 1] if kind.slice else None
            following = kinds[number + 1] if kind.slice + 1 < kind.request.chain else None
            while (found := lacking(kind, following)) and kind.ranks_here(found[0]):
                kind = trace_stage(kind, previous, *found)
                changed = True
            kinds[number] = kind
    return kinds


def lacking(kind: TracedKind, after: TracedKind | None) -> tuple[int, frozenset[int]] | None:
    """The last stage whose programs have a cotangent for an output that has none, and all its
    outputs without.

    Carries are outputs of the stages of this process, whose gradients the slice ``after``
    computes.
    """
    graph = kind.graph
    for stage in reversed(range(len(kind.interfaces))):
        unused = graph.unused(stage)
        carries = _unused_carries(kind, stage, after)
        programs = kind.local(stage)
        known = frozenset[int]() if programs is None else programs.outputs.unused
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

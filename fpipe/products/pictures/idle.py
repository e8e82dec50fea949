# SPDX-License-Identifier: Apache-2.0
"""Why a rank is idle, in which phase of a step a rank is, and which actions the total depends on.
Knows no colours.

A rank warms up until its first backward begins, and is in its tail after its last forward. Within a
lane of bars, an idle time before the first backward is the warm-up, one after the last forward the
tail. Between them, it is the time in which a message was on the way, after the action that sent it
had ended, or imbalance, while another rank was still computing that action. A time on the way
counts as a message in every phase, once the rank has begun.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .lanes import Bar, Gap, Lane

#: cause -> its name in the legend
CAUSES = {
    "warmup": "warm-up",
    "message": "message on the way",
    "imbalance": "another rank computes",
    "tail": "tail",
    "other": "other, or not known",
}
PHASES = ("warm-up", "steady", "tail")


def phases(bars: Sequence[Bar]) -> tuple[float, float]:
    """When the warm-up of a rank ends and when its tail begins; its first start and last end
    without backwards.
    """
    if not bars:
        return 0.0, 0.0
    ops = [{part.op for part in bar.action.parts} for bar in bars]
    first = next(
        (bar.start for bar, op in zip(bars, ops, strict=True) if op & {"B", "I"}), bars[0].start
    )
    backward = any(op & {"B", "I"} for op in ops)
    forwards = [bar.end for bar, op in zip(bars, ops, strict=True) if "F" in op]
    last = forwards[-1] if forwards and backward else bars[-1].end
    return first, max(first, last)


def gaps(lanes: Sequence[Sequence[Bar]], rank: int, total: float) -> Iterator[Gap]:
    """The idle times of a rank in order, none shorter than a billionth of the total."""
    bars, least = lanes[rank], 1e-9 * total
    first, last = phases(bars)
    free = 0.0
    for k, bar in enumerate(bars):
        if bar.start - free > least:
            sent = bar.start
            if k and bar.cause is not None:
                sent = min(max(lanes[bar.cause[0]][bar.cause[1]].end, free), bar.start)
            known = bar.cause is not None
            waiting = "imbalance" if known else "other"
            cause = (
                "warmup"
                if k == 0 or bar.start <= first
                else "tail"
                if bar.start > last
                else waiting
            )
            yield from (
                gap
                for gap in (Gap(free, sent, cause), Gap(sent, bar.start, "message"))
                if gap.end - gap.start > least
            )
        free = max(free, bar.end)
    if total - free > least:
        yield Gap(free, total, "tail" if bars else "other")


def critical(lanes: Sequence[Lane]) -> list[tuple[int, int]]:
    """(rank, index of a bar) of the chain of actions that ends last, each held back by the one
    before it.
    """
    ends = [(-lane.bars[-1].end, rank) for rank, lane in enumerate(lanes) if lane.bars]
    if not ends:
        return []
    rank = min(ends)[1]
    index = len(lanes[rank].bars) - 1
    path: list[tuple[int, int]] = []
    while index >= 0:
        path.append((rank, index))
        rank, index = lanes[rank].bars[index].cause or (rank, index - 1)
    return path[::-1]


def messages(lanes: Sequence[Lane]) -> Iterator[tuple[int, int, int, int]]:
    """(rank, index) of an action, and of the one on another rank that takes its result, by the text
    of actions.
    """
    where = {
        str(part): (rank, k)
        for rank, lane in enumerate(lanes)
        for k, bar in enumerate(lane.bars)
        for part in bar.action.parts
    }
    for text, (rank, k) in where.items():
        op = text.lstrip("0123456789")[:1]
        stage, rest = text.split(op, 1)
        users = {"F": [f"{int(stage) + 1}F"], "B": [f"{int(stage) - 1}{b}" for b in "BI"]}
        users["I"] = users["B"]
        for user in users.get(op, ()):
            if user + rest in where and where[user + rest][0] != rank:
                yield rank, k, *where[user + rest]


def shares(
    intervals: Sequence[tuple[float, float, str]], edges: Sequence[float]
) -> list[dict[str, float]]:
    """Of each piece between two edges, the share of every key; the intervals are in order of time.

    >>> shares([(0, 1, "F"), (1, 3, "B")], [0, 2, 4])
    [{'F': 0.5, 'B': 0.5}, {'B': 0.5}]
    """
    pieces: list[dict[str, float]] = [{} for _ in edges[1:]]
    at = 0
    for start, end, key in intervals:
        while at < len(pieces) and edges[at + 1] <= start:
            at += 1
        piece = at
        while piece < len(pieces) and edges[piece] < end:
            low, high = edges[piece], edges[piece + 1]
            inside = min(end, high) - max(start, low)
            if inside > 0 and high > low:
                pieces[piece][key] = pieces[piece].get(key, 0.0) + inside / (high - low)
            piece += 1
    return pieces

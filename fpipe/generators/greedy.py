# SPDX-License-Identifier: Apache-2.0
"""Greedy placement of W: backwards are split, and each W fills a wait of its rank.

Qi et al., "Zero Bubble Pipeline Parallelism", 2024 (arXiv:2401.10241), observe that no other rank
waits for W, so that it can run wherever its rank would idle. 1F1B on 3 ranks, where a backward
takes two slots, and with its backwards split:

    rank 0   F F F . . B B F B B F B B . B B . B B
    rank 1   . F F . B B F B B F B B F B B F ...

    rank 0   F F F . I W F I W F I W F I W I W I W
    rank 1   . F F I . F I W F I W F I W ...
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from ..actions.action import Action, plain
from ..schedule import Schedule


def split_backwards(schedule: Schedule, limit: int) -> Schedule | None:
    """The schedule with I in the place of each B, and W where its rank would wait or lack memory.

    All passes take one slot, and a stage holds one activation of a microbatch from F to W. A rank
    holds at most ``limit`` of them. There is no result where the forwards do not fit in the memory.

    >>> whole = Schedule.parse("[0F0, 0F1, 0B0, 0B1]\\n[1F0, 1B0, 1F1, 1B1]")
    >>> print(split_backwards(whole, 2))
    [0F0, 0F1, 0I0, 0W0, 0I1, 0W1]
    [1F0, 1I0, 1F1, 1I1, 1W0, 1W1]
    """
    ranks = range(schedule.ranks)
    queues = [deque(plain(row)) for row in schedule.rows]
    rows: list[list[Action]] = [[] for _ in ranks]
    weights: list[deque[Action]] = [deque() for _ in ranks]  #: W that could run, the oldest first
    clock, held = [0] * len(ranks), [0] * len(ranks)
    ends: dict[Action, int] = {}
    waiting: dict[Action, int] = {}  #: the rank that waits for an action
    ready = list(ranks)[::-1]

    def run(rank: int, action: Action) -> None:
        rows[rank].append(action)
        clock[rank] += 1
        held[rank] += (action.op == "F") - (action.op == "W")

    while ready:
        rank = ready.pop()
        while queues[rank]:
            stage, op, microbatch = queues[rank][0]
            forward, needed = op == "F", _needed(queues[rank][0], schedule.stages - 1)
            if needed is not None and needed not in ends:
                waiting[needed] = rank
                break
            arrival = 0 if needed is None else ends[needed]
            while weights[rank] and (clock[rank] < arrival or held[rank] + forward > limit):
                run(rank, weights[rank].popleft())
            if held[rank] + forward > limit:
                return None
            clock[rank] = max(clock[rank], arrival)
            action = Action(stage, "F" if forward else "I", microbatch)
            run(rank, action)
            queues[rank].popleft()
            ends[action] = clock[rank]
            if not forward:
                weights[rank].append(Action(stage, "W", microbatch))
            if action in waiting:
                ready.append(waiting.pop(action))
    if any(queues):
        return None
    whole = tuple((*row, *left) for row, left in zip(rows, weights, strict=True))
    return replace(schedule, rows=whole)


def _needed(action: Action, last: int) -> Action | None:
    """The action of another stage whose result an F or B needs, or the F of the last stage."""
    stage, op, microbatch = action
    if op == "F":
        return Action(stage - 1, "F", microbatch) if stage else None
    return Action(stage + 1, "I", microbatch) if stage < last else Action(stage, "F", microbatch)

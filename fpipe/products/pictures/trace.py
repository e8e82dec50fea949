# SPDX-License-Identifier: Apache-2.0
"""A timeline as a trace of events, the JSON that Perfetto and Chrome's tracing page open.

Each timeline is a process there and each rank a thread; what an action waited for is an arrow, and
what a rank holds is a counter. Traces count in microseconds; one unit of a cost model without a
unit of time is shown as a millisecond.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TypeAlias

from ...actions import Timeline
from .scene import Look, Scenes

Event: TypeAlias = dict[str, object]

_SCALE = {"s": 1e6, "ms": 1e3, "us": 1.0}


def paint(scenes: Scenes, look: Look) -> str:
    """The file's text."""
    events = [event for k, scene in enumerate(scenes) for event in _events(k, scene.timeline)]
    trace = {"displayTimeUnit": "ms", "traceEvents": events}
    return json.dumps(trace, separators=(",", ":"))


def _events(pid: int, timeline: Timeline) -> Iterator[Event]:
    scale = _SCALE.get(timeline.unit, 1e3)

    def event(phase: str, tid: int, time: float, name: str, **rest: object) -> Event:
        at = (time - timeline.start) * scale
        return {"ph": phase, "pid": pid, "tid": tid, "ts": at, "name": name, **rest}

    def label(what: str, tid: int, **args: object) -> Event:
        return event("M", tid, timeline.start, what, args=args)

    yield label("process_name", 0, name=timeline.name or "schedule")
    rows = [timeline.of_rank(rank) for rank in range(timeline.ranks)]
    for rank, row in enumerate(rows):
        yield label("thread_name", rank, name=f"rank {rank}")
        yield label("thread_sort_index", rank, sort_index=rank)
        for span in row:
            args: Event = {}
            if wait := timeline.waited_for(rank, span.position):
                before = rows[wait.rank][wait.position]
                args = {"for": str(before.action), "of rank": wait.rank, "waited": wait.time}
                arrow = {"cat": "wait", "id": f"{pid}.{rank}.{span.position}"}
                inside = 0.01 * before.start + 0.99 * before.end  # an arrow starts within a slice
                yield event("s", wait.rank, inside, "waited for", **arrow)
                yield event("f", rank, span.start, "waited for", bp="e", **arrow)
            parts = span.action.parts
            yield event(
                "X",
                rank,
                span.start,
                ";".join(map(str, parts)),
                dur=(span.end - span.start) * scale,
                cat="+".join(part.op for part in parts),
                args=args,
            )
        for at, amount in timeline.curve(rank):
            yield event("C", rank, at, f"rank {rank} holds", args={"held": amount})

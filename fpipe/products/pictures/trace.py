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

from .scene import Scene, Scenes

Event: TypeAlias = dict[str, object]

_SCALE = {"s": 1e6, "ms": 1e3, "us": 1.0}


def paint(scenes: Scenes) -> str:
    """The file's text."""
    events = [event for pid, scene in enumerate(scenes) for event in _events(pid, scene)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))


def _events(pid: int, scene: Scene) -> Iterator[Event]:
    scale = _SCALE.get(scene.timeline.unit, 1e3)

    def event(phase: str, rank: int, name: str, time: float, **rest: object) -> Event:
        place = {"pid": pid, "tid": rank, "ts": time * scale}
        return {"ph": phase, **place, "name": name, **rest}

    yield event("M", 0, "process_name", 0, args={"name": scene.name})
    for rank, lane in enumerate(scene.lanes):
        yield event("M", rank, "thread_name", 0, args={"name": f"rank {rank}"})
        yield event("M", rank, "thread_sort_index", 0, args={"sort_index": rank})
        for position, bar in enumerate(lane.bars):
            args: Event = {}
            if wait := bar.wait:
                before = scene.lanes[wait.rank].bars[wait.position]
                args = {"for": str(before.action), "of rank": wait.rank, "waited": wait.time}
                arrow = {"cat": "wait", "id": f"{pid}.{rank}.{position}"}
                inside = 0.01 * before.start + 0.99 * before.end  # an arrow starts within a slice
                yield event("s", wait.rank, "waited for", inside, **arrow)
                yield event("f", rank, "waited for", bar.start, bp="e", **arrow)
            yield event(
                "X",
                rank,
                ";".join(map(str, bar.action.parts)),
                bar.start,
                dur=(bar.end - bar.start) * scale,
                cat="+".join(part.op for part in bar.action.parts),
                args=args,
            )
        for time, amount in scene.timeline.curve(rank):
            yield event("C", rank, f"rank {rank} holds", time, args={"held": amount})

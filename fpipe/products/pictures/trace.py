# SPDX-License-Identifier: Apache-2.0
"""A timeline as a trace of events, the JSON that Perfetto and Chrome's tracing page open, and back
again.

Each timeline is a process there and each rank a thread; what an action waited for is an arrow, and
what a rank holds is a counter. Traces count in microseconds; one unit of a cost model without a
unit of time is shown as a millisecond.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ...actions import MOST_SLICES, OPS, Action, Carried, Slice, Span, Wait, joined, read_bytes
from ...errors import FpipeError
from .convert import Drawable
from .scene import Points, Scene, Scenes

Event: TypeAlias = dict[str, Any]

_SCALE = {"s": 1e6, "ms": 1e3, "us": 1.0}
_PART = re.compile(rf"([0-9]{{1,9}})([{OPS}])([0-9]{{1,9}})(?:[.]([0-9]{{1,6}}))?")
_VERSION = 1
MOST_BYTES = 256 << 20  #: of a file that is read
_HEAD = b'{"otherData":{"fpipe":'


def paint(scenes: Scenes) -> str:
    """The file's text."""
    facts = [  # what the events do not contain
        {"name": s.name, "unit": s.unit, "span": s.span, "bubble": s.bubble, "ranks": len(s.lanes)}
        for s in scenes
    ]
    # otherData is first: is_timeline recognises a file by it
    trace = {
        "otherData": {"fpipe": _VERSION, "timelines": facts},
        "displayTimeUnit": "ms",
        "traceEvents": [event for k, scene in enumerate(scenes) for event in _events(k, scene)],
    }
    return json.dumps(trace, separators=(",", ":"))


def _events(pid: int, scene: Scene) -> Iterator[Event]:
    scale = _SCALE.get(scene.unit, 1e3)

    def event(phase: str, tid: int, time: float, name: str, **rest: object) -> Event:
        return {"ph": phase, "pid": pid, "tid": tid, "ts": time * scale, "name": name, **rest}

    def piece(tid: int, start: float, end: float, name: str, category: str, args: Event) -> Event:
        return event("X", tid, start, name, dur=(end - start) * scale, cat=category, args=args)

    def thread(tid: int, name: str, rank: int) -> Iterator[Event]:
        for what, args in ("name", {"name": name}), ("sort_index", {"sort_index": rank}):
            yield event("M", tid, 0, f"thread_{what}", args=args)

    yield event("M", 0, 0, "process_name", args={"name": scene.name or "schedule"})
    for rank, lane in enumerate(scene.lanes):
        yield from thread(rank, f"rank {rank}", rank)
        for position, bar in enumerate(lane.bars):
            args: Event = {}
            if bar.cause is not None:
                other, index = bar.cause
                before = scene.lanes[other].bars[index]
                args = {"for": str(before.action), "of rank": other, "position": index}
                args["waited"] = bar.wait
                arrow = {"cat": "wait", "id": f"{pid}.{rank}.{position}"}
                inside = 0.01 * before.start + 0.99 * before.end  # an arrow starts within a slice
                yield event("s", other, inside, "waited for", **arrow)
                yield event("f", rank, bar.start, "waited for", bp="e", **arrow)
            ops = "+".join(part.op for part in bar.action.parts)
            name = ";".join(map(str, bar.action.parts))
            yield piece(rank, bar.start, bar.end, name, ops, args)
        link = len(scene.lanes) + rank
        if lane.carried:
            yield from thread(link, f"rank {rank} link", rank)
        for start, end, what in lane.carried:
            yield piece(link, start, end, what, "link", {})
        for at, amount in lane.curve:
            yield event("C", rank, at, f"rank {rank} holds", args={"held": amount})


# ---- and back ----
@dataclass(frozen=True)
class Recorded:
    """A timeline read from a trace: enough of one to be drawn again (see ``Drawable``)."""

    name: str
    unit: str
    span: float
    bubble: float
    rows: dict[int, list[Span]]  # by rank
    curves: dict[int, list[tuple[float, float]]]
    links: dict[int, list[Carried]]
    waits: dict[tuple[int, int], Wait]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @property
    def carried(self) -> list[list[Carried]]:
        """What the links of all ranks carry."""
        return list(self.links.values())

    def of_rank(self, rank: int, /) -> Sequence[Span]:
        """The spans of a rank, in order."""
        return self.rows[rank]

    def curve(self, rank: int, /) -> Points:
        """(time, amount that the rank holds from then on)."""
        return self.curves[rank]

    def waited_for(self, rank: int, position: int, /) -> Wait | None:
        """What a span waited for."""
        return self.waits.get((rank, position))


def is_timeline(path: Path) -> bool:
    """Whether a file looks like one that :func:`paint` wrote."""
    with path.open("rb") as file:
        return file.read(len(_HEAD)) == _HEAD


def read(path: Path) -> tuple[Drawable, ...]:
    """The timelines in a trace that :func:`paint` wrote."""
    try:
        trace = json.loads(read_bytes(path, MOST_BYTES), parse_constant=_no_constant)
        timelines = trace["otherData"]["timelines"]
        return tuple(_recorded(k, facts, trace["traceEvents"]) for k, facts in enumerate(timelines))
    except OSError as error:
        raise FpipeError(
            f"cannot read {str(path)!r}: {error.strerror}; give the path of a timeline"
        ) from error
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise FpipeError(
            f"{path} is not a timeline that fpipe wrote ({type(error).__name__}: "
            f"{str(error)[:80]}); give a .json that a timeline's save(...) wrote"
        ) from error


def _recorded(pid: int, facts: Event, events: list[Event]) -> Recorded:
    unit, ranks = str(facts["unit"]), int(facts["ranks"])
    if ranks > len(events):  # each rank has an event with its name
        raise ValueError(f"{ranks} ranks in {len(events)} events")
    rows, curves, links = ({rank: [] for rank in range(ranks)} for _ in range(3))
    waits: dict[tuple[int, int], Wait] = {}
    scale = _SCALE.get(unit, 1e3)
    for event in (event for event in events if event["pid"] == pid and event["ph"] in "XC"):
        name, start, rank = str(event["name"]), float(event["ts"]) / scale, int(event["tid"])
        args = event["args"]
        if event["ph"] == "C":
            curves[int(name.split()[1])].append((start, float(args["held"])))
            continue
        end = start + float(event["dur"]) / scale
        if event["cat"] == "link":
            links[rank - ranks].append(Carried(start, end, name))
            continue
        row, action = rows[rank], joined(list(map(_part, name.split(";"))))
        if args:
            wait = Wait(int(args["of rank"]), int(args["position"]), float(args["waited"]))
            waits[rank, len(row)] = wait
        row.append(Span(rank, len(row), action, start, end))
    if any(not 0 <= wait.position < len(rows[wait.rank]) for wait in waits.values()):
        raise ValueError("an action waits for one that does not exist")
    span, bubble = float(facts["span"]), float(facts["bubble"])
    return Recorded(str(facts["name"]), unit, span, bubble, rows, curves, links, waits)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _part(text: str) -> Action:
    match = _PART.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is no action")
    stage, op, microbatch, part = match.groups()
    at = int(microbatch) if part is None else Slice(int(microbatch), int(part), MOST_SLICES)
    return Action._make((int(stage), op, at))

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ...actions import MOST_SLICES, Action, Carried, Slice, Span, Wait, joined
from ...actions.action_kinds import OPS
from ...actions.text_files import read_bytes
from ...errors import FpipeError
from .scene import Drawable, Scene

Event: TypeAlias = dict[str, Any]

_SCALE = {"s": 1e6, "ms": 1e3, "us": 1.0}
_PART = re.compile(rf"([0-9]{{1,9}})([{OPS}])([0-9]{{1,9}})(?:[.]([0-9]{{1,6}}))?")
_VERSION = 1
MOST_BYTES = 256 << 20  #: of a file that is read
_HEAD = b'{"otherData":{"fpipe":'


def paint(scenes: Sequence[Scene], look: object = None) -> str:
    """The file's text; ``look`` concerns other formats."""
    events = [event for k, scene in enumerate(scenes) for event in _events(k, scene)]
    facts = [  # what the events do not contain
        {"name": s.name, "unit": s.unit, "span": s.span, "bubble": s.bubble, "ranks": len(s.lanes)}
        for s in scenes
    ]
    # otherData is first: is_timeline recognises a file by it
    trace = {
        "otherData": {"fpipe": _VERSION, "timelines": facts},
        "displayTimeUnit": "ms",
        "traceEvents": events,
    }
    return json.dumps(trace, separators=(",", ":"))


def _events(pid: int, scene: Scene) -> Iterator[Event]:
    scale = _SCALE.get(scene.unit, 1e3)
    yield {
        "ph": "M",
        "pid": pid,
        "name": "process_name",
        "args": {"name": scene.name or "schedule"},
    }
    for rank, lane in enumerate(scene.lanes):
        yield from _thread(pid, rank, f"rank {rank}", rank)
        for position, bar in enumerate(lane.bars):
            args: Event = {}
            if bar.cause is not None:
                cause, index = bar.cause
                before = scene.lanes[cause].bars[index]
                args = {
                    "waited": bar.wait,
                    "for": str(before.action),
                    "of rank": cause,
                    "position": index,
                }
                arrow = {"cat": "wait", "name": "waited for", "id": f"{pid}.{rank}.{position}"}
                inside = (
                    0.01 * before.start + 0.99 * before.end
                )  # an arrow starts within a slice, not at its end
                yield {"ph": "s", "pid": pid, "tid": cause, "ts": inside * scale, **arrow}
                yield {
                    "ph": "f",
                    "bp": "e",
                    "pid": pid,
                    "tid": rank,
                    "ts": bar.start * scale,
                    **arrow,
                }
            ops = "+".join(part.op for part in bar.action.parts)
            name = ";".join(map(str, bar.action.parts))
            yield _slice(
                pid, rank, bar.start * scale, (bar.end - bar.start) * scale, name, ops, args
            )
        link = len(scene.lanes) + rank
        if lane.carried:
            yield from _thread(pid, link, f"rank {rank} link", rank)
        for start, end, what in lane.carried:
            yield _slice(pid, link, start * scale, (end - start) * scale, what, "link", {})
        for at, amount in lane.curve:
            yield {
                "ph": "C",
                "pid": pid,
                "ts": at * scale,
                "name": f"rank {rank} holds",
                "args": {"held": amount},
            }


def _thread(pid: int, tid: int, name: str, order: int) -> Iterator[Event]:
    yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
    yield {
        "ph": "M",
        "pid": pid,
        "tid": tid,
        "name": "thread_sort_index",
        "args": {"sort_index": order},
    }


def _slice(
    pid: int, tid: int, start: float, length: float, name: str, category: str, args: Event
) -> Event:
    times = {"ts": start, "dur": length}
    return {"ph": "X", "pid": pid, "tid": tid, **times, "name": name, "cat": category, "args": args}


# ---- and back ----
@dataclass(frozen=True)
class Recorded:
    """A timeline read from a trace: enough of one to be drawn again (see ``Drawable``)."""

    name: str
    unit: str
    span: float
    bubble: float
    ranks: int
    of_rank: Callable[[int], Sequence[Span]]
    curve: Callable[[int], Sequence[tuple[float, float]]]
    waited_for: Callable[[int, int], Wait | None]
    carried: Sequence[Sequence[Carried]]


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
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        what = (
            f"{path} is not a timeline that fpipe wrote ({type(error).__name__}: {str(error)[:80]})"
        )
        raise FpipeError(f"{what}; give a .json that a timeline's save(...) wrote") from error


def _recorded(pid: int, facts: Event, events: list[Event]) -> Recorded:
    scale = _SCALE.get(facts["unit"], 1e3)
    ranks = facts["ranks"]
    _check(facts, {"name": str, "unit": str, "span": float, "bubble": float, "ranks": int})
    if ranks > len(events):  # each rank has an event with its name
        raise ValueError(f"{ranks} ranks in {len(events)} events")
    lanes: list[list[Span]] = [[] for _ in range(ranks)]
    curves: list[list[tuple[float, float]]] = [[] for _ in range(ranks)]
    waits: dict[tuple[int, int], Wait] = {}
    links: list[list[Carried]] = [[] for _ in range(ranks)]
    for event in (event for event in events if event["pid"] == pid):
        if event["ph"] == "X":
            _check(event, {"tid": int, "name": str, "ts": float, "dur": float})
            rank, args, name, start = (
                event["tid"],
                event["args"],
                event["name"],
                event["ts"] / scale,
            )
            end = start + event["dur"] / scale
            if event["cat"] == "link":
                links[rank - ranks].append(Carried(start, end, name))
                continue
            position = len(lanes[rank])
            if args:
                _check(args, {"of rank": int, "position": int, "waited": float})
                waits[rank, position] = Wait(args["of rank"], args["position"], args["waited"])
            lanes[rank].append(
                Span(rank, position, joined(list(map(_part, name.split(";")))), start, end)
            )
        elif event["ph"] == "C":
            _check(event, {"ts": float})
            _check(event["args"], {"held": float})
            curves[int(event["name"].split()[1])].append(
                (event["ts"] / scale, event["args"]["held"])
            )
    if any(wait.position >= len(lanes[wait.rank]) for wait in waits.values()):
        raise ValueError("an action waits for one that does not exist")

    def waited_for(rank, position):
        return waits.get((rank, position))

    parts = lanes.__getitem__, curves.__getitem__, waited_for, links
    return Recorded(facts["name"], facts["unit"], facts["span"], facts["bubble"], ranks, *parts)


def _check(values: Event, types: dict[str, type]) -> None:
    """Raise unless the values have these types; a float may be an int, and an int is at least 0."""
    for name, cls in types.items():
        value = values[name]
        if type(value) not in ((int, float) if cls is float else (cls,)) or (
            cls is int and value < 0
        ):
            raise ValueError(f"{name} is {str(value)[:40]!r}")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _part(text: str) -> Action:
    match = _PART.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is no action")
    stage, op, microbatch, part = match.groups()
    at = int(microbatch) if part is None else Slice(int(microbatch), int(part), MOST_SLICES)
    return Action._make((int(stage), op, at))

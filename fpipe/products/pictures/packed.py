# SPDX-License-Identifier: Apache-2.0
"""The data of the page: scenes as lists of small differences, which compress to a hundredth.

Times are whole numbers of ``tick``, the greatest length of which all are multiples. A lane's bars
are lists: ``gaps`` before and ``lengths`` of them, ``parts`` (how many actions are fused in each),
and for each part ``codes``, an index of a stage and an op, and ``steps``: how far its microbatch
is, among all of them, from the one after that of the last part with its code. ``viewer/data.js``
reverses this.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from math import floor, gcd, log10
from typing import Any, TypeAlias

from ...actions.action import Action
from .idle import CAUSES
from .lanes import Lane
from .scene import Scene, name

Json: TypeAlias = dict[str, Any]
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"  # a shade as one letter


def compressed(data: Json) -> str:
    """JSON, deflated, in base64."""
    return base64.b64encode(
        zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 9)
    ).decode()


def expanded(text: str) -> Json:
    """What :func:`compressed` was given.

    >>> expanded(compressed({"a": [1]}))
    {'a': [1]}
    """
    return json.loads(zlib.decompress(base64.b64decode(text)))


def lanes_of(scene: Scene) -> Json:
    """The lanes of a scene: ``tick``, ``amount``, ``codes``, ``suffixes``, and a list for each
    lane.
    """
    places = 8 - floor(log10(scene.total)) if scene.total > 0 else 8
    times = [_whole(lane, 10.0**places) for lane in scene.lanes]
    tick = gcd(*(value for lane in times for one in lane for value in one)) or 1
    amounts = [[round(held * 1000) for _, held in lane.curve] for lane in scene.lanes]
    amount = gcd(*(value for lane in amounts for value in lane)) or 1
    parts = [part for lane in scene.lanes for bar in lane.bars for part in bar.action.parts]
    codes = {code: k for k, code in enumerate(dict.fromkeys(map(_code, parts)))}
    found = dict.fromkeys(map(_suffix, parts))
    suffixes = {
        suffix: k
        for k, suffix in enumerate(sorted(found, key=lambda text: [*map(int, text.split("."))]))
    }
    rows = [
        _lane(
            lane,
            [[value // tick for value in one] for one in whole],
            [value // amount for value in held],
            codes,
            suffixes,
        )
        for lane, whole, held in zip(scene.lanes, times, amounts, strict=True)
    ]
    return {
        "tick": tick / 10.0**places,
        "amount": amount / 1000,
        "codes": list(codes),
        "suffixes": list(suffixes),
        "causes": list(CAUSES),
        "lanes": rows,
    }


def _code(part: Action) -> str:
    return str(part)[: -len(_suffix(part))]


def _suffix(part: Action) -> str:
    return name(part, 1)


def _whole(lane: Lane, scale: float) -> tuple[list[int], ...]:
    """The times of a lane as whole numbers: starts, ends, waits, points of the curve, starts and
    ends of idle times.
    """
    bars, gaps = lane.bars, lane.gaps
    return (
        [round(bar.start * scale) for bar in bars],
        [round(bar.end * scale) for bar in bars],
        [round(bar.wait * scale) for bar in bars if bar.cause is not None],
        [round(time * scale) for time, _ in lane.curve],
        [round(gap.start * scale) for gap in gaps],
        [round(gap.end * scale) for gap in gaps],
    )


def _lane(
    lane: Lane,
    times: Sequence[list[int]],
    held: Sequence[int],
    codes: dict[str, int],
    suffixes: dict[str, int],
) -> Json:
    starts, ends, waits, points, idle_starts, idle_ends = times
    at: dict[int, int] = {}
    parts: list[int] = []
    steps: list[int] = []
    for part in (part for bar in lane.bars for part in bar.action.parts):
        code, suffix = codes[_code(part)], suffixes[_suffix(part)]
        parts.append(code)
        steps.append(suffix - at.get(code, -1) - 1)
        at[code] = suffix
    waiting = [(k, bar.cause) for k, bar in enumerate(lane.bars) if bar.cause is not None]
    return {
        "bubble": round(lane.bubble, 6),
        "peak": lane.peak,
        "gaps": _differences(starts, [0, *ends]),
        "lengths": _differences(ends, starts),
        "parts": [len(bar.shades) for bar in lane.bars],
        "codes": parts,
        "steps": steps,
        "shades": "".join(_DIGITS[min(shade, 35)] for bar in lane.bars for shade in bar.shades),
        "waits": [
            waits,
            _differences([k for k, _ in waiting], [0, *(k for k, _ in waiting)]),
            [rank for _, (rank, _) in waiting],
            [k - index for k, (_, index) in waiting],
        ],
        "times": _differences(points, [0, *points]),
        "held": _differences(held, [0, *held]),
        "idle": [
            _differences(idle_starts, [0, *idle_starts]),
            _differences(idle_ends, idle_starts),
            [list(CAUSES).index(gap.cause) for gap in lane.gaps],
        ],
    }


def _differences(values: Iterable[int], before: Iterable[int]) -> list[int]:
    return [value - last for value, last in zip(values, before, strict=False)]

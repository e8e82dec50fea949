# SPDX-License-Identifier: Apache-2.0
"""From what was recorded to a ``Timeline``, and to the ``Costs`` by which a simulation comes out like it.

An action lasts from the start of its first program to the end of the last. A message costs its sender the time of the
send, its receiver the time of the receive; the time between them is its latency. All figures are means, since means add
up along a step: medians predict too little wherever times have a tail. Knows the names of instructions; no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from ...schedules.actions import Action, AnyAction, Fused
from ...schedules.costs import Costs
from ...schedules.timeline import Timeline
from .recording import Event, Run

_COMPUTES = frozenset(("F", "B", "I", "W", "ADD", "EACH"))
_HANDLES = frozenset(("RECV", "SETTLE"))


class Message(NamedTuple):
    """A message between ranks over a boundary (s: between stage s and the next), with its times on both sides."""

    src: int
    dst: int
    boundary: int
    nbytes: int
    sending: float  # the send began
    sent: float  # and ended
    asked: float  # the receiver began to wait
    had: float  # and went on


def spans(runs: Iterable[Run]) -> Iterator[tuple[int, AnyAction, float, float]]:
    """(rank, action, start, end) of every action; those of one rank that ran at once are one fused action."""
    for run in runs:
        times: dict[Action, tuple[float, float]] = {}
        for did in run.did:
            if did.kind in _COMPUTES:
                for action in (did.action, did.beside):
                    if action is not None:
                        start, _ = times.get(action, (did.start, 0.0))
                        times[action] = start, did.end
        yield from ((run.rank, *span) for span in _apart(times | dict(_idle(run, times))))


def _idle(run: Run, times: Mapping[Action, tuple[float, float]]) -> Iterator[tuple[Action, tuple[float, float]]]:
    """Actions that need no instruction, such as an unused gradient of an input: they take no time after the action
    before them."""
    last = max((place for place, action in enumerate(run.actions) if action in times), default=-1)
    clock = run.did[0].start if run.did else 0.0
    for action in run.actions[: last + 1]:
        if action in times:
            clock = times[action][1]
        else:
            yield action, (clock, clock)


def _apart(times: Mapping[Action, tuple[float, float]]) -> Iterator[tuple[AnyAction, float, float]]:
    parts: list[Action] = []
    first = last = 0.0
    for action, (start, end) in sorted(times.items(), key=lambda item: item[1]):
        if parts and start >= last:
            yield (parts[0] if len(parts) == 1 else Fused(tuple(parts))), first, last
            parts = []
        first = first if parts else start
        last = max(last, end) if parts else end
        parts.append(action)
    if parts:
        yield (parts[0] if len(parts) == 1 else Fused(tuple(parts))), first, last


def messages(runs: Iterable[Run]) -> Iterator[Message]:
    """The messages of actions that both sides recorded."""
    runs = list(runs)
    waits = {
        (did.peer, run.rank, did.number): did
        for run in runs for did in run.did if did.kind == "WAIT" and did.number >= 0
    }  # fmt: skip
    for run in runs:
        for did in run.did:
            wait = waits.get((run.rank, did.peer, did.number)) if did.kind == "SEND" and did.number >= 0 else None
            if wait is not None and did.action is not None:
                boundary = did.action.stage if did.action.op == "F" else did.action.stage - 1
                yield Message(
                    run.rank, did.peer, max(boundary, 0), did.nbytes, did.start, did.end, wait.start, wait.end
                )


def timeline(runs: Iterable[Run], name: str = "measured") -> Timeline:
    """The measured timeline, in seconds."""
    return Timeline.measured(spans(runs), name=name, unit="s")


def costs(
    steps: Sequence[Sequence[Run]], saved: Sequence[float] | None = None, kept: Sequence[float] | None = None
) -> Costs:
    """The costs of these steps, of all ranks; ``saved`` and ``kept`` are bytes by stage, where they are known."""
    lasted: dict[str, dict[int, list[float]]] = {op: {} for op in ("F", "B", "I", "W", "overlap")}
    for _, action, start, end in (span for runs in steps for span in spans(runs)):
        op = action.op if isinstance(action, Action) else "overlap"
        lasted[op].setdefault(action.parts[0].stage, []).append(end - start)
    stages = 1 + max(part.stage for runs in steps for _, action, *_ in spans(runs) for part in action.parts)
    each = {op: {stage: fmean(found) for stage, found in by_stage.items()} for op, by_stage in lasted.items()}
    forward, whole, inputs, weights = (each[op] for op in "FBIW")
    half = {stage: whole[stage] / 2 for stage in whole if stage not in inputs}
    inputs, weights = half | inputs, half | weights
    whole = {stage: inputs[stage] + weights[stage] for stage in inputs if stage in weights} | whole
    known: dict[str, Sequence[float] | None] = {"saved": saved, "kept": kept}
    if each["overlap"]:
        apart = {stage: forward.get(stage, 0.0) + whole.get(stage, 0.0) for stage in range(stages)}
        known["overlap"] = _all(apart | each["overlap"], stages)
    if stages > 1:
        known |= links(steps, stages)
    return Costs(
        F=_all(forward, stages), I=_all(inputs, stages), W=_all(weights, stages), B=_all(whole, stages), unit="s",
        **{name: value for name, value in known.items() if value is not None},
    )  # fmt: skip


def _all(found: Mapping[int, float], stages: int) -> tuple[float, ...]:
    return tuple(found.get(stage, 0.0) for stage in range(stages))


def links(steps: Sequence[Sequence[Run]], stages: int) -> dict[str, tuple[float, ...]]:
    """The costs of messages over each boundary: ``comm`` for the latency, ``send`` and ``receive`` for either side,
    ``boundary`` in bytes; 0 where no message passes."""
    by_boundary: dict[int, list[Message]] = {}
    for message in (m for runs in steps for m in messages(runs)):
        by_boundary.setdefault(message.boundary, []).append(message)
    count = sum(map(len, by_boundary.values()))
    handled = sum(did.end - did.start for runs in steps for run in runs for did in run.did if did.kind in _HANDLES)
    found = {boundary: _link(sent, handled / count) for boundary, sent in by_boundary.items()}
    none = (0.0, 0.0, 0.0, 0.0)
    columns = zip(*(found.get(boundary, none) for boundary in range(stages - 1)), strict=True)
    return dict(zip(("comm", "send", "receive", "boundary"), columns, strict=True))


def _link(sent: Sequence[Message], handling: float) -> tuple[float, float, float, float]:
    """(latency, sending, receiving, bytes). Where the receiver waited, latency and receiving are measured together;
    receiving alone is measured where the message arrived long before."""
    awaited = [m.had - m.sent for m in sent if m.asked < m.sending]
    both = fmean(awaited) if awaited else 0.0
    there = [m.had - m.asked for m in sent if m.asked > m.sent + 2 * both]
    taking = fmean(there) if there else min((m.had - m.asked for m in sent), default=0.0)
    way = max(both - taking, 0.0)
    return way, fmean(m.sent - m.sending for m in sent), taking + handling, fmean(m.nbytes for m in sent)


def shares(run: Run) -> dict[str, float]:
    """How a rank spent its time between its first instruction and its last, by kind of work."""
    words = {"WAIT": "waiting", "SEND": "sending", "RECV": "asking", "SETTLE": "asking"}
    found: dict[str, float] = {}
    for did in run.did:
        word = "programs" if did.kind in _COMPUTES else words.get(did.kind, "the rest")
        found[word] = found.get(word, 0.0) + did.end - did.start
    found["between"] = _length(run.did) - sum(found.values())
    return found


def _length(did: Sequence[Event]) -> float:
    return did[-1].end - did[0].start if did else 0.0

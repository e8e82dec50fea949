# SPDX-License-Identifier: Apache-2.0
"""From what was recorded to a ``Timeline``, and to the ``Costs`` by which a simulation comes out
like it.

An action lasts from the start of its first program to the end of the last. A message costs its
sender the time of the send, its receiver the time of the receive; the time between them is its
latency. All figures are means, since means add up along a step: medians predict too little wherever
times have a tail. Knows the names of instructions; no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from ...actions.action import Action, AnyAction, Fused
from ...actions.costs import Costs, PerStage
from ...actions.timeline import Timeline
from .recording import Run

_COMPUTES = frozenset(("F", "B", "I", "W", "ADD", "EACH"))
_HANDLES = frozenset(("RECV", "SETTLE"))


class Message(NamedTuple):
    """A message between ranks over a boundary (s: between stage s and the next), with its times on
    both sides.
    """

    src: int
    dst: int
    boundary: int
    nbytes: int
    sending: float  # the send began
    sent: float  # and ended
    asked: float  # the receiver began to wait
    had: float  # and went on


def spans(runs: Iterable[Run]) -> Iterator[tuple[int, AnyAction, float, float]]:
    """(rank, action, start, end) of every action; those of one rank that ran at once are one fused
    action.
    """
    for run in runs:
        times: dict[Action, tuple[float, float]] = {}
        for did in run.did:
            if did.kind in _COMPUTES:
                for action in filter(None, (did.action, did.beside)):
                    times[action] = times.get(action, (did.start,))[0], did.end
        groups: list[tuple[tuple[Action, ...], float, float]] = []
        for action, (start, end) in sorted(
            (times | _idle(run, times)).items(), key=lambda item: item[1]
        ):
            if groups and start < groups[-1][2]:
                parts, first, last = groups.pop()
                groups.append(((*parts, action), first, max(last, end)))
            else:
                groups.append(((action,), start, end))
        for parts, first, last in groups:
            yield run.rank, parts[0] if len(parts) == 1 else Fused(parts), first, last


def _idle(
    run: Run, times: Mapping[Action, tuple[float, float]]
) -> dict[Action, tuple[float, float]]:
    """Actions that need no instruction, such as an unused gradient of an input: they take no time
    after the action before them.
    """
    idle: dict[Action, tuple[float, float]] = {}
    later: list[Action] = []  # those without an instruction since the last one with
    clock = run.did[0].start if run.did else 0.0
    for action in run.actions:
        if action in times:
            idle |= dict.fromkeys(later, (clock, clock))
            clock, later = times[action][1], []
        else:
            later.append(action)
    return idle


def messages(runs: Iterable[Run]) -> Iterator[Message]:
    """The messages of actions that both sides recorded."""
    events = [(run.rank, did) for run in runs for did in run.did if did.number >= 0]
    waits = {(did.peer, rank, did.number): did for rank, did in events if did.kind == "WAIT"}
    for rank, did in events:
        wait = waits.get((rank, did.peer, did.number))
        if did.kind == "SEND" and wait is not None and did.action is not None:
            boundary = did.action.stage - (did.action.op != "F")
            yield Message(
                rank,
                did.peer,
                max(boundary, 0),
                did.nbytes,
                did.start,
                did.end,
                wait.start,
                wait.end,
            )


def timeline(runs: Iterable[Run], name: str = "measured") -> Timeline:
    """The measured timeline, in seconds."""
    return Timeline.measured(spans(runs), name=name, unit="s")


def costs(
    steps: Sequence[Sequence[Run]], saved: PerStage = 1.0, kept: PerStage | None = None
) -> Costs:
    """The costs of these steps, of all ranks, for whole microbatches; ``saved`` and ``kept`` are
    bytes by stage.
    """
    lasted: dict[str, dict[int, list[float]]] = {op: {} for op in ("F", "B", "I", "W", "overlap")}
    stages, slices = 0, 1
    for _, action, start, end in (span for runs in steps for span in spans(runs)):
        op, slices = action.op if isinstance(action, Action) else "overlap", action.parts[0].slices
        lasted[op].setdefault(action.parts[0].stage, []).append((end - start) * slices)
        stages = max(stages, *(part.stage + 1 for part in action.parts))
    forward, whole, inputs, weights, overlap = (
        {stage: fmean(times) for stage, times in by_stage.items()} for by_stage in lasted.values()
    )
    half = {stage: time / 2 for stage, time in whole.items() if stage not in inputs}
    inputs, weights = half | inputs, half | weights
    whole = {stage: inputs[stage] + weights[stage] for stage in inputs if stage in weights} | whole

    def row(times: Mapping[int, float]) -> tuple[float, ...]:
        return tuple(times.get(stage, 0.0) for stage in range(stages))

    apart = {stage: forward.get(stage, 0.0) + whole.get(stage, 0.0) for stage in range(stages)}
    return Costs(
        F=row(forward),
        I=row(inputs),
        W=row(weights),
        B=row(whole),
        unit="s",
        saved=saved,
        kept=kept,
        overlap=row(apart | overlap) if overlap else None,
        **(links(steps, stages, slices) if stages > 1 else {}),
    )


def links(
    steps: Sequence[Sequence[Run]], stages: int, slices: int = 1
) -> dict[str, tuple[float, ...]]:
    """The costs of messages over each boundary: ``comm`` for the latency, ``send`` and ``receive``
    for either side, ``boundary`` in bytes; 0 where no message passes.
    """
    by_boundary: dict[int, list[Message]] = {}
    for message in (m for runs in steps for m in messages(runs)):
        by_boundary.setdefault(message.boundary, []).append(message)
    count = sum(map(len, by_boundary.values()))
    handled = sum(
        did.end - did.start
        for runs in steps
        for run in runs
        for did in run.did
        if did.kind in _HANDLES
    )
    rows = [
        _link(by_boundary[boundary], handled / count, slices)
        if boundary in by_boundary
        else (0.0,) * 4
        for boundary in range(stages - 1)
    ]
    return dict(zip(("comm", "send", "receive", "boundary"), zip(*rows, strict=True), strict=True))


def _link(
    sent: Sequence[Message], handling: float, slices: int
) -> tuple[float, float, float, float]:
    """(latency, sending, receiving, bytes). Where the receiver waited, latency and receiving are
    measured together; receiving alone is measured where the message arrived long before.
    """
    awaited = [m.had - m.sent for m in sent if m.asked < m.sending]
    both = fmean(awaited) if awaited else 0.0
    there = [m.had - m.asked for m in sent if m.asked > m.sent + 2 * both]
    taking = fmean(there) if there else min((m.had - m.asked for m in sent), default=0.0)
    way = max(both - taking, 0.0)
    return (
        way,
        fmean(m.sent - m.sending for m in sent),
        taking + handling,
        fmean(m.nbytes for m in sent) * slices,
    )


def shares(run: Run) -> dict[str, float]:
    """How a rank spent its time between its first instruction and its last, by kind of work."""
    names = dict.fromkeys(_COMPUTES, "programs") | {
        "WAIT": "waiting",
        "SEND": "sending",
        "RECV": "posting",
        "SETTLE": "posting",
    }
    times: dict[str, float] = {}
    for did in run.did:
        name = names.get(did.kind, "the rest")
        times[name] = times.get(name, 0.0) + did.end - did.start
    length = run.did[-1].end - run.did[0].start if run.did else 0.0
    return times | {"between": length - sum(times.values())}

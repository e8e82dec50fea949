# SPDX-License-Identifier: Apache-2.0
"""From what was recorded to a ``Timeline``, and to the ``Costs`` by which a simulation comes out
like it.

An action lasts from the start of its first program to the end of the last. A message costs its
sender the time of the send, its receiver the time of the receive; the time between them is its
latency. All figures are means, since means add up along a step: medians predict too little wherever
times have a tail. Knows the names of instructions; no tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import add, itemgetter
from statistics import fmean, median, median_low
from typing import NamedTuple

from ...actions.action import Action, AnyAction, joined
from ...actions.costs import Costs, PerStage
from ...actions.text import number, readable
from ...actions.timeline import Timeline
from .recording import Run

_COMPUTES = frozenset(("F", "B", "I", "W", "ADD", "EACH"))
_HANDLES = frozenset(("RECV", "SETTLE"))
#: The kinds of work by the kinds of instructions.
_WORK: dict[str, str] = {"WAIT": "waiting", "SEND": "sending"}
_WORK |= dict.fromkeys(_COMPUTES, "programs") | dict.fromkeys(_HANDLES, "posting")

#: What the heads and cells of a profile's tables say.
MEANINGS = """\
F: forward; a loss is part of the last stage
B: backward
I: the part of a backward that computes gradients of inputs
W: the part that computes gradients of weights
-: none
posting: announcing receives to the backend early, and completing sends
programs: running stages, and adding gradients
sending: handing messages to the backend
waiting: for messages that have not arrived
the rest: other instructions, such as reductions over copies
between: from an instruction to the next one, in the loop of fpipe"""

#: How a rank keeps the others waiting by what is not work, and what is said then.
_OWN = {
    "start": "Shorten what rank {} does before a step: its first instruction is {} later",
    "between": "Shorten what rank {} does between its instructions: it takes {} longer",
}
_MOST = 2.0  #: times the fastest step, or the simulated one, for measured times to be trusted


def shown(*times: float) -> list[str]:
    """Times in seconds, all in the unit in which pictures show the longest.

    >>> shown(0.0123456, 0.0001051), shown(0.0001051)
    (['12.35 ms', '0.1051 ms'], ['105.1 us'])
    """
    unit, scale = readable(max(times))
    return [f"{number(scale * time)} {unit}" for time in times]


def table(
    title: str, head: str, columns: Mapping[str, Sequence[float]]
) -> tuple[str, list[Sequence[object]]]:
    """The title of a table of times by number, with their unit, and its rows below their head: the
    longest with three digits or more, all with its decimals, without columns of zeros.

    >>> table("Times", "stage", {"F": (0.0123456, 0.002), "I": (0.001, 0.0), "W": (1e-6, 0.0)})
    ('Times, in ms', [('stage', 'F', 'I'), (0, '12.3', '1.0'), (1, '2.0', '-')])
    """
    longest = max(map(max, columns.values()))
    unit, scale = readable(longest)
    decimals = sum(scale * longest < limit for limit in (1, 10, 100))
    cells = {
        name: [f"{scale * time:.{decimals}f}" if time else "-" for time in times]
        for name, times in columns.items()
    }
    seen = {name: column for name, column in cells.items() if "".join(column).strip("-0.")}
    rows = enumerate(zip(*seen.values(), strict=True))
    return f"{title}, in {unit}", [(head, *seen), *((place, *row) for place, row in rows)]


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
        actions: list[Action] = []
        start = end = 0.0
        for action, (first, last) in sorted(_times(run).items(), key=itemgetter(1)):
            if actions and first >= end:
                yield run.rank, joined(actions), start, end
                actions = []
            start = start if actions else first
            end = max(end, last) if actions else last
            actions.append(action)
        if actions:
            yield run.rank, joined(actions), start, end


def _times(run: Run) -> dict[Action, tuple[float, float]]:
    """Start and end of the actions of a rank, without what they send before they add gradients.

    Those without an instruction, such as an unused gradient of an input, take no time after the
    action before them; the last ones are left out.
    """
    times: dict[Action, tuple[float, float]] = {}
    sent = 0.0
    for event in run.events:
        if event.kind == "SEND":
            sent = event.end
        if event.kind in _COMPUTES and event.action is not None:
            start, end = times.get(event.action, (event.start, event.end))
            if event.kind == "ADD" and end < sent:
                end += event.end - event.start
            else:
                end = event.end
            times[event.action] = start, end
    idle: dict[Action, tuple[float, float]] = {}
    later: list[Action] = []  # those without an instruction since the last one with
    clock = run.events[0].start if run.events else 0.0
    for action in run.actions:
        if action in times:
            idle |= dict.fromkeys(later, (clock, clock))
            _, clock = times[action]
            later = []
        else:
            later.append(action)
    return times | idle


def messages(runs: Iterable[Run]) -> Iterator[Message]:
    """The messages of actions that both sides recorded."""
    events = [(run.rank, event) for run in runs for event in run.events if event.number >= 0]
    waits = {(e.peer, rank, e.number): e for rank, e in events if e.kind == "WAIT"}
    for rank, sent in events:
        wait = waits.get((rank, sent.peer, sent.number))
        if sent.kind == "SEND" and wait is not None and sent.action is not None:
            stage, op, _ = sent.action
            boundary = max(stage - (op != "F"), 0)
            times = sent.start, sent.end, wait.start, wait.end
            yield Message(rank, sent.peer, boundary, sent.nbytes, *times)


def timeline(runs: Iterable[Run], name: str = "measured") -> Timeline:
    """The measured timeline, in seconds."""
    return Timeline.measured(spans(runs), name=name, unit="s")


def costs(
    steps: Sequence[Sequence[Run]], saved: PerStage = 1.0, kept: PerStage | None = None
) -> Costs:
    """The costs of these steps, of all ranks, for whole microbatches; ``saved`` and ``kept`` are
    bytes by stage.
    """
    lasted = {op: defaultdict[int, list[float]](list) for op in ("F", "B", "I", "W", "overlap")}
    stages = 0
    slices = 1
    for runs in steps:
        for _, action, start, end in spans(runs):
            first = action.parts[0]
            slices = first.slices
            op = action.op if isinstance(action, Action) else "overlap"
            lasted[op][first.stage].append((end - start) * slices)
            stages = max(stages, *(part.stage + 1 for part in action.parts))
    forward, whole, inputs, weights, overlap = (
        {stage: median(times) for stage, times in by_stage.items()} for by_stage in lasted.values()
    )
    half = {stage: time / 2 for stage, time in whole.items() if stage not in inputs}
    inputs = half | inputs
    weights = half | weights
    whole = {stage: inputs[stage] + weights[stage] for stage in inputs if stage in weights} | whole

    def row(times: Mapping[int, float]) -> tuple[float, ...]:
        return tuple(times.get(stage, 0.0) for stage in range(stages))

    one_by_one = dict(enumerate(map(add, row(forward), row(whole))))
    return Costs(
        F=row(forward),
        I=row(inputs),
        W=row(weights),
        B=row(whole),
        unit="s",
        saved=saved,
        kept=kept,
        overlap=row(one_by_one | overlap) if overlap else None,
        **(_links(steps, stages, slices) if stages > 1 else {}),
    )


def _links(
    steps: Sequence[Sequence[Run]], stages: int, slices: int
) -> dict[str, tuple[float, ...]]:
    """The costs of messages over each boundary: ``comm`` for the latency, ``send`` and ``receive``
    for either side, ``boundary`` in bytes; 0 where no message passes.
    """
    by_boundary = defaultdict[int, list[Message]](list)
    handling = 0.0
    for runs in steps:
        for message in messages(runs):
            by_boundary[message.boundary].append(message)
        for run in runs:
            handling += sum(e.end - e.start for e in run.events if e.kind in _HANDLES)
    count = sum(map(len, by_boundary.values()))
    rows = [(0.0,) * 4] * (stages - 1)
    for boundary, passed in by_boundary.items():
        rows[boundary] = _link(passed, handling / count, slices)
    return dict(zip(("comm", "send", "receive", "boundary"), zip(*rows, strict=True), strict=True))


def _link(
    passed: Sequence[Message], handling: float, slices: int
) -> tuple[float, float, float, float]:
    """(latency, sending, receiving, bytes). Where the receiver waited, latency and receiving are
    measured together; receiving alone is measured where the message arrived long before.
    """
    awaited = [m.had - m.sent for m in passed if m.asked < m.sending]
    both = fmean(awaited) if awaited else 0.0
    waits = [m.had - m.asked for m in passed]
    arrived = [m.had - m.asked for m in passed if m.asked > m.sent + 2 * both]
    receiving = fmean(arrived) if arrived else min(waits)
    sending = fmean(m.sent - m.sending for m in passed)
    nbytes = fmean(m.nbytes for m in passed) * slices
    return max(both - receiving, 0.0), sending, receiving + handling, nbytes


def shares(run: Run) -> defaultdict[str, float]:
    """How a rank spent its time between its first instruction and its last, by kind of work."""
    times = defaultdict[str, float](float)
    for event in run.events:
        times[_WORK.get(event.kind, "the rest")] += event.end - event.start
    length = run.events[-1].end - run.events[0].start if run.events else 0.0
    times["between"] = length - sum(times.values())
    return times


def length(runs: Sequence[Run]) -> float:
    """From the first start of all ranks to their last end."""
    return max(run.events[-1].end for run in runs) - min(run.events[0].start for run in runs)


def _delays(steps: Sequence[Sequence[Run]]) -> Iterator[tuple[float, str]]:
    """By how much a rank is behind the mean of the other ranks, if it is so in three of four
    steps, and what to do about it.
    """
    for kind, words in _OWN.items():
        excess = defaultdict[int, list[float]](list)
        for runs in steps:
            times = [
                (shares(run) | {"start": run.events[0].start - run.free})[kind] for run in runs
            ]
            for rank, time in enumerate(times):
                excess[rank].append(time - fmean(times[:rank] + times[rank + 1 :]))
        for rank, found in excess.items():
            by = median(found)
            if sorted(found)[len(found) // 4] > 0:
                yield by, f"{words.format(rank, *shown(by))} than the mean of the other ranks."


def varies(steps: Sequence[Sequence[Run]], took: float, simulated: float) -> str:
    """That the times of these steps vary, if they do, beside that of the simulated step. ``took``
    is the measured time of the latter.
    """
    lengths = sorted(map(length, steps))
    whole = median_low(lengths)
    delay = max((by for by, _ in _delays(steps)), default=0.0)
    if max(whole / lengths[0], (took - delay) / simulated) <= _MOST:
        return ""
    *times, would = shown(lengths[0], lengths[-1], simulated)
    return (
        f"A step took {' to '.join(dict.fromkeys(times))}, in the simulation {would}: times vary, "
        "as with other programs or too few cores. Measure again."
    )


def delays(steps: Sequence[Sequence[Run]], simulated: float) -> Iterator[tuple[float, str]]:
    """The ranks that are late by what is not work: the share of a step that a change saves at most,
    and the change. They count as far as steps are longer than the simulated one.
    """
    for by, words in _delays(steps):
        whole = median_low(map(length, steps))
        gain = min(by, whole - simulated) / whole
        yield gain, f"{words} That saves at most {gain:.0%} of a step."

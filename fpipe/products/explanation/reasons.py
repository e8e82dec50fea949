# SPDX-License-Identifier: Apache-2.0
"""Why ranks are idle in a simulated step, and what would shorten it most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from textwrap import fill
from typing import TypeAlias

from ... import Costs, Schedule, Timeline
from ...errors import FpipeError
from ..pictures.labels import percent, with_code
from ..search.comparison import named_alike

MOST_FORWARDS = 1 << 12  #: of a schedule that is compared with all others
MEASURE = "fpipe.measure_costs(pipe, params, x, y)"
HEADING = "What to change first"
#: with line ends, and within its cell
PARAGRAPH = '<p style="white-space:pre-line;overflow-wrap:anywhere">'
LEAST_GAIN = 0.02  #: of the time of a step, for advice
MOST_MEMORY = 2.0  #: of a schedule to change to, in that of this one
#: Shares of the time that changes save, and what to change.
Advice: TypeAlias = Iterator[tuple[float, str]]


def idle_of(timeline: Timeline, rank: int) -> list[tuple[float, str]]:
    """The part of a rank in the bubble, as shares of the span with their causes, the longest first.
    A wait also names another
    stage, at which a chain of waits for each other begins, for more than half of the time.
    """
    spent: defaultdict[str, float] = defaultdict(float)
    first: defaultdict[tuple[str, int, int], float] = defaultdict(float)
    for before, span in pairwise(timeline.of_rank(rank)):
        wait = timeline.waited_for(rank, span.position)
        if wait is None or wait.time <= 0:
            spent["waits for messages"] += max(span.start - before.end, 0.0)
            continue
        cause = timeline.rows[wait.rank][wait.position].parts[0]
        what = "output" if cause.op == "F" else "gradient"
        why = f"waits for the {what} of stage {cause.stage} on rank {wait.rank}"
        spent[why] += wait.time
        begin = wait
        while (earlier := timeline.waited_for(*begin[:2])) and earlier.time > 0:
            begin = earlier
        first[why, cause.stage, timeline.rows[begin.rank][begin.position].parts[0].stage] += (
            wait.time
        )
    spent["its own span is shorter than the longest one"] = timeline.span - timeline.windows[rank]
    held = {
        why: f", held up by stage {stage}"
        for (why, own, stage), time in first.items()
        if time > spent[why] / 2 and stage != own
    }
    shares = (
        (time / timeline.span, why + held.get(why, ""))
        for why, time in spent.items()
        if time > 5e-4 * timeline.span
    )
    return sorted(shares, reverse=True)


def advice(
    schedule: Schedule,
    costs: Costs,
    named: str,
    of_count: Callable[[int], Schedule],
    others: Iterable[tuple[float, str]] = (),
) -> tuple[str, ...]:
    """What to change first, as sentences: the two changes that save most, of those with a gain.

    ``named`` is an expression of the costs, ``of_count`` the schedule of the pipeline for another
    number of microbatches, and ``others`` are changes that the caller has found.
    """
    timeline = schedule.simulate(costs)
    if not timeline.total:
        return ()
    found = [
        *others,
        *_balance(timeline, named),
        *_messages(schedule, timeline, costs),
        *_microbatches(timeline, costs, of_count),
        *_schedules(schedule, timeline, costs),
    ]
    ranked = sorted((one for one in found if one[0] >= LEAST_GAIN), reverse=True)
    return tuple(text for _, text in ranked[:2])


def as_text(advice: Sequence[str]) -> list[str]:
    """The lines about what to change, below their heading."""
    lines = "\n".join(_numbered(advice)).splitlines()
    return ["", HEADING, *(fill(line, 80, subsequent_indent="   ") for line in lines)]


def as_html(advice: Sequence[str]) -> str:
    """The same for a page."""
    texts = (f"{PARAGRAPH}{with_code(text)}</p>" for text in _numbered(advice))
    return f"<h3>{HEADING}</h3>{''.join(texts)}"


def _numbered(advice: Sequence[str]) -> list[str]:
    numbered = (f"{place}. {text}" for place, text in enumerate(advice, 1))
    texts = [text.replace("\n", "\n   ") for text in numbered]
    return texts or ["Nothing stands out: no change that is known here saves 2% of a step."]


def _balance(timeline: Timeline, costs: str) -> Advice:
    """The ranks with the most work, for which others wait, and those with less than four fifths of
    the mean, or the one with the least; where one stage is most of what a rank has above the mean,
    that stage. ``costs`` is an expression of them.
    """
    busy = timeline.busy
    mean = sum(busy) / len(busy)
    most = max(busy)
    if most <= 1.05 * mean:
        return

    def named(ranks: Sequence[int]) -> str:
        many = f"s {', '.join(map(str, ranks[:-1]))} and" * (len(ranks) > 1)
        times = sorted(busy[rank] / mean for rank in ranks)
        share = " to ".join(dict.fromkeys(f"{time:.2g}" for time in (times[0], times[-1])))
        return f"rank{many} {ranks[-1]} ({share} times the mean work)"

    full = [rank for rank, time in enumerate(busy) if time > 0.95 * most]
    below = max(0.8 * mean, min(busy))
    empty = [rank for rank, time in enumerate(busy) if time <= below]
    work: defaultdict[int, float] = defaultdict(float)
    for span in timeline.of_rank(full[0]):
        work[span.action.parts[0].stage] += span.end - span.start
    alone, stage = max(zip(work.values(), work, strict=True))
    copies = ""
    text = f"Move work from {named(full)}, for which the others wait, to {named(empty)}"
    if len(full) > len(busy) / 2:
        text = f"Move work to {named(empty)}, idle while the others compute"
    elif len(full) == 1 and 2 * alone > most + mean:
        text = (
            f"Split stage {stage} of {named(full)}, for which the others wait, and move a part of "
            f"it to {named(empty)}"
        )
        copies = (
            "\nA stage that cannot be split can have copies on several ranks, with "
            f"schedule=fpipe.auto(costs={costs}, replicate=True)."
        )
    gain = (most - mean) / timeline.total
    yield (
        gain,
        f"{text}. An even split saves at most {percent(gain)} of a step.\n"
        f"cuts = fpipe.balance(parts, {len(busy)}, pipe.schedule("
        f"{timeline.microbatches // timeline.slices})).cuts\n"
        "parts: all modules, or the costs of all layers, in order (fpipe.measure_costs has them "
        f"with one stage a layer).{copies}",
    )


def _messages(schedule: Schedule, timeline: Timeline, costs: Costs) -> Advice:
    """Fewer messages for as much work."""
    free = schedule.simulate(replace(costs, comm=0.0, send=0.0, receive=0.0)).total
    gain = 1 - free / timeline.total
    yield (
        gain,
        "Use larger microbatches or larger stages: without its messages a step takes "
        f"{percent(gain)} less time.",
    )


def _microbatches(timeline: Timeline, costs: Costs, of_count: Callable[[int], Schedule]) -> Advice:
    """Twice as many microbatches of the same size."""
    if isinstance(costs.load, Sequence) or isinstance(costs.size, Sequence):
        return  # one number for each microbatch
    count = timeline.microbatches // timeline.slices
    try:
        twice = of_count(2 * count).simulate(costs)
    except FpipeError:
        return  # it has no form for that number, or was given for this one
    gain = 1 - twice.total / 2 / timeline.total
    yield (
        gain,
        f"With microbatches={2 * count} of the same size a sample takes {percent(gain)} less time "
        f"than with {count}.",
    )


def _schedules(schedule: Schedule, timeline: Timeline, costs: Costs) -> Advice:
    """The named schedule for these ranks and stages that ends first, of those without much more
    memory.
    """
    if schedule.stages * schedule.microbatches > MOST_FORWARDS or schedule.slices > 1:
        return
    limit = max(timeline.peak_bytes)
    found = []
    for name, other in named_alike(schedule):
        simulated = other.simulate(costs)
        loss = simulated.total / timeline.total - 1
        peak = max(simulated.peak_bytes)
        if -loss >= LEAST_GAIN and peak <= MOST_MEMORY * limit:
            found.append((peak > limit * (1 + 1e-9), loss, peak, len(found), name))
    if found:
        _, loss, peak, _, name = min(found)
        more = f" for {peak / limit:.1f} times the memory" if peak > 1.05 * limit else ""
        text = (
            f'With schedule="{name}" a step takes {percent(-loss)} less time at these costs{more}.'
        )
        yield -loss, text

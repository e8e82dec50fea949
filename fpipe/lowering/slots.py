# SPDX-License-Identifier: Apache-2.0
"""Register allocation: steps over keys become instructions over slots, with frees.

A slot is reused after the last use of its value; a program takes values that it uses last out of
their slots, so that they can be freed inside it. Knows one rank and no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..tree import Aval, Spec
from .keys import Key
from .plan import Instruction, LoweringInput, Plan
from .step import Step, Use
from .value_graph import spec_of
from .weaving.weave import Weave


def assign(
    job: LoweringInput,
    rank: int,
    steps: Sequence[Step],
    split: int,
    wanted: Sequence[Key],
    weaves: Mapping[str, Weave],
) -> Plan:
    """Assign slots."""
    feeds = _feeds(steps, wanted)
    uses = tuple(reversed(list(_uses(steps, wanted, feeds))))
    slots, spare, size = dict(feeds), list[int](), len(feeds)
    instructions = []
    for step, (ends, needed) in zip(steps, uses, strict=True):
        reads = tuple([slots[key] for key in step.reads])
        for key, later in zip(step.writes, needed, strict=True):
            if later and key not in slots:
                if not spare:
                    spare, size = [size], size + 1
                slots[key] = spare.pop()
        writes = tuple([slots.get(key, -1) for key in step.writes])
        frees = tuple([slots.pop(step.reads[place]) for place in ends])
        spare += frees
        if not idle(step):
            instructions.append(
                Instruction(
                    step.kind,
                    step.action,
                    reads,
                    writes,
                    frees,
                    step.program,
                    step.peer,
                    step.number,
                    specs_of(step),
                    step.how,
                    step.share,
                    step.owner,
                    step.stage,
                )
            )
    results = {key: slots[key] for key in wanted if key in slots}
    return Plan(
        rank,
        tuple(instructions),
        size,
        feeds,
        results,
        split,
        weaves,
        job.schedule[rank],
        tuple(steps),
        uses,
        job.wired,
    )


def idle(step: Step) -> bool:
    """Whether a step needs no instruction."""
    return step.kind == "ZERO" and not step.writes


def specs_of(step: Step) -> tuple[Spec, ...]:
    """The specs of the tensors of a step."""
    return tuple([spec_of(aval) if isinstance(aval, Aval) else aval for aval in step.avals])


def _uses(steps: Sequence[Step], wanted: Sequence[Key], feeds: dict[Key, int]) -> Iterator[Use]:
    """From the last step to the first: the places of the reads that end there, and which writes are
    used later.

    The first ADD creates a gradient; later ones read it and write into it.
    """
    used = {*wanted, *feeds}
    for step in reversed(steps):
        needed = tuple([key in used for key in step.writes])
        if step.kind == "ADD" or step.kind == "SUM":
            used.update(step.writes)
        elif (
            step.share is not None
        ):  # parameters may be gathered more than once: earlier values have ended
            used.difference_update(step.writes)
        ends = []
        for place, key in enumerate(step.reads):
            if key not in used:
                used.add(key)
                ends.append(place)
        yield tuple(ends), needed


def _feeds(steps: Sequence[Step], wanted: Sequence[Key]) -> dict[Key, int]:
    """Keys that are read before anything writes them: the caller passes these."""
    written: set[Key] = set()
    feeds: dict[Key, int] = {}
    for step in (*steps, Step("EACH", reads=tuple(wanted))):
        for key in step.reads:
            if key not in written and key not in feeds:
                feeds[key] = len(feeds)
        written.update(step.writes)
    return feeds

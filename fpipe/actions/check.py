# SPDX-License-Identifier: Apache-2.0
"""Checks whether a schedule is complete and can run.

The error names the first broken rule, with rank, position and remedy.

    rule         what it requires
    action       every cell is an action, or two or more fused ones
    range        stages and microbatches are counted from 0, as many as the schedule has
    placement    an action is on the rank of its stage and microbatch
    slices       all actions have slices or none, and those of a microbatch are on one rank
    count        each stage and microbatch, or slice, has F once, and B once or I and W once
    fused        the parts of a fused action do not need each other
    order        what an action needs from its own rank is before it; slices run forwards in order,
                 backwards in reverse
    deadlock     no ranks wait for each other in a circle

The last rule suffices even where a send blocks until it is received. Without a circle there is an
order of all actions in which each follows what it needs. Insert every message into that order, as
one event, behind the action that sends it. Each rank runs its part of the order. Then all
participants of the first unfinished event have reached it, so some event can always complete.

A fast pass counts actions. Only if it fails, ``broken_rules`` searches for the place. Nothing here
knows time, memory or tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, cast

from ..errors import ScheduleError
from . import broken_rules
from .action import LARGE, Action, Fused, Row, Rows, size
from .dependencies import walk
from .rule import AFTER, BIT, FORWARD, TRAINED, Walk
from .unit import Slice

if TYPE_CHECKING:
    from .columns import Waves

_WIDE = 16  #: ranks; with fewer, a loop over actions is faster


class Inspection(NamedTuple):
    """What a check finds in the rows of a schedule.

    ``seen`` has the ops that occur, as the sum of their bits, at ``stage * units + unit``.
    ``walk`` has an order of the actions, or ``waves`` has it.
    """

    schedule: Rows
    seen: bytearray
    walk: Walk
    waves: Waves | None = None


def check_rows(inspected: Inspection, *, training: bool = True) -> None:
    """Raise ScheduleError for the first broken rule. ``training=False`` requires F alone.

    >>> from fpipe import Placement
    >>> rows = [(Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "B", 0), Action(1, "F", 0))]
    >>> check_rows(inspect_rows(Rows(rows, Placement.loop(2), 1)))
    Traceback (most recent call last):
        ...
    fpipe.errors.ScheduleError: rank 1, position 0 (1B0): it needs the output of 1F0, which stands
    later on this rank, at position 1; move 1F0 before it
        rank 1 | 1B0 1F0
                 ^^^
    """
    schedule, seen, walked, _ = inspected
    rows, placement, units, slices = schedule
    complete = TRAINED if training else FORWARD
    if sum(map(seen.count, complete)) != placement.stages * units:
        index = next(index for index, bits in enumerate(seen) if bits not in complete)
        ops = frozenset(op for op, bit in BIT.items() if seen[index] & bit)
        raise broken_rules.missing(schedule, *divmod(index, units), ops, training=training)
    if walked.blocked:
        raise broken_rules.stuck(rows, placement.stages, walked)
    if slices > 1 and (fault := broken_rules.wrong_slice_order(rows)):
        raise fault


def inspect_rows(schedule: Rows) -> Inspection:
    """Check the first four rules and that no action occurs twice, and walk through the rows.

    Actions may be missing, or blocked.

    >>> from fpipe import Placement
    >>> rows = [(Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1))]
    >>> list(inspect_rows(Rows(rows, Placement.loop(1), 2)).seen)
    [3, 1]
    """
    rows, placement, units, slices = schedule
    if len(rows) != placement.ranks or placement.stages * units > most_units(rows):
        raise broken_rules.wrong_size(schedule)
    if slices == 1 and len(rows) >= _WIDE and size(rows) >= LARGE:
        found = import_module(f"{__package__}.columns").inspect(schedule)
        if found:
            return Inspection(*found)
    try:
        cut = slices > 1 or any(
            Slice in set(map(type, map(itemgetter(2), _parts(row)))) for row in rows
        )
        if cut and (fault := broken_rules.wrong_slices(schedule)):
            raise fault
        seen = _tally(schedule)
    except ScheduleError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError):  # a wrong cell
        raise broken_rules.wrong_cell(schedule) from None
    return Inspection(schedule, seen, walk(rows, placement.stages, units))


def most_units(rows: Sequence[Row]) -> int:
    """The most stages times microbatches for rows of this length. With more, tables of all facts
    would be mostly empty.
    """
    return 100_000 + 100 * size(rows)


def _tally(schedule: Rows) -> bytearray:
    """Which ops occur; ValueError or KeyError if a cell breaks a rule."""
    rows, placement, units, _ = schedule
    paths = list(map(placement.path, range(units)))
    owners = {path: dict(enumerate(path)) for path in set(paths)}
    # Both levels are dictionaries, so that a number out of range raises KeyError.
    where = {microbatch: owners[path] for microbatch, path in enumerate(paths)}
    seen = bytearray(placement.stages * units)
    for rank, row in enumerate(rows):
        for stage, op, microbatch in _parts(row):
            if where[microbatch][stage] != rank:
                raise ValueError
            at = stage * units + microbatch
            # Where the op breaks a rule, AFTER has 256. A bytearray raises ValueError for that.
            seen[at] = AFTER[op][seen[at]]
    return seen


def _parts(row: Row) -> Sequence[Action]:
    """The actions of a row, with the parts of fused ones; the row itself if none is fused."""
    types = set(map(type, row))
    if types <= {Action}:
        return cast(Sequence[Action], row)
    parts = [part for action in row for part in action.parts]
    if not types <= {Action, Fused} or set(map(type, parts)) != {Action}:
        raise TypeError
    if any(type(action) is Fused and len(action.parts) < 2 for action in row):
        raise ValueError
    return parts

# SPDX-License-Identifier: Apache-2.0
"""The catalogue: how a name, a file, a function or a ``Schedule`` becomes a ``Schedule``.

A new schedule is one function and one row in ``TABLE``. A user registers one with
:func:`register_schedule`. The file of a generator is loaded when its schedule is first made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from os import PathLike
from typing import Any, NamedTuple, TypeGuard

from ..actions.dependencies import uncollected
from ..actions.product import load_pass
from ..schedule import Schedule
from .refusals import no_source, too_large, unknown_name, wrong_count, wrong_stages
from .sources import ScheduleSource, called, make_registered, read_schedule, returned


class Entry(NamedTuple):
    """A schedule with a name: its generator, and how many stages it places on a rank.

    ``generator`` is the file and the function, which makes rows, or the function that a user
    registered, which makes a Schedule, and of which nothing else is known. A rank gets ``per_rank``
    stages by default, or any multiple of ``step`` that the caller asks for. A ``fixed`` number is
    the only one. ``orders_slices``: the generator takes ``slices=`` and has an order for slices.
    """

    name: str
    generator: str | Callable[..., Schedule]
    per_rank: int = 1
    step: int = 1
    fixed: bool = False
    orders_slices: bool = False

    @property
    def make(self) -> Callable[..., Any]:
        """The function of the generator."""
        if callable(self.generator):
            return self.generator
        file, _, function = self.generator.partition(".")
        return getattr(import_module(f"{__package__}.{file}"), function)


TABLE = (
    Entry("GPipe", "gpipe.make_gpipe"),
    Entry("1F1B", "one_f_one_b.make_one_f_one_b"),
    Entry("Interleaved1F1B", "interleaved.make_interleaved_one_f_one_b", 2),
    Entry("LoopedBFS", "interleaved.make_looped_bfs", 2),
    Entry("ZBVZeroBubble", "zbv.make_zbv", 2, fixed=True),
    Entry("DualPipeV", "dualpipe.make_dual_pipe_v", 2, fixed=True),
    Entry("Eager1F1B", "one_f_one_b.make_eager_one_f_one_b"),
    Entry("Overlapped1F1B", "one_f_one_b.make_overlapped_one_f_one_b", fixed=True),
    Entry("ZBH1", "zero_bubble.make_zb_h1"),
    Entry("ZBH2", "zero_bubble.make_zb_h2"),
    Entry("ZB1P", "zb_1p_2p.make_zb_1p"),
    Entry("ZB2P", "zb_1p_2p.make_zb_2p"),
    Entry("InterleavedZeroBubble", "zero_bubble.make_interleaved_zero_bubble", 2),
    Entry("VHalf", "v_family.make_v_half", 2, fixed=True),
    Entry("VMin", "v_family.make_v_min", 2, fixed=True),
    Entry("DualPipe", "dualpipe.make_dual_pipe", fixed=True),
    Entry("Chimera", "chimera.make_chimera", fixed=True),
    Entry("Hanayo", "hanayo.make_hanayo", 2, step=2),
    Entry("Seq1F1B", "one_f_one_b.make_seq_one_f_one_b", orders_slices=True),
    Entry("SeqZBH1", "zero_bubble.make_seq_zb_h1", orders_slices=True),
)
#: Other names for schedules of the table.
ALIASES = {"ZBV": "ZBVZeroBubble"}
#: The forwards and backwards of the largest schedule, which takes some gigabytes.
MOST_ACTIONS = 1 << 24


def key(name: object) -> str:
    """A name without case, blanks, ``-`` and ``_``: names with equal keys are the same name.

    >>> key("Zero-Bubble V")
    'zerobubblev'
    """
    return re.sub("[-_ ]", "", str(name).lower())


#: The entries by the keys of all names; :func:`register_schedule` adds to them.
ENTRIES = {key(entry.name): entry for entry in TABLE}
ENTRIES |= {key(other): ENTRIES[key(name)] for other, name in ALIASES.items()}


def schedule_names() -> tuple[str, ...]:
    """The names that :func:`make_schedule` knows, built-in ones first.

    Returns:
        Names, as text.

    >>> schedule_names()[:3]
    ('GPipe', '1F1B', 'Interleaved1F1B')
    """
    return tuple(dict.fromkeys(entry.name for entry in ENTRIES.values()))


def make_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    stages: int | None = None,
    *,
    slices: int = 1,
    replicas: Sequence[int] | None = None,
) -> Schedule:
    """The schedule called ``name`` for these counts.

    Args:
        name: one of :func:`schedule_names`; case, blanks, ``-`` and ``_`` do not matter.
        ranks: how many ranks there are.
        microbatches: how many microbatches a step has.
        stages: how many stages there are in all; by default one or two for each rank, depending on
            the schedule.
        slices: into how many slices the sequence of each microbatch is cut. "Seq1F1B" and "SeqZBH1"
            order slices as others order microbatches. In any other schedule, each action becomes
            one action for each slice (see ``Schedule.sliced``).
        replicas: on how many ranks each stage is, for schedules of one stage a rank: ``(3, 1)`` is
            stage 0 on ranks 0 to 2 and stage 1 on rank 3. Microbatch m runs on copy ``m % k`` of a
            stage with k copies. Rows assume that a stage with k copies takes k times as long as one
            with one. Gradients are added in the order of microbatches.

    Raises:
        ScheduleError: if there is no such name, or the schedule has no form for these counts.

    >>> print(make_schedule("1F1B", ranks=2, microbatches=2))
    [0F0, 0F1, 0B0, 0B1]
    [1F0, 1B0, 1F1, 1B1]
    >>> make_schedule("interleaved1f1b", 4, 8, stages=12).placement
    Placement(0: [0, 4, 8], 1: [1, 5, 9], 2: [2, 6, 10], 3: [3, 7, 11])
    >>> print(make_schedule("Seq1F1B", ranks=1, microbatches=1, slices=2))
    [0F0.0, 0F0.1, 0B0.1, 0B0.0]
    >>> print(make_schedule("1F1B", ranks=3, microbatches=4, replicas=(2, 1)))
    [0F0, 0F2, 0B0, 0B2]
    [0F1, 0F3, 0B1, 0B3]
    [1F0, 1B0, 1F1, 1B1, 1F2, 1B2, 1F3, 1B3]
    """
    counts = {"ranks": ranks, "microbatches": microbatches, "slices": slices, "stages": stages}
    for what, count in counts.items():
        if (what, count) != ("stages", None) and (type(count) is not int or count < 1):
            raise wrong_count(what, count)
    entry = ENTRIES.get(key(name))
    if entry is None:
        raise unknown_name(name, {key(known): known for known in (*schedule_names(), *ALIASES)})
    if replicas is not None:
        of_stages = load_pass("replicas")
        copies = of_stages.checked(replicas, ranks, stages)
        stages = len(copies)
        if stages < ranks:
            return of_stages.make_replicated(entry.name, copies, microbatches, slices, MOST_ACTIONS)
    if callable(entry.generator):
        return make_registered(entry.name, entry.generator, ranks, microbatches, stages, slices)
    default = ranks * entry.per_rank
    count = default if stages is None else stages
    if count % (ranks * entry.step) or (entry.fixed and count != default):
        raise wrong_stages(entry.name, ranks, count, default if entry.fixed else 0, entry.step)
    if 2 * count * microbatches * slices > MOST_ACTIONS:
        raise too_large(count, microbatches, slices, MOST_ACTIONS)
    with uncollected():
        ordered = {"slices": slices} if entry.orders_slices else {}
        rows, placement = entry.make(ranks, microbatches, count, **ordered)
        schedule = Schedule(rows, placement, microbatches, entry.name, **ordered)
        return schedule if ordered else schedule.sliced(slices)


def schedule_from(
    source: ScheduleSource,
    ranks: int,
    microbatches: int,
    stages: int | None = None,
    slices: int = 1,
) -> Schedule:
    """The schedule that ``source`` describes; not yet checked.

    ``source`` is one of these: a name for :func:`make_schedule`; the path of a file (see
    :func:`is_path`); a function ``(ranks, microbatches) -> Schedule``; or a Schedule, which is
    returned as it is. The counts are for a name and a function. A file and a Schedule have other
    counts, and so may the result of a function: the caller compares them with what it needs.

    >>> schedule_from("1F1B", ranks=2, microbatches=3)
    Schedule(1F1B, ranks=2, microbatches=3, stages=2)
    >>> schedule_from(lambda ranks, microbatches: make_schedule("ZBV", ranks, microbatches), 2,
    ...     3).stages
    4
    """
    if isinstance(source, Schedule):
        return source
    if is_path(source):
        return read_schedule(source)
    if isinstance(source, str):
        return make_schedule(source, ranks, microbatches, stages, slices=slices)
    if not callable(source):
        raise no_source(source)
    return returned(called(source, ranks, microbatches), "the schedule function")


def is_path(source: object) -> TypeGuard[str | PathLike[str]]:
    """Whether :func:`schedule_from` reads ``source`` as a path.

    A path as text ends in .csv or .txt, contains a separator of folders, or is an existing file
    whose name is not that of a schedule.

    >>> is_path("plan.csv"), is_path("1F1B")
    (True, False)
    """
    if not isinstance(source, str):
        return isinstance(source, PathLike)
    if source.lower().endswith((".csv", ".txt")) or os.sep in source:
        return True
    return os.path.isfile(source) and key(source) not in ENTRIES

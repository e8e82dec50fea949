# SPDX-License-Identifier: Apache-2.0
"""The rows of a large schedule as columns of integers, and what NumPy computes of them.

This file is loaded for large schedules alone. It has the rules and the arithmetic of ``check``,
``dependencies``, ``simulation`` and ``timeline``, to the bit, for complete schedules without fused
actions and slices. Others are left to those files, as are schedules with a fault, which they name.

The cells of all rows lie one behind another. Before the first row and behind each row is a cell
that is no action. So the cell before an action is the action that its rank runs before it, or none.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np

from .action import Action, LazyRows, Placement, Row, Rows
from .action_kinds import KINDS, OPS, REQUIRED
from .dependencies import Facts
from .rule import TRAINED, Walk

_CODES = {op: code for code, op in enumerate(OPS)}
_NO_ACTION = [[len(OPS)], [-1], [-1]]
_LEAST_WIDTH = 8  #: actions at once; with fewer, a loop over actions is faster


class Columns(LazyRows):
    """Rows whose actions are made when they are read; equal to the tuple of rows.

    Args:
        rows: of each rank the codes of the ops, the stages and the microbatches.
        made: the rows of actions, where they exist.

    >>> rows = Columns([([0, 1], [0, 0], [0, 0]), ([0, 1], [1, 1], [0, 0])])
    >>> rows[1], rows == ((Action(0, "F", 0), Action(0, "B", 0)), rows[1])
    ((1F0, 1B0), True)
    """

    def __init__(self, rows: Iterable[Any], made: Iterable[Row] = ()):
        cells = chain.from_iterable(zip(rows, repeat(_NO_ACTION), strict=False))
        columns = list(zip(_NO_ACTION, *cells, strict=True))
        #: where the cells are that are no action
        self.gaps = np.cumsum(list(map(len, columns[0])))[::2] - 1
        self.ops, self.stages, self.microbatches = (
            np.concatenate(column, dtype=kind)
            for column, kind in zip(columns, (np.int8, np.int32, np.int32), strict=True)
        )
        self.size = len(self.ops) - len(self.gaps)
        self._made = dict(enumerate(made))
        self._row = cache(self._actions)

    @classmethod
    def of_patterns(cls, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> Columns:
        """From the pattern and the tapes of each row (see ``generators.patterns``)."""

        def row(pattern: str, tapes: Mapping[str, Any]) -> Any:
            letters = np.frombuffer(pattern.encode(), np.uint8)
            columns = np.empty((3, len(letters)), np.int32)
            for letter in set(pattern):
                stage, op, microbatches = tapes[letter]
                at = np.flatnonzero(letters == ord(letter))
                values = _CODES[op], stage, microbatches
                for column, value in zip(columns, values, strict=True):
                    if isinstance(value, range):
                        value = np.arange(value.start, value.stop, value.step)
                    column[at] = value if isinstance(value, int) else value[: len(at)]
            return columns

        return cls(row(*pair) for pair in rows)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Columns:
        """From rows of actions; ValueError if one is fused, has a slice or is malformed."""

        def row(actions: Any) -> Any:
            stages, ops, microbatches = zip(*actions, strict=True) if actions else ((), (), ())
            numbers = set(map(type, chain(stages, microbatches)))
            if not (set(map(type, actions)) <= {Action} and numbers <= {int}):
                raise ValueError
            return list(map(_CODES.__getitem__, ops)), stages, microbatches

        return cls(map(row, rows), rows)

    def row(self, rank: int) -> tuple[slice, np.ndarray, np.ndarray, np.ndarray]:
        """Where the cells of a rank are, and its columns."""
        cells = slice(self.gaps[rank] + 1, self.gaps[rank + 1])
        return cells, self.ops[cells], self.stages[cells], self.microbatches[cells]

    # ---- as a tuple of rows ----
    def __len__(self) -> int:
        return len(self.gaps) - 1

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return tuple(self)[rank]
        return self._row(range(len(self))[rank])

    def _actions(self, rank: int) -> Row:
        if rank in self._made:
            return self._made[rank]
        ops, stages, microbatches = (column.tolist() for column in self.row(rank)[1:])
        fields = zip(stages, map(OPS.__getitem__, ops), microbatches, strict=True)
        return tuple(map(tuple.__new__, repeat(Action), fields))

    def __reduce__(self) -> Any:
        return tuple, (list(self),)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, Columns) else other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    # ---- figures of a timeline ----
    def most(
        self, held: Mapping[str, Sequence[float]], sizes: Sequence[float]
    ) -> tuple[float, ...]:
        """For each rank the most that it holds."""
        table = np.array([held[op] for op in OPS])

        def of_rank(rank: int) -> float:
            _, ops, stages, microbatches = self.row(rank)
            changes = table[ops, stages]
            if sizes:
                changes = changes * np.array(sizes)[microbatches]
            return np.cumsum(changes).max(initial=0.0).item()

        return tuple(map(of_rank, range(len(self))))

    def tally(self, kinds: Sequence[Hashable]) -> Counter[tuple[Any, str, int]]:
        """How often there are (kind of the microbatch, op, stage), where microbatches have
        ``kinds``.
        """
        index = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        numbers = np.array([index[kind] for kind in kinds])
        shape = len(index), len(OPS) + 1, int(self.stages.max()) + 1
        found = np.zeros(shape, np.int64)
        for rank in range(len(self)):
            _, ops, stages, microbatches = self.row(rank)
            where = np.ravel_multi_index((numbers[microbatches], ops, stages), shape)
            found += np.bincount(where, minlength=found.size).reshape(shape)
        keys = list(index)
        return Counter(
            {
                (keys[kind], OPS[op], stage): int(found[kind, op, stage])
                for kind, op, stage in np.argwhere(found).tolist()
            }
        )


class Waves(NamedTuple):
    """An order of the cells of complete rows. The actions of a step need none of each other.

    ``needs`` has for each cell the one of another rank that it needs, or 0.
    """

    rows: Columns
    facts: Facts
    needs: np.ndarray
    steps: list[np.ndarray]

    def run(
        self, costs: Sequence[Mapping[str, Sequence[Sequence[float]]]]
    ) -> tuple[tuple[array[float], ...], tuple[array[float], ...], tuple[array[int], ...]]:
        """The starts, ends and causes of actions, with the steps of ``simulation`` as costs."""
        rows = self.rows
        groups = {id(group): group for group in costs}
        table = [group[op] for group in groups.values() for op in OPS]
        free = np.zeros((1, 6))
        numbers = {key: number for number, key in enumerate(groups)}
        route = np.array([numbers[id(group)] for group in costs], np.int32) * len(OPS)
        kinds = (route[rows.microbatches] + rows.ops) * self.facts.stages + rows.stages
        kinds[rows.gaps] = -1
        offset, travel, receive, length, send, _ = np.concatenate((*table, free)).T.copy()
        starts = np.zeros(len(kinds))
        ends = np.zeros(len(kinds))
        for step in self.steps:
            kind = kinds[step]
            before = step - 1
            arrival = ends[self.needs[step]] + travel[kind]
            clock = np.maximum(ends[before] + send[kinds[before]], arrival) + receive[kind]
            starts[step] = clock
            ends[step] = clock + length[kind]

        ranks = range(len(rows))
        began = tuple(array("d", starts[rows.row(rank)[0]].tobytes()) for rank in ranks)
        del starts  # of a large schedule, these are hundreds of megabytes

        def causes(rank: int) -> np.ndarray:
            cells, _, stages, microbatches = rows.row(rank)
            before = slice(cells.start - 1, cells.stop - 1)
            kind = kinds[cells]
            waits = ends[self.needs[cells]] + travel[kind] > ends[before] + send[kinds[before]]
            fact = stages * self.facts.microbatches + microbatches + offset[kind].astype(np.int64)
            return np.where(waits, fact, -1)

        caused = tuple(array("q", causes(rank).tobytes()) for rank in ranks)
        ended = tuple(array("d", ends[rows.row(rank)[0]].tobytes()) for rank in ranks)
        return began, ended, caused


def inspect(schedule: Rows) -> tuple[Rows, bytearray, Walk, Waves] | None:
    """What ``check.inspect_rows`` finds, with waves; None if there is a fault, or if too few
    actions can run at once.
    """
    rows, placement, units, _ = schedule
    facts = Facts(placement.stages, units)
    try:
        columns = rows if isinstance(rows, Columns) else Columns.of(rows)
        needs = _needs(columns, placement, facts)
        waves = Waves(columns, facts, needs, _steps(columns, needs))
    except (TypeError, ValueError, KeyError, IndexError, OverflowError):
        return None
    seen = bytearray(TRAINED[:1]) * (placement.stages * units)
    return schedule._replace(rows=columns), seen, Walk(array("q"), ()), waves


def _needs(rows: Columns, placement: Placement, facts: Facts) -> np.ndarray:
    """The ``needs`` of ``Waves``. ValueError if an action breaks a rule within its row, or actions
    are missing.
    """
    units = facts.microbatches
    paths = np.array(placement.paths, np.int32)
    route = np.array(list(map(placement.path_index, range(units))), np.int32)
    table = [(code, KINDS[op].needs, *facts.table[op]) for code, op in enumerate(OPS)]
    sources = np.zeros(facts.size, np.int32)
    provided = 0
    for rank in range(len(rows)):
        cells, ops, stages, microbatches = rows.row(rank)
        if min(stages.min(initial=0), microbatches.min(initial=0)) < 0:
            raise ValueError
        if (paths[route[microbatches], stages] != rank).any():
            raise ValueError
        for code, _, _, offsets in table:
            at = np.flatnonzero(ops == code)
            facts_of = stages[at] * units + microbatches[at]
            for offset in offsets:
                sources[facts_of + offset] = at + cells.start
                provided += len(at)
    if not np.count_nonzero(sources) == provided == len(REQUIRED) * placement.stages * units:
        raise ValueError  # one is missing, or there twice
    needs = np.zeros(len(rows.ops), np.int32)
    for rank in range(len(rows)):
        cells, ops, stages, microbatches = rows.row(rank)
        for code, kinds, offsets, _ in table:
            at = np.flatnonzero(ops == code)
            facts_of = stages[at] * units + microbatches[at]
            at += cells.start
            for (_, by), offset in zip(kinds, offsets, strict=True):
                source = sources[facts_of + offset]
                if by:
                    needs[at] = source
                elif (source > at).any():
                    raise ValueError
    return needs


def _steps(rows: Columns, needs: np.ndarray) -> list[np.ndarray]:
    """The ``steps`` of ``Waves``. ValueError if ranks wait for ever, or few actions run at once."""
    needs[rows.gaps[1:]] = rows.gaps[-1]  # a rank at the end of its row waits for ever
    done = np.zeros(len(needs), bool)
    done[0] = True
    cursor = rows.gaps[:-1] + 1
    left = rows.size
    steps: list[np.ndarray] = []
    while left:
        runs = done[needs[cursor]]
        step = cursor[runs]
        if not len(step) or (len(steps) - 1024) * _LEAST_WIDTH > rows.size - left:
            raise ValueError
        done[step] = True
        cursor += runs
        steps.append(step)
        left -= len(step)
    return steps

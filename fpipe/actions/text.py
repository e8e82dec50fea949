# SPDX-License-Identifier: Apache-2.0
"""Schedules as text: a line for each rank, in brackets for people or as CSV.

    [0F0, 0F1, (0F2;3B0)OVERLAP_F_B]      brackets: what str(schedule) writes
    [0F0.0, 0F0.1, 0B0.1, 0B0.0]          slices of microbatches
    0F0,0F1,(0F2;3B0)OVERLAP_F_B          CSV: what torch.distributed.pipelining reads and writes

Text that was written is read as the same rows. The readers are strict: every character of a cell
belongs to an action, or a ``ScheduleError`` names line, column and the expected text. They raise no
other exception. ``check`` validates the actions of all rows.

In brackets, blank lines are ignored. In a CSV, empty cells and actions of communication and
sharding are dropped, and a blank line is an idle rank. torch.distributed.pipelining does not know
slices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..errors import ScheduleError
from .action import Action, AnyAction, Fused, Row
from .action_kinds import OPS
from .progress_line import Track
from .unit import unit

_NUMBER = "(0|[1-9][0-9]{0,5})"
_ACTION = re.compile(f"{_NUMBER}([{OPS}]){_NUMBER}(?:[.]{_NUMBER})?")
#: Actions that the lowering of torch.distributed.pipelining adds; that of fpipe adds instructions.
_DROPPED = re.compile(
    f"{_NUMBER}(?:(?:WAIT_SEND|SEND|RECV)_[FB]{_NUMBER}|(?:UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD)(?:{_NUMBER})?)"
)
_FUSED_END = ")OVERLAP_F_B"
_BLANK = " \t"
_MOST_RANKS = 100_000
_EXPECTED = (
    f"an action such as 2F0 (stage, one of {' '.join(OPS)}, microbatch), 2F0.1 (its slice) or "
    "(2F1;3B0)OVERLAP_F_B"
)


def number(value: float, digits: int = 4) -> str:
    """A number with at most so many significant digits, or all those before the point.

    >>> number(26.0), number(0.30000000000000004), number(123456.7), number(2 / 3)
    ('26', '0.3', '123457', '0.6667')
    """
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


#: unit, how many of it are a second, and the least time in seconds that is shown in it
_SECONDS = (("s", 1.0, 2.0), ("ms", 1e3, 1e-3), ("us", 1e6, 0.0))


def readable(longest: float, unit: str = "s") -> tuple[str, float]:
    """The unit in which times are shown, and how many of it are one of theirs.

    >>> readable(7666, "us"), readable(3, ""), readable(0.0009)
    (('ms', 0.001), ('', 1.0), ('us', 1000000.0))
    """
    for theirs, count, _ in _SECONDS:
        if theirs == unit:
            return next((u, n / count) for u, n, least in _SECONDS if longest >= least * count)
    return unit, 1.0


def counted(count: int, what: str) -> str:
    """A count and its noun, in the plural unless the count is 1.

    >>> counted(1, "rank"), counted(2, "microbatch")
    ('1 rank', '2 microbatches')
    """
    if count == 1:
        return f"1 {what}"
    return f"{count} {what}{'es' if what.endswith('ch') else 's'}"


def format_rows(rows: Iterable[Iterable[AnyAction]]) -> str:
    """One bracketed line per rank.

    >>> print(format_rows([[Action(0, "F", 0), Action(0, "B", 0)], []]))
    [0F0, 0B0]
    []
    """
    return "\n".join("[" + ", ".join(map(str, row)) + "]" for row in rows)


def format_csv(rows: Iterable[Iterable[AnyAction]]) -> str:
    """One line of comma-separated cells per rank, for ``torch.distributed.pipelining`` and for
    spreadsheets.

    >>> format_csv([[Action(0, "F", 0), Action(0, "B", 0)], []])
    '0F0,0B0\\n\\n'
    """
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


def parse_rows(text: str, track: Track = iter) -> tuple[Row, ...]:
    """The rows that :func:`format_rows` wrote. ``track`` yields the lines, and may count them.

    >>> parse_rows("[0F0, 0B0]")
    ((0F0, 0B0),)
    >>> parse_rows("[0F0, 0F1junk]")
    Traceback (most recent call last):
        ...
    fpipe.errors.ScheduleError: line 1, column 10: expected ',' or the end after 0F1, but found
    'junk'
        [0F0, 0F1junk]
                 ^^^^
    """
    if not isinstance(text, str):
        raise ScheduleError(
            f"a schedule is read from text, not from a {type(text).__name__}; give one line for "
            "each rank"
        )
    slices = _slices(text)
    rows: list[Row] = []
    for number, line in enumerate(track(_lines(text)), 1):
        body = line.strip(_BLANK)
        if not body:
            continue
        place = _Line(line, number, len(rows), slices)
        start = line.index(body[0])
        end = start + len(body)
        if body[0] != "[":
            raise place.error(start, start + 1, "a '[' that opens the actions of a rank")
        if body[-1] != "]":
            expected = "a ']' that closes the actions of the rank"
            raise place.error(end, end + 1, expected, "the end of the line")
        rows.append(tuple(_cells(body[1:-1], place, start + 1, csv=False)))
    return tuple(rows)


def parse_csv(text: str, track: Track = iter) -> tuple[Row, ...]:
    """The rows of a CSV, without the cells that are not compute. ``track`` is as above.

    >>> parse_csv("0UNSHARD,0F0,0SEND_F0,,0RECV_B0,0WAIT_SEND_F0,0B0")
    ((0F0, 0B0),)
    """
    lines = _lines(text.removeprefix("\ufeff"))
    if lines[-1] == "":
        lines.pop()
    slices = _slices(text)
    return tuple(
        tuple(_cells(line, _Line(line, rank + 1, rank, slices), 0, csv=True))
        for rank, line in enumerate(track(lines))
    )


def _slices(text: str) -> int:
    """The number of slices of a microbatch: the greatest that is named, and 1."""
    return max(map(int, re.findall("[.]([0-9]{1,6})", text)), default=0) + 1


def _lines(text: str) -> list[str]:
    lines = text.replace("\r\n", "\n").split("\n")
    if len(lines) > _MOST_RANKS:
        raise ScheduleError(
            f"{len(lines)} lines are no schedule: one line is one rank", rule="text"
        )
    return lines


class _Line(NamedTuple):
    """A line of the text, and errors about it."""

    text: str
    number: int
    rank: int
    slices: int

    def error(
        self, start: int, end: int, expected: str, found: str = "", position: int | None = None
    ) -> ScheduleError:
        """The error for columns ``start`` to ``end``, which are marked under the line."""
        found = found or self.text[start:end]
        what = found or "nothing"
        if found and not found.startswith("the "):
            what = repr(found[:40])
        more = " and more" if len(found) > 40 else ""
        where = f"line {self.number}, column {start + 1}"
        left = max(0, start - 30)
        shown = "".join(c if c.isprintable() else "?" for c in self.text[left : start + 50])
        dots = "... " if left else ""
        before = " " * (len(dots) + start - left)
        mark = "^" * max(1, min(end - start, 50))
        shown = f"    {dots}{shown}\n    {before}{mark}"
        message = f"{where}: expected {expected}, but found {what}{more}\n{shown}"
        return ScheduleError(message, rank=self.rank, position=position, rule="text")


def _cells(text: str, line: _Line, column: int, *, csv: bool) -> Iterator[AnyAction]:
    """The actions in ``text``, whose first character is at ``column`` of the line."""
    if not text.strip(_BLANK + "," if csv else _BLANK):
        return
    for position, (cell, at) in enumerate(_split(text, ",", column)):
        if match := _ACTION.fullmatch(cell):
            yield _action(match, line)
        elif cell[:1] == "(":
            yield _fused(cell, line, at, position)
        elif not csv or (cell and not _DROPPED.fullmatch(cell)):
            raise _bad(cell, line, at, position)


def _split(text: str, separator: str, column: int) -> Iterator[tuple[str, int]]:
    """The cells of a text without blanks, each with its column; the text is at ``column``."""
    for cell in text.split(separator):
        blanks = len(cell) - len(cell.lstrip(_BLANK))
        yield cell.strip(_BLANK), column + blanks
        column += len(cell) + 1


def _action(match: re.Match[str], line: _Line) -> Action:
    stage, op, microbatch, part = match.groups()
    at = int(microbatch)
    if part is not None:
        at = unit(at * line.slices + int(part), line.slices)
    return Action._make((int(stage), op, at))


def _fused(cell: str, line: _Line, column: int, position: int) -> Fused:
    stop = column + len(cell)
    end = cell.find(")")
    if cell[end:] != _FUSED_END:
        start = column + end if end >= 0 else stop - 1
        expected = f"{_FUSED_END!r} to end the fused action"
        raise line.error(start, stop, expected, position=position)
    parts: list[Action] = []
    for part, at in _split(cell[1:end], ";", column + 1):
        if not (match := _ACTION.fullmatch(part)):
            raise _bad(part, line, at, position)
        parts.append(_action(match, line))
    if len(parts) < 2:
        expected = "two or more actions between '(' and ')', with ';' between"
        raise line.error(column, stop, expected, position=position)
    return Fused(tuple(parts))


def _bad(cell: str, line: _Line, column: int, position: int) -> ScheduleError:
    """The most helpful error for a cell that is no action."""
    end = column + len(cell)
    match = _ACTION.match(cell)
    if match and not cell[match.end()].isdigit():
        expected = f"',' or the end after {match[0]}"
        return line.error(column + match.end(), end, expected, position=position)
    hints = {
        "only compute here (lowering adds communication)": _DROPPED.fullmatch(cell),
        "a number of at most 6 digits": re.search("[0-9]{7}", cell[:60]),
        "a number without leading zeros": re.match(
            "0[0-9]|[0-9]+[FBIW](?:0[0-9]|[0-9]+[.]0[0-9])", cell
        ),
    }
    expected = next((hint for hint, applies in hints.items() if applies), _EXPECTED)
    return line.error(column, end, expected, cell, position)

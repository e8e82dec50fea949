# SPDX-License-Identifier: Apache-2.0
"""Schedules as text: one line of cells per rank, as brackets for people or as CSV, both ways and
exact.

The readers are strict: every character of a cell belongs to an action, or a ``ScheduleError`` names
line, column and the expected text; no text raises another exception. ``check`` validates the
actions together.

    [0F0, 0F1, (0F2;3B0)OVERLAP_F_B]      brackets: what str(schedule) writes, blank lines ignored
    [0F0.0, 0F0.1, 0B0.1, 0B0.0]          slices of microbatches, which torch.distributed.pipelining
    does not know 0F0,0F1,(0F2;3B0)OVERLAP_F_B          CSV: what torch.distributed.pipelining reads
    and writes; its empty cells,
                                          communication and sharding actions are dropped, a blank
                                          line is an idle rank
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..errors import ScheduleError
from .action import Action, AnyAction, Fused, Row, joined
from .action_kinds import OPS
from .unit import MOST_SLICES, Slice, unit

_NUMBER = "(0|[1-9][0-9]{0,5})"
_ACTION = re.compile(f"{_NUMBER}([{OPS}]){_NUMBER}(?:[.]{_NUMBER})?")
#: what the lowering of torch.distributed.pipelining adds; ours adds its own
_DROPPED = re.compile(
    f"{_NUMBER}(?:(?:WAIT_SEND|SEND|RECV)_[FB]{_NUMBER}|(?:UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD)(?:{_NUMBER})?)"
)
_FUSED_END = ")OVERLAP_F_B"
_BLANK = " \t"
_MOST_RANKS = 100_000
_EXPECTED = (
    "an action such as 2F0 (stage, one of F B I W, microbatch), 2F0.1 (its slice) or "
    "(2F1;3B0)OVERLAP_F_B"
)


def number(value: float) -> str:
    """At most four significant digits, thousands and more in full, no trailing zeros.

    >>> number(26.0), number(0.30000000000000004), number(123456.7), number(2 / 3)
    ('26', '0.3', '123457', '0.6667')
    """
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def counted(count: int, what: str) -> str:
    """A number of things.

    >>> counted(1, "rank"), counted(2, "microbatch")
    ('1 rank', '2 microbatches')
    """
    return f"{count} {what}" + ("" if count == 1 else "es" if what.endswith("ch") else "s")


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


def parse_rows(text: str, track: Callable[[list[str]], Iterable[str]] = iter) -> tuple[Row, ...]:
    """The rows that :func:`format_rows` wrote; ``track`` yields their lines, for a display of
    progress.

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
    rows: list[Row] = []
    for number, line in enumerate(track(_lines(text)), 1):
        body = line.strip(_BLANK)
        if not body:
            continue
        place = _Place(line, number, len(rows))
        start = line.index(body[0])
        if body[0] != "[":
            raise place.error(start, start + 1, "a '[' that opens the actions of a rank")
        if body[-1] != "]":
            end = start + len(body)
            raise place.error(
                end, end + 1, "a ']' that closes the actions of the rank", "the end of the line"
            )
        inside = body[1:-1]
        rows.append(
            tuple(_cells(inside, place, start + 1, csv=False)) if inside.strip(_BLANK) else ()
        )
    return _counted_slices(rows)


def parse_csv(text: str, track: Callable[[list[str]], Iterable[str]] = iter) -> tuple[Row, ...]:
    """The rows of a CSV, each line one rank; cells that are not compute are dropped. ``track`` is
    as above.

    >>> parse_csv("0UNSHARD,0F0,0SEND_F0,,0RECV_B0,0WAIT_SEND_F0,0B0")
    ((0F0, 0B0),)
    """
    lines = _lines(text.removeprefix("\ufeff"))
    if lines[-1] == "":
        lines.pop()
    places = (_Place(line, number, number - 1) for number, line in enumerate(track(lines), 1))
    return _counted_slices([tuple(_cells(place.line, place, 0, csv=True)) for place in places])


def _counted_slices(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows with the number of slices of a microbatch that they have in all."""
    numbers = (part.microbatch for row in rows for cell in row for part in cell.parts)
    most = max((number.slice + 1 for number in numbers if isinstance(number, Slice)), default=0)
    if not most:
        return tuple(rows)

    def counted(part: Action) -> Action:
        at = part.microbatch
        return (
            part._replace(microbatch=unit(at.microbatch * most + at.slice, most))
            if isinstance(at, Slice)
            else part
        )

    return tuple(
        tuple(joined([counted(part) for part in cell.parts]) for cell in row) for row in rows
    )


def _lines(text: str) -> list[str]:
    lines = text.replace("\r\n", "\n").split("\n")
    if len(lines) > _MOST_RANKS:
        raise ScheduleError(
            f"{len(lines)} lines are no schedule: one line is one rank", rule="text"
        )
    return lines


class _Place:
    """A line of the text, and errors about it."""

    __slots__ = ("line", "number", "rank")

    def __init__(self, line: str, number: int, rank: int):
        self.line, self.number, self.rank = line, number, rank

    def error(
        self, start: int, end: int, expected: str, found: str = "", position: int | None = None
    ) -> ScheduleError:
        """Expected text against actual text; columns ``start`` to ``end`` are marked under the
        line.
        """
        what = found if found.startswith("the ") else _clip(found or self.line[start:end])
        where = f"line {self.number}, column {start + 1}"
        left = max(0, start - 30)
        shown = "".join(c if c.isprintable() else "?" for c in self.line[left : start + 50])
        dots = "... " if left else ""
        mark = " " * (4 + len(dots) + start - left) + "^" * max(1, min(end, start + 50) - start)
        message = f"{where}: expected {expected}, but found {what}\n    {dots}{shown}\n{mark}"
        return ScheduleError(message, rank=self.rank, position=position, rule="text")


def _clip(found: str) -> str:
    return (
        "nothing"
        if not found
        else repr(found)
        if len(found) <= 40
        else repr(found[:40]) + " and more"
    )


def _cells(text: str, place: _Place, column: int, *, csv: bool) -> Iterator[AnyAction]:
    """The actions in ``text``, whose first character is at ``column`` of the line."""
    if csv and not text.strip(_BLANK + ","):
        return
    plain = _ACTION.fullmatch
    for position, cell in enumerate(text.split(",")):
        word = cell.strip(_BLANK)
        if match := plain(word):
            yield _action(match)
        elif word[:1] == "(":
            yield _fused(word, place, column + cell.index("("), position)
        elif not csv or (word and not _DROPPED.fullmatch(word)):
            raise _bad(word, place, column + len(cell) - len(cell.lstrip(_BLANK)), position)
        column += len(cell) + 1


def _action(match: re.Match[str]) -> Action:
    stage, op, microbatch, part = match.groups()
    at = int(microbatch) if part is None else Slice(int(microbatch), int(part), MOST_SLICES)
    return Action._make((int(stage), op, at))


def _fused(word: str, place: _Place, column: int, position: int) -> Fused:
    end = word.find(")")
    if word[end:] != _FUSED_END:
        start = column + (end if end >= 0 else len(word) - 1)
        raise place.error(
            start, column + len(word), f"{_FUSED_END!r} to end the fused action", position=position
        )
    parts: list[Action] = []
    at = column + 1
    for cell in word[1:end].split(";"):
        part = cell.strip(_BLANK)
        if not (match := _ACTION.fullmatch(part)):
            raise _bad(part, place, at + len(cell) - len(cell.lstrip(_BLANK)), position)
        parts.append(_action(match))
        at += len(cell) + 1
    if len(parts) < 2:
        expected = "two or more actions between '(' and ')', with ';' between"
        raise place.error(column, column + len(word), expected, position=position)
    return Fused(tuple(parts))


def _bad(word: str, place: _Place, column: int, position: int) -> ScheduleError:
    """The most helpful error for a cell that is no action."""
    end = column + len(word)
    if match := _ACTION.match(word):
        rest = word[match.end() :]
        if not rest[0].isdigit():
            return place.error(
                end - len(rest), end, f"',' or the end after {match[0]}", position=position
            )
    hints = {
        "only compute here (lowering adds communication)": _DROPPED.fullmatch(word),
        "a number of at most 6 digits": re.search("[0-9]{7}", word[:60]),
        "a number without leading zeros": re.match(
            "0[0-9]|[0-9]+[FBIW](?:0[0-9]|[0-9]+[.]0[0-9])", word
        ),
    }
    expected = next((hint for hint, applies in hints.items() if applies), _EXPECTED)
    return place.error(column, end, expected, word, position)

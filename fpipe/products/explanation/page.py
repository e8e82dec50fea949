# SPDX-License-Identifier: Apache-2.0
"""``Explanation``: the page, as text and as HTML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from html import escape
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeAlias

from ... import Costs, Timeline
from ...actions import number, write_bytes
from ...errors import FpipeError
from ...tree import Tree
from .. import pictures
from ..pictures.labels import percent, size_text
from .facts import Facts, collect
from .reasons import advice, idle_of

COLUMNS = 48  #: of a curve of memory in text
_LEVELS = " .:-=+*#%@"
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color-scheme:light dark}table{border-collapse:collapse}"
    "td,th{padding:.15rem .8rem .15rem 0;text-align:left;vertical-align:top}pre{overflow:auto}"
)
Table: TypeAlias = tuple[Sequence[str], Sequence[Sequence[object]]]


def explain(
    pipe: Any,
    params: Sequence[Tree],
    x: Tree,
    targets: Sequence[Tree],
    side: Mapping[str, Any],
    costs: Costs | None,
) -> Explanation:
    """The page of a call; see ``Pipeline.explain``."""
    if not (costs is None or isinstance(costs, Costs)):
        raise FpipeError(
            f"costs={costs!r:.100}; give fpipe.Costs, such as those of fpipe.measure_costs(pipe, "
            "params, x), or leave it out for estimates"
        )
    facts = collect(pipe, params, x, targets, side, costs)
    ranked = advice(facts.schedule, facts.costs, pipe.schedule)
    return Explanation(facts, tuple(text for _, text in ranked))


class Explanation:
    """What a call will run, as one page that is printed and saved.

    ``timeline`` is the simulated step, ``advice`` what to change first.
    """

    def __init__(self, facts: Facts, advice: Sequence[str]):
        self.facts = facts
        self.advice = advice

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step."""
        return self.facts.timeline

    def save(self, path: str | PathLike[str]) -> None:
        """Write the page as ``.html``, or as ``.txt``.

        Raises:
            FpipeError: the suffix is another one, or the file cannot be written.
        """
        writers = {".html": self._html, ".txt": self.__str__}
        suffix = Path(fspath(path)).suffix.lower()
        if suffix not in writers:
            raise FpipeError(
                f"no explanation is written as {suffix!r} ({fspath(path)}); use .html or .txt"
            )
        try:
            write_bytes(path, writers[suffix]().encode())
        except OSError as error:
            raise FpipeError(
                f"cannot write {fspath(path)!r}: {error.strerror}; give a path that can be written"
            ) from error

    def __str__(self) -> str:
        parts = [self.facts.title, self._about, ""]
        for title, (head, rows) in self._tables.items():
            parts += [title, *_aligned([head, *rows]), ""]
        return "\n".join([*parts, "What to change first", *self._advice])

    __repr__ = __str__

    def _html(self) -> str:
        body = [f"<h1>{escape(self.facts.title)}</h1><p>{escape(self._about)}</p>"]
        for title, (head, rows) in self._tables.items():
            body.append(f"<h2>{escape(title)}</h2>{pictures.table(head, rows)}")
        said = "".join(f"<p>{escape(line)}</p>" for line in self._advice)
        body.append(f"<h2>What to change first</h2>{said}<h2>The step</h2>")
        page = "".join(body) + pictures.figure(self.timeline)
        head = f"<meta charset='utf-8'><title>fpipe explain</title><style>{_STYLE}</style>"
        return f"<!doctype html><html lang='en'><head>{head}</head><body>{page}</body></html>\n"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return pictures.titled(str(self))

    # ---- its parts ----
    @property
    def _about(self) -> str:
        t = self.timeline
        kind = "measured or given" if self.facts.measured else "estimates from shapes"
        return (
            f"A step takes {number(t.total)} {t.unit}".rstrip()
            + f", and the bubble is {percent(max(t.bubble, 0.0))}. Times are {kind}."
        )

    @property
    def _advice(self) -> list[str]:
        if not self.advice:
            return ["Nothing stands out: no change that is known here saves 2% of a step."]
        return [f"{place}. {text}" for place, text in enumerate(self.advice, 1)]

    @property
    def _tables(self) -> dict[str, Table]:
        facts = self.facts
        edge = "rank", "to", "of stage", "direction", "messages", "bytes of one"
        edges = [
            (e.rank, e.to, e.stage, e.direction, e.messages, size_text(e.nbytes / e.messages))
            for e in facts.edges
        ]
        memory = "rank", f"activations over the step, in {COLUMNS} parts", "most", "peak of plan"
        where = "rank", "device", "stage", "engine", "parameters", "F", "I", "W"
        return {
            "What runs where": (where, list(self._where())),
            "Messages of a step": (edge, edges),
            "Memory against time": (memory, list(self._memory())),
            "Idle": (("rank", "idle", "it waits"), list(self._idle())),
        }

    def _where(self) -> Iterator[Sequence[object]]:
        costs = self.facts.costs
        for rank, stages in sorted(self.facts.stages.items()):
            for one in stages:
                times = [number(_of(getattr(costs, op), one.stage)) for op in "FIW"]
                held = f"{one.parameters:,} ({size_text(one.nbytes)})"
                name = f"{one.stage} {one.name}"
                yield (rank, self.facts.devices[rank], name, one.engine, held, *times)

    def _memory(self) -> Iterator[Sequence[object]]:
        t = self.timeline
        most = max(t.peak_bytes, default=0.0)
        for rank, peak in sorted(self.facts.peaks.items()):
            curve = t.curve(rank)
            first = max(curve, key=lambda point: point[1], default=(t.start, 0.0))
            when = percent((first[0] - t.start) / (t.total or 1.0))
            held = f"{size_text(t.peak_bytes[rank])} at {when}"
            yield rank, _line(curve, t, most), held, size_text(peak)

    def _idle(self) -> Iterator[Sequence[object]]:
        for rank in range(self.timeline.ranks):
            causes = idle_of(self.timeline, rank)
            total = percent(sum(one.share for one in causes))
            shown = "; ".join(f"{percent(one.share)} {one.why}" for one in causes[:3])
            yield rank, total, shown or "-"


def _of(value: Any, stage: int) -> float:
    """A cost of a stage."""
    return float(value[stage] if isinstance(value, Sequence) else value)


def _line(curve: Sequence[tuple[float, float]], t: Timeline, most: float) -> str:
    """What a rank holds at equal times: a character for each, from blank to @, which is the most of
    all ranks.
    """
    points = iter((*curve, (float("inf"), 0.0)))
    time, then = next(points)
    now = 0.0
    marks = ""
    for part in range(COLUMNS):
        end = t.start + t.total * (part + 1) / COLUMNS
        high = now
        while time < end:
            now = then
            high = max(high, now)
            time, then = next(points)
        marks += _LEVELS[round((len(_LEVELS) - 1) * high / most)] if most else " "
    return f"[{marks}]"


def _aligned(rows: Sequence[Sequence[object]]) -> list[str]:
    """The lines of a table, each column as wide as its widest cell."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]

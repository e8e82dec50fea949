"""Where the time of a step goes on one rank, by the clock at the borders of every instruction.

``python -m benchmarks.bench_limit --sizes small --borders`` prints it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fpipe.engine.execute import WATCH

#: Parts of a step, in microseconds: what the table says of each.
PARTS = {
    "begin": "the call, until its first instruction",
    "programs": "the programs, alone",
    "around": "what they take longer in a step: registers, freed values, caches",
    "send": "sends",
    "receive": "receives of messages that have arrived",
    "wait": "waiting for messages",
    "loss": "the total of the losses",
    "other": "other instructions",
    "end": "after the last instruction",
}


class Borders:
    """Runs steps with a clock at the borders of instructions; the clock adds a tenth of a
    microsecond to each.
    """

    def __init__(self, step: Callable[[], object], alone: float):
        self._step, self._alone = step, 1e6 * alone
        self._instructions: Sequence[Any] = ()
        self._times: list[float] = []
        self.rows: list[Mapping[str, float]] = []

    def run(self, steps: int) -> None:
        """Run some steps in a row after one that does not count."""
        before = WATCH.set(self._watch)
        try:
            for number in range(steps + 1):
                self._times.clear()
                begin = time.perf_counter()
                self._step()
                end = time.perf_counter()
                if number:
                    self.rows.append(self._parts(begin, end))
        finally:
            WATCH.reset(before)

    def _watch(self, bound: Any, phase: int | None) -> Iterable[tuple[int, Any]]:
        assert phase is None
        self._instructions = bound.plan.instructions
        return enumerate([self._timed(step) for step in bound.steps])

    def _timed(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        clock, note = time.perf_counter, self._times.append

        def timed(r: Any) -> Any:
            note(clock())
            pending = step(r)
            if pending is not None:
                pending[0].wait()
            note(clock())
            return pending

        return timed

    def _parts(self, begin: float, end: float) -> Mapping[str, float]:
        starts, ends = self._times[::2], self._times[1::2]
        took: dict[str, list[float]] = {
            "program": [0.0],
            "SEND": [0.0],
            "WAIT": [0.0],
            "LOSS": [0.0],
        }
        for ins, start, stop in zip(self._instructions, starts, ends, strict=True):
            took.setdefault("program" if ins.program is not None else ins.kind, []).append(
                1e6 * (stop - start)
            )
        programs, waits = sum(took["program"]), took["WAIT"][1:]
        arrived = statistics.quantiles(waits)[0] if len(waits) > 1 else 0.0
        parts = {
            "begin": 1e6 * (starts[0] - begin),
            "programs": self._alone,
            "around": programs - self._alone,
            "send": sum(took["SEND"]),
            "receive": sum(min(each, arrived) for each in waits),
            "wait": sum(max(each - arrived, 0.0) for each in waits),
            "loss": sum(took["LOSS"]),
            "end": 1e6 * (end - ends[-1]),
        }
        return parts | {"other": 1e6 * (end - begin) - sum(parts.values())}

    def medians(self) -> dict[str, float]:
        """Of all steps, in the order of :data:`PARTS`."""
        return {name: statistics.median(row[name] for row in self.rows) for name in PARTS}

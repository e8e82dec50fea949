"""When would each action run, and what would each rank hold?  Costs in, a ``Timeline`` out.

Every rank runs its row in order, each action as soon as the rank is free and what the action needs has arrived. Links
have a latency and a bandwidth but no queue. The order comes from ``walk``; whether the schedule is complete is for
``check`` to say, and half a schedule can be simulated too.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf, nan
from operator import add
from typing import Any, NamedTuple, TypeAlias

from ..errors import ScheduleError
from .actions import RULE, Action, AnyAction, Placement, Row
from .check import check_cells, stuck
from .dependences import Facts, walk
from .timeline import Carried, Timeline

PerStage: TypeAlias = float | Sequence[float] | Mapping[int, float]


class Beside(NamedTuple):
    """What a woven action is expected to take: its time, and what the link carries from its start on."""

    time: float
    carried: tuple[tuple[float, float, str], ...] = ()  # (start, end, what)


#: From an action, fused or plain, to its time, or None for the time that it would take otherwise.
Predict: TypeAlias = Callable[[AnyAction], "Beside | float | None"]


@dataclass(frozen=True)
class Costs:
    """What actions cost: each one number, or one per stage (a sequence, or a mapping from stage to number).

    ``F``, ``I``, ``W`` and ``B`` (default: I + W) are times. ``overlap`` is the time of a fused action, by the stage of
    its first part (default: the sum of its parts), or a function of an action, as ``pipe.plan(...).costs`` has. A
    message between different ranks takes ``comm``, a latency, plus ``boundary``, its bytes, over ``bandwidth``, bytes
    per time; besides, it keeps its sender's rank busy for ``send``, after the action, and its receiver's for
    ``receive``, before the action that needs it. All of these may differ by boundary, one number between each stage and
    the next. Memory: ``saved`` bytes are held from F on; I leaves ``kept`` of them (default: all) for W, and W or B
    frees the rest. So F adds ``saved``, I adds ``kept - saved``, W adds ``-kept`` and B ``-saved``.

    >>> Costs(F=1, I=[1, 2], W=0.5)
    Costs(F=1.0, I=(1.0, 2.0), W=0.5)
    """

    F: PerStage = 1.0
    I: PerStage = 1.0  # noqa: E741
    W: PerStage = 1.0
    B: PerStage | None = None
    overlap: PerStage | Predict | None = None
    comm: PerStage = 0.0
    boundary: PerStage = 0.0
    bandwidth: PerStage = inf
    send: PerStage = 0.0
    receive: PerStage = 0.0
    saved: PerStage = 1.0
    kept: PerStage | None = None
    unit: str = ""  #: of time, for people

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
        if not isinstance(self.unit, str):
            raise _refuse(f"unit={self.unit!r} must be a word, such as 'ms'")

    def __repr__(self) -> str:
        said = [f.name for f in fields(self) if f.name in "FIW" or getattr(self, f.name) != f.default]
        return f"Costs({', '.join(f'{name}={getattr(self, name)!r}' for name in said)})"

    # ---- text ---------------------------------------------------------------------------------------------------
    @classmethod
    def parse(cls, text: str) -> Costs:
        """From ``name=number`` with commas between; ``name=1:2:1`` gives one number per stage.

        >>> Costs.parse("F=1, B=2:3, comm=0.1")
        Costs(F=1.0, I=1.0, W=1.0, B=(2.0, 3.0), comm=0.1)
        """
        given: dict[str, Any] = {}
        for item in filter(None, map(str.strip, text.split(","))):
            name, sign, value = (word.strip() for word in item.partition("="))
            if not sign or name not in _NUMBERS or name in given:
                why = f"{name} is there twice" if name in given else f"the names are {', '.join(_NUMBERS)}"
                raise _refuse(f"{item[:60]!r} is not name=number: {why}")
            try:
                numbers = [float(number) for number in value.split(":")]
            except ValueError:
                raise _refuse(f"{name}={value[:60]} is not a number, nor numbers with ':' between") from None
            given[name] = numbers if ":" in value else numbers[0]
        return cls(**given)

    def to_json(self) -> str:
        """These costs as JSON, defaults left out.

        >>> Costs(F=2, I=[1, 3]).to_json()
        '{"F": 2.0, "I": [1.0, 3.0]}'
        """
        if callable(self.overlap):
            raise _refuse("costs whose overlap is a function cannot be written down; give it as numbers")
        return json.dumps({f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default})

    @classmethod
    def from_json(cls, text: str) -> Costs:
        """Read what :meth:`to_json` wrote.

        >>> Costs.from_json('{"F": 2, "I": [1, 3]}')
        Costs(F=2.0, I=(1.0, 3.0), W=1.0)
        """
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _refuse(f"these costs are not JSON: {error}") from None
        names = (*_NUMBERS, "unit")
        if not isinstance(given, dict) or not set(given) <= set(names):
            raise _refuse(f"costs in JSON are an object with some of the names {', '.join(names)}")
        return cls(**given)

    # ---- by stage -----------------------------------------------------------------------------------------------
    def times(self, stages: int) -> dict[str, tuple[float, ...]]:
        """op -> the time that it takes on each stage; ``"overlap"`` is there only where it was given.

        >>> Costs(I=2).times(2)["B"]
        (3.0, 3.0)
        """
        by_op = {name: self._spread(name, stages) for name in ("F", "I", "W")}
        by_op["B"] = tuple(map(sum, zip(by_op["I"], by_op["W"], strict=True)))
        for name in ("B", "overlap"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                by_op[name] = self._spread(name, stages)
        return by_op

    def memory(self, stages: int) -> dict[str, tuple[float, ...]]:
        """op -> what it adds to the bytes that its rank holds, for each stage.

        >>> Costs(saved=10, kept=4).memory(1)
        {'F': (10.0,), 'I': (-6.0,), 'W': (-4.0,), 'B': (-10.0,)}
        """
        saved = self._spread("saved", stages)
        kept = saved if self.kept is None else self._spread("kept", stages)
        return {
            "F": saved,
            "I": tuple(k - s for k, s in zip(kept, saved, strict=True)),
            "W": tuple(-k for k in kept),
            "B": tuple(-s for s in saved),
        }

    def links(self, stages: int) -> tuple[float, ...]:
        """The time that a message takes over each boundary once it is sent, where its ends are on different ranks.

        >>> Costs(comm=0.5, boundary=[10, 20], bandwidth=10).links(3)
        (1.5, 2.5)
        """
        comm, size, width = (self._spread(name, stages - 1) for name in ("comm", "boundary", "bandwidth"))
        return tuple(c + s / w for c, s, w in zip(comm, size, width, strict=True))

    def handling(self, stages: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The times that a message over each boundary keeps its sender and its receiver busy."""
        return self._spread("send", stages - 1), self._spread("receive", stages - 1)

    def sizes(self, stages: int) -> tuple[float, ...]:
        """The bytes of a message over each boundary."""
        return self._spread("boundary", stages - 1)

    def _spread(self, name: str, count: int) -> tuple[float, ...]:
        value = getattr(self, name)
        if not isinstance(value, tuple):
            return (value,) * count
        if len(value) != count:
            things = "boundaries between stages" if name in _AT_BOUNDARIES else "stages"
            raise _refuse(
                f"{name} has {len(value)} numbers, but there are {count} {things}; give one number, or {count}"
            )
        return value


_NUMBERS = tuple(f.name for f in fields(Costs) if f.name != "unit")
_AT_BOUNDARIES = ("comm", "boundary", "bandwidth", "send", "receive")


def _refuse(message: str) -> ScheduleError:
    return ScheduleError(message, rule="costs")


def _numbers(name: str, value: Any) -> Any:
    """One float or a tuple of them; None only where that is the default; a function for ``overlap`` as it is."""
    if name == "overlap" and callable(value):
        return value
    if value is None and name in ("B", "overlap", "kept"):
        return None
    if isinstance(value, Mapping):
        try:
            value = [value[stage] for stage in range(len(value))]
        except KeyError:
            raise _refuse(f"{name} must name every stage from 0 on, without gaps") from None
    value = getattr(value, "tolist", lambda: value)()  # an array or a tensor
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_number(name, number) for number in value)
    return _number(name, value)


def _number(name: str, value: Any) -> float:
    try:
        number = nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = nan
    good = number > 0 if name == "bandwidth" else 0 <= number < inf
    if not good:
        kind = "above 0" if name == "bandwidth" else "from 0 up"
        raise _refuse(f"{name}: {str(value)[:60]!r} must be a number {kind}; give one number, or one per stage")
    return number


# ---- the clock ------------------------------------------------------------------------------------------------------
class _Op(NamedTuple):
    """What an op waits for, makes and costs; whatever depends on the stage is a tuple by stage."""

    needs: tuple[tuple[int, tuple[float, ...]], ...]  # offset of a fact that it waits for, the time that this travels
    gives: tuple[int, ...]  # offsets of the facts that it makes and others wait for
    length: tuple[float, ...]
    before: tuple[float, ...]  # receiving what it needs
    after: tuple[float, ...]  # sending what it made


def simulate_rows(
    rows: tuple[Row, ...], placement: Placement, microbatches: int, costs: Costs, *, name: str = ""
) -> Timeline:
    """The timeline of these rows.

    >>> from fpipe.schedules.actions import Action
    >>> rows = ((Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "F", 0), Action(1, "B", 0)))
    >>> simulate_rows(rows, Placement.loop(2), 1, Costs(comm=0.5)).total
    7.0
    """
    check_cells(rows, placement, microbatches)
    stages = placement.stages
    result = walk(rows, stages, microbatches)
    if result.blocked:
        raise stuck(rows, stages, result)
    facts = Facts(stages, microbatches)
    by_path = [_table(facts, path, costs) for path in placement.paths]
    tables = [by_path[placement.path_index(microbatch)] for microbatch in range(microbatches)]
    starts, ends, causes = (tuple(array(code) for _ in rows) for code in "ddq")
    there = [0.0] * facts.size
    clocks = [0.0] * len(rows)
    fused = costs.times(stages).get("overlap")
    predict = costs.overlap if callable(costs.overlap) else None
    carried: list[list[Carried]] = [[] for _ in rows]
    for rank, first, stop in result.runs:
        lane, begin, end, cause = rows[rank], starts[rank].append, ends[rank].append, causes[rank].append
        clock = clocks[rank]
        for position in range(first, stop):
            action = lane[position]
            parts = (action,) if isinstance(action, Action) else action.parts
            waited, received, together, sent = -1, 0.0, 0.0, 0.0
            for stage, op, microbatch in parts:
                base = stage * microbatches + microbatch
                needs, _, length, before, after = tables[microbatch][op]
                for need, travel in needs:
                    arrival = there[base + need] + travel[stage]
                    if arrival > clock:
                        clock, waited = arrival, base + need
                received += before[stage]
                together += length[stage]
                sent += after[stage]
            clock += received
            begin(clock)
            cause(waited)
            if predict is not None:
                together = _predicted(predict(action), together, clock, carried[rank])
            clock += together if fused is None or len(parts) == 1 else fused[parts[0].stage]
            end(clock)
            for stage, op, microbatch in parts:
                for made in tables[microbatch][op][1]:
                    there[stage * microbatches + microbatch + made] = clock
            clock += sent
        clocks[rank] = clock
    return Timeline(
        rows, starts, ends, placement, microbatches, causes, costs.memory(stages), costs.sizes(stages), name,
        costs.unit, tuple(map(tuple, carried)),
    )  # fmt: skip


def _predicted(found: Beside | float | None, otherwise: float, start: float, carried: list[Carried]) -> float:
    """The time of an action; what its link carries is laid down."""
    if found is None:
        return otherwise
    if not isinstance(found, Beside):
        return _number("overlap", found)
    carried += [Carried(start + begin, start + end, what) for begin, end, what in found.carried]
    return found.time


def _table(facts: Facts, path: Sequence[int], costs: Costs) -> dict[str, _Op]:
    """What each op waits for, makes and costs, for microbatches that take this path.

    What an action needs of its own stage was made on its own rank before it, so it never waits for that; and what
    nobody waits for need not be noted.
    """
    stages = range(facts.stages)
    links, times = costs.links(facts.stages), costs.times(facts.stages)
    send, receive = costs.handling(facts.stages)

    def over(by: int, each: Sequence[float]) -> tuple[float, ...]:
        """A number of each boundary, by the stage on its other side; 0 where both live on one rank."""
        return tuple(
            each[min(stage, stage + by)] if stage + by in stages and path[stage + by] != path[stage] else 0.0
            for stage in stages
        )

    def total(lists: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
        return tuple(map(sum, zip([0.0] * facts.stages, *lists, strict=True)))

    users = {(kind, -by) for _, asked in RULE.values() for kind, by in asked if by}  # of a fact: who asks for it
    table = {}
    for op, (made, asked) in RULE.items():
        needs, gives = facts.table[op]
        outward = [by for kind, by in users if kind in made]
        travel = [tuple(map(add, over(by, links), over(by, send))) for _, by in asked]
        table[op] = _Op(
            tuple((need, times_) for need, times_, (_, by) in zip(needs, travel, asked, strict=True) if by),
            tuple(offset for offset, kind in zip(gives, made, strict=True) if kind in {kind for kind, _ in users}),
            times[op],
            total(over(by, receive) for _, by in asked if by),
            total(over(by, send) for by in outward),
        )
    return table

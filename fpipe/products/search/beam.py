# SPDX-License-Identifier: Apache-2.0
"""Beam search for small problems: rows grow action by action, and of each length the best few are
kept.

Local search does not leave rows whose improvement takes changes on several ranks at once, with
memory full between them. Here the action that can end first names a rank, and each action that this
rank can start before that end is a branch: the best rows are among these (Giffler and Thompson,
1960). Of rows with the same actions done those are dropped that others are not behind of in any
way. The value of a state is a lower bound on the span of all that it can become.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter, le
from typing import NamedTuple, TypeVar

from ...generators.fill import Filled
from ...generators.problem import ALMOST, Problem, Rows

T = TypeVar("T")

_BY_VALUE = itemgetter(0)
_REST = 0.3  #: of the mean of the ranks' bounds in a state's value, so that all ranks count


class _Action(NamedTuple):
    end: float
    start: float
    op: int
    stage: int


class _State(NamedTuple):
    """Begun rows. Numbers are by rank, ``done`` by op and stage, ``arrivals`` by pass: of those
    that have not run.
    """

    done: tuple[int, ...]
    clock: tuple[float, ...]
    first: tuple[float, ...]  #: when a rank started; -1 for not yet
    held: tuple[float, ...]
    left: tuple[float, ...]  #: work
    arrivals: tuple[tuple[float, ...], ...]
    before: tuple[_State, _Action] | None

    @property
    def times(self) -> list[float]:
        """What two states with the same actions done differ in; less is better."""
        waiting = [time for times in self.arrivals for time in times]
        return [*self.clock, *waiting, *(-start for start in self.first)]


def beam(
    problem: Problem, width: int, alike: int = 3, passed: Callable[[], bool] = lambda: False
) -> Filled | None:
    """The best rows of a search that keeps so many states; None where all run out of memory, or
    time has passed.

    Of states with the same actions done it keeps at most ``alike``.

    >>> from fpipe.actions.costs import Costs
    >>> beam(Problem.of(Costs(), (0, 1), 2, 4, (2.0, 2.0)), width=10).windows
    [13.0, 12.0]
    """
    p, search = problem, _Beam(problem)
    waiting = ((0.0,) * p.microbatches, *((),) * (2 * p.stages - 1))
    none = (0.0,) * p.ranks
    states = [_State((0,) * 3 * p.stages, none, (-1.0,) * p.ranks, none, p.work, waiting, None)]
    for _ in range(p.actions):
        if passed():
            return None
        reached: dict[tuple[int, ...], list[tuple[list[float], _State]]] = {}
        for state in states:
            for action in search.branches(state):
                after = search.after(state, action)
                _keep(reached.setdefault(after.done, []), after)
        best = [
            one
            for same in reached.values()
            for one in sorted(map(search.valued, same), key=_BY_VALUE)[:alike]
        ]
        states = [state for _, state in sorted(best, key=_BY_VALUE)[:width]]
    finished = [(search.windows(state), state) for state in states]
    if not finished:
        return None
    windows, state = min(finished, key=lambda pair: max(pair[0]))
    return Filled(_rows(problem, state), windows)


def _keep(same: list[tuple[list[float], _State]], state: _State) -> None:
    """Add a state to those with the same actions done, unless one of them is better; without those
    that are worse.
    """
    times = state.times
    for others, _ in same:
        if all(map(le, others, times)):
            return
    same[:] = [one for one in same if not all(map(le, times, one[0]))]
    same.append((times, state))


class _Beam:
    """A problem as a search needs it."""

    def __init__(self, problem: Problem):
        p = self.problem = problem
        self.stages, self.microbatches = p.stages, p.microbatches
        self.length = (p.F, p.I, p.W)
        self.limit = [limit * ALMOST for limit in p.limit]
        way = [0.0] * (2 * p.stages)  # from the start of a pass until the microbatch has come back
        for s in range(p.stages):
            way[p.stages + s] = p.I[s] + (p.link[s - 1] + way[p.stages + s - 1] if s else p.W[0])
        for s in reversed(range(p.stages)):
            way[s] = p.F[s] + (p.link[s] + way[s + 1] if s + 1 < p.stages else way[p.stages + s])
        short = min(p.load)
        #: By pass: the rank, the time of one, and the time from its start until the microbatch has
        #: come back
        self.ways = [
            (p.path[at % p.stages], step * short, time * short)
            for at, (step, time) in enumerate(zip((*p.F, *p.I), way, strict=True))
        ]

    def branches(self, state: _State) -> Iterator[_Action]:
        """The actions of one rank of which one is next."""
        found: list[_Action] = []
        for rank, stages in enumerate(self.problem.of_rank):
            for s in stages:
                self._add(found, state, rank, s)
        if not found:
            return
        best = min(found)
        rank = self.problem.path[best.stage]
        yield best
        for one in found:
            if one is not best and one.start < best.end and self.problem.path[one.stage] == rank:
                yield one

    def _add(self, found: list[_Action], state: _State, rank: int, s: int) -> None:
        """The next actions of a stage, as far as they have arrived and fit in memory."""
        p, done, arrivals, stages, clock = (
            self.problem,
            state.done,
            state.arrivals,
            self.stages,
            state.clock[rank],
        )
        if arrivals[s]:
            held, k = state.held[rank] + p.adds[0][s] * p.size[done[s]], done[s]
            if held <= self.limit[rank] and self._leaves_room(state, rank, s, held):
                start = max(clock, arrivals[s][0])
                found.append(_Action(start + p.F[s] * p.load[k], start, 0, s))
        if arrivals[stages + s]:
            k = done[stages + s]
            if state.held[rank] + p.adds[1][s] * p.size[k] <= self.limit[rank]:
                start = max(clock, arrivals[stages + s][0])
                found.append(_Action(start + p.I[s] * p.load[k], start, 1, s))
        if (k := done[2 * stages + s]) < done[stages + s]:
            found.append(_Action(clock + p.W[s] * p.load[k], clock, 2, s))

    def _leaves_room(self, state: _State, rank: int, s: int, held: float) -> bool:
        """Whether a later stage of this rank can still run, or some microbatch has been there and
        will free memory.
        """
        p, last = self.problem, self.problem.of_rank[rank][-1]
        if s == last or state.done[last] > state.done[2 * self.stages + s]:
            return True
        return (
            held + max(p.saved[later] for later in p.of_rank[rank] if later > s) * max(p.size)
            <= self.limit[rank]
        )

    def after(self, state: _State, action: _Action) -> _State:
        """The state after one more action."""
        p, (end, start, op, s) = self.problem, action
        stages, rank, at = self.stages, p.path[s], op * self.stages + s
        k, arrivals = state.done[at], state.arrivals
        if op < 2:
            arrivals = _set(arrivals, at, arrivals[at][1:])
            then = at - 1 if op else s + 1 if s + 1 < stages else stages + s
            if then >= stages or not op:
                link = p.link[s - 1] if op else p.link[s] if s + 1 < stages else 0.0
                arrivals = _set(arrivals, then, (*arrivals[then], end + link))
        first = state.first if state.first[rank] >= 0 else _set(state.first, rank, start)
        held = _set(state.held, rank, state.held[rank] + p.adds[op][s] * p.size[k])
        left = _set(state.left, rank, state.left[rank] - self.length[op][s] * p.load[k])
        clock = _set(state.clock, rank, end)
        return _State(
            _set(state.done, at, k + 1), clock, first, held, left, arrivals, (state, action)
        )

    def windows(self, state: _State) -> list[float]:
        """How long ranks are busy or wait, if they do not wait any more."""
        return [
            (clock - first if first >= 0 else 0.0) + left
            for clock, first, left in zip(state.clock, state.first, state.left, strict=True)
        ]

    def valued(self, one: tuple[list[float], _State]) -> tuple[float, _State]:
        """A state with its value: a lower bound on the span, and a little of the other ranks'."""
        state, rank = one[1], self.problem.path[0]
        windows = self.windows(state)
        span = max(*windows, self._back(state) - max(0.0, state.first[rank]))
        return span + _REST * sum(windows) / len(windows), state

    def _back(self, state: _State) -> float:
        """When all microbatches can have come back to the first rank."""
        latest, last, clock = 0.0, self.microbatches - 1, state.clock
        for (rank, step, way), done, arrivals in zip(
            self.ways, state.done, state.arrivals, strict=False
        ):
            if done <= last:
                time = clock[rank]
                if arrivals and arrivals[0] > time:
                    time = arrivals[0]
                time += (last - done) * step + way
                if time > latest:
                    latest = time
        return latest


def _set(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _rows(problem: Problem, state: _State) -> Rows:
    rows: Rows = [[] for _ in range(problem.ranks)]
    while state.before is not None:
        state, (_, _, op, s) = state.before
        rows[problem.path[s]].append((op, s, state.done[op * problem.stages + s]))
    return [row[::-1] for row in rows]

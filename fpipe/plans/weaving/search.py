# SPDX-License-Identifier: Apache-2.0
"""The list scheduler of weaves: a beam search over the orders in which lines of segments can be merged.

The objective is time by two clocks, one that computes and one that carries; the bound is on the bytes of what crosses
from segment to segment. The same tasks give the same order on every rank. Standard library only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .weave import Memory, Task, Weave, play, woven


def weave(
    lines: Sequence[str], tasks: Sequence[Task], *, sizes: Mapping[Hashable, tuple[Hashable, int]] | None = None,
    bound: int | None = None,
) -> Weave:  # fmt: skip
    """The fastest order that a short search finds, within a bound on memory.

    ``sizes`` gives, for a value, the storage behind it and its bytes. The bound, if none is given, is what the lines
    take one after the other plus what is in flight.

    >>> from fpipe.plans.weaving.weave import Transfer
    >>> a2a = Transfer("y", "all_to_all", "ep", 50)
    >>> first = Task(0, "dispatch", 10, writes=("y",), starts=(a2a,)), Task(0, "experts", 10, ("y",), waits=("y",))
    >>> w = weave(("1F3", "2B0"), (*first, Task(1, "attention", 50)))
    >>> [w.tasks[k].name for k in w.order], w.total, w.one_after_another
    (['dispatch', 'attention', 'experts'], 70, 120)
    """
    tasks = tuple(tasks)
    search = _Search(tasks, sizes or {}, bound)
    order = search.best()
    return woven(tuple(lines), tasks, order, search.memory)


class _State(NamedTuple):
    score: int  # no order that begins so can end before
    peak: int
    clock: int
    line_free: int
    order: tuple[int, ...]
    done: int
    live: int
    arrive: tuple[tuple[Hashable, int], ...]


@dataclass
class _Search:
    """A beam over the orders of the tasks: the best few beginnings of each length are kept."""

    tasks: tuple[Task, ...]
    sizes: Mapping[Hashable, tuple[Hashable, int]]
    bound: int | None
    width: int = 24
    memory: Memory = field(init=False)
    before: list[int] = field(init=False)
    tail: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.memory = Memory(self.tasks, self.sizes)
        self.before = list(_before(self.tasks))
        self.tail = _tails(self.tasks, self.before)
        in_flight = sum(self.sizes[t.value][1] for task in self.tasks for t in task.starts if t.value in self.sizes)
        if self.bound is None:
            self.bound = self.memory.peak(range(len(self.tasks))) + in_flight

    def best(self) -> tuple[int, ...]:
        """The best order found; one line after the other if nothing is better."""
        alone = tuple(range(len(self.tasks)))
        beam = [_State(0, self.memory.first, 0, 0, (), 0, self.memory.first, ())]
        for _ in self.tasks:
            following = [state for old in beam for state in self._following(old)]
            beam = self._pruned(following)
            if not beam:
                return alone
        best = min(beam)
        return best.order if best.score < play(self.tasks, alone)[0] else alone

    def _following(self, old: _State) -> Iterator[_State]:
        left = [k for k in range(len(self.tasks)) if not old.done >> k & 1]
        ready = [k for k in left if not self.before[k] & ~old.done]
        taken: set[tuple[int, bool]] = set()
        arrive = dict(old.arrive)
        for number in ready:
            task = self.tasks[number]
            if (task.line, task.loose) in taken:  # of each line the next one, and its next loose one
                continue
            taken.add((task.line, task.loose))
            clock = max([old.clock, *(arrive.get(value, 0) for value in task.waits)]) + task.nanoseconds
            line_free, now = old.line_free, dict(arrive)
            for transfer in task.starts:
                line_free = now[transfer.value] = max(clock, line_free) + transfer.nanoseconds
            during, live = self.memory.step(number, old.done, old.live)
            assert self.bound is not None
            if during > self.bound:
                continue
            done = old.done | 1 << number
            score = self._score([k for k in left if k != number], clock, line_free, now)
            yield _State(score, max(old.peak, during), clock, line_free, (*old.order, number), done, live,
                         tuple(now.items()))  # fmt: skip

    def _score(self, left: Sequence[int], clock: int, line_free: int, arrive: Mapping[Hashable, int]) -> int:
        compute = clock + sum(self.tasks[k].nanoseconds for k in left)
        carry = max(clock, line_free) + sum(t.nanoseconds for k in left for t in self.tasks[k].starts)
        if not any(self.tasks[k].starts for k in left):
            carry = line_free
        chains = (max([clock, *(arrive.get(value, 0) for value in self.tasks[k].waits)]) + self.tail[k] for k in left)
        return max([compute, carry, *chains])

    def _pruned(self, states: list[_State]) -> list[_State]:
        """The best of each set of tasks done that no other beats in both clocks, and of those the best few."""
        states.sort()
        kept: list[_State] = []
        seen: dict[int, list[_State]] = {}
        for state in states:
            others = seen.setdefault(state.done, [])
            if any(o.clock <= state.clock and o.line_free <= state.line_free for o in others) or len(others) > 3:
                continue
            others.append(state)
            kept.append(state)
            if len(kept) == self.width:
                break
        return kept


def _before(tasks: Sequence[Task]) -> Iterator[int]:
    """For every task the mask of those that must come before it."""
    makers = {value: k for k, task in enumerate(tasks) for value in task.writes}
    last: dict[int, int] = {}
    for number, task in enumerate(tasks):
        mask = 0
        for value in (*task.reads, *task.waits):
            maker = makers.get(value, number)
            if maker != number:
                mask |= 1 << maker
        if not task.loose:
            if task.line in last:
                mask |= 1 << last[task.line]
            last[task.line] = number
        yield mask


def _tails(tasks: Sequence[Task], before: Sequence[int]) -> list[int]:
    """The longest way from the start of each task to the end, transfers included."""
    tails = [0] * len(tasks)
    for number in reversed(range(len(tasks))):
        task = tasks[number]
        after = 0
        for later in range(number + 1, len(tasks)):
            if before[later] >> number & 1:
                travel = max((t.nanoseconds for t in task.starts if t.value in tasks[later].waits), default=0)
                after = max(after, travel + tails[later])
        tails[number] = task.nanoseconds + max([after, *(t.nanoseconds for t in task.starts)])
    return tails

"""Random schedules that can run, and orders for them."""

from __future__ import annotations

import random
from typing import Any

from fpipe.actions.action import Action, Placement
from fpipe.actions.action_kinds import Op
from fpipe.actions.rule import needs, provides
from fpipe.schedule import Schedule

#: The actions of a stage, whole and split.
OPS: tuple[tuple[Op, ...], ...] = ("F", "B"), ("F", "I", "W")


def drawn(ranks: int, stages: int, microbatches: int, rng: random.Random) -> Schedule:
    """A random schedule that can run: a random order of all actions, by rank."""
    homes = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages - ranks))]
    rng.shuffle(homes)
    placement = Placement((tuple(homes),), ranks)
    split = [rng.random() < 0.5 for _ in range(stages)]
    left = [
        Action(stage, op, mb)
        for stage in range(stages)
        for mb in range(microbatches)
        for op in OPS[split[stage]]
    ]
    provided = set()
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    while left:
        able = [a for a in left if provided.issuperset(needs(a, stages))]
        action = rng.choice(able)
        left.remove(action)
        provided.update(provides(action))
        rows[homes[action.stage]].append(action)
    return Schedule(tuple(map(tuple, rows)), placement, microbatches)


def random_case(seed: int, ranks: tuple[int, ...] = (2, 3)) -> tuple[Schedule, Any]:
    """A random schedule, and an order for it."""
    rng = random.Random(seed)
    schedule = drawn(rng.choice(ranks), 4, rng.choice([2, 4]), rng)
    return schedule, rng.choice(["ready", ("ready", rng.randrange(1, 9))])

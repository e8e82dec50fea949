# SPDX-License-Identifier: Apache-2.0
"""The plans of a pipeline by signature: found, or prepared together with the other ranks.

Knows calls and plans; not what is done with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..collectives.group import Facts
from ..errors import BatchError
from ..programs.cache import measured
from ..programs.spent import Spent
from . import mistakes
from .arguments import Call
from .config import Config
from .feed import Feeder
from .first_call import FirstCall, compare_copies, enter, refused
from .prepare import Prepared, prepare
from .results import ResultLayout

#: How many signatures' plans a pipeline caches; those of the least recent calls are dropped.
KEPT = 128
#: The number of plans after which a pipeline warns, once, if the later ones took more than these
#: seconds.
HINT = 16
DEAR = 10.0
#: How many earlier calls are looked at for plans that can be used again, and for sizes to expect.
SEEN = 6


@dataclass(frozen=True, eq=False)
class CachedPlans:
    """Everything about one signature that later calls use again."""

    config: Config
    prepared: Prepared
    facts: Facts  # of the signature
    number: int  # of the call for which they were prepared, among those of the group
    misplaced: str | None  # set where a value is on a device that cannot be used
    spent: tuple[Spent, ...] = ()  # to prepare them

    def announce(self, call: Call, pullback: int = -1) -> int:
        """Announce a call that runs these plans, or the pullback of an earlier call; returns its
        number.
        """
        if self.config.local:
            return 0
        return enter(call, self.facts, self.prepared.tag, self.number, pullback)

    @cached_property
    def feeders(self) -> Mapping[int, Feeder]:
        """Where fed values come from, by rank."""
        group = self.config.group
        return {
            r: Feeder(plan, self.prepared, group.device(r))
            for r, plan in self.prepared.plans.items()
        }

    @cached_property
    def layout(self) -> ResultLayout:
        """Where the results are."""
        return ResultLayout(self.config, self.prepared)


class Cache:
    """What a pipeline keeps between calls: plans by signature, and the layouts of leaves that
    copies share.
    """

    def __init__(self, shares: Any = None, agreed: bool = False):
        self.plans: dict[tuple[Any, ...], CachedPlans] = {}
        self.shares = shares
        self.agreed = agreed
        self.graphs: dict[Any, Any] = {}  # of captured steps, by signature
        self.modes: dict[
            bool, tuple[Config, Cache]
        ] = {}  # of the same pipeline in training and in evaluation

    def plans_for(self, call: Call) -> CachedPlans:
        """The plans of a call, prepared for the first of its signature."""
        key = call.signature()
        cached = self._find(key)
        return self._keep(call, key) if cached is None else cached

    def announced(self, call: Call) -> tuple[CachedPlans, int]:
        """The plans of a call that is about to run, and its number; it is announced to the other
        ranks.
        """
        try:
            key = call.signature()
            cached = self._find(key)
            misplaced = call.misplaced() if cached is None else cached.misplaced
            if misplaced is not None:
                raise BatchError(misplaced)
        except Exception as error:
            refused(call.config, error)
            raise
        if cached is not None:
            return cached, cached.announce(call)
        cached = self._keep(call, key)
        return cached, cached.number

    def _find(self, key: tuple[Any, ...]) -> CachedPlans | None:
        try:
            cached = self.plans.get(key)
        except TypeError as error:
            raise mistakes.unhashable(error) from error
        if cached is not None and len(self.plans) > KEPT // 2:  # the last is the most recently used
            self.plans[key] = self.plans.pop(key)
        return cached

    def _keep(self, call: Call, key: tuple[Any, ...]) -> CachedPlans:
        """Prepare the plans of a call, and warn of the time where many calls needed plans."""
        with measured() as parts:
            cached = self._prepared(call)
        cached = self.plans[key] = replace(cached, spent=tuple(parts))
        if len(self.plans) == HINT:
            mistakes.warn_of_shapes([each.spent for each in self.plans.values()], DEAR)
        if len(self.plans) > KEPT:
            del self.plans[next(iter(self.plans))]
        return cached

    def _prepared(self, call: Call) -> CachedPlans:
        """Prepare the plans of a call, after a comparison with the other ranks where there are any
        in other processes.
        """
        config = call.config
        latest = [each.prepared for each in list(self.plans.values())[-SEEN:]]
        if config.copies is not None and not self.agreed:
            self.agreed = True
            compare_copies(config)
        try:
            request = call.request(self.shares)
            first = None if config.local else FirstCall(call, request, self.shares)
        except Exception as error:
            refused(config, error)
            raise
        if first is None:
            prepared = prepare(config, request, 0, None, latest)
            return CachedPlans(config, prepared, {}, 0, call.misplaced())
        agreed = first.compared(latest)
        prepared = prepare(config, agreed.request, agreed.tag, agreed.traced, latest)
        return CachedPlans(config, prepared, agreed.facts, agreed.number, call.misplaced())

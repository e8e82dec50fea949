# SPDX-License-Identifier: Apache-2.0
"""The cache of a pipeline's plans: the first call of a signature prepares them, together with the
other ranks, and later calls use them again.

Knows calls and plans; not how plans run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..actions.product import load_pass
from ..errors import BatchError
from ..programs.cache import Spent, measured
from . import mistakes
from .arguments import Call
from .config import Config
from .feed import Feeder
from .first_call import Agreed, compare, compare_copies, enter, refused
from .prepare import Prepared, prepare
from .results import ResultLayout

#: The number of signatures whose plans are cached. The plans of the least recent calls are dropped.
MAX_PLANS = 128
#: With so many plans, a pipeline warns once if those after the first took more than WARN_SECONDS.
WARN_PLANS = 16
WARN_SECONDS = 10.0
#: The number of earlier plans that may be used again for other sizes, or predict other sizes.
RECENT = 6


@dataclass(frozen=True, eq=False)
class CachedPlans:
    """The plans of one signature, and what calls that run them read."""

    config: Config
    prepared: Prepared
    agreed: Agreed
    misplaced: str | None  # why the arguments cannot be used, if a tensor is on a wrong device

    def announce(self, call: Call, pullback: int = -1) -> int:
        """Announce a call that runs these plans, and return its number.

        With ``pullback`` announce the pullback of the call of that number.
        """
        if self.config.local:
            return 0
        return enter(call, self.agreed, pullback)

    @cached_property
    def feeders(self) -> Mapping[int, Feeder]:
        """The functions that fill the registers, by rank."""
        device = self.config.group.device
        plans = self.prepared.plans
        return {rank: Feeder(plan, self.prepared, device(rank)) for rank, plan in plans.items()}

    @cached_property
    def layout(self) -> ResultLayout:
        """Where the registers hold the results."""
        return ResultLayout(self.config, self.prepared)


class Cache:
    """What a pipeline keeps between calls.

    * ``plans``: by signature
    * ``spent``: seconds of each preparation, by part
    * ``shares``: the layouts of parameters that copies of the pipeline share
    * ``copies_compared``: whether the copies have compared their configurations
    * ``graphs``: of captured steps, by signature
    * ``modes``: the pipeline in training (True) and in evaluation (False)
    """

    def __init__(self, shares: Any = None, copies_compared: bool = False):
        self.plans: dict[tuple[Any, ...], CachedPlans] = {}
        self.spent: list[list[Spent]] = []
        self.shares = shares
        self.copies_compared = copies_compared
        self.graphs: dict[Any, Any] = {}
        self.modes: dict[bool, tuple[Config, Cache]] = {}

    def plans_for(self, call: Call) -> CachedPlans:
        """The plans of a call that is not run, prepared where they are not cached."""
        key = call.signature()
        cached = self._lookup(call, key)
        return self._add(call, key) if cached is None else cached

    def announce(self, call: Call) -> tuple[CachedPlans, int]:
        """Announce a call to the other ranks. Returns its plans, prepared where they are not
        cached, and its number.
        """
        try:
            key = call.signature()
            cached = self._lookup(call, key)
            misplaced = call.misplaced() if cached is None else cached.misplaced
            if misplaced is not None:
                raise BatchError(misplaced)
        except Exception as error:
            refused(call.config, error)
            raise
        if cached is not None:
            return cached, cached.announce(call)
        cached = self._add(call, key)
        return cached, cached.agreed.number

    def _lookup(self, call: Call, key: tuple[Any, ...]) -> CachedPlans | None:
        try:
            cached = self.plans.get(key)
        except TypeError as error:
            raise mistakes.unhashable(call) from error
        if cached is not None and len(self.plans) > MAX_PLANS // 2:
            self.plans[key] = self.plans.pop(key)  # the plans of the most recent call are the last
        return cached

    def _add(self, call: Call, key: tuple[Any, ...]) -> CachedPlans:
        """Prepare the plans of a call and cache them. Warn where many shapes cost much time."""
        with measured() as spent:
            cached = self._prepare(call)
        self.spent.append(spent)
        self.plans[key] = cached
        if len(self.plans) == WARN_PLANS:
            mistakes.warn_of_shapes(self.spent, WARN_SECONDS)
        if len(self.plans) > MAX_PLANS:
            del self.plans[next(iter(self.plans))]
        return cached

    def _prepare(self, call: Call) -> CachedPlans:
        """Prepare the plans of a call. Ranks in several processes compare the call first."""
        config = call.config
        if config.copies is not None and not self.copies_compared:
            self.copies_compared = True
            compare_copies(config)
        try:
            request = call.request(self.shares)
        except Exception as error:
            refused(config, error)
            raise
        if config.local:
            if config.tied and not self.plans:
                ties = load_pass("ties")
                ties.check_equal(config, [ties.tensors(call, request)])
            agreed = Agreed(request)
        else:
            recent = [plans.prepared for plans in list(self.plans.values())[-RECENT:]]
            agreed = compare(call, request, self.shares, recent)
        prepared = prepare(config, agreed.request, agreed.kinds)
        return CachedPlans(config, prepared, agreed, call.misplaced())

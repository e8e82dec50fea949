# SPDX-License-Identifier: Apache-2.0
"""The first call of a signature, on several processes: ranks compare what they are about to run,
and complete arguments that only some of them have. Knows calls and facts; no plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..actions.product import feature
from ..collectives.group import Facts
from .arguments import Call, Offers
from .config import Config
from .facts import facts, of_call, shared
from .handshake import agree, tag_of, together
from .interfaces import tree_data, tree_from_data
from .kinds import TracedKind
from .prepare import Prepared
from .request import Request

#: The number that stands for None in the words of calls.
_NONE = -(2**60)
#: The word of a call that has no plans yet.
NEW = 1


@dataclass(frozen=True)
class Agreed:
    """What all ranks agree on. ``traced`` are stages that were traced for expected interfaces."""

    request: Request
    facts: Facts
    number: int
    tag: int
    traced: list[TracedKind] | None


class FirstCall:
    """A call without plans; ``facts`` are what this rank has to say of it."""

    def __init__(self, call: Call, request: Request, shares: Any):
        self.call = call
        self.request = request
        self.shares = shares
        self.facts = facts(call.config, request)

    def compared(self, latest: Sequence[Prepared]) -> Agreed:
        """Announce the call and compare it with the other ranks. Where all expect the same
        interfaces after the ``latest`` calls, these need no exchange.
        """
        call = self.call
        request = self.request
        known = self.facts
        config = call.config
        described = of_call(known, call.seed, call.scale, "none yet")
        number = config.group.enter(NEW, lambda: described)

        def details(fact: str) -> str:
            if fact == "schedule":
                return str(self.request.schedule)
            return ""

        ready = feature("sizes.prediction").ready
        guess = ready(config, request, latest)
        more = (call.absent, guess and guess.word)
        answers = agree(config.group, shared(described), details, more)
        absent = [each for each, _ in answers]
        if any(absent):
            request = self._completed(absent)
            known = facts(config, request)
            guess = ready(config, request, latest)
            answers = agree(config.group, shared(known), more=((), guess and guess.word))
        if len({word for _, word in answers}) > 1:
            guess = None
        # Two pipelines may be equal in all facts: each has plans that were prepared for a call of
        # its own.
        tag = tag_of({**shared(known), "number": str(number)})
        return Agreed(request, known, number, tag, None if guess is None else guess.traced)

    def _completed(self, absent: Sequence[Sequence[str]]) -> Request:
        """The request of a call some of whose arguments only other processes have: these describe
        them.
        """
        arguments = feature("elsewhere.arguments")
        call = self.call
        names = [name for lacking in absent for name in lacking]
        offers = together(
            call.config.group, lambda: arguments.offered(call, names), _as_data, _from_data
        )
        return arguments.completed(call, absent, offers).request(self.shares)


def _as_data(offers: Offers) -> dict[str, list[Any]]:
    return {name: list(map(tree_data, trees)) for name, trees in offers.items()}


def _from_data(offers: Any) -> Offers:
    return {name: tuple(map(tree_from_data, trees)) for name, trees in offers.items()}


def compare_copies(config: Config) -> None:
    """Before the first step of all, copies of the pipeline compare their configurations."""
    assert config.copies is not None
    agree(
        config.copies.group,
        {
            "schedule": repr(config),
            "copies": config.copies.description,
            "tied parameters": str(config.tied),
            "the dtype of accumulation": str(config.accumulate),
            "the stages here": str(config.here),
        },
    )


# ---- every call ----
def enter(call: Call, known: Facts, tag: int, number: int, pullback: int) -> int:
    """Announce a call that runs plans with this tag, which were prepared for an earlier call, or
    the pullback of a call; returns its number.
    """
    seed = call.seed
    scale = call.scale

    def described() -> Facts:
        facts = of_call(known, seed, scale, f"those prepared for call {number}")
        if pullback < 0:
            return facts
        return facts | {"call": f"the pullback of call {pullback}"}

    # The hash of None is an address.
    numbers = (_NONE if value is None else value for value in (seed, scale))
    return call.config.group.enter(hash((tag, pullback, *numbers)), described)


def refused(config: Config, error: Exception) -> None:
    """Report to the other ranks that this one raised before it announced a call."""
    with suppress(RuntimeError):  # of the group or the store: the next call raises it
        config.group.refuse(error)
    if config.copies is not None:
        config.copies.group.failed(error)  # other copies of the pipeline run, and wait for this one

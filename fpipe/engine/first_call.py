# SPDX-License-Identifier: Apache-2.0
"""The first call of a signature on several processes: ranks compare what they are about to run.

Arguments that only some ranks have are described to the others. Later calls are only announced.
Knows calls and facts; no plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ..actions.product import feature
from ..collectives.group import Facts
from .arguments import Call, Descriptions, LossScale
from .config import Config
from .facts import facts, of_call, shared
from .handshake import agree, on_all_ranks, tag_of
from .interfaces import tree_data, tree_from_data
from .kinds import TracedKind
from .prepare import Prepared
from .request import Request

#: The announcement of a call that has no plans yet.
NEW = 1


@dataclass(frozen=True)
class Agreed:
    """What all ranks agree on.

    ``traced`` are the stages of this process if all ranks predicted the same interfaces.
    """

    request: Request
    facts: Facts
    number: int
    tag: int
    traced: list[TracedKind] | None


class FirstCall:
    """A call without plans; ``facts`` describe it as this rank makes it."""

    def __init__(self, call: Call, request: Request, shares: Any):
        self.call = call
        self.request = request
        self.shares = shares
        self.facts = facts(call.config, request)

    def compare(self, recent: Sequence[Prepared]) -> Agreed:
        """Announce the call, and compare it with the other ranks.

        From ``recent`` plans each rank predicts the interfaces of all stages. If all predict the
        same, they need not be exchanged.
        """
        call = self.call
        request = self.request
        signature_facts = self.facts
        config = call.config
        call_facts = of_call(signature_facts, call.seed, _number(call.loss_scale), "none yet")
        number = config.group.enter(NEW, lambda: call_facts)

        def details(fact: str) -> str:
            if fact == "schedule":
                return str(self.request.schedule)
            return ""

        predict = feature("sizes.prediction").predict
        prediction = predict(config, request, recent)
        report = (call.absent, None if prediction is None else prediction.digest)
        reports = agree(config.group, shared(call_facts), details, report)
        absent = [names for names, _ in reports]
        if any(absent):
            request = self._request_with_descriptions(absent)
            signature_facts = facts(config, request)
            prediction = predict(config, request, recent)
            report = ((), None if prediction is None else prediction.digest)
            reports = agree(config.group, shared(signature_facts), more=report)
        if len({digest for _, digest in reports}) > 1:
            prediction = None
        # Two pipelines may have equal facts, but their plans were prepared in different calls. So
        # the number of the call is a part of the tag.
        tag = tag_of({**shared(signature_facts), "number": str(number)})
        traced = None if prediction is None else prediction.traced
        return Agreed(request, signature_facts, number, tag, traced)

    def _request_with_descriptions(self, absent: Sequence[Sequence[str]]) -> Request:
        """The request of the call, where each rank lacks the arguments in ``absent``.

        Processes that have them describe them.
        """
        arguments = feature("elsewhere.arguments")
        call = self.call
        names = [name for of_rank in absent for name in of_rank]
        descriptions = on_all_ranks(
            call.config.group, lambda: arguments.describe(call, names), _as_data, _from_data
        )
        return arguments.completed(call, absent, descriptions).request(self.shares)


def _as_data(descriptions: Descriptions) -> dict[str, list[Any]]:
    return {name: list(map(tree_data, trees)) for name, trees in descriptions.items()}


def _from_data(descriptions: Any) -> Descriptions:
    return {name: tuple(map(tree_from_data, trees)) for name, trees in descriptions.items()}


def compare_copies(config: Config) -> None:
    """Compare the configurations of the copies of the pipeline, before the first step of all."""
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
def enter(call: Call, signature_facts: Facts, tag: int, number: int, pullback: int) -> int:
    """Announce a call that runs cached plans, and return its number.

    The plans have this ``tag``, and were prepared for the call of this ``number``. A ``pullback``
    of 0 or more is the number of the call whose pullback runs.
    """
    seed = call.seed
    scale = _number(call.loss_scale)

    def call_facts() -> Facts:
        facts = of_call(signature_facts, seed, scale, f"those prepared for call {number}")
        if pullback < 0:
            return facts
        return facts | {"call": f"the pullback of call {pullback}"}

    word = tag_of(of_call({"pullback": str(pullback)}, seed, scale, str(tag)))
    return call.config.group.enter(word, call_facts)


def _number(scale: LossScale) -> float | None:
    """A loss scale as a number that ranks can compare; 0 for a tensor on an accelerator."""
    if isinstance(scale, torch.Tensor) and scale.device.type != "cpu":
        return 0.0
    return None if scale is None else float(scale)


def refused(config: Config, error: Exception) -> None:
    """Report to the other ranks that this one raised before it announced a call.

    Other copies of the pipeline run the call, and wait for this one.
    """
    with suppress(RuntimeError):  # An error of the group is raised by the next call.
        config.group.refuse(error)
    if config.copies is not None:
        config.copies.group.failed(error)

# SPDX-License-Identifier: Apache-2.0
"""The first call of a signature on several processes: ranks compare what they are about to run.

Arguments that only some ranks have are described to the others. Later calls are only announced.
Knows calls and facts; no plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ..actions.product import load_pass
from ..collectives.group import Facts
from .arguments import Call, LossScale
from .config import Config
from .facts import facts, of_call, shared
from .handshake import agree, on_all_ranks, tag_of
from .kinds import TracedKind
from .prepare import Prepared
from .request import Request

#: The announcement of a call that has no plans yet.
NEW = 1


@dataclass(frozen=True)
class Agreed:
    """What all ranks agree on: the request, the facts that they compared and their digest ``tag``,
    and the ``number`` of the group's call.

    ``kinds`` are traced on this process already if all ranks predicted the same interfaces.
    """

    request: Request
    facts: Facts = field(default_factory=dict)
    number: int = 0
    tag: int = 0
    kinds: list[TracedKind] | None = None


def compare(call: Call, request: Request, shares: Any, recent: Sequence[Prepared]) -> Agreed:
    """Announce a call that has no plans, and compare it with the other ranks.

    From ``recent`` plans each rank predicts the interfaces of all stages. If all predict the same,
    they need not be exchanged. The first call of a pipeline compares tied parameters.
    """
    config = call.config
    group = config.group
    signature_facts = facts(config, request)
    call_facts = of_call(signature_facts, call.seed, _number(call.loss_scale), "none yet")
    number = group.enter(NEW, lambda: call_facts)
    prediction = load_pass("sizes.prediction")
    kinds = prediction.predict(config, request, recent)
    ties = load_pass("ties") if config.tied and not recent else None
    tied = {} if ties is None else ties.digests(call, request)
    report: Any = (call.absent, prediction.digest(kinds), tied)
    reports = agree(group, shared(call_facts), request.schedule, report)
    if ties is not None:
        ties.check_equal(config, [leaves for *_, leaves in reports])
    absent = [names for names, *_ in reports]
    if any(absent):
        # Processes describe the arguments that they have and others lack.
        arguments = load_pass("elsewhere.arguments")
        names = [name for of_rank in absent for name in of_rank]
        descriptions = on_all_ranks(group, lambda: arguments.describe(call, names))
        request = arguments.completed(call, absent, descriptions).request(shares)
        signature_facts = facts(config, request)
        kinds = prediction.predict(config, request, recent)
        report = ((), prediction.digest(kinds), {})
        reports = agree(group, shared(signature_facts), more=report)
    same = len({digest for _, digest, _ in reports}) == 1
    # Two pipelines may have equal facts, but their plans were prepared in different calls. So
    # the number of the call is a part of the tag.
    tag = tag_of({**shared(signature_facts), "number": str(number)})
    return Agreed(request, signature_facts, number, tag, kinds if same else None)


def compare_copies(config: Config) -> None:
    """Compare the configurations of the copies of the pipeline, before the first step of all."""
    assert config.copies is not None
    agree(
        config.copies.group,
        {
            "schedule": config.title,
            "copies": config.copies.description,
            "tied parameters": str(config.tied),
            "the dtype of accumulation": str(config.accumulate),
            "the stages here": str(config.here),
        },
    )


# ---- every call ----
def enter(call: Call, agreed: Agreed, pullback: int) -> int:
    """Announce a call that runs the cached plans on which ranks ``agreed``; returns its number.

    A ``pullback`` of 0 or more is the number of the call whose pullback runs.
    """
    seed = call.seed
    scale = _number(call.loss_scale)

    def call_facts() -> Facts:
        facts = of_call(agreed.facts, seed, scale, f"those prepared for call {agreed.number}")
        if pullback < 0:
            return facts
        return facts | {"call": f"the pullback of call {pullback}"}

    word = tag_of(of_call({"pullback": str(pullback)}, seed, scale, str(agreed.tag)))
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

"""Issue-sized promises about real models: tiny decoders in 4 and 8 stages under every schedule,
here and over gloo.

Each schedule runs with one of the families of ``HERE`` in one process. ``make test-long`` runs all
families in 4 and in 8 stages under all schedules, and all over four processes.
benchmarks/trial_models.py runs the whole table over four processes too, through memory and through
gloo.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import forked
import fpipe
from huggingface_decoders import ACCEPTANCE, MICROBATCHES, against_unsplit, decoder, verdict
from sample import also, covering
from schedule_table import TABLE, Case


def schedules(stages: int) -> Iterator[Case]:
    """Every schedule, on 4 ranks or, where it cannot have so many stages there, on 2 (in a V) or 8
    (one each).
    """
    for entry in TABLE:
        ranks = next(ranks for ranks in (4, 2, 8) if stages // ranks in entry.per_rank)
        yield Case(entry.name, ranks, MICROBATCHES, stages)


def wrong(family: str, case: Case, group: Any) -> list[str]:
    """What differs from the unsplit model: loss, gradients, and which parameters have a
    gradient.
    """
    comparison = verdict(
        group.gather_objects(against_unsplit(family, case, group)), family, case.stages
    )
    return [] if comparison.right else [f"{family} under {case}: {comparison}"]


#: The families that the suite runs in one process, and in how many stages: those that take long to
#: trace in four.
HERE = (("gpt2", 4),)
ALL = [(family, stages) for family in ACCEPTANCE for stages in (4, 8)]


def chosen(family: str, stages: int) -> list[Case]:
    """The schedules under which the suite runs a family in one process: a part of all."""
    table = [(case, name) for name, count in HERE for case in schedules(count)]
    return [
        case for case, name in covering(table, lambda row: (row[0].name, row[1])) if name == family
    ]


@pytest.mark.parametrize(("family", "stages"), [*HERE, *also(*(r for r in ALL if r not in HERE))])
def test_every_schedule_equals_unsplit(family: str, stages: int, long: bool):
    cases = schedules(stages) if long else chosen(family, stages)
    assert [fault for case in cases for fault in wrong(family, case, fpipe.local(case.ranks))] == []


#: What is cut in how many over processes. The suite takes the first of each, which are not in
#: ``HERE``.
CUT = {4: ("gemma", "qwen3-moe", "mixtral"), 8: ("llama", "qwen3", "gpt2")}


def dealt(family: str, long: bool) -> list[Case]:
    """A family's share of the schedules with the stages in which it is cut; those together that
    trace the same. The suite cuts each schedule in its default number of stages.
    """
    stages, families = next(each for each in CUT.items() if family in each[1])
    families = families if long else families[:1]
    default = {entry.name: 4 * entry.per_rank[0] for entry in TABLE}
    cases = [c for c in schedules(stages) if c.ranks == 4 and (long or default[c.name] == stages)]
    cases.sort(key=lambda case: str(case.make().placement))
    share = -(-len(cases) // len(families))
    return cases[families.index(family) * share :][:share]


def _over_gloo(long: bool) -> list[str]:
    torch.set_num_threads(1)
    group = fpipe.init()
    return [
        fault
        for family in taken(long)
        for case in dealt(family, long)
        for fault in wrong(family, case, group)
    ]


def taken(long: bool) -> list[str]:
    return [family for families in CUT.values() for family in (families if long else families[:1])]


def _models() -> None:
    for family in taken(True):
        decoder(family, layers=1)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_over_four_processes(long: bool):
    assert {case.name for family in taken(long) for case in dealt(family, long)} == {
        entry.name for entry in TABLE
    }
    assert forked.launch(_models, _over_gloo, long, ranks=4, timeout=200) == [[]] * 4

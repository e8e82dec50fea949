"""Issue-sized promises about real models: tiny decoders in 4 and 8 stages under every schedule, here and over gloo.

Here each family in 4 or in 8 stages under a third of the schedules: every schedule with one family in each;
all of them in ``make test-long``. Over four processes every schedule, dealt to two of the families, or to all.
benchmarks/trial_models.py runs the whole table over four processes too, through memory and through sockets.
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
from schedule_table import TABLE, Case


def schedules(stages: int) -> Iterator[Case]:
    """Every schedule, on 4 ranks or, where it cannot have so many stages there, on 2 (in a V) or 8 (one each)."""
    for entry in TABLE:
        ranks = next(ranks for ranks in (4, 2, 8) if stages // ranks in entry.per_rank)
        yield Case(entry.name, ranks, MICROBATCHES, stages)


def wrong(family: str, case: Case, group: Any) -> list[str]:
    """What differs from the unsplit model: loss, gradients, and which parameters have a gradient."""
    comparison = verdict(group.gather_objects(against_unsplit(family, case, group)), family, case.stages)
    return [] if comparison.right else [f"{family} under {case}: {comparison}"]


def chosen(family: str, stages: int, long: bool) -> list[Case]:
    """The schedules under which a family runs here."""
    place = ACCEPTANCE.index(family)
    here = place % 2 == (stages == 8)
    return [case for number, case in enumerate(schedules(stages)) if long or (here and number % 3 == place // 2)]


@pytest.mark.parametrize("stages", [4, 8])
@pytest.mark.parametrize("family", ACCEPTANCE)
def test_every_schedule_equals_unsplit(family: str, stages: int, long: bool):
    cases = chosen(family, stages, long)
    assert [fault for case in cases for fault in wrong(family, case, fpipe.local(case.ranks))] == []


@pytest.mark.parametrize("stages", [4, 8])
def test_every_schedule_runs_with_one_family(stages: int):
    runs = [case for family in ACCEPTANCE for case in chosen(family, stages, False)]
    assert sorted(runs) == sorted(schedules(stages))


#: What is cut in how many over processes: families that take long to trace in four. The suite takes the first of each.
CUT = {4: ("qwen3-moe", "mixtral", "gemma"), 8: ("llama", "qwen3", "gpt2")}


def dealt(family: str, long: bool) -> list[Case]:
    """A family's share of the schedules with the stages in which it is cut; those together that trace the same."""
    stages, families = next(each for each in CUT.items() if family in each[1])
    families = families if long else families[:1]
    cases = [case for case in schedules(stages) if case.ranks == 4]
    cases.sort(key=lambda case: str(case.make().placement))
    share = -(-len(cases) // len(families))
    return cases[families.index(family) * share :][:share]


def _over_gloo(long: bool) -> list[str]:
    torch.set_num_threads(1)
    group = fpipe.init()
    return [fault for family in taken(long) for case in dealt(family, long) for fault in wrong(family, case, group)]


def taken(long: bool) -> list[str]:
    return [family for families in CUT.values() for family in (families if long else families[:1])]


def _models() -> None:
    for family in taken(True):
        decoder(family, layers=1)


@pytest.mark.timeout(240)
def test_over_four_processes(long: bool):
    assert {case.name for family in taken(long) for case in dealt(family, long)} == {entry.name for entry in TABLE}
    assert forked.launch(_models, _over_gloo, long, ranks=4, timeout=200) == [[]] * 4

"""Pipelines on several fake devices of one process have the CPU's bits, whatever the delays.

``--long`` runs every schedule, model and engine under 50 seeds of delays.
"""

from __future__ import annotations

import pytest

import fpipe
from models import MODELS
from sample import covering
from schedule_table import TABLE, Case, cases

from . import cases as pipelines
from .loader import missing

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.xdist_group("fake device"),
    pytest.mark.timeout(7200),
]
ENGINES = ("trace", "eager")


def found(rows: list[tuple[Case, str, str]], seeds: int) -> list[str]:
    """What is wrong with a step of each row, in one process."""
    return [
        f"{row}: {what}"
        for at, row in enumerate(rows)
        for what in pipelines.wrong(
            pipelines.of_model(row), row[0].ranks, range(at, at + seeds)
        )
    ]  # fmt: off


def _columns(row: tuple[Case, str, str]) -> tuple[object, ...]:
    case, model, engine = row
    return case.name, model, engine, case.ranks


def test_every_schedule_has_the_bits_of_the_cpu(long: bool):
    rows = [
        (case, model, engine)
        for case in cases(ranks=(2, 4), microbatches=(4,))
        for model in MODELS
        for engine in ENGINES
    ]
    if not long:
        rows = covering(rows, _columns)
    assert {case.name for case, _, _ in rows} == {family.name for family in TABLE}
    seeds = 50 if long else 1
    assert fpipe.launch(found, rows, seeds, ranks=1, timeout=7000) == [[]]


def _more(names: list[str], seeds: int) -> list[str]:
    return [
        f"{name}: {what}"
        for at, name in enumerate(names)
        for what in pipelines.wrong(pipelines.MORE[name], 2, range(at, at + seeds))
    ]


def test_whatever_else_a_pipeline_does(long: bool):
    seeds = 50 if long else 1
    assert fpipe.launch(_more, list(pipelines.MORE), seeds, ranks=1, timeout=7000) == [[]]

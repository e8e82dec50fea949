"""A second of ``make fuzz``, or a minute in ``make test-long``: some cases always the same,
then new ones. Functions of sizes, of which some are always the same, too.
"""

from __future__ import annotations

import random
import time

import pytest

from sample import also

from .cases import PER_MODEL
from .engine import run_case
from .sizes import run


def test_random_cases_have_the_results_of_plain_autograd(long: bool):
    first = random.SystemRandom().randrange(2**24) * PER_MODEL
    end = time.monotonic() + (60 if long else 1)
    same = PER_MODEL if long else 3
    for number in range(10_000):
        seed = number if number < same else first + number
        found = run_case(seed)
        assert found.kind not in ("different", "error"), (
            f'{found.text}\nmake fuzz ARGS="--case {seed}" runs this again'
        )
        if number >= same and time.monotonic() > end:
            return


@pytest.mark.parametrize("seed", [100_007_414, *also(100_011_356)])
def test_the_end_of_a_send_before_any_message_of_its_receiver(seed: int):
    """In the ready order, which took it for a step of the wait for such a message."""
    assert run_case(seed).kind == "equal"


def test_a_rank_whose_plan_is_empty_in_the_ready_order():
    """A case of a stage without gradients, which a check refuses later."""
    assert run_case(1943).kind == "refused"


def test_functions_of_sizes_have_the_results_of_autograd(long: bool):
    """Sizes as texts, keys and types, from the second length on: ``python -m tests.fuzz.sizes``."""
    uses = [
        "BY_TEXT.get(f'{n}', 1.0)",
        "BY_TEXT.get(str(list(x.shape)), 1.0)",
        "2.0 if isinstance(n, int) else 3.0",
        "first_number([n, 5])",
        "by_number(n)",
    ]
    for number, use in enumerate(uses if long else uses[::4]):
        found = run(number, lengths=3, uses=(use,))
        assert found.kind.startswith("equal"), found.text
    for seed in range(300 * long):
        found = run(seed)
        assert found.kind.startswith("equal"), found.text

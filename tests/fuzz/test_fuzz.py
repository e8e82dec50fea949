"""Four seconds of ``make fuzz``, or a minute in ``make test-long``: some cases always the same,
then new ones.
"""

from __future__ import annotations

import random
import time

from .cases import PER_MODEL
from .engine import run_case


def test_random_cases_have_the_results_of_plain_autograd(long: bool):
    first = random.SystemRandom().randrange(2**24) * PER_MODEL
    end = time.monotonic() + (60 if long else 4)
    for number in range(10_000):
        seed = number if number < 2 * PER_MODEL else first + number
        found = run_case(seed)
        assert found.kind not in ("different", "error"), (
            f'{found.text}\nmake fuzz ARGS="--case {seed}" runs this again'
        )
        if number >= 2 * PER_MODEL and time.monotonic() > end:
            return

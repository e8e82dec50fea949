"""Two hosts with two processes each, under torchrun: the bits of one process."""

from __future__ import annotations

from typing import Any

import pytest

import fpipe
import network_namespaces
import training_steps

PLANS = [(4, 2), (6, 3)]


def _steps() -> dict[str, dict[Any, str]]:
    return training_steps.steps_under(["ZBVZeroBubble"], PLANS)


@pytest.mark.timeout(240)
def test_two_hosts_give_the_bits_of_one_process():
    try:
        with network_namespaces.two_namespaces():
            found = network_namespaces.launch(_steps, timeout=150)
    except network_namespaces.NotAllowedError as error:
        pytest.skip(f"no network namespaces here ({error})")
    assert len(found) == 4
    expected = training_steps.steps(fpipe.local(4), "ZBVZeroBubble", PLANS)
    for part in found:
        mine = part["ZBVZeroBubble"]
        assert mine.items() <= expected.items()
    assert set().union(*(part["ZBVZeroBubble"] for part in found)) == expected.keys()

"""Two hosts with two processes each, under torchrun: the bits of one process."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

import fpipe
import network_namespaces
import training_steps


@pytest.mark.timeout(240)  # six interpreters start
def test_two_hosts_give_the_bits_of_one_process():
    script = Path(training_steps.__file__)
    paths = os.pathsep.join([str(script.parent), str(script.parent.parent)])
    try:
        with network_namespaces.two_namespaces():
            nodes = network_namespaces.torchrun([str(script), "ZBVZeroBubble"], timeout=150, env={"PYTHONPATH": paths})
    except network_namespaces.NotAllowedError as error:
        pytest.skip(f"no network namespaces here ({error})")
    for code, _, err in nodes:
        assert code == 0, err[-3000:]
    found = training_steps.steps(fpipe.local(4), "ZBVZeroBubble", [(4, 2), (6, 3)])
    digest = hashlib.sha256(repr(sorted(found.items(), key=str)).encode()).hexdigest()[:12]
    outputs = [out for _, out, _ in nodes if out.strip()]
    assert outputs == [f"ZBVZeroBubble {digest}\n"], "rank 0 prints, on whichever host it is"

"""Two hosts with two processes each, under torchrun: the bits of one process."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

import fpipe
import spmd
import two_hosts


@pytest.mark.timeout(240)  # six interpreters start
def test_two_hosts_give_the_bits_of_one_process():
    script = Path(spmd.__file__)
    paths = os.pathsep.join([str(script.parent), str(script.parent.parent)])
    try:
        with two_hosts.two_hosts():
            nodes = two_hosts.torchrun([str(script), "ZBVZeroBubble"], timeout=150, env={"PYTHONPATH": paths})
    except two_hosts.NotAllowedError as error:
        pytest.skip(f"no network namespaces here ({error})")
    for code, _, err in nodes:
        assert code == 0, err[-3000:]
    found = spmd.steps(fpipe.local(4), "ZBVZeroBubble", [(4, 2), (6, 3)])
    digest = hashlib.sha256(repr(sorted(found.items(), key=str)).encode()).hexdigest()[:12]
    told = [out for _, out, _ in nodes if out.strip()]
    assert told == [f"ZBVZeroBubble {digest}\n"], "rank 0 tells, on whichever host it is"

"""Where a send is complete when it returns, the rank that computes the loss sends it by an
instruction of its plan.
"""

from __future__ import annotations

import pytest
import torch

import fpipe
from fpipe.collectives.shared_memory._native import AVAILABLE

MICROBATCHES = 4


def _pipe(group: fpipe.Group) -> tuple[fpipe.Pipeline, list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    params = [torch.randn(4, 4) for _ in range(2)]
    loss = lambda y: (y * y).mean()
    pipe = fpipe.pipeline(
        [lambda p, x: torch.tanh(x @ p)] * 2,
        "1F1B",
        loss=loss,
        microbatches=MICROBATCHES,
        group=group,
    )
    return pipe, params, torch.randn(8, 4)


def _on_two_processes() -> tuple[bool, dict[int, list[str]], torch.Tensor]:
    group = fpipe.init(timeout=60)
    pipe, params, x = _pipe(group)
    (rank,) = group.here
    local = pipe.place(params)
    plan = pipe.plan(local, x).by_rank[rank]
    fpipe.grad(pipe)(local, x)  # the loss is sent without a request
    return (
        group.at_once,
        {rank: [ins.kind for ins in plan.instructions]},
        fpipe.value_and_grad(pipe)(local, x)[0],
    )


@pytest.mark.skipif(not AVAILABLE, reason="no shared memory here")
def test_the_loss_is_sent_after_the_next_send():
    found = fpipe.launch(_on_two_processes, ranks=2, timeout=300)
    pipe, params, x = _pipe(fpipe.local(2))
    expected = fpipe.value_and_grad(pipe)(params, x)[0]
    kinds = {rank: kinds for _, by_rank, _ in found for rank, kinds in by_rank.items()}
    assert all(at_once for at_once, _, _ in found)
    assert all(torch.equal(value, expected) for *_, value in found)
    assert "LOSS" not in kinds[0]
    place = kinds[1].index("LOSS")
    assert (
        kinds[1].count("LOSS") == 1
        and kinds[1][place - 1] == "SEND"
        and "F" not in kinds[1][place:]
    )


def test_a_local_group_and_a_pullback_send_no_loss():
    pipe, params, x = _pipe(fpipe.local(2))
    assert all(
        ins.kind != "LOSS" for p in pipe.plan(params, x).by_rank.values() for ins in p.instructions
    )

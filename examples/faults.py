"""Test a pipeline with injected faults (fault injection): late and lost messages, a killed rank, an operation refused.

``fpipe.testing`` runs a training step on four fake ranks in one process. Its clock is simulated: a time-out of a minute
takes no time. The same seed gives the same run. A fault that does not occur is an error, so no test passes by chance.

The loss is that of a small regression. A late message changes no number. After a fault that a run cannot survive, every
other rank raises an error in time, which names the rank to look at. The functions ``test_...`` are for pytest.

python examples/faults.py                                   # four fake ranks in one process
torchrun --nproc-per-node 4 examples/faults.py              # each process does the same
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fpipe
from fpipe.errors import PeerError, StalledError, UnsupportedError
from fpipe.testing import Delay, Drop, Kill, Outcome, Refuse, outcomes, run

WIDTH, TIMEOUT = 8, 60.0


def layer(p: Tensor, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p)


def loss(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean()


def train(group: Any, steps: int = 3) -> list[float]:
    """What is tested: a training run, as a function of the group of its rank."""
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw)
    pipe = fpipe.pipeline([layer] * 4, "1F1B", loss=loss, microbatches=4, group=group)
    params, x, t = pipe.place([normal(WIDTH, WIDTH) / 4 for _ in range(4)]), normal(16, WIDTH), normal(16, WIDTH)
    step, tx = fpipe.value_and_grad(pipe), fpipe.sgd(0.5)
    state, losses = tx.init(params), []
    for _ in range(steps):
        value, grads = step(params, x, t)
        updates, state = tx.update(grads, state, params)
        params = fpipe.apply_updates(params, updates)
        losses.append(value.item())
    return losses


FAULTS = {
    "a message comes late": Delay(0, 1, nth=2, seconds=TIMEOUT / 2),
    "a message comes after the time-out": Delay(0, 1, nth=2, seconds=2 * TIMEOUT),
    "a message is lost": Drop(0, 1, nth=2),
    "a rank is killed": Kill(2, before=10),
    "a rank cannot receive": Refuse("recv", rank=1),
}


def ends(name: str) -> Sequence[Outcome]:
    return outcomes(train, 4, faults=[FAULTS[name]], timeout=TIMEOUT)


def test_a_late_message_changes_no_number() -> None:
    alone = run(train, 4)
    assert [end.value for end in ends("a message comes late")] == alone


def test_a_lost_message_is_noticed() -> None:
    for name in ("a message is lost", "a message comes after the time-out"):
        errors = [end.error for end in ends(name)]
        assert "0F2's message from rank 0" in str(errors[1])
        assert all(isinstance(error, PeerError | StalledError) for error in errors)
        assert any(isinstance(error, StalledError) for error in errors)


def test_a_killed_rank_is_noticed() -> None:
    found = ends("a rank is killed")
    assert found[2].killed and any("rank 2 is gone" in str(end.error) for end in found)
    assert all(isinstance(end.error, PeerError | StalledError) for end in found if not end.killed)


def test_a_refusal_is_raised_where_it_occurs() -> None:
    assert isinstance(ends("a rank cannot receive")[1].error, UnsupportedError)


def main(steps: int = 10) -> list[float]:
    torch.set_num_threads(1)
    for name in FAULTS:
        kinds = ("killed" if end.killed else type(end.error).__name__ if end.error else "ends" for end in ends(name))
        print(f"{name:36s}", " ".join(f"{kind:16s}" for kind in kinds))
    return run(partial(train, steps=steps), 4, faults=[FAULTS["a message comes late"]])[0]


if __name__ == "__main__":
    print("losses", " ".join(f"{value:.4f}" for value in main()))

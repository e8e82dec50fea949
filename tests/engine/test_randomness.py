"""Streams of random numbers: one for each stage and the loss, not shared between threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe

X = torch.ones(8, 64)


@pytest.mark.parametrize("engine", ["trace", "eager"])
def test_the_loss_and_the_last_stage_draw_other_numbers(engine: str):
    drawn: list[Tensor] = []

    def stage(p: Any, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    def loss(y: Tensor, target: Tensor) -> Any:
        return y.mean(), (y, torch.rand_like(y))

    pipe = fpipe.pipeline(
        [stage], loss=loss, microbatches=1, group=fpipe.local(1), seed=3, engine=engine
    )
    _, aux = pipe([None], X, X, has_aux=True)
    drawn = list(aux[0])
    assert not torch.equal(drawn[0], drawn[1])


def test_two_threads_with_seeds_have_the_numbers_of_one():
    """Two pipelines of their own groups, each in a thread: their draws came from one global
    stream.
    """

    def stage(p: Tensor, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x * p, 0.5)

    def run(seed: int, count: int) -> list[float]:
        pipe = fpipe.pipeline(
            [stage, stage],
            loss=lambda y, t: (y - t).square().mean(),
            microbatches=4,
            group=fpipe.local(2),
            seed=seed,
        )
        return [
            float(fpipe.value_and_grad(pipe)([torch.ones(64)] * 2, X, X)[0]) for _ in range(count)
        ]

    alone = {seed: run(seed, 1)[0] for seed in (1, 2)}
    found: dict[int, Any] = {}

    def work(seed: int) -> None:
        try:
            found[seed] = run(seed, 30)
        except fpipe.FpipeError as error:
            found[seed] = error

    threads = [threading.Thread(target=work, args=(seed,)) for seed in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, value in alone.items():
        assert not isinstance(found[seed], Exception), found[seed]
        assert set(found[seed]) == {value}


def test_streams_of_other_cuts_are_documented():
    """The streams belong to stages: another cut of the same model draws other numbers, as the docs
    of seed= say.
    """
    assert fpipe.pipeline.__doc__ is not None
    assert "stage" in fpipe.pipeline.__doc__[fpipe.pipeline.__doc__.index("seed") :][:400]


def _forked(p: Tensor, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return x * p + torch.rand_like(x)


def _restored(p: Tensor, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    y = x * p + torch.rand_like(x)
    torch.set_rng_state(state)
    return y


def _forked_and_seeded(p: Tensor, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return x * p + torch.rand_like(x)


SEEDING = {
    "torch.manual_seed": lambda p, x: (torch.manual_seed(0), x * p)[1],
    "default_generator": lambda p, x: (torch.default_generator.manual_seed(0), x * p)[1],
    "torch.seed": lambda p, x: (torch.seed(), x * p)[1],
    "fork_rng": _forked,
    "set_rng_state": _restored,
    "fork_rng and manual_seed": _forked_and_seeded,
}


@pytest.mark.parametrize("name", SEEDING)
def test_a_traced_stage_that_seeds_a_stream_is_refused(name: str):
    """The seed was set once, while the stage was traced, and counted for no run of it."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with pytest.raises(fpipe.errors.TraceError, match="Pass seed= to "):
        fpipe.trace(SEEDING[name], torch.tensor(2.0), X)
    assert torch.equal(torch.get_rng_state(), before), "the stream of the process is as before"


def test_draws_of_a_traced_stage_leave_the_stream_of_the_process():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    fpipe.trace(
        lambda p, x: torch.nn.functional.dropout(x * p) + torch.rand_like(x), torch.tensor(2.0), X
    )
    assert torch.equal(torch.get_rng_state(), before)

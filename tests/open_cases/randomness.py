# ruff: noqa: PT017
"""Streams of random numbers: one for each stage and the loss, on the rank's device, not shared between threads."""

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

    pipe = fpipe.pipeline([stage], loss=loss, microbatches=1, group=fpipe.local(1), seed=3, engine=engine)
    _, aux = pipe([None], X, X, has_aux=True)
    drawn = list(aux[0])
    assert not torch.equal(drawn[0], drawn[1])


def test_two_threads_with_seeds_have_the_numbers_of_one():
    """Two pipelines of their own groups, each in a thread: their draws came from one global stream."""

    def stage(p: Tensor, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x * p, 0.5)

    def run(seed: int, count: int) -> list[float]:
        pipe = fpipe.pipeline(
            [stage, stage], loss=lambda y, t: (y - t).square().mean(), microbatches=4, group=fpipe.local(2), seed=seed
        )
        return [float(fpipe.value_and_grad(pipe)([torch.ones(64)] * 2, X, X)[0]) for _ in range(count)]

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


def test_one_pipeline_in_two_threads_is_right_or_refused():
    stage = lambda p, x: x + torch.tanh(x * p)
    pipe = fpipe.pipeline(
        [stage] * 4, "1F1B", loss=lambda y, t: (y - t).square().mean(), microbatches=8, group=fpipe.local(4)
    )
    params = [torch.ones(64)] * 4
    expected = float(fpipe.value_and_grad(pipe)(params, X, X)[0])
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(30):
            try:
                value = float(fpipe.value_and_grad(pipe)(params, X, X)[0])
            except fpipe.GroupError as error:
                assert "in use by another thread" in str(error)
            except BaseException as error:
                wrong.append(error)
            else:
                if value != expected:
                    wrong.append(value)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_first_calls_in_two_threads():
    """Concurrent traces raised an AssertionError of torch."""
    wrong: list[BaseException] = []

    def work(number: int) -> None:
        stage = lambda p, x: x + torch.tanh(x * p) * number
        pipe = fpipe.pipeline(
            [stage] * 2, loss=lambda y, t: (y - t).square().mean(), microbatches=2, group=fpipe.local(2)
        )
        try:
            fpipe.value_and_grad(pipe)([torch.ones(64)] * 2, X, X)
        except BaseException as error:
            wrong.append(error)

    for _ in range(3):
        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong, wrong


def test_draws_do_not_depend_on_the_cut():
    """The streams belong to stages: another cut of the same model draws other numbers, as the docs of seed= say."""
    assert fpipe.pipeline.__doc__ is not None
    assert "stage" in fpipe.pipeline.__doc__[fpipe.pipeline.__doc__.index("seed") :][:400]

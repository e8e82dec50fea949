# ruff: noqa: PT017
"""A group serves one call at a time: several threads, and calls inside calls."""

from __future__ import annotations

import threading

import pytest
import torch

import fpipe

X = torch.ones(8, 64)


def test_first_calls_in_two_threads():
    """Concurrent traces raised an AssertionError of torch."""
    wrong: list[BaseException] = []

    def work(number: int) -> None:
        stage = lambda p, x: x + torch.tanh(x * p) * number
        pipe = fpipe.pipeline(
            [stage] * 2,
            loss=lambda y, t: (y - t).square().mean(),
            microbatches=2,
            group=fpipe.local(2),
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


def test_one_pipeline_in_two_threads_is_right_or_refused():
    stage = lambda p, x: x + torch.tanh(x * p)
    pipe = fpipe.pipeline(
        [stage] * 4,
        "1F1B",
        loss=lambda y, t: (y - t).square().mean(),
        microbatches=8,
        group=fpipe.local(4),
    )
    params = [torch.ones(64)] * 4
    expected = float(fpipe.value_and_grad(pipe)(params, X, X)[0])
    wrong: list[object] = []

    def work() -> None:
        for _ in range(30):
            try:
                value = float(fpipe.value_and_grad(pipe)(params, X, X)[0])
            except fpipe.errors.GroupError as error:
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


def test_a_pipeline_inside_each_does_not_mix_messages():
    """The inner call runs on the group whose outer call is not over."""
    group = fpipe.local(2)
    params = [torch.full((64,), 0.5)] * 2
    layer = lambda p, x: x + torch.tanh(x * p)
    outer = fpipe.pipeline([layer, layer], microbatches=4, group=group)
    inner = fpipe.pipeline([layer, layer], microbatches=2, group=group)
    alone = inner(params, X)

    def each(number: int, y: torch.Tensor) -> torch.Tensor:
        return inner(params, X)

    try:
        results = outer(params, X, each=each)
    except fpipe.FpipeError as error:
        assert "in use" in str(error)
        return
    for result in results:
        assert torch.equal(result, alone)


def test_two_pipelines_on_one_group_in_two_threads_are_right_or_refused():
    group, params = fpipe.local(2), [torch.full((64,), 0.5)] * 2
    pipes = [
        fpipe.pipeline(
            [lambda p, x, n=n: x + torch.tanh(x * p) * n] * 2, microbatches=4, group=group
        )
        for n in (1, 2)
    ]
    expected = [pipe(params, X) for pipe in pipes]
    wrong: list[object] = []
    refused = 0

    def work(number: int) -> None:
        nonlocal refused
        for _ in range(30):
            try:
                y = pipes[number](params, X)
            except fpipe.errors.GroupError as error:
                refused += "in use by another thread" in str(error)
            else:
                wrong.extend([] if torch.equal(y, expected[number]) else [y])

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert torch.equal(pipes[0](params, X), expected[0]), "free again"


def test_a_group_is_free_after_an_error():
    group = fpipe.local(2)
    pipe = fpipe.pipeline([lambda p, x: x * p] * 2, microbatches=2, group=group)
    with pytest.raises(fpipe.errors.ActionError, match="division"):
        pipe([torch.ones(64)] * 2, X, each=lambda number, y: 1 // 0)
    y, pullback = fpipe.vjp(pipe, [torch.ones(64)] * 2, X)
    assert torch.equal(pipe([torch.ones(64)] * 2, X), X), "also between the phases of another call"
    pullback(torch.ones_like(y))

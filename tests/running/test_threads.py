"""Pipelines in several threads of a process."""

from __future__ import annotations

import threading

import torch

import fpipe

X = torch.ones(8, 64)


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

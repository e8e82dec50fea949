# ruff: noqa: PT017
"""Streams of random numbers: one for each stage and the loss, on the rank's device, not shared between threads."""

from __future__ import annotations

import threading
from typing import Any

import torch

import fpipe

X = torch.ones(8, 64)


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

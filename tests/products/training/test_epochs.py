"""``Epochs``: the same rows in every process, in a run that continues, and for copies together."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

import fpipe
from fpipe.errors import BatchError

ROWS = TensorDataset(torch.arange(10), torch.arange(10) * 10)


def test_every_epoch_has_each_row_once_in_an_order_of_its_own():
    data = fpipe.Epochs(ROWS, 5, seed=3)
    epochs = [torch.cat([data(2 * epoch + step)[0] for step in range(2)]) for epoch in range(4)]
    assert all(sorted(epoch.tolist()) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 4
    assert all(torch.equal(10 * x, t) for x, t in map(data, range(8)))


@pytest.mark.parametrize("workers", [0, 1])
def test_any_step_has_the_rows_of_a_run_from_the_start(workers: int):
    data = fpipe.Epochs(ROWS, 3, num_workers=workers)
    found = [data(step)[0] for step in range(7)]
    for step in (6, 2, 3, 3, 0):
        assert torch.equal(data(step)[0], found[step])


def test_it_leaves_the_random_stream_of_the_program():
    before = torch.get_rng_state()
    fpipe.Epochs(ROWS, 3)(0)
    assert torch.equal(torch.get_rng_state(), before)


def test_copies_share_a_batch():
    whole = fpipe.Epochs(ROWS, 4)
    groups: list[Any] = [SimpleNamespace(size=2, here=(rank,)) for rank in range(2)]
    parts = [fpipe.Epochs(ROWS, 4, dp=group) for group in groups]
    for step in range(5):
        assert torch.equal(torch.cat([part(step)[0] for part in parts]), whole(step)[0])


def test_rows_without_shuffle_keep_their_order():
    data = fpipe.Epochs(ROWS, 3, shuffle=False)
    assert torch.cat([data(step)[0] for step in range(6)]).tolist() == 2 * list(range(9))


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return itertools.count()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fpipe.Epochs(ROWS, 11), "rows=11 of 10 for 1 copy"),
        (lambda: fpipe.Epochs(ROWS, 0), "rows=0 of 10"),
        (lambda: fpipe.Epochs(ROWS, 3, dp=fpipe.local(2)), "rows=3 of 10 for 2 copies"),
        (lambda: fpipe.Epochs(ROWS, 3, seed=-1), "seed=-1; give a seed of at least 0"),
        (lambda: fpipe.Epochs(Endless(), 3), "Endless has none"),
    ],
)
def test_mistakes(make: Any, message: str):
    with pytest.raises(BatchError, match=message):
        make()

# SPDX-License-Identifier: Apache-2.0
"""Batches of a data set by the number of the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ...collectives import Group
from ...errors import BatchError, checked


class Epochs:
    """Batches of a data set, as a function of the number of the step, for ``fpipe.Loop``.

    The order of an epoch depends on the seed and the number of the epoch alone, so every process
    reads the same rows, and a run that continues reads those that come next, without reading those
    before. What is left of an epoch after its last whole batch is dropped.

    Args:
        data: a data set of torch with a length: ``data[index]`` is one row, ``(x, *targets)``.
        rows: of a batch, those of all copies of the pipeline together.
        seed: of the order, at least 0.
        shuffle: whether each epoch has an order of its own.
        dp: the group of the copies of the pipeline, as ``group.dp``: each copy reads its share.
        loader: further options of ``torch.utils.data.DataLoader``, as ``num_workers=2``.

    Raises:
        BatchError: if the data set has fewer rows than a batch, the copies cannot share a batch, or
            the seed is below 0.

    >>> x = torch.arange(10.0)
    >>> data = Epochs(torch.utils.data.TensorDataset(x, x), rows=4)
    >>> len(data), data(2)[0].shape
    (2, torch.Size([4]))
    >>> torch.equal(Epochs(data.data, rows=4)(3)[0], [data(step)[0] for step in range(4)][3])
    True
    """

    @checked
    def __init__(
        self,
        data: Dataset[object],
        rows: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        dp: Group | None = None,
        **loader: Any,
    ):
        if not isinstance(data, Sized):
            raise BatchError(
                f"Epochs needs a data set with a length, and {type(data).__name__} has none; give "
                "Loop.run a function of the step with state_dict() and load_state_dict(state)"
            )
        copies = 1 if dp is None else dp.size
        if not 0 < rows <= len(data) or rows % copies:
            raise BatchError(
                f"rows={rows} of {len(data)} for {copies} cop{'y' if copies == 1 else 'ies'}: give "
                "a batch at least one row for each copy, equally many, and at most all rows"
            )
        if seed < 0:
            raise BatchError(f"seed={seed}; give a seed of at least 0")
        self.data = data
        self.rows = rows
        self._size = len(data)
        self._seed = seed
        self._shuffle = shuffle
        self._loader = loader
        self._share = rows // copies
        self._first = 0 if dp is None else dp.here[0] * self._share
        #: By the step whose batch comes next.
        self._under_way: dict[int, Iterator[Sequence[torch.Tensor]]] = {}

    def __len__(self) -> int:
        """The steps of an epoch."""
        return self._size // self.rows

    def __call__(self, step: int) -> tuple[torch.Tensor, ...]:
        """The batch of a step; steps in a row are the fastest.

        Args:
            step: its number, from 0.

        Returns:
            ``(x, *targets)``, as the data set has them.

        Raises:
            BatchError: for a step before 0.

        >>> x = torch.arange(6.0)
        >>> Epochs(torch.utils.data.TensorDataset(x, x), rows=2, shuffle=False)(1)
        (tensor([2., 3.]), tensor([2., 3.]))
        """
        if step < 0:
            raise BatchError(f"step={step}; steps count from 0")
        epoch, position = divmod(step, len(self))
        batches = self._under_way.pop(step, None)
        if batches is None:
            draw = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
            size = self._size
            order = torch.randperm(size, generator=draw) if self._shuffle else torch.arange(size)
            every = order[: len(self) * self.rows].view(len(self), self.rows)
            mine = every[position:, self._first : self._first + self._share].tolist()
            # for the workers' seed, which is drawn from the global generator otherwise
            options = {"generator": draw, **self._loader}
            batches = iter(DataLoader(self.data, batch_sampler=mine, **options))
        batch = tuple(next(batches))
        self._under_way.clear()
        if position + 1 < len(self):
            self._under_way[step + 1] = batches
        return batch

"""Measures the peak memory of a step by the lifetimes of its tensors' storages."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of live storages that were allocated inside the context, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {
            t.untyped_storage()._cdata
            for t in optree.tree_leaves((args, kwargs))
            if isinstance(t, Tensor)
        }
        for tensor in optree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in inputs | self.known and storage.nbytes():
                    self.begin(storage)
        return out

    def begin(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.end, key, size)

    def end(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def peak_bytes(step: Callable[[], Any]) -> int:
    """Peak bytes of one step, results included. The step runs once before, so that the measured run
    traces nothing.
    """
    step()
    gc.collect()
    with LiveStorages() as storages:
        results = step()
    del results
    return storages.peak

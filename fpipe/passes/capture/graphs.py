# SPDX-License-Identifier: Apache-2.0
"""Graphs of kernels: the work that a function starts on a device, recorded once and started again
as a whole.

Knows devices and functions; no groups or stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch

T = TypeVar("T")

#: The class of a graph in the module of a device, ``torch.cuda`` for example.
_NAMES = ("CUDAGraph", "XPUGraph", "NPUGraph")


class Recorded(NamedTuple, Generic[T]):
    """What a function returned, whose tensors ``replay`` fills anew from the memory that the
    function read.
    """

    results: T
    replay: Callable[[], object]


Record = Callable[[Callable[[], Any]], Recorded[Any]]


def recorder(device: torch.device) -> Record | None:
    """A function that records another one on a device; None where torch records no graphs.

    While a function is recorded none of its kernels run: only ``replay`` runs them. Work that waits
    for the device, or copies from ordinary memory of the host, cannot be recorded and raises.

    >>> recorder(torch.device("cpu")) is None
    True
    """
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    kind = next((getattr(module, name) for name in _NAMES if hasattr(module, name)), None)
    if kind is None or not hasattr(module, "graph"):
        return None

    def record(fn: Callable[[], Any]) -> Recorded[Any]:
        graph = kind()
        with module.device(device):
            with module.graph(graph):
                results = fn()
            return Recorded(results, graph.replay)

    return record

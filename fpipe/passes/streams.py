# SPDX-License-Identifier: Apache-2.0
"""Random streams: the default generators of devices.

Torch has one default generator per device and process, and operations such as dropout draw from it
whatever the thread. Programs that draw therefore run one at a time in a process, each on a stream
of its own. This module must not know
stages or programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..programs.internals import exclusive

T = TypeVar("T")

#: The states of random streams by device.
Streams: TypeAlias = Sequence[tuple[torch.device, Tensor]]


def drawn(
    run: Callable[[list[Any]], T],
    box: list[Any],
    device: torch.device,
    start: int | Tensor | None,
    leaves: bool = False,
) -> tuple[T, Tensor | None]:
    """``run(box)`` on a stream of its own, which starts at a seed or a state; with ``leaves``, the
    state after it too.

    The stream of the device is as before then. ``None`` draws from the stream of the device as it
    is.

    >>> draw, cpu = lambda box: torch.rand(1).item(), torch.device("cpu")
    >>> (first, state), (again, _) = drawn(draw, [], cpu, 7, leaves=True), drawn(draw, [], cpu, 7)
    >>> first == again, first == drawn(draw, [], cpu, state)[0]
    (True, False)
    """
    with exclusive():
        if start is None or device.type == "meta":
            return run(box), None
        before = _state(device)
        try:
            if isinstance(start, int):
                start = torch.Generator(device).manual_seed(start).get_state()
            _set_state(device, start)
            return run(box), _state(device) if leaves else None
        finally:
            _set_state(device, before)


def save_streams(devices: Iterable[torch.device]) -> Streams:
    """The states of the devices' streams.

    >>> states = save_streams([torch.device("cpu")])
    >>> first = torch.rand(2)
    >>> restore_streams(states)
    >>> bool((torch.rand(2) == first).all())
    True
    """
    return [(device, _state(device)) for device in devices if device.type != "meta"]


def restore_streams(states: Streams) -> None:
    """Put the streams back into saved states."""
    for device, state in states:
        _set_state(device, state)


# ---- one device ----
# All of these name the device: torch.cuda.manual_seed, for example, seeds the current one.


def _state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.default_generator.get_state()
    return torch.get_device_module(device).get_rng_state(*_index(device))


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.default_generator.set_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, *_index(device))


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # of which a machine has one

# SPDX-License-Identifier: Apache-2.0
"""The states of torch's default random streams, to save and restore. Knows devices alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

States: TypeAlias = Sequence[tuple[torch.device, torch.Tensor]]


def save(devices: Iterable[torch.device]) -> States:
    """The states of the devices' streams.

    >>> states = save([torch.device("cpu")])
    >>> first = torch.rand(2)
    >>> restore(states)
    >>> bool((torch.rand(2) == first).all())
    True
    """
    return [
        (d, torch.get_rng_state() if d.type == "cpu" else torch.get_device_module(d).get_rng_state(d))
        for d in devices if d.type != "meta"
    ]  # fmt: skip


def restore(states: States) -> None:
    """Put the streams back into saved states."""
    for device, state in states:
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)

# SPDX-License-Identifier: Apache-2.0
"""Checks of what a group is given."""

from __future__ import annotations

from ..errors import GroupError
from .group import Group


def check_channel(src: int, dst: int, size: int) -> None:
    """Raise GroupError if a rank of a channel is not one of a group's."""
    for rank in (src, dst):
        if not 0 <= rank < size:
            raise GroupError(f"rank {rank} is not in a group of {size}; ranks count from 0")


def as_group(option: str, value: object) -> Group:
    """``value``, or GroupError where it is no group, as where a process group was passed as it
    is.
    """
    if isinstance(value, Group):
        return value
    raise GroupError(
        f"{option}={value!r} is no group of ranks; pass fpipe.init(), fpipe.local(ranks), or "
        "fpipe.adopt(process_group)"
    )

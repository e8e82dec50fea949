# SPDX-License-Identifier: Apache-2.0
"""Values that are told apart by identity, such as functions that cannot be referenced weakly.

Knows functions and traces alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ..programs.cache import Traces


class Same:
    """A value that can be hashed and is equal to itself alone."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@lru_cache(maxsize=256)
def traces_of(fn: Same) -> Traces:
    """The traces of a function that cannot be referenced weakly; those of the least recently used
    one are dropped.
    """
    return Traces()

# SPDX-License-Identifier: Apache-2.0
"""The memory behind the values of a stage's programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Held(NamedTuple):
    """The memory behind a named value: the first value on its storage, and the storage's size."""

    root: str
    nbytes: int
    given: bool = False  # the storage of an input


class HeldBytes:
    """What programs hold between each other, in bytes."""

    memory: Mapping[str, Held]
    saved: tuple[str, ...]
    kept: tuple[str, ...]

    def held(self, names: Sequence[str]) -> int:
        """Bytes behind some names, each storage once; parameters, side inputs and state are the
        caller's.
        """
        behind = {self.memory[n].root: self.memory[n] for n in names if n in self.memory}
        return sum(h.nbytes for h in behind.values() if not (h.given and h.root[0] in "pkt"))

    @property
    def saved_bytes(self) -> int:
        """Bytes held from F to I or B, the stage's own input included where it is needed."""
        return self.held(self.saved)

    @property
    def kept_bytes(self) -> int:
        """Bytes held from I to W."""
        return self.held(self.kept)

# SPDX-License-Identifier: Apache-2.0
"""``Step``: an instruction before slots are assigned, over keys. Knows programs and keys, no
tensors or backends.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from ..actions.action import Action
from ..programs.program import Program
from ..programs.stage_programs import Programs
from ..tree import Aval, Spec
from .keys import Key
from .sharding import Share

Kind: TypeAlias = Literal[
    "F",
    "B",
    "I",
    "W",
    "RECV",
    "WAIT",
    "SEND",
    "ADD",
    "ZERO",
    "SUM",
    "SETTLE",
    "REDUCE",
    "UNSHARD",
    "RESHARD",
    "EACH",
    "LOSS",
]

#: Of a step: the places of the reads that end there, and which of its writes are used later.
Use: TypeAlias = tuple[tuple[int, ...], tuple[bool, ...]]


class Step(NamedTuple):
    """An instruction before slots are assigned: the same, over keys."""

    kind: Kind
    action: Action | None = None
    reads: tuple[Key, ...] = ()
    writes: tuple[Key, ...] = ()
    program: Program | None = None
    owner: Programs | None = None
    peer: int = -1
    number: int = -1
    avals: tuple[Aval | Spec, ...] = ()
    how: tuple[str, ...] = ()
    share: Share | None = None
    stage: int = -1

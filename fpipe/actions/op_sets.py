# SPDX-License-Identifier: Apache-2.0
"""Sets of ops as bits of a byte: what a stage and microbatch has had, and what it has after another
action.
"""

from __future__ import annotations

from collections.abc import Sequence

from .action_kinds import KINDS, OPS, REQUIRED

#: op -> its bit in the set of ops that a stage and microbatch has had
BIT = {op: 1 << index for index, op in enumerate(OPS)}
#: The bit of a stage and microbatch where an op came before what it needs of its stage.
EARLY = 1 << len(OPS)
ALL_OPS = bytes(had % EARLY for had in range(256))  # without that bit


def _providing(facts: Sequence[str]) -> int:
    """The ops that provide one of these facts, as bits."""
    return sum(bit for op, bit in BIT.items() if set(facts) & set(KINDS[op].provides))


def _complete(had: int) -> bool:
    """Whether these ops provide every fact once."""
    provided = [fact for op, bit in BIT.items() if had & bit for fact in KINDS[op].provides]
    return sorted(fact for fact in provided if fact in REQUIRED) == sorted(REQUIRED)


def _after(op: str) -> list[int]:
    """By what a stage and microbatch has had: what it has after ``op``; a number that is no byte
    where another op provided the same.
    """
    kind = KINDS[op]
    bit = BIT[op]
    clash = _providing(kind.provides)
    return [
        256
        if had & clash
        else had | bit | (EARLY if not all(had & _providing(f) for f in kind.before) else 0)
        for had in range(2 * EARLY)
    ]


AFTER = {op: _after(op) for op in OPS}
#: What a complete stage and microbatch has, with its backward and without.
TRAINED = tuple(filter(_complete, range(EARLY)))
FORWARD = (BIT["F"],)

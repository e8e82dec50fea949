# SPDX-License-Identifier: Apache-2.0
"""Sets of ops as bits of a byte, for a stage and microbatch: those that have occurred so far."""

from __future__ import annotations

from .action_kinds import KINDS, OPS, REQUIRED

#: op -> its bit in a set of ops
BIT = {op: 1 << index for index, op in enumerate(OPS)}
_SETS = range(1 << len(OPS))


def _complete(ops: int) -> bool:
    """Whether these ops provide every required fact once."""
    provided = [fact for op, bit in BIT.items() if ops & bit for fact in KINDS[op].provides]
    return sorted(fact for fact in provided if fact in REQUIRED) == sorted(REQUIRED)


def _after(op: str) -> list[int]:
    """For each set of ops, the set after ``op`` was added.

    It is 256, which does not fit into a byte, where an op of the set provided the same.
    """
    provided = set(KINDS[op].provides)
    clash = sum(bit for other, bit in BIT.items() if provided & set(KINDS[other].provides))
    return [256 if ops & clash else ops | BIT[op] for ops in _SETS]


AFTER = {op: _after(op) for op in OPS}
#: The sets of a complete stage and microbatch, with its backward and without.
TRAINED = tuple(filter(_complete, _SETS))
FORWARD = (BIT["F"],)

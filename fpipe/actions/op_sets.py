# SPDX-License-Identifier: Apache-2.0
"""Sets of ops as bits of a byte, for a stage and microbatch: those that have occurred so far."""

from __future__ import annotations

from collections.abc import Sequence

from .action_kinds import KINDS, OPS, REQUIRED

#: op -> its bit in a set of ops
BIT = {op: 1 << index for index, op in enumerate(OPS)}
#: The bit that says that an op came before another op of its stage that it needs.
EARLY = 1 << len(OPS)
#: set -> the set without that bit
ALL_OPS = bytes(ops % EARLY for ops in range(256))


def _providing(facts: Sequence[str]) -> int:
    """The ops that provide one of these facts, as bits."""
    return sum(bit for op, bit in BIT.items() if set(facts) & set(KINDS[op].provides))


def _complete(ops: int) -> bool:
    """Whether these ops provide every required fact once."""
    provided = [fact for op, bit in BIT.items() if ops & bit for fact in KINDS[op].provides]
    return sorted(fact for fact in provided if fact in REQUIRED) == sorted(REQUIRED)


def _after(op: str) -> list[int]:
    """For each set of ops, the set after ``op`` was added.

    It is 256, which does not fit into a byte, where an op of the set provided the same.
    """
    kind = KINDS[op]
    clash = _providing(kind.provides)

    def after(ops: int) -> int:
        if ops & clash:
            return 256
        early = not all(ops & _providing(fact) for fact in kind.before)
        return ops | BIT[op] | EARLY * early

    return list(map(after, range(2 * EARLY)))


AFTER = {op: _after(op) for op in OPS}
#: The sets of a complete stage and microbatch, with its backward and without.
TRAINED = tuple(filter(_complete, range(EARLY)))
FORWARD = (BIT["F"],)

"""The table of all schedules: every property test runs over it, and a new generator is one row.

from schedule_table import TABLE, cases
@pytest.mark.parametrize("case", cases(ranks=(1, 2, 4), microbatches=(1, 4, 12)), ids=str)
def test_something(case): schedule = case.make()
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fpipe import Schedule, make_schedule


class Family(NamedTuple):
    """A schedule by name, and the numbers of stages per rank that it supports (the default
    first).
    """

    name: str
    per_rank: tuple[int, ...]
    fused: bool = False  #: has fused actions
    split: bool = False  #: splits backward into I and W
    even: bool = False  #: needs an even number of ranks, or one
    replicas: bool = False  #: every stage on two ranks


TABLE = (
    Family("GPipe", (1, 2, 3, 4)),
    Family("1F1B", (1, 2, 3, 4)),
    Family("Interleaved1F1B", (2, 1, 3, 4)),
    Family("LoopedBFS", (2, 1, 3, 4)),
    Family("InterleavedZeroBubble", (2, 1, 3, 4), split=True),
    Family("ZBVZeroBubble", (2,), split=True),
    Family("DualPipeV", (2,), fused=True, split=True),
    Family("Eager1F1B", (1, 2, 3, 4)),
    Family("Overlapped1F1B", (1,), fused=True),
    Family("ZBH1", (1, 2, 3, 4), split=True),
    Family("ZBH2", (1, 2, 3, 4), split=True),
    Family("ZB1P", (1, 2, 3, 4), split=True),
    Family("ZB2P", (1, 2, 3, 4), split=True),
    Family("VHalf", (2,), split=True),
    Family("VMin", (2,), split=True),
    Family("DualPipe", (1,), fused=True, split=True, even=True, replicas=True),
    Family("Chimera", (1,), even=True, replicas=True),
    Family("Hanayo", (2, 4)),
    Family("Seq1F1B", (1, 2, 3, 4)),
    Family("SeqZBH1", (1, 2, 3, 4), split=True),
)


class Case(NamedTuple):
    """One schedule of the table."""

    name: str
    ranks: int
    microbatches: int
    stages: int

    def make(self) -> Schedule:
        """Build the schedule."""
        return make_schedule(self.name, self.ranks, self.microbatches, self.stages)

    def __str__(self) -> str:
        return f"{self.name}-{self.ranks}x{self.microbatches}-{self.stages}stages"


def cases(
    ranks: Iterable[int],
    microbatches: Iterable[int],
    *,
    per_rank: Iterable[int] | None = None,
    name: str | None = None,
) -> Iterator[Case]:
    """Every schedule (or the one named ``name``) for these counts, with its default number of
    stages per rank or with those of ``per_rank`` that it supports.
    """
    ranks, microbatches = tuple(ranks), tuple(microbatches)
    wanted = None if per_rank is None else tuple(per_rank)
    for family in TABLE:
        if name is not None and family.name != name:
            continue
        counts = (
            family.per_rank[:1] if wanted is None else [v for v in family.per_rank if v in wanted]
        )
        allowed = [p for p in ranks if p == 1 or not (family.even and p % 2)]
        yield from (
            Case(family.name, p, m, p * v) for v in counts for p in allowed for m in microbatches
        )

# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks run the same call, and the error that says how they differ.

Before each call a rank announces a digest: a number that is equal on all ranks if they run the same
plan with the same options. An exchange compares the digests while the call runs: by a reduction
over the backend (:class:`Reduced`), or by a board in shared memory. Where they differ, the ranks
exchange their facts, as text through the store, so that every rank raises the same error. This
module must not know plans, nor what the facts mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from ..errors import GroupError, MismatchError, PeerError
from .bounded import BoundedStore
from .codec import decode, encode
from .faults import FaultMonitor
from .group import Facts

if TYPE_CHECKING:
    from .shared_memory.outbox import Board

_MASK = 2**62 - 1
_HEADER = 2**31 - 1
_STEP = 0x9E3779B1  #: between the digests of two groups of the same ranks
_PATIENCE = 2.0  #: seconds to wait for the facts of the other ranks
#: Between two looks at a reduction; c10d takes less than a millisecond for no bound.
_SLICE = timedelta(milliseconds=10)
#: seconds for the other ranks to read that this one refuses a call: its process may end then
_LINGER = 1.0
_REFUSED = 2  #: the digest of a refused call
_REFUSAL = "refusal"  #: the fact that says why
_PART = "; "  #: between the parts of a fact, of which an error names the first that differs

#: What to do about a fact that differs.
_REMEDIES = {
    "versions": "install the same versions of Python, fpipe and torch everywhere",
    "schedule": "give every rank the same schedule",
    "microbatches": "call with the same number of microbatches on every rank",
    "call": "make the same calls in the same order on every rank",
    "the stages here": "give dp= the processes that hold the same stages",
    "plans": "make the same calls in the same order on every rank, with arguments of the same "
    "shapes and strides",
}


class Difference(NamedTuple):
    """A fact of which two ranks have different values."""

    fact: str
    ranks: tuple[int, int]
    values: tuple[str, str]

    @classmethod
    def of(cls, by_rank: Mapping[int, Facts]) -> Difference | None:
        """The first one; None where all facts are equal.

        >>> Difference.of({0: {"seed": "1"}, 2: {"seed": "2"}})
        Difference(fact='seed', ranks=(0, 2), values=('1', '2'))
        """
        for fact in dict.fromkeys(fact for facts in by_rank.values() for fact in facts):
            known = {rank: facts.get(fact) for rank, facts in by_rank.items()}
            values = {rank: value for rank, value in known.items() if value is not None}
            one, *others = values or [0]
            for other in others:
                if values[other] != values[one]:
                    return cls(fact, (one, other), _parted(values[one], values[other]))
        return None

    def text(self, names: Sequence[int], where: str = "") -> str:
        """A sentence that names the fact, both ranks by their global numbers, both values, and the
        remedy.
        """
        (one, other) = self.ranks
        (first, second) = self.values
        remedy = _REMEDIES.get(self.fact, "pass the same arguments and options on every rank")
        return (
            f"ranks disagree about {self.fact}: rank {names[one]} has {first}, rank {names[other]} "
            f"has {second}{where}; {remedy}"
        )


def _parted(one: str, other: str) -> tuple[str, str]:
    """Of two values with as many parts, the first parts that differ."""
    parts = one.split(_PART), other.split(_PART)
    if len(parts[0]) != len(parts[1]):
        return one, other
    return next((a, b) for a, b in zip(*parts, strict=True) if a != b)


class Agreement:
    """One rank's view of the calls of its group.

    ``head`` contains the header of this rank's messages in its upper 32 bits. It is different in
    every call, so that a message of one call is never taken for one of another. The group is the
    ``nth`` of its ranks.
    """

    def __init__(self, store: BoundedStore, monitor: FaultMonitor, nth: int):
        #: Announces the number and digest of a call, and returns the comparison of the ranks.
        self.exchange: Callable[[int, int], Reduced | Board] | None = None
        #: The comparison of the ranks; None once every rank is known to run the call.
        self._compared: Reduced | Board | None = None
        self.head = [0]
        self._store = store
        self._monitor = monitor
        self.number = -1  # of the last call that this rank announced
        self._base = nth * _STEP
        self._facts: Callable[[], Facts] = dict
        self._round = -1
        #: Set from a call that a rank refused until :meth:`leave`: the error that this rank raised.
        self.refusal: BaseException | None = None

    @property
    def tag(self) -> int:
        """The header as a tag of torch.distributed."""
        return self.head[0] >> 32

    def enter(self, digest: int, facts: Callable[[], Facts]) -> int:
        """Announce the next call; returns its number. ``facts()`` is called only where ranks
        differ.
        """
        if self._monitor.broken is not None:
            self._monitor.check()
        self._facts = facts
        return self._announce(digest)

    def _announce(self, digest: int) -> int:
        number = self.number = self.number + 1
        # other than in earlier calls of the same plan
        digest = (digest + number + self._base) & _MASK
        self.head[0] = (digest & _HEADER) << 32
        if self.exchange is not None:
            self._compared = self.exchange(number, digest)
        return number

    def check(self) -> bool:
        """Whether every rank is known to run this call; raises if one is known to run another.
        Never blocks.
        """
        if self._compared is not None:
            equal = self._compared.equal()
            if equal is False:
                raise self._disagreement()
            if equal:
                self._compared = None
        return self._compared is None

    def confirm(self) -> None:
        """Wait until every rank has announced this call."""
        compared = self._compared
        if compared is None:
            return
        end = time.perf_counter() + compared.poll
        while not self.check() and time.perf_counter() < end:
            pass  # a rank that sleeps wakes late
        while not self.check():
            peer = compared.missing()
            self._monitor.until(
                lambda peer=peer: self.check() or compared.missing() != peer,
                peer,
                "for the calls of" if peer is None else "for the call of",
                compared.pause,
                compared.gone,
            )

    # ---- calls that a rank refuses ----
    def refuse(self, error: BaseException) -> None:
        """Announce, in place of the next call, that this rank refuses its arguments.

        Returns once the other ranks know it, or after a short time.
        """
        self.refusal = error
        end = time.monotonic() + _LINGER
        self._announce(_REFUSED)
        self._compared = None
        self._store.set(self._key(self._monitor.rank), encode(refusing(error)))
        self._wait_for_readers(range(self._monitor.size), end)

    def leave(self) -> list[str]:
        """Leave a call that a rank refused; then the next one can begin, once all ranks met.

        Returns what this rank wrote for it: no rank reads these keys after that meeting.
        """
        self._compared = None
        self.refusal = None
        me = self._monitor.rank
        key = self._key(me)
        rounds = [f"{kind}/{self._round - n}/{me}" for kind in ("round", "left") for n in (0, 1)]
        self._round = (self.number + 1) << 32  # ranks left it in different rounds
        return [key, f"{key}/read", *rounds]

    def next_round(self) -> int:
        """The number of the next round in which the ranks exchange objects."""
        self._round += 1
        return self._round

    # ---- the error ----
    def _disagreement(self) -> GroupError:
        """The error that all ranks raise. The group cannot be used again, unless a rank refused the
        call.
        """
        error = disagreement(self._facts_of_all(), self._monitor.names)
        if isinstance(error, PeerError):
            self.refusal = error
        else:
            self._monitor.end(error)
        return error

    def _facts_of_all(self) -> dict[int, Facts]:
        """The facts of every rank that publishes them in time."""
        me = self._monitor.rank
        end = time.monotonic() + _PATIENCE
        mine = dict(self._facts())
        by_rank = {}
        try:
            self._store.set(self._key(me), encode(mine))
            for rank in range(self._monitor.size):
                if self._store.appears(self._key(rank), end):
                    by_rank[rank] = decode(self._store.get(self._key(rank)))
            # the process of rank 0 may host the store, and may exit right after
            self._wait_for_readers(by_rank if me == 0 else (), end)
        except RuntimeError:  # the process that hosted the store is gone
            by_rank.setdefault(me, mine)
        return by_rank

    def _key(self, rank: int) -> str:
        """The key of the facts of a rank in this call."""
        return f"call/{self.number}/{rank}"

    def _wait_for_readers(self, ranks: Iterable[int], end: float) -> None:
        """Say that this rank has read all facts, and wait until these ranks have, or the end."""
        self._store.set(f"{self._key(self._monitor.rank)}/read", "")
        all(self._store.appears(f"{self._key(rank)}/read", end) for rank in ranks)


def refusing(error: BaseException) -> Facts:
    """The facts of a rank that refuses a call."""
    return {_REFUSAL: f"{type(error).__name__}: {error}"}


def disagreement(by_rank: Mapping[int, Facts], names: Sequence[int]) -> PeerError | MismatchError:
    """The error of ranks that do not run the same call: a PeerError if one of them refused it."""
    for rank, facts in by_rank.items():
        if _REFUSAL in facts:
            return PeerError(
                f"rank {names[rank]} refused the arguments of this call, so no rank completes it: "
                f"{facts[_REFUSAL]}. All ranks can go on with their next call"
            )
    difference = Difference.of(by_rank)
    if difference is not None:
        text = difference.text(names)
    else:
        known = ", ".join(str(names[rank]) for rank in by_rank)
        text = f"ranks run different calls (known are those of rank {known}); {_REMEDIES['call']}"
    return MismatchError(f"{text}. This group cannot be used again")


class Reduced(NamedTuple):
    """The digests of a call, compared by a reduction that runs beside it."""

    digests: list[int]  # that of the call, and the same negated
    both: torch.Tensor  # the largest of each
    work: dist.Work
    poll: float = 0.0  # seconds to look before the first pause, which ends with the reduction

    @classmethod
    def announced(cls, pg: dist.ProcessGroup, number: int, digest: int) -> Reduced:
        """The exchange over a backend: one reduction per call, by the process group itself, since
        ``dist.all_reduce`` costs twice the time.
        """
        digests = [digest, -digest]
        both = torch.tensor(digests, dtype=torch.int64, device="cpu")
        return cls(digests, both, pg.allreduce([both], dist.ReduceOp.MAX))

    def equal(self) -> bool | None:
        """Whether the digests of all ranks are equal; None while one is missing. Never blocks."""
        if not self.work.is_completed():
            return None
        # it is complete: this returns at once, or raises the error of the backend
        self.work.wait()
        return self.both.tolist() == self.digests

    def missing(self) -> None:
        """The rank whose digest is missing: it is not known."""

    def pause(self) -> None:
        """Wait until the reduction is complete, at most some milliseconds."""
        with suppress(RuntimeError):  # late, or an error that ``equal`` raises
            self.work.wait(_SLICE)

    def gone(self) -> str:
        """Why the digests that are missing will not come: it is not known."""
        return ""

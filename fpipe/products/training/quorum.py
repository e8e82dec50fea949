# SPDX-License-Identifier: Apache-2.0
"""Which copies of a pipeline take part in a step: the loss of a copy does not stop the others, and
it can come back.

Each copy is a job of its own with its own store; what the copies share is one more store, which
outlives them. The copies that train together are the members of an epoch. A lost or a new member
ends the epoch, and the next one begins where all members have the same step. In a step, rank r of
each member adds up gradients with rank r of the others, and all ranks of all members vote: the sum
counts if every one of them has it; else none uses it. This module must not know pipelines and
optimizers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from ...collectives import BoundedStore, Group, decode, encode
from ...errors import GroupError
from ...tree import Tree
from .peers import DIST, LOOK, Peers

T = TypeVar("T")

#: Environment variables: the address of the store, this copy, and the number of copies.
ADDRESS, COPY, COPIES = "FPIPE_QUORUM", "FPIPE_COPY", "FPIPE_COPIES"
_SLOW = 0.02  #: seconds between two looks into the store, at most
#: What the ranks of all members conclude: the sum counts; it counts, and a copy waits to be
#: admitted; it does not.
Verdict: TypeAlias = Literal["counts", "counts, then meet", "void"]


class Member(NamedTuple):
    """A copy, by its number, and how often it was started."""

    copy: int
    start: int


class Quorum:
    """The copies of a pipeline that train together, as one process of one of them sees them.

    ``copy`` is the number of this copy, ``copies`` how many there are at most, ``members`` those
    that take part now; ``changed`` says that they must meet before the next step.
    """

    def __init__(self, store: BoundedStore, copy: int, copies: int, timeout: float = 60.0):
        self.copy, self.copies, self.timeout = copy, copies, timeout
        self.members: tuple[Member, ...] = ()
        self.changed = True
        self._store, self._epoch = store, 0
        self._me = Member(copy, 0)
        self._group: Group | None = None
        self._peers: Peers | None = None

    # ---- steps ----
    def join(self, group: Group, state: Tree, step: int) -> tuple[Tree, int]:
        """Meet the other copies until all are at one step; the latest state, and its step. Each
        rank calls it.

        Args:
            group: of the pipeline of this copy.
            state: a pytree of tensors and data with the form of that of the others.
            step: how many steps it has; below 0: none yet, and a copy that has some sends its
                state.

        Returns:
            ``(state, step)``.

        Raises:
            GroupError: if the other copies went on without this one.
        """
        self._begin(group)
        try:
            while True:
                self._meet(step)
                found = self._attempt(lambda peers: self._latest(peers, state, step))
                if self._vote("begin", found is not None) != "void" and found is not None:
                    self.changed = False
                    return found
        except GroupError:
            self.leave()
            raise

    def running(self, group: Group) -> bool:
        """Whether other copies train already, so that their state is later than any that was saved.

        Args:
            group: of the pipeline of this copy; each rank calls it.
        """
        self._begin(group)
        record = self._record(max(self._number("latest"), 0)) if 0 in group.here else None
        return self._from_first(not all(map(self._lost, record or [])))

    def mean(self, tensors: Sequence[Tensor], step: int) -> list[Tensor] | None:
        """The mean over the members, the same bits on each; ``None`` if members were lost: call
        ``join``, then again.

        Args:
            tensors: of this rank; those of rank r of each member have the same shapes and dtypes.
            step: the number of the step.

        Returns:
            New tensors on the same devices.
        """
        result = self._attempt(lambda peers: peers.means(tensors))
        verdict = self._vote(f"step/{step}", result is not None)
        self.changed = verdict != "counts"
        return None if verdict == "void" else result

    def leave(self, step: int = -1) -> None:
        """Leave the others, which go on without this copy.

        Args:
            step: where training is complete, the number of steps: a copy that comes later has
                nothing to do.
        """
        if self._group is not None and 0 in self._group.here:
            with suppress(RuntimeError):
                if step >= 0:
                    self._store.set("ended", str(step))
                self._store.set(f"dead/{self.copy}", str(self._me.start))

    # ---- members ----
    def _begin(self, group: Group) -> None:
        if self._group is None:
            self._group = group
            first = self._store.add(f"starts/{self.copy}", 1) if 0 in group.here else 0
            self._me = Member(self.copy, self._from_first(first))

    def _meet(self, step: int) -> None:
        """Begin the next epoch with those members that are left, and those that ask to be
        admitted.
        """
        assert self._group is not None
        self._peers = None
        found: Any = None
        if 0 in self._group.here:
            try:
                found = self._next_epoch() if self._me in self.members else self._admitted(step)
            except Exception as error:  # the other ranks of this copy wait for the answer
                found = str(error)
        found = self._from_first(found)
        if isinstance(found, str):
            raise GroupError(found)
        self._epoch, members = found
        self.members = tuple(members)
        if self._me not in self.members:
            raise GroupError(
                f"copy {self.copy} took longer than timeout={self.timeout:g} s, or one of its "
                "processes was lost, and the others went on without it; start it again, or "
                "give a longer timeout"
            )
        where = f"peers/{self._epoch}/{self._group.here[0]}"
        with suppress(RuntimeError):  # of a member that is gone: the vote that follows is void
            self._peers = Peers(
                DIST.PrefixStore(where, self._store.raw),
                self.members.index(self._me),
                len(self.members),
                self.timeout,
                self._disturbed,
            )

    def _attempt(self, fn: Callable[[Peers], T]) -> T | None:
        """What a function of the peers returns; ``None`` if one is lost."""
        try:
            return None if self._peers is None else fn(self._peers)
        except GroupError:
            raise
        except RuntimeError:
            return None

    @staticmethod
    def _latest(peers: Peers, state: Tree, step: int) -> tuple[Tree, int]:
        """The state of the member with the most steps, sent to all where their steps differ."""
        steps = peers.numbers(step)
        most = max(steps)
        return (state if len(set(steps)) == 1 else peers.state(state, steps.index(most))), most

    def _from_first(self, value: Any) -> Any:
        """What the process with the first rank of this copy has."""
        assert self._group is not None
        return self._group.gather_objects(value)[0]

    def _next_epoch(self) -> tuple[int, list[Member]]:
        """As a member of an epoch: the next one, once each other member is known to go on or to be
        lost.
        """
        epoch, end = self._epoch + 1, time.monotonic() + self.timeout
        self._store.set(f"meets/{epoch}/{self.copy}", str(self._me.start))
        while (record := self._record(epoch)) is None:
            missing = [
                m
                for m in self.members
                if not self._lost(m) and self._number(f"meets/{epoch}/{m.copy}") == -1
            ]
            if not missing or time.monotonic() > end:
                for member in missing:
                    self._store.set(f"dead/{member.copy}", str(member.start))
                here = [m for m in self.members if not self._lost(m)]
                record = self._settled(epoch, [*here, *self._asking(here)])
                break
            time.sleep(_SLOW)
        return epoch, record

    def _admitted(self, step: int) -> tuple[int, list[Member]]:
        """As a copy that is no member: ask, and wait for the epoch that has it as one."""
        self._store.set(f"asks/{self.copy}", str(self._me.start))
        end = time.monotonic() + self.timeout
        for wait in count():
            epoch = max(self._number("latest"), 0)
            record = self._record(epoch) if epoch else None
            if record is not None and self._me in record:
                return epoch, record
            alive = [m for m in record or [] if not self._lost(m)]
            asking = self._asking(())
            if not alive and (ended := self._number("ended")) > step:
                raise GroupError(
                    f"the other copies ended after step {ended}; copy {self.copy} came too late"
                )
            if not alive and (
                len(asking) == self.copies or (epoch and wait * _SLOW > 1) or time.monotonic() > end
            ):
                # the first epoch, or one after all were lost
                return epoch + 1, self._settled(epoch + 1, asking)
            if alive and time.monotonic() > end + self.timeout:
                raise GroupError(
                    f"copies {[m.copy for m in alive]} did not admit copy {self.copy} within "
                    f"{2 * self.timeout:g} s; a step must not take longer than the timeout"
                )
            time.sleep(_SLOW)
        raise AssertionError

    def _asking(self, members: Sequence[Member]) -> list[Member]:
        """The copies that ask to be admitted, or were among the members of a first epoch that began
        without them.
        """
        others = set(range(self.copies)) - {member.copy for member in members}
        asks = [Member(copy, self._number(f"asks/{copy}")) for copy in sorted(others)]
        return [member for member in asks if member.start >= 0 and not self._lost(member)]

    def _settled(self, epoch: int, members: Sequence[Member]) -> list[Member]:
        """The record of an epoch: that of the first who writes one."""
        record = decode(self._store.settle(f"epochs/{epoch}", encode(sorted(members))))
        self._store.set("latest", str(epoch))
        return record

    def _record(self, epoch: int) -> list[Member] | None:
        key = f"epochs/{epoch}"
        return decode(self._store.get(key)) if self._store.check([key]) else None

    def _lost(self, member: Member) -> bool:
        return self._number(f"dead/{member.copy}") >= member.start

    def _number(self, key: str) -> int:
        """A number in the store; -1 where there is none."""
        return int(self._store.get(key)) if self._store.check([key]) else -1

    # ---- votes ----
    def _vote(self, what: str, good: bool) -> Verdict:
        """What all ranks of all members conclude; it is void if one has no result, or is gone."""
        assert self._group is not None
        key, end = f"votes/{self._epoch}/{what}", time.monotonic() + self.timeout
        verdict, wait = f"{key}/verdict", 0.0005
        if not good:
            self._store.settle(verdict, b"void")
        elif self._store.add(key, 1) == len(self.members) * self._group.size // len(
            self._group.here
        ):
            asked = self._asking(self.members)
            self._store.settle(verdict, b"counts, then meet" if asked else b"counts")
        look = time.monotonic() + LOOK
        while not self._store.check([verdict]):
            if (now := time.monotonic()) > look:
                look = now + LOOK
                if now > end or self._disturbed():
                    self._store.settle(verdict, b"void")
            time.sleep(wait)
            wait = min(2 * wait, _SLOW)
        found: Any = self._store.get(verdict).decode()
        return found

    def _disturbed(self) -> bool:
        """Whether a member is lost, or meets already for the next epoch."""
        return any(
            self._lost(member) or self._number(f"meets/{self._epoch + 1}/{member.copy}") >= 0
            for member in self.members
        )


def quorum(*, timeout: float = 60.0) -> Quorum | None:
    """The copies of which this process is part, as ``fpipe.launch(copies=)`` and ``fpipe copies``
    start them.

    Args:
        timeout: how many seconds the others wait for a copy that neither goes on nor is known to be
            lost.

    Returns:
        What ``Loop(quorum=)`` takes; ``None`` where the process was not started as part of a copy.

    Raises:
        GroupError: if the environment variables contradict each other, or their store cannot be
        reached.

    >>> print(quorum())
    None
    """
    if ADDRESS not in os.environ:
        return None
    host, _, port = os.environ[ADDRESS].rpartition(":")
    try:
        copy, copies = int(os.environ[COPY]), int(os.environ[COPIES])
        number = int(port)
    except (KeyError, ValueError) as error:
        raise GroupError(
            f"{ADDRESS}={os.environ[ADDRESS]} with {COPY} or {COPIES} wrong: {error}"
        ) from error
    if not 0 <= copy < copies:
        raise GroupError(f"{COPY}={copy} with {COPIES}={copies}; copies are numbered from 0")
    return Quorum(_store(host, number, timeout), copy, copies, timeout)


def _store(host: str, port: int, timeout: float) -> BoundedStore:
    try:
        store = DIST.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        raise GroupError(
            f"the store of the copies at {host}:{port} cannot be reached: {error}"
        ) from error
    return BoundedStore(store, timeout)

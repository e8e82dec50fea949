# SPDX-License-Identifier: Apache-2.0
"""Copies of a pipeline of which some may be lost: the others go on, and a copy can come back.

Each copy is a job of its own. torchft decides which copies take part in a step: a lighthouse serves
all copies, and each copy has a manager. This module does the rest: it adds up gradients in the
order of the copies, and those that meet take over the latest state among them. It must not know
pipelines and optimizers.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from ...collectives import Group
from ...errors import GroupError
from ...tree import Tree
from .outcome import store
from .peers import PROMPT, Peers

if TYPE_CHECKING:
    from torchft import Manager

#: Environment variables of torchft: the address of the lighthouse, this copy, and how many there
#: are.
LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
COPY = "REPLICA_GROUP_ID"
COPIES = "NUM_REPLICA_GROUPS"
#: What a request for the members may take. It is lost with the lighthouse, and made again. It waits
#: longer than ``PROMPT`` and the silence after which a copy is lost.
_ANSWER = timedelta(seconds=5.5)
_PAUSE = 0.05  #: seconds between two attempts to meet


@dataclass(frozen=True)
class Elastic:
    """One of several copies: its number, how many there are, where their lighthouse is, and how
    many seconds the others wait for a copy that does not answer.
    """

    copy: int
    copies: int
    lighthouse: str
    timeout: float


def elastic(*, timeout: float = 60.0) -> Elastic | None:
    """The copy of which this process is part, by the environment variables of torchft, which
    ``fpipe copies`` sets.

    Args:
        timeout: how many seconds the others wait for a copy that neither goes on nor is known to be
            lost. A step must not take longer.

    Returns:
        What ``Loop(elastic=)`` takes; ``None`` without ``TORCHFT_LIGHTHOUSE``: there is one copy.

    Raises:
        GroupError: if the environment variables contradict each other.

    >>> print(elastic())
    None
    """
    if not timeout > 0:
        raise GroupError(f"timeout={timeout!r}; give seconds above 0")
    lighthouse = os.environ.get(LIGHTHOUSE)
    if lighthouse is None:
        return None
    try:
        copy = int(os.environ[COPY])
        copies = int(os.environ[COPIES])
    except (KeyError, ValueError) as error:
        raise GroupError(
            f"{LIGHTHOUSE}={lighthouse} with {COPY} or {COPIES} wrong: {error}; give each copy "
            "its number, from 0, and the number of copies"
        ) from error
    if not 0 <= copy < copies:
        raise GroupError(f"{COPY}={copy} with {COPIES}={copies}; copies are numbered from 0")
    return Elastic(copy, copies, lighthouse, timeout)


class Members:
    """The copies that take part in a run, as one process of one of them sees them.

    Each rank of a copy makes one, and calls every method. To the manager of torchft it is the
    process group too, and a transport of checkpoints that is never asked for one.
    """

    def __init__(self, elastic: Elastic, group: Group):
        self._elastic = elastic
        self._group = group
        self._peers = Peers()
        self._changed = True
        self._last = 0  # the quorum of the last step that counted; 0: none yet
        self._manager = self._connected()

    def _connected(self) -> Manager:
        """A manager of torchft; the first rank serves the store of those of this copy."""
        here = self._group.here
        rank = here[0] // len(here)
        host = _host(self._elastic.lighthouse)
        self._store = store(host) if rank == 0 else None
        address = self._store and (host, self._store.port)
        host, port = self._group.gather_objects(address)[0]
        seconds = timedelta(seconds=self._elastic.timeout)
        try:
            return import_torchft().Manager(
                pg=self,
                load_state_dict=None,
                state_dict=None,
                min_replica_size=1,
                init_sync=False,
                timeout=seconds,
                quorum_timeout=min(seconds, _ANSWER),
                connect_timeout=seconds,
                rank=rank,
                world_size=self._group.size // len(here),
                store_addr=host,
                store_port=port,
                lighthouse_addr=self._elastic.lighthouse,
                replica_id=f"{self._elastic.copy:06}",  # torchft sorts the copies by this text
                hostname=host,
                checkpoint_transport=self,
            )
        except (RuntimeError, TimeoutError) as error:
            raise GroupError(
                f"the lighthouse at {self._elastic.lighthouse} cannot be reached: {error}"
            ) from error

    @property
    def copies(self) -> tuple[int, ...]:
        """The numbers of the copies that take part, ascending."""
        return self._peers.copies

    @property
    def leads(self) -> bool:
        """Whether this copy writes log and checkpoints."""
        return self._elastic.copy == self.copies[0]

    # ---- steps ----
    def join(self, state: Tree, step: int) -> tuple[Tree, int]:
        """Meet the other copies before a step. One that has done fewer steps takes over the state
        of another one.

        Args:
            state: a pytree of tensors and data with the form of that of the others.
            step: how many steps it has.

        Returns:
            ``(state, step)``, the same on all copies that take part.

        Raises:
            GroupError: if the lighthouse does not answer, or the states have different forms.
        """
        end = time.monotonic() + self._elastic.timeout
        while True:
            self._start(end)
            if self._changed:
                met = self._met(state, step, time.monotonic() < end)
                of_ranks = self._group.gather_objects(met and met[-1])  # their clocks may differ
                if met is None or None in of_ranks:
                    self._manager.should_commit(timeout=PROMPT)  # it does not: the next set is new
                else:
                    state, step, self._last, _ = met
                    self._changed = of_ranks[0]
            if not self._changed:
                return state, step
            time.sleep(_PAUSE)

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """The means over the members, the same bits on each; ``None`` if a member was lost: join
        the others, and compute the step again.

        Args:
            tensors: of this rank; those of rank r of each member have the same shapes and dtypes.
        """
        means = None
        try:
            means = self._peers.means(tensors)
        except RuntimeError as error:
            self._lost(error)
        self._group.barrier()  # raises at once if a process is gone, for which torchft would wait
        if not self._manager.should_commit(timeout=PROMPT):
            return None
        self._last = self._peers.quorum
        return means

    def leave(self) -> None:
        """Leave the others, which go on without this copy."""
        self._manager.shutdown()

    def _start(self, end: float) -> None:
        """Let torchft find the members, also if the lighthouse is away for some time."""
        while True:
            failure = None
            self._manager.start_quorum(allow_heal=False)
            self._group.barrier()  # as in ``mean``
            try:
                self._manager.wait_quorum()
            except (RuntimeError, TimeoutError) as error:
                failure = time.monotonic() > end, str(error)
            failures = list(filter(None, self._group.gather_objects(failure)))
            if not failures:
                return
            over, text = max(failures)
            if over:
                raise GroupError(
                    f"the lighthouse at {self._elastic.lighthouse} or a process of this copy did "
                    f"not answer for {self._elastic.timeout:g} s: {text}"
                )
            self._manager.shutdown()  # after an error it has no further quorum
            self._manager = self._connected()

    def _met(self, state: Tree, step: int, waits: bool) -> tuple[Tree, int, int, bool] | None:
        """The latest state among the members, its step, the quorum of that step, and whether to
        wait for more members; ``None`` if one was lost.
        """
        mine = [step, self._last]
        failure = self._manager.errored()
        if failure is not None:
            self._lost(failure)
            return None
        try:
            marks = [row.tolist() for row in self._peers.gathered(torch.tensor([*mine, waits]))]
            # of steps of one number, that counts which was done by those who met last
            latest = max(mark[:2] for mark in marks)
            source = next(n for n, mark in enumerate(marks) if mark[:2] == latest)
            if any(mark[:2] != latest for mark in marks):
                state = self._peers.share(state, source, takes=mine != latest)
        except GroupError:
            raise
        except RuntimeError as error:
            self._lost(error)
            return None
        step, last = latest
        few = not last and len(marks) < self._elastic.copies
        return state, step, last, few and all(waiting for *_, waiting in marks)

    def _lost(self, error: Exception) -> None:
        """Let the other members notice at once that this one misses a member."""
        self._peers = self._peers._replace(gloo=None)
        self._manager.report_error(RuntimeError(str(error)))  # a traceback refers to the peers

    # ---- what torchft calls ----
    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int,
        group_rank: int,
        group_world_size: int,
        global_ranks: list[int],
    ) -> None:
        """Connect to new members."""
        self._changed = True
        copies = tuple(number // group_world_size for number in global_ranks)
        self._peers = Peers.connect(store_addr, rank, copies, quorum_id, self._elastic.timeout)

    def errored(self) -> Exception | None:
        """Nothing fails behind the program."""

    def metadata(self) -> str:
        """Tell others where a checkpoint is: there is none."""
        return ""

    def disallow_checkpoint(self) -> None:
        """Nothing is kept for others."""

    def shutdown(self, wait: bool = True) -> None:
        """Close the connections."""
        self._peers = self._peers._replace(gloo=None)


def import_torchft(name: str = "torchft") -> Any:
    """A module of torchft; GroupError, which says how to install it, if there is none."""
    os.environ.setdefault("RUST_LOG", "error")  # else it prints several lines a step
    logging.getLogger("torchft.manager").setLevel(logging.ERROR)
    try:
        return import_module(name)
    except ImportError as error:
        raise GroupError(
            f"elastic= needs torchft ({error}); pip install '.[elastic]' in a checkout of fpipe"
        ) from error


def _host(lighthouse: str) -> str:
    """The address of this machine in the network of the lighthouse.

    >>> _host("http://127.0.0.1:29510")
    '127.0.0.1'
    """
    url = urlsplit(lighthouse)
    if url.hostname is None or url.port is None:
        raise GroupError(f"{LIGHTHOUSE}={lighthouse} is no address, such as http://host:29510")
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((url.hostname, url.port))  # sends nothing
        return probe.getsockname()[0]

# SPDX-License-Identifier: Apache-2.0
"""The seam to an optional transport, which carries messages between some ranks in place of the
backend.

Ranks of one host have one: ``shared_memory``, which is imported only where two ranks share a host.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from .agreement import Agreement, Exchange
from .faults import FaultMonitor
from .group import Sender, Work
from .rendezvous import Gather
from .wire import WireFormat

#: The environment variable that, set to 0, leaves messages between ranks of one host to the
#: backend.
SWITCH = "FPIPE_SHARED_MEMORY"


class Transport(Protocol):
    """What carries messages to some ranks; ``rank in transport`` tells which."""

    @property
    def exchange(self) -> Exchange:
        """The exchange through which these ranks compare their calls."""
        ...

    def __contains__(self, rank: int) -> bool:
        """Whether it carries messages to a rank."""
        ...

    def sender(self, form: WireFormat, dst: int) -> Sender:
        """A function that sends a message, without waiting for its receiver."""
        ...

    def recv(self, form: WireFormat, src: int) -> Work:
        """Request the next message of a rank."""
        ...

    def fetcher(self, form: WireFormat, src: int) -> Callable[[], tuple[Tensor, ...] | None]:
        """A function that returns the next message if it has arrived."""
        ...

    def share(
        self, form: WireFormat, tensors: tuple[Tensor, ...] | None, src: int
    ) -> tuple[Tensor, ...]:
        """Broadcast from one rank to those of this transport."""
        ...

    def flush(self) -> None:
        """Wait until no message is queued."""
        ...

    def drop(self) -> None:
        """Drop the messages of a call that was refused; all ranks do, after the last was sent."""
        ...

    def fail(self) -> None:
        """End the messages of this rank: it failed."""
        ...


def connect(
    monitor: FaultMonitor, agreement: Agreement, gather: Gather
) -> tuple[Transport | None, bool]:
    """The transport of this rank, if it shares a host with another one; and whether every two ranks
    of the group have one, which is the same on all ranks.
    """
    hosts = gather(_host())
    if all(not host or hosts.count(host) == 1 for host in hosts):
        return None, False
    from .shared_memory import mailboxes

    near = [rank for rank, host in enumerate(hosts) if host and host == hosts[monitor.rank]]
    return mailboxes.connect(monitor, agreement, gather, near)


def _host() -> str:
    """Equal for processes that may share memory: those of one boot and one set of name spaces.

    Empty where this process cannot, or may not.
    """
    if sys.platform != "linux" or os.environ.get(SWITCH, "1") == "0":
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return " ".join((boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))))
    except OSError:
        return ""

# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks of one host through memory that they share, in place of the backend.

``mailboxes`` is imported only where all ranks of a group share a host.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..agreement import Agreement
    from ..faults import FaultMonitor
    from ..rendezvous import Gather
    from .mailboxes import SharedMemory

#: The environment variable that, set to 0, leaves messages between ranks of one host to the
#: backend.
SWITCH = "FPIPE_SHARED_MEMORY"


def connect(monitor: FaultMonitor, agreement: Agreement, gather: Gather) -> SharedMemory | None:
    """The memory of this rank, if all ranks of the group can share memory."""
    hosts = gather(_host())
    if "" in hosts or len(set(hosts)) > 1:
        return None
    from . import mailboxes

    return mailboxes.connect(monitor, agreement, gather)


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

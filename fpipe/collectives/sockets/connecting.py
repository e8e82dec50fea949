# SPDX-License-Identifier: Apache-2.0
"""Connecting each rank to every other one that it shares no memory with, by addresses that all
ranks exchange.

Every rank listens until all are connected, no longer. Both ends of a connection prove that they are
ranks of the group by a token that travelled through the store of the job. A pair that cannot
connect uses the backend. This module must not know messages.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from struct import Struct
from typing import Any, NamedTuple

_HELLO = Struct(
    "<16sII"
)  #: the token of the rank that is called, the caller's rank, the kind of connection
_TOKEN = 16
_PATIENCE = 2.0  #: seconds to connect to one address
_ANSWER = 10.0  #: seconds for the answer of a rank that was reached
_KINDS = 3
_AVAILABLE = hasattr(socket.socket, "recvmsg_into") and hasattr(select, "poll")  # not on Windows
_LOOPBACK = ("127.", "::1")
_ADDRESS_OF = 0x8915  #: of an interface, as Linux numbers its calls


class Links(NamedTuple):
    """The connections between two ranks: for messages of plans, broadcasts, and the words of
    calls.
    """

    plans: socket.socket
    shared: socket.socket
    words: socket.socket


class Address(NamedTuple):
    """Where a rank listens: its host, the addresses of that host, a port, and a token."""

    host: str
    names: tuple[str, ...]
    port: int
    token: bytes


def connect(
    rank: int, size: int, near: Collection[int], gather: Callable[[object], list[Any]], wanted: bool
) -> tuple[dict[int, Links], bool]:
    """Connections to the ranks that are not ``near``, by three rounds of ``gather``, in which all
    ranks take part.

    Without ``wanted`` this rank has none. The result has a rank exactly if that rank's has this
    one. Also returns whether every two ranks are near or connected: the same on all ranks.
    """
    with _listening(size) if wanted else nullcontext() as listener:
        mine = (
            None
            if listener is None
            else Address(_host(), _names(), listener.getsockname()[1], os.urandom(_TOKEN))
        )
        found = {
            other: Address(*each) for other, each in enumerate(gather(mine)) if each is not None
        }
        far = {
            other: at
            for other, at in found.items()
            if mine is not None and other not in near and other != rank
        }
        ends = {
            other: _called(mine, at, rank)
            for other, at in far.items()
            if other < rank and mine is not None
        }
        callers = [
            other for other, ranks in enumerate(gather([*filter(ends.get, ends)])) if rank in ranks
        ]
        if listener is not None and mine is not None:
            ends |= _answered(
                listener, mine.token, {other: far[other].token for other in callers if other in far}
            )
            ends |= {other: _confirmed(ends[other], mine.token) for other in ends if other < rank}
        links = {other: Links(*each) for other, each in ends.items() if len(each) == _KINDS}
        every = [(set(beside), set(ranks)) for beside, ranks in gather(([*near], [*links]))]
        kept = {other for other, (_, ranks) in enumerate(every) if rank in ranks}
    for other in ends:
        if other not in kept:
            _close(ends[other])

    def mutual(a, b):
        return b in every[a][0] or (b in every[a][1] and a in every[b][1])

    whole = all(mutual(a, b) for a in range(size) for b in range(size) if a != b)
    return {other: each for other, each in links.items() if other in kept}, whole


# ---- addresses ----
def _host() -> str:
    """Equal for processes of one host."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return socket.gethostname()


def _names() -> tuple[str, ...]:
    """The addresses at which others may reach this process, the likeliest first."""
    return tuple(dict.fromkeys(_each_name()))


def _each_name() -> Iterator[str]:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface:
        with suppress(OSError):
            yield _of_interface(interface)
            return
    if _alone():
        yield "127.0.0.1"
        return
    with suppress(OSError):
        yield _towards(
            os.environ["MASTER_ADDR"] if "MASTER_ADDR" in os.environ else socket.gethostname()
        )
    with suppress(OSError):
        for *_, at in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            yield str(at[0])


def _alone() -> bool:
    """Whether the store of the job can be reached from this host alone: all ranks are on it."""
    name = os.environ.get("MASTER_ADDR", "")
    return name == "localhost" or name.startswith(_LOOPBACK)


def _towards(name: str) -> str:
    """The address of this host on the way to another one; nothing is sent."""
    family, kind, _, _, at = socket.getaddrinfo(name, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(at)
        return probe.getsockname()[0]


def _of_interface(name: str) -> str:
    """The IPv4 address of a network interface."""
    fcntl: Any = import_module("fcntl")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _ADDRESS_OF, name.encode()[:15].ljust(256, b"\0"))
    return socket.inet_ntoa(answer[20:24])


@contextmanager
def _listening(size: int) -> Iterator[socket.socket | None]:
    """A socket that waits for calls; None where the system has no such calls, or refuses them."""
    if not _AVAILABLE:
        yield None
        return
    try:
        both = socket.has_dualstack_ipv6() and not _alone()
        family, name = socket.AF_INET6 if both else socket.AF_INET, "127.0.0.1" if _alone() else ""
        listener = socket.create_server(
            (name, 0), family=family, backlog=_KINDS * size, dualstack_ipv6=both
        )
    except OSError:
        yield None
        return
    with listener:
        yield listener


# ---- both ends ----
def _called(mine: Address, other: Address, rank: int) -> list[socket.socket]:
    """Connections to a rank, which has not answered yet; none if it cannot be reached."""
    names = [
        name for name in other.names if mine.host == other.host or not name.startswith(_LOOPBACK)
    ]
    for name in names:
        ends: list[socket.socket] = []
        try:
            for kind in range(_KINDS):
                ends.append(socket.create_connection((name, other.port), _PATIENCE))
                ends[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                ends[-1].sendall(_HELLO.pack(other.token, rank, kind))
            return ends
        except OSError:
            _close(ends)
    return []


def _answered(
    listener: socket.socket, token: bytes, callers: Mapping[int, bytes]
) -> dict[int, list[socket.socket]]:
    """The connections of the ranks that have called this one; others are closed."""
    found: dict[tuple[int, int], socket.socket] = {}
    end = time.monotonic() + _ANSWER
    while len(found) < _KINDS * len(callers) and time.monotonic() < end:
        listener.settimeout(max(0.01, end - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except OSError:
            continue
        try:
            connection.settimeout(_PATIENCE)
            said, rank, kind = _HELLO.unpack(_read(connection, _HELLO.size))
            if not hmac.compare_digest(said, token) or rank not in callers:
                raise ConnectionError("a stranger")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(callers[rank])
            found[rank, kind] = connection
        except OSError:
            connection.close()
    return {
        rank: [found[rank, kind] for kind in range(_KINDS) if (rank, kind) in found]
        for rank in callers
    }


def _confirmed(ends: list[socket.socket], token: bytes) -> list[socket.socket]:
    """The same connections if the other end has answered with this rank's token."""
    try:
        for end in ends:
            end.settimeout(_ANSWER)
        if all(hmac.compare_digest(_read(end, _TOKEN), token) for end in ends):
            return ends
    except OSError:
        pass
    _close(ends)
    return []


def _read(connection: socket.socket, size: int) -> bytes:
    raw = b""
    while len(raw) < size:
        part = connection.recv(size - len(raw))
        if not part:
            raise ConnectionError("the connection ended")
        raw += part
    return raw


def _close(ends: Iterable[socket.socket]) -> None:
    for end in ends:
        end.close()

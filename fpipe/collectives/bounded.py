# SPDX-License-Identifier: Apache-2.0
"""A store whose calls end in time, and whose values are encrypted and signed.

``TCPStore`` applies its time-out to ``wait`` and ``get`` alone: ``set``, ``add`` and ``check`` wait
for ever while the process or the machine of the store is stopped or cut off. Here each call runs on
a thread, and the caller waits for at most ``seconds``. A call that exceeds them is left behind with
its connection.

Everybody who reaches the port of a ``TCPStore`` can read it and write to it. If ``FPIPE_SECRET`` is
set, as ``fpipe.launch`` does, values are unreadable without it, and one that was written without it
is refused. This module must not know keys.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import GroupError
from ._store import Store, connection, default_store, prefixed

T = TypeVar("T")
_FIRST = (
    0.0005  #: seconds between the first two looks for a key; each further pause is twice as long
)
_SHORTEST = (
    1.0  #: seconds that the store has for an answer, also where less is left: it may be busy
)
#: The environment variable of the secret of a job.
SECRET = "FPIPE_SECRET"
_SIGNATURE, _NONCE = 32, 16
_HEAD = _SIGNATURE + _NONCE


class StoreLostError(RuntimeError):
    """The store did not answer in time, or its process is gone."""


def of_group(pg: dist.ProcessGroup, purpose: str, seconds: float) -> tuple[BoundedStore, int]:
    """A prefix of the default store: the same for all ranks of a process group, different for every
    other group.

    It contains how often this rank asked for a group of these ranks, which is returned too. The
    store holds that count, so it is right also for a process that was restarted while the store
    kept running.
    """
    store = default_store()
    name = f"fpipe/{purpose}/{'-'.join(map(str, dist.get_process_group_ranks(pg)))}"
    nth = BoundedStore(store, seconds).add(f"{name}/{pg.rank()}", 1)
    return BoundedStore(prefixed(f"{name}/{nth}", store), seconds), nth


def host() -> tuple[str, int | None]:
    """Who hosts the store of the job, as text, and its global rank if it is a rank."""
    address = (
        f"{os.environ.get('MASTER_ADDR', 'an unknown host')}:{os.environ.get('MASTER_PORT', '?')}"
    )
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return f"the launcher at {address}", None
    return f"rank 0 at {address}", 0


class BoundedStore:
    """The calls of a store that fpipe uses, each with a bound.

    After a call without an answer, further calls fail at once for ``pause`` seconds; then a new
    connection is tried.

    >>> import torch.distributed as dist
    >>> store = BoundedStore(dist.HashStore(), 5.0)
    >>> store.set("key", b"value"), store.check(["key"]), store.get("key"), store.add("count", 1)
    (None, True, b'value', 1)
    """

    def __init__(self, store: Store, seconds: float, pause: float = 0.0, secret: str | None = None):
        self.seconds, self.pause = seconds, pause
        self._secret = (os.environ.get(SECRET, "") if secret is None else secret).encode()
        self.raw = store
        self._calls: SimpleQueue[_Call] | None = None
        self._lost_at = float("-inf")

    def bounded(self, seconds: float, pause: float) -> BoundedStore:
        """The same store over another connection, with other bounds."""
        return BoundedStore(self.raw, seconds, pause, self._secret.decode())

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        raw = value.encode() if isinstance(value, str) else value
        sealed: Any = self._sealed(key, raw)
        self._run(lambda store: store.set(key, sealed))

    def settle(self, key: str, value: bytes) -> bytes:
        """Store a value unless there is one; the value that is there then."""
        sealed: Any = self._sealed(key, value)
        return self._opened(key, self._run(lambda store: store.compare_set(key, "", sealed)))

    def get(self, key: str) -> bytes:
        """The value of a key that is set."""
        return self._opened(key, self._run(lambda store: store.get(key)))

    def _opened(self, key: str, raw: bytes) -> bytes:
        if not self._secret:
            return raw
        signature, nonce, value = raw[:_SIGNATURE], raw[_SIGNATURE:_HEAD], raw[_HEAD:]
        if not hmac.compare_digest(signature, self._signature(key, nonce + value)):
            raise GroupError(
                f"the value of {key!r} in the store of the job was not written by this job: its "
                "signature is wrong. "
                f"Another process writes to the store; {SECRET} must be equal on all ranks"
            )
        return self._crypted(nonce, value)

    def _sealed(self, key: str, value: bytes) -> bytes:
        if not self._secret:
            return value
        nonce = os.urandom(_NONCE)
        hidden = nonce + self._crypted(nonce, value)
        return self._signature(key, hidden) + hidden

    def _signature(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self._secret, b"sign" + key.encode() + b"\0" + value, "sha256")

    def _crypted(self, nonce: bytes, value: bytes) -> bytes:
        """Encrypt, or decrypt: combine with a stream of bytes that the secret and the nonce
        determine.
        """
        key = hmac.digest(self._secret, b"hide" + nonce, "sha256")
        stream = int.from_bytes(hashlib.shake_256(key).digest(len(value)), "little")
        return (int.from_bytes(value, "little") ^ stream).to_bytes(len(value), "little")

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        return self._run(lambda store: store.check(list(keys)))

    def appears(self, key: str, end: float, pause: float, until: float = float("inf")) -> bool:
        """Wait until a key is set, at most until ``end`` of ``time.monotonic``; whether it is.

        A wait in parts ends at ``until``, and the store has until ``end`` for each answer. It
        polls, with pauses of up to ``pause`` seconds: a blocking wait of the store prints warnings
        if it ends without a result.
        """
        wait = min(_FIRST, pause)
        while not self._run(
            lambda store: store.check([key]), max(_SHORTEST, end - time.monotonic())
        ):
            if time.monotonic() >= min(end, until):
                return False
            time.sleep(wait)
            wait = min(2 * wait, pause)
        return True

    def add(self, key: str, number: int) -> int:
        """Add to a counter, and return it."""
        return self._run(lambda store: store.add(key, number))

    def delete(self, *keys: str) -> None:
        """Delete keys, with one bound for all."""
        self._run(lambda store: [store.delete_key(key) for key in keys])

    @property
    def lost(self) -> bool:
        """Whether the last call got no answer."""
        return self._lost_at > float("-inf")

    def _run(self, function: Callable[[Store], T], seconds: float = float("inf")) -> T:
        """The result of a call that has the bound of the store, or fewer ``seconds``."""
        if time.monotonic() - self._lost_at < self.pause:
            raise _no_answer(self.seconds)
        if self._calls is None:
            self._calls = SimpleQueue()
            args = (self.raw, timedelta(seconds=self.seconds), self._calls)
            threading.Thread(target=_serve, args=args, name="fpipe-store", daemon=True).start()
            weakref.finalize(self, self._calls.put, _Call(None))
        call, seconds = _Call(function), min(seconds, self.seconds)
        self._calls.put(call)
        if not call.done.acquire(timeout=seconds):
            self._lost_at = time.monotonic()
            self._calls.put(_Call(None))  # the thread ends if the store ever answers
            self._calls = None
            raise _no_answer(seconds)
        if call.error is not None:
            raise call.error
        self._lost_at = float("-inf")
        return call.result


def _no_answer(seconds: float) -> StoreLostError:
    return StoreLostError(f"the store of the job timed out: no answer within {seconds:.3g} s")


class _Call:
    """A function of the store, and its result; ``done`` is released when there is one. None ends
    the thread.
    """

    def __init__(self, function: Callable[[Store], Any] | None):
        self.function = function
        self.done = threading.Lock()
        self.done.acquire()  # at once: nothing else holds it yet
        self.result: Any = None
        self.error: RuntimeError | None = None


def _serve(store: Store, seconds: timedelta, calls: SimpleQueue[_Call]) -> None:
    """The thread: one connection, calls in their order."""
    connected: Store | None = None
    while (
        function := (call := calls.get()).function
    ) is not None:  # without a bound: nothing waits for this daemon
        try:
            connected = connected or connection(store, seconds)
            call.result = function(connected)
        except RuntimeError as error:
            call.error = error
        call.done.release()

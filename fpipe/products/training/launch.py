# SPDX-License-Identifier: Apache-2.0
"""``fpipe.launch``: one function on several processes of this machine.

Sets the environment variables of torchrun, returns the results by rank, raises the first failure
with that rank's traceback, and ends the other ranks. Knows nothing of the function.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Container, Sequence
from functools import partial
from math import inf
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar

from ...devices import keep_freed
from ...errors import LaunchError
from .outcome import Report, call, environment, results, store

#: Imported once, before the processes are forked: what a first step imports takes each process
#: seconds. Fake tensors import the last one.
_PRELOADED = (
    "fpipe.collectives.setup",
    "fpipe.engine.prepare",
    "fpipe.engine.gradients",
    "torch._dynamo",
)
GRACE = 3.0  #: seconds for the other ranks to report after a failure
_ENDED = 2.0  #: seconds for a process to end when it is asked
#: Seconds for a killed process to end: only one in a call of the system that cannot be interrupted
#: stays.
_KILLED = 10.0
#: Seconds between two looks: of a process at its launcher, whose end it learns at once otherwise,
#: and of the launcher at its clock.
_LOOK = 60.0
_UNGUARDED = 97  #: how a new process ends whose import of the script calls ``launch``
_GUARD = (
    "each new process imports the script, and that calls launch again; put the call of launch "
    'under if __name__ == "__main__":'
)
T = TypeVar("T")


def launch(
    fn: Callable[..., T],
    *args: object,
    ranks: int,
    timeout: float | None = None,
    start: str | None = None,
    env: dict[str, str] | None = None,
) -> list[T]:
    """Run ``fn(*args)`` on ``ranks`` processes of this machine, and return the results by rank.

    Inside, ``fpipe.init()`` connects the ranks. On Linux, the processes keep freed memory for their
    next step, unless ``FPIPE_KEEP_FREED=0``, a ``MALLOC_`` variable, or ``GLIBC_TUNABLES`` for
    malloc is set.

    Args:
        fn: a function; in a script it is imported in each new process, so keep the call of
            ``launch`` under ``if __name__ == "__main__"``.
        args: what ``fn`` is called with.
        ranks: how many processes are started.
        timeout: of the whole run, in seconds.
        start: a start method of multiprocessing; by default that which fits a script or a notebook.
        env: what is added to the environment of each process.

    Returns:
        What ``fn`` returned, by rank; it must be picklable.

    Raises:
        LaunchError: if a process failed or the time is over; it names the rank that failed first.

    >>> import fpipe, os
    >>> fpipe.launch(os.getenv, "RANK", ranks=2)  # doctest: +SKIP
    ['0', '1']
    """
    if not callable(fn):
        raise LaunchError(f"launch takes a function that runs on each rank, not {fn!r}")
    if type(ranks) is not int or ranks < 1:
        raise LaunchError(f"ranks={ranks!r}; give a whole number of processes, 1 or more")
    context = _context(start, fn)
    tcp_store = store("127.0.0.1")
    shared = dict(env or {})
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        shared = {"GLOO_SOCKET_IFNAME": "lo", **shared}
    children: list[_Child] = []
    reports: dict[int, Report] = {}
    try:
        for rank in range(ranks):
            variables = {**environment(rank, ranks, tcp_store), **shared}
            children.append(_start(context, partial(fn, *args), variables))
        reports = _collected(children, timeout)
        return results(reports, ranks, timeout)
    finally:
        _end(children, reports)


class _Child(NamedTuple):
    process: BaseProcess
    pipe: Connection

    def read(self, rank: int) -> Report:
        """Receive its report, or report how it ended without one."""
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(_ENDED)
            code = self.process.exitcode or 0
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            what = f"rank {rank} ended by {how} before it finished; see its output"
            return Report(failure=_GUARD if code == _UNGUARDED else what, ended=True)
        except Exception as error:  # its result or exception cannot be unpickled in this process
            return Report(failure=f"the result of rank {rank} cannot be read here: {error!r}")


def _collected(children: Sequence[_Child], timeout: float | None) -> dict[int, Report]:
    """The reports by rank; after a failure, the other ranks have ``GRACE`` seconds to report
    theirs.
    """
    deadline = inf if timeout is None else time.monotonic() + timeout
    reports = {}
    pending = {child.pipe: rank for rank, child in enumerate(children)}
    while pending and (left := deadline - time.monotonic()) > 0:
        ready = wait(pending, min(left, _LOOK))
        for pipe in [pipe for pipe in pending if pipe in ready]:
            rank = pending.pop(pipe)
            reports[rank] = children[rank].read(rank)
            if reports[rank].failure:
                deadline = min(deadline, time.monotonic() + GRACE)
    return reports


def _context(start: str | None, fn: Callable[..., object]) -> Any:
    methods = mp.get_all_start_methods()
    if start is None:
        main = sys.modules.get("__main__")
        script = hasattr(main, "__file__") or getattr(main, "__spec__", None) is not None
        # No process can import what a notebook defines, so its processes are forked. All others
        # start clean.
        notebook = getattr(fn, "__module__", None) == "__main__" and not script
        preferred = "fork" if notebook else "forkserver"
        start = preferred if preferred in methods else "spawn"
    if start not in methods:
        raise LaunchError(f"start={start!r}; this machine has {', '.join(methods)}")
    context = mp.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(list(_PRELOADED))
    return context


def _start(context: Any, fn: partial[T], env: dict[str, str]) -> _Child:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_run,
        args=(theirs, fn, env),
        name=f"fpipe-rank-{env['RANK']}",
        daemon=True,
    )
    try:
        process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchError(
            f"{fn.func!r} or its arguments cannot be sent to another process ({error}); define the "
            "function at the top of a module, or pass start='fork'"
        ) from error
    except RuntimeError as error:
        if "bootstrapping" in str(error):  # this is a new process, which imports the script
            os._exit(_UNGUARDED)
        raise
    finally:
        theirs.close()
    return _Child(process, ours)


def _run(pipe: Connection, fn: Callable[[], object], env: dict[str, str]) -> None:
    """In the new process: call the function and send the report."""
    os.environ.update(env)
    keep_freed()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, name="fpipe-parent", daemon=True).start()
    pipe.send_bytes(call(fn, int(env["RANK"])))
    pipe.close()


def _end_with_parent() -> None:
    """End this process when its launcher ends, even if the launcher is killed."""
    parent = mp.parent_process()
    if parent is not None:
        while parent.is_alive():
            parent.join(_LOOK)
        os._exit(1)


def _end(children: Sequence[_Child], reported: Container[int]) -> None:
    """End all processes: ask those that have not reported, and kill any that remains after
    ``_ENDED`` seconds.
    """
    for rank, child in enumerate(children):
        if rank not in reported and child.process.is_alive():
            child.process.terminate()
    deadline = time.monotonic() + _ENDED
    for rank, (process, pipe) in enumerate(children):
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():  # stopped, or it ignores the request
            process.kill()
            process.join(_KILLED)
        if process.is_alive():
            warnings.warn(
                f"rank {rank} (process {process.pid}) did not end within {_KILLED:g} s "
                "after it was killed: a call of the system keeps it, such as one of a device or of "
                "a network file system",
                stacklevel=2,
            )
        pipe.close()

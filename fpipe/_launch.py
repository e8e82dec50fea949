"""``fpipe.launch``: one function on several processes of this machine, for notebooks and scripts.

Sets the environment that torchrun would set, brings the results back by rank, raises the first failure with that
rank's traceback and ends the others. Knows nothing of what the function does.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from .errors import LaunchError, PeerError, StalledError

_GRACE = 2.0  #: seconds in which the others may say what they saw, and then in which they may end by themselves


def launch(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int,
    timeout: float | None = None,
    start: str | None = None,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Run ``fn(*args)`` on ``ranks`` processes of this machine; what each returned, by rank.

    Inside, ``fpipe.init()`` finds its peers. What the function returns must be picklable. ``start`` is a start method
    of multiprocessing: a script's function is imported anew in each process (keep the call under ``if __name__ ==
    "__main__"``), a notebook's is forked. ``timeout`` bounds the whole run, in seconds; ``env`` is added to the
    environment of each process.

    .. code-block:: python

        def rank_of():
            return fpipe.init().rank

        fpipe.launch(rank_of, ranks=4)  # [0, 1, 2, 3]
    """
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise LaunchError(f"ranks={ranks!r}; give a whole number of processes, 1 at least")
    context = _context(start)
    store = _store()  # kept by this process, so that it outlives every rank
    children: list[_Child] = []
    try:
        for rank in range(ranks):
            children.append(_start(context, fn, args, _environment(rank, ranks, store.port, env or {})))
        return _collect(children, timeout)
    finally:
        _end(children)


@dataclass
class _Child:
    process: Any
    pipe: Connection
    report: _Report | None = None

    def read(self) -> None:
        """Take its report, or find that it ended without one."""
        try:
            self.report = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(_GRACE)
            self.report = _Report(died=True, when=time.time())
        except Exception as error:  # what it returned or raised cannot be read here
            self.report = _Report(text=f"what it sent cannot be read here: {error!r}", when=time.time())


@dataclass
class _Report:
    ok: bool = False
    value: Any = None
    text: str = ""
    when: float = 0.0
    died: bool = False


def _context(start: str | None) -> Any:
    if start is None:
        main = sys.modules.get("__main__")
        scripted = hasattr(main, "__file__") or getattr(main, "__spec__", None) is not None
        methods = mp.get_all_start_methods()
        start = next(name for name in (("forkserver", "spawn") if scripted else ("fork", "spawn")) if name in methods)
    if start not in mp.get_all_start_methods():
        raise LaunchError(f"start={start!r}; this machine has {', '.join(mp.get_all_start_methods())}")
    context = mp.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(["torch", "torch.distributed", "fpipe.collectives.setup"])
    return context


def _store() -> Any:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # slow, and only needed here

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _environment(rank: int, ranks: int, port: int, more: dict[str, str]) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there: rank 0 must not start one
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **more,
    }


def _start(context: Any, fn: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str]) -> _Child:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, fn, args, env), name=f"fpipe-rank-{env['RANK']}", daemon=True)
    try:
        process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchError(
            f"{fn!r} or its arguments cannot be sent to another process ({error}); define the function at the top of "
            f"a module, or pass start='fork'"
        ) from error
    finally:
        theirs.close()
    return _Child(process, ours)


def _run(pipe: Connection, fn: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str]) -> None:
    """In the new process: call, and report."""
    os.environ.update(env)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, name="fpipe-parent", daemon=True).start()
    try:
        report = _Report(ok=True, value=fn(*args))
    except BaseException as error:
        report = _Report(value=error, text=traceback.format_exc())
    report.when = time.time()
    try:
        raw = pickle.dumps(report)
        pickle.loads(raw)
    except Exception as error:
        text = (
            f"what rank {env['RANK']} returned cannot be sent to another process: {error}" if report.ok else report.text
        )
        raw = pickle.dumps(_Report(text=text, when=report.when))
    pipe.send_bytes(raw)
    pipe.close()


def _end_with_parent() -> None:
    """A rank outlives its launcher by nothing, also where the launcher was killed."""
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _collect(children: list[_Child], timeout: float | None) -> list[Any]:
    deadline = None if timeout is None else time.monotonic() + timeout
    failed_at = None
    while any(child.report is None for child in children):
        left = None if deadline is None else deadline - time.monotonic()
        if failed_at is not None:
            left = failed_at + _GRACE - time.monotonic()
        if left is not None and left <= 0:
            break
        pending = {child.pipe: child for child in children if child.report is None}
        for pipe in wait(list(pending), left):
            child = pending[pipe]  # type: ignore[index]
            child.read()
            if failed_at is None and child.report is not None and not child.report.ok:
                failed_at = time.monotonic()
    failures = [(rank, child) for rank, child in enumerate(children) if child.report and not child.report.ok]
    if failures:
        _raise_first(failures)
    late = [rank for rank, child in enumerate(children) if child.report is None]
    if late:
        raise LaunchError(f"ranks {late} were not done after timeout={timeout:g} seconds; all were ended")
    return [child.report.value for child in children if child.report is not None]


def _raise_first(failures: list[tuple[int, _Child]]) -> None:
    """The cause before its consequences: who died, then who raised, then who lost a peer."""

    def order(item: tuple[int, _Child]) -> tuple[int, float]:
        report = item[1].report
        assert report is not None
        return (0 if report.died else 2 if isinstance(report.value, (PeerError, StalledError)) else 1), report.when

    rank, child = min(failures, key=order)
    report = child.report
    assert report is not None
    if report.died:
        code = child.process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        raise LaunchError(f"rank {rank} ended by {how} before it was done; its own output says more")
    if isinstance(report.value, BaseException):
        raise report.value from LaunchError(f"on rank {rank}:\n\n{report.text}")
    raise LaunchError(f"on rank {rank}: {report.text}")


def _end(children: list[_Child]) -> None:
    for child in children:
        if child.report is None and child.process.is_alive():
            child.process.terminate()
    deadline = time.monotonic() + _GRACE
    for child in children:
        child.process.join(max(0.1, deadline - time.monotonic()))
        if child.process.is_alive():  # stopped, or deaf
            child.process.kill()
            child.process.join()
        child.pipe.close()

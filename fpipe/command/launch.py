"""``fpipe.launch``: one function on several processes of this machine or of a Ray cluster.

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
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from ..errors import LaunchError
from .malloc import keep_freed
from .outcome import GRACE, Report, call, environment, raise_first, store
from .ray import launch as on_ray


def launch(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int,
    timeout: float | None = None,
    start: str | None = None,
    env: dict[str, str] | None = None,
    on: str = "processes",
) -> list[Any]:
    """Run ``fn(*args)`` on ``ranks`` processes of this machine; what each returned, by rank.

    Inside, ``fpipe.init()`` finds its peers. What the function returns must be picklable. ``start`` is a start method
    of multiprocessing: a script's function is imported anew in each process (keep the call under ``if __name__ ==
    "__main__"``), a notebook's is forked. ``timeout`` bounds the whole run, in seconds; ``env`` is added to the
    environment of each process. Processes of this machine keep what they free for their next step, unless a ``MALLOC_``
    variable, or ``GLIBC_TUNABLES`` for malloc, is set.

    ``on="ray"`` takes one actor of a Ray cluster for each rank instead, each with an accelerator where the cluster has
    some (``"ray:NPU"``, ``"ray:CPU"`` name what each shall have); it needs ``pip install fpipe[ray]``.

    .. code-block:: python

        def rank_of():
            return fpipe.init().rank

        fpipe.launch(rank_of, ranks=4)  # [0, 1, 2, 3]
    """
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise LaunchError(f"ranks={ranks!r}; give a whole number of processes, 1 at least")
    kind, _, resource = on.partition(":")
    if kind == "ray" and start is None:
        return on_ray(fn, args, ranks, timeout, env or {}, resource or None)
    if on != "processes":
        raise LaunchError(f"on={on!r} with start={start!r}; give on='processes', or on='ray' without start=")
    context = _context(start, fn)
    kept = store("127.0.0.1")
    children: list[_Child] = []
    try:
        for rank in range(ranks):
            children.append(
                _start(context, fn, args, {**environment(rank, ranks, "127.0.0.1", kept.port), **(env or {})})
            )
        return _collect(children, timeout)
    finally:
        _end(children)


@dataclass
class _Child:
    process: Any
    pipe: Connection
    report: Report | None = None

    def read(self) -> None:
        """Take its report, or find that it ended without one."""
        try:
            self.report = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(GRACE)
            self.report = Report(how=_how(self.process.exitcode), when=time.time())
        except Exception as error:  # what it returned or raised cannot be read here
            self.report = Report(text=f"what it sent cannot be read here: {error!r}", when=time.time())


def _how(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _context(start: str | None, fn: Callable[..., Any]) -> Any:
    if start is None:
        main = sys.modules.get("__main__")
        scripted = hasattr(main, "__file__") or getattr(main, "__spec__", None) is not None
        # What a notebook defined can be imported by nobody: its processes are forked. All others start clean.
        typed = getattr(fn, "__module__", None) == "__main__" and not scripted
        methods = mp.get_all_start_methods()
        start = next(name for name in (("fork", "spawn") if typed else ("forkserver", "spawn")) if name in methods)
    if start not in mp.get_all_start_methods():
        raise LaunchError(f"start={start!r}; this machine has {', '.join(mp.get_all_start_methods())}")
    context = mp.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(["torch", "torch.distributed", "fpipe.collectives.setup"])
    return context


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
    keep_freed()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, name="fpipe-parent", daemon=True).start()
    pipe.send_bytes(call(fn, args, int(env["RANK"])))
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
            left = failed_at + GRACE - time.monotonic()
        if left is not None and left <= 0:
            break
        pending = {child.pipe: child for child in children if child.report is None}
        for pipe in wait(list(pending), left):
            child = pending[pipe]  # type: ignore[index]
            child.read()
            if failed_at is None and child.report is not None and not child.report.ok:
                failed_at = time.monotonic()
    raise_first({rank: child.report for rank, child in enumerate(children) if child.report is not None})
    late = [rank for rank, child in enumerate(children) if child.report is None]
    if late:
        raise LaunchError(f"ranks {late} were not done after timeout={timeout:g} seconds; all were ended")
    return [child.report.value for child in children if child.report is not None]


def _end(children: list[_Child]) -> None:
    for child in children:
        if child.report is None and child.process.is_alive():
            child.process.terminate()
    deadline = time.monotonic() + GRACE
    for child in children:
        child.process.join(max(0.1, deadline - time.monotonic()))
        if child.process.is_alive():  # stopped, or deaf
            child.process.kill()
            child.process.join()
        child.pipe.close()

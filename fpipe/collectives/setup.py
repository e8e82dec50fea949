# SPDX-License-Identifier: Apache-2.0
"""``fpipe.init``: the group of this process, from the environment variables of torchrun if they are set.

The only file that starts process groups. Device types and backends come from their tables. This module must not know
schedules.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from ..devices import kind, pick
from ..errors import FpipeError, GroupError
from ._store import prefixed, set_timeout
from .bounded import BoundedStore, host
from .c10d import C10dGroup
from .capabilities import Capabilities
from .local import LocalGroup, check_ranks, local
from .watchdog import ends

TIMEOUT = 300.0


class MeshGroup(C10dGroup):
    """The pipeline axis of ``mesh``; ``dp`` and ``tp`` are groups over its other two axes."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, timeout: float):
        self.mesh = mesh
        self.dp, self.tp = (C10dGroup(mesh.get_group(axis), device, timeout, purpose=axis) for axis in ("dp", "tp"))
        super().__init__(mesh.get_group("pp"), device, timeout)
        for axis in mesh.mesh_dim_names or ():
            pg = mesh.get_group(axis)
            if pg is not dist.group.WORLD:  # some calls of backends ignore the time-out of their wait
                set_timeout(pg, timeout)

    def close(self) -> None:
        """End the threads of all axes."""
        for group in (self.dp, self.tp, super()):
            group.close()


def init(
    pp: int | None = None, dp: int = 1, tp: int = 1, *,
    device: str | torch.device | None = None, backend: str | None = None, timeout: float | timedelta | None = None,
) -> MeshGroup | LocalGroup:  # fmt: skip
    """The group of this process: one rank under torchrun, all ranks if there is one process.

    A pipeline has ``pp`` ranks. There are ``dp`` copies of it, and ``tp`` processes per stage, whose code calls
    collectives; ``pp * dp * tp`` is the number of processes. ``pp`` defaults to that number divided by ``dp * tp``.
    ``device`` and ``backend`` default to the accelerator of the machine and its backend. An initialized process group
    is used as it is. A second call returns the group of the first, with its ``timeout``; the default is five minutes.

    >>> init().size, init(pp=4).size  # without torchrun: all ranks are in this process
    (1, 4)
    """
    requested = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    seconds = TIMEOUT if requested is None else float(requested)
    _check(pp, dp, tp, seconds)
    started = dist.is_initialized()
    if not started and not _launched():
        if dp * tp != 1:
            needed = dp * tp * (pp or 1)
            raise GroupError(f"{_copies(dp, tp)} needs {needed} processes and there is one; start them with torchrun")
        return local(devices=[pick(device)] * (pp or 1))
    picked = pick(device, int(os.environ.get("LOCAL_RANK", "0")))
    if not started:
        _start(picked, backend, seconds)
    pp = _shape(pp, dp, tp)
    key = (pp, dp, tp, picked, dist.group.WORLD)
    group = _GROUPS.get(key)
    if group is None or (requested is not None and group.timeout != seconds):
        for old in _GROUPS.values():  # of a destroyed process group, or of another shape
            old.close()
        _GROUPS.clear()
        # Neighbouring ranks of the last axis are close to each other. Pipelines communicate least, copies of a stage
        # more, and processes that share a stage most.
        with ends(seconds, f"the processes did not connect within {seconds:g} s; look for a rank that has not started"):
            group = _GROUPS[key] = _connected(picked, (pp, dp, tp), seconds)
    return group


def _connected(device: torch.device, shape: tuple[int, int, int], seconds: float) -> MeshGroup:
    try:
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "tp"))
        return MeshGroup(mesh, device, seconds)
    except FpipeError:
        raise
    except RuntimeError as error:
        raise GroupError(f"the processes met, and could not connect ({error}){_files(error)}") from error


#: The latest group of this process, by the arguments of ``init``, which may be called several times.
_GROUPS: dict[tuple[object, ...], MeshGroup] = {}


def adopt(
    pg: dist.ProcessGroup, device: str | torch.device = "cpu", *,
    timeout: float = TIMEOUT, capabilities: Capabilities | None = None, purpose: str = "pp",
) -> C10dGroup:  # fmt: skip
    """A Group over an existing process group; every rank of it must call this.

    ``capabilities`` replace those of the table, for a backend that is not in it.
    """
    return C10dGroup(pg, torch.device(device), timeout, capabilities, purpose)


def _launched() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 or "TORCHELASTIC_RUN_ID" in os.environ


def _check(pp: object, dp: object, tp: object, seconds: float) -> None:
    for name, ranks in (("pp", 1 if pp is None else pp), ("dp", dp), ("tp", tp)):
        check_ranks(name, ranks)
    if not seconds > 0:
        raise GroupError(f"timeout={seconds:g}; give the seconds that a rank may wait for another, above 0")


def _start(device: torch.device, backend: str | None, seconds: float) -> None:
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    try:
        with ends(seconds, f"the processes did not meet within {seconds:g} s; look at {host()[0]} first"):
            store, rank, size = _meet(seconds)
            dist.init_process_group(
                backend or kind(device.type).backends, timeout=timedelta(seconds=seconds), store=store, rank=rank,
                world_size=size,
            )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise GroupError(
            f"the processes could not meet at the store of the job, which {host()[0]} hosts ({error}); check RANK, "
            f"WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun sets, and that "
            f"backend={backend or kind(device.type).backends!r} is in this build of torch{_files(error)}"
        ) from error


def _files(error: Exception) -> str:
    """What to do where a process may not open more files; empty for other errors."""
    return "; raise the limit of open files, as with ulimit -n 4096" if "Too many open files" in str(error) else ""


#: The latest store, rank and size, by the address at which the processes meet.
_MET: dict[tuple[str | None, ...], tuple[Any, int, int]] = {}


def _meet(seconds: float) -> tuple[Any, int, int]:
    """The store with a prefix for this process group, the rank and the size, of the environment variables of torchrun.

    Process groups of one job have the same names after ``destroy_process_group``. With one prefix, a backend would read
    the addresses of the ones before.
    """
    address = tuple(map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")))
    if address not in _MET:
        _MET.clear()
        _MET[address] = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
    store, rank, size = _MET[address]
    nth = BoundedStore(store, seconds).add(f"fpipe/init/{rank}", 1)
    return prefixed(f"fpipe/init/{nth}", store), rank, size


def _shape(pp: int | None, dp: int, tp: int) -> int:
    world = dist.get_world_size()
    ranks = world // (dp * tp) if pp is None else pp
    if ranks * dp * tp != world:
        raise GroupError(
            f"pp={'(the rest)' if pp is None else pp} x {_copies(dp, tp)} is not the {world} processes that were "
            f"started; start {max(ranks, 1) * dp * tp}, or leave pp out"
        )
    return ranks


def _copies(dp: int, tp: int) -> str:
    return f"dp={dp}" + (f" x tp={tp}" if tp != 1 else "")

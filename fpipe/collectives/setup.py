# SPDX-License-Identifier: Apache-2.0
"""``fpipe.init``: the group of this process, from the environment variables of torchrun or of
another launcher if they are set.

The only file that starts process groups. Device types and backends come from their tables. This
module must not know schedules.
"""

from __future__ import annotations

import os
from contextlib import closing
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..devices import current, keep_freed, kind, pick
from ..errors import FpipeError, GroupError
from ._store import backends as backends_of, prefixed, set_timeout
from .bounded import BoundedStore, host, of_group
from .c10d import C10dGroup, capabilities_of
from .capabilities import Capabilities
from .faults import FaultMonitor, too_many_files
from .journal import Journal
from .local import LocalGroup, check_ranks, local
from .meeting import meet, variable

TIMEOUT = 300.0
#: What the variables of other launchers than torchrun begin with.
_LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PALS_", "MPI_LOCAL")


class MeshGroup(C10dGroup):
    """The pipeline axis of ``mesh``; ``dp`` and ``tp`` are groups over its other two axes."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, timeout: float, journal: Journal):
        self.mesh = mesh  # of one journal: a rank of one axis may stop another's
        self.dp, self.tp = (
            C10dGroup(mesh.get_group(axis), device, timeout, journal=journal)
            for axis in ("dp", "tp")
        )
        super().__init__(mesh.get_group("pp"), device, timeout, journal=journal)
        for axis in mesh.mesh_dim_names or ():
            pg = mesh.get_group(axis)
            if pg is not dist.group.WORLD:
                set_timeout(pg, timeout)  # some calls of backends ignore that of their wait


def init(
    pp: int | None = None,
    dp: int = 1,
    tp: int = 1,
    *,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout: float | timedelta | None = None,
) -> MeshGroup | LocalGroup:
    """The group of this process: one rank under torchrun, srun or mpirun, all ranks if there is one
    process.

    An initialized process group is used as it is. Otherwise the environment variables of torchrun
    are read or, where RANK and WORLD_SIZE are not set, those of SLURM, Open MPI, MPICH, Intel MPI
    and PALS: torchrun's variables are set from them, and rank 0 prints a line. Then a CPU rank on
    Linux keeps freed memory for its next step, unless ``FPIPE_KEEP_FREED=0`` or a ``MALLOC_``
    variable is set. A second call returns the group of the first, with its ``timeout``.

    Args:
        pp: how many ranks a pipeline has; by default the number of processes divided by
            ``dp * tp``.
        dp: how many copies of the pipeline there are; ``.dp`` of the result is the group of copies,
            for ``pipeline(dp=)``.
        tp: how many processes work on each stage; the code of the stages calls collectives of
            ``.tp``.
        device: of this process; by default an accelerator of the machine, else the CPU.
        backend: of torch.distributed; by default that of the device.
        timeout: after how many seconds without a message a wait ends with an error; five minutes by
            default.

    Returns:
        The group of the pipeline that this process belongs to, with ``rank``, ``size``, ``dp`` and
        ``tp``.

    Raises:
        GroupError: if ``pp * dp * tp`` is not the number of processes, the processes cannot
        connect, or a launcher started several and some of its variables are missing.

    >>> # without a launcher, all ranks are in this process
    >>> init().size, init(pp=4).size
    (1, 4)
    """
    seconds = _seconds(TIMEOUT if timeout is None else timeout)
    for name, ranks in (("pp", 1 if pp is None else pp), ("dp", dp), ("tp", tp)):
        check_ranks(name, ranks)
    started = dist.is_initialized()
    several = started or _launched()
    if not started and "RANK" in os.environ and pick(device).type == "cpu":
        keep_freed()  # the process is for this rank alone
    if not several:
        if dp * tp != 1:
            raise GroupError(
                f"{_copies(dp, tp)} needs {dp * tp * (pp or 1)} processes and there is one; start "
                "them with torchrun"
            )
        return local(devices=[pick(device)] * (pp or 1))
    picked = pick(device, variable("LOCAL_RANK", 0, default="0"))
    if not started:
        _start(picked, backend, seconds)
    world = dist.get_world_size()
    ranks = world // (dp * tp) if pp is None else pp
    if ranks * dp * tp != world:
        raise GroupError(
            f"pp={'(the rest)' if pp is None else pp} x {_copies(dp, tp)} is not the {world} "
            f"processes that were started; start {max(ranks, 1) * dp * tp}, or leave pp out"
        )
    key = (ranks, dp, tp, picked, dist.group.WORLD)
    group = _GROUPS.get(key)
    if group is None or (timeout is not None and group.timeout != seconds):
        for old in _GROUPS.values():  # of a destroyed process group, or of another shape
            old.close()
        _GROUPS.clear()
        # Neighbouring ranks of the last axis are close to each other. Pipelines communicate least,
        # copies of a stage more, and processes that share a stage most.
        group = _GROUPS[key] = _group(picked, (ranks, dp, tp), seconds)
    return group


def _seconds(timeout: float | timedelta) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not seconds > 0:
        raise GroupError(
            f"timeout={seconds:g}; give the seconds that a rank may wait for another, above 0"
        )
    return seconds


def _group(device: torch.device, shape: tuple[int, int, int], seconds: float) -> MeshGroup:
    world = dist.group.WORLD
    assert world is not None
    capabilities_of(world, device)  # first: torch's fake backend has no store either
    try:
        store, _ = of_group(world, seconds)
        journal = Journal(store, dist.get_rank())
        with FaultMonitor(store, world.rank(), range(world.size()), seconds, journal).connecting():
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "tp"))
        return MeshGroup(mesh, device, seconds, journal)
    except FpipeError:
        raise
    except RuntimeError as error:
        raise GroupError(
            f"the processes could not connect ({error}). Look at {host()[0]}, which hosts the "
            f"store of the job, first{too_many_files(error)}"
        ) from error


#: The latest group of this process, by the arguments of ``init``, which may be called several
#: times.
_GROUPS: dict[tuple[object, ...], MeshGroup] = {}


def adopt(
    source: dist.ProcessGroup | DeviceMesh,
    device: str | torch.device | None = None,
    *,
    timeout: float | timedelta = TIMEOUT,
    capabilities: Capabilities | None = None,
) -> C10dGroup:
    """A group over a process group or one axis of a device mesh that exists already; every rank of
    it calls this.

    Adopt a process group once and use the result for all pipelines: each call connects the
    processes anew.

    Args:
        source: the process group, or a DeviceMesh with one axis, as in ``mesh["pp"]``.
        device: of this rank; a type without an index is its current device. By default the
            accelerator, if the process group carries its tensors, else the CPU.
        timeout: how many seconds a rank waits for another.
        capabilities: of the backend, for one that is not in fpipe's table.

    Returns:
        a group for ``fpipe.pipeline(..., group=)``, or for ``dp=``.

    Raises:
        GroupError: if ``source`` is neither, the mesh has several axes, or ranks that do not
        ascend, or the process group cannot carry the device.

    >>> adopt("pp")
    Traceback (most recent call last):
        ...
    fpipe.errors.GroupError: adopt takes a ProcessGroup or a DeviceMesh with one axis, not str 'pp';
    ...
    """
    pg = _process_group(source)
    carried = backends_of(pg)
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = accelerator if accelerator and accelerator.type in carried else "cpu"
    return C10dGroup(pg, current(device), _seconds(timeout), capabilities)


def _process_group(source: object) -> dist.ProcessGroup:
    if isinstance(source, DeviceMesh):
        if source.ndim != 1:
            raise GroupError(
                f"the mesh has the axes {source.mesh_dim_names or source.ndim}; give one of them, "
                "as in mesh['pp']"
            )
        pg = source.get_group()
        ranks = dist.get_process_group_ranks(pg)
        if source.mesh.tolist() != ranks:
            raise GroupError(
                f"the mesh has the ranks {source.mesh.tolist()} in this order, and torch's process "
                f"group of them is in the order {ranks}, in which a pipeline would have its "
                "stages; give a mesh whose ranks ascend along each axis"
            )
        return pg
    if not isinstance(source, dist.ProcessGroup):
        raise GroupError(
            "adopt takes a ProcessGroup or a DeviceMesh with one axis, not "
            f"{type(source).__name__} {source!r}; torch.distributed.group.WORLD is that of all "
            "processes, once torch.distributed is initialized"
        )
    return source


def _launched() -> bool:
    if any(name.startswith(_LAUNCHERS) for name in os.environ):
        from .launchers import variables

        os.environ.update(variables())
    return variable("WORLD_SIZE", 1, default="1") > 1 or "TORCHELASTIC_RUN_ID" in os.environ


def _start(device: torch.device, backend: str | None, seconds: float) -> None:
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    backend = backend or kind(device.type).backends
    try:
        store, rank, size = meet(seconds)
        monitor = FaultMonitor(
            BoundedStore(prefixed("connect", store), seconds), rank, range(size), seconds
        )
        with closing(monitor.journal), monitor.connecting():
            wait = timedelta(seconds=seconds)
            dist.init_process_group(backend, timeout=wait, store=store, rank=rank, world_size=size)
    except GroupError:
        raise
    except (AssertionError, RuntimeError, ValueError) as error:
        raise GroupError(
            f"the processes could not meet at the store of the job ({error}). Look at {host()[0]}, "
            "which hosts it, first; check RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which "
            f"the launcher sets, and that backend={backend!r} is in this build of "
            f"torch{too_many_files(error)}"
        ) from error


def _copies(dp: int, tp: int) -> str:
    return f"dp={dp}" + (f" x tp={tp}" if tp != 1 else "")

# SPDX-License-Identifier: Apache-2.0
"""``fpipe.init``: the group of this process, from the environment variables of torchrun if they are set.

The only file that starts process groups. Device types and backends come from their tables. This module must not know
schedules.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..devices import kind, pick
from ..errors import GroupError
from ._store import of_group
from .c10d import Backend, C10dGroup
from .capabilities import Capabilities
from .local import LocalGroup, local

TIMEOUT = 300.0


class MeshGroup(C10dGroup):
    """The pipeline axis of ``mesh``; ``dp`` and ``tp`` are groups over its other two axes."""

    def __init__(
        self, backend: Backend, device: torch.device, timeout: float, mesh: DeviceMesh, dp: C10dGroup, tp: C10dGroup
    ):
        super().__init__(backend, device, timeout)
        self.mesh, self.dp, self.tp = mesh, dp, tp


def init(
    pp: int | None = None,
    dp: int = 1,
    tp: int = 1,
    *,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout: float | timedelta | None = None,
) -> MeshGroup | LocalGroup:
    """The group of this process: one rank under torchrun, all ranks if there is one process.

    ``pp`` ranks in a pipeline, ``dp`` copies of it, and ``tp`` processes that share each stage by the collectives in
    it: their product is the number of processes. ``pp`` defaults to the number of processes divided by the others.
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
            shape = f"dp={dp}" + (f" x tp={tp}" if tp != 1 else "")
            needed = dp * tp * (pp or 1)
            raise GroupError(f"{shape} needs {needed} processes and there is one; start them with torchrun")
        return local(devices=[pick(device)] * (pp or 1))
    picked = pick(device, int(os.environ.get("LOCAL_RANK", "0")))
    if not started:
        _start(picked, backend, seconds)
    pp = _shape(pp, dp, tp)
    key = (pp, dp, tp, picked, dist.group.WORLD)
    group = _GROUPS.get(key)
    if group is None or (requested is not None and group.timeout != seconds):
        _GROUPS.clear()  # of a destroyed process group, or of another shape
        group = _GROUPS[key] = _build((pp, dp, tp), picked, seconds)
    return group


#: The latest group of this process, by the arguments of ``init``, which may be called several times.
_GROUPS: dict[tuple[object, ...], MeshGroup] = {}


def adopt(
    pg: dist.ProcessGroup,
    device: str | torch.device = "cpu",
    *,
    timeout: float = TIMEOUT,
    capabilities: Capabilities | None = None,
    purpose: str = "pp",
) -> C10dGroup:
    """A Group over an existing process group; every rank of it must call this.

    ``capabilities`` replace those of the table, for a backend that is not in it.
    """
    device = torch.device(device)
    return C10dGroup(_backend(pg, device, capabilities, purpose), device, timeout)


def _backend(pg: dist.ProcessGroup, device: torch.device, capabilities: Capabilities | None, purpose: str) -> Backend:
    backends = _backends(pg)
    if device.type not in backends:
        raise GroupError(
            f"the process group carries {', '.join(backends)} and this rank is on {device.type}; start it with "
            f"backend={kind(device.type).backends!r}"
        )
    can = capabilities or Capabilities.of(device.type, backends[device.type])
    cpu = Capabilities.of("cpu", backends["cpu"]) if "cpu" in backends and device.type != "cpu" else None
    back = _twin(pg) if not can.habit("crossed") and pg.size() > 1 else pg
    return Backend(pg, back, of_group(pg, purpose), can, cpu)


def _twin(pg: dist.ProcessGroup) -> dist.ProcessGroup:
    """A second process group of the same ranks and backends."""
    ranks, config = dist.get_process_group_ranks(pg), dist.get_backend_config(pg)
    twin = dist.new_group(ranks, backend=config, use_local_synchronization=True)
    assert isinstance(twin, dist.ProcessGroup)
    return twin


def _backends(pg: dist.ProcessGroup) -> dict[str, str]:
    """device type -> backend, of ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``."""
    config = dist.get_backend_config(pg)
    pairs = [part.split(":") for part in config.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        return dict.fromkeys(dist.Backend.backend_capability.get(config, ["cpu"]), config)
    return dict(pairs)


def _launched() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 or "TORCHELASTIC_RUN_ID" in os.environ


def _check(pp: object, dp: object, tp: object, seconds: float) -> None:
    for name, value in (("pp", 1 if pp is None else pp), ("dp", dp), ("tp", tp)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise GroupError(f"{name}={value!r}; give a whole number of ranks, 1 at least")
    if not seconds > 0:
        raise GroupError(f"timeout={seconds:g}; give the seconds that a rank may wait for another, above 0")


def _start(device: torch.device, backend: str | None, seconds: float) -> None:
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    try:
        dist.init_process_group(backend or kind(device.type).backends, timeout=timedelta(seconds=seconds))
    except (RuntimeError, ValueError) as error:
        raise GroupError(
            f"the processes could not meet ({error}); check RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which "
            f"torchrun sets, and that backend={backend or kind(device.type).backends!r} is in this build of torch"
        ) from error


def _shape(pp: int | None, dp: int, tp: int) -> int:
    world = dist.get_world_size()
    ranks = world // (dp * tp) if pp is None else pp
    if ranks * dp * tp != world:
        asked = "(the rest)" if pp is None else pp
        shape = f"pp={asked} x dp={dp}" + (f" x tp={tp}" if tp != 1 else "")
        raise GroupError(
            f"{shape} is not the {world} processes that were started; start {max(ranks, 1) * dp * tp}, or leave pp out"
        )
    return ranks


def _build(shape: tuple[int, int, int], device: torch.device, seconds: float) -> MeshGroup:
    # Neighbouring ranks of the last axis are close to each other. Pipelines communicate least, copies of a stage more,
    # and processes that share a stage most.
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "tp"))
    dp, tp = (adopt(mesh.get_group(axis), device, timeout=seconds, purpose=axis) for axis in ("dp", "tp"))
    pg = mesh.get_group("pp")
    return MeshGroup(_backend(pg, device, None, "pp"), device, seconds, mesh, dp, tp)

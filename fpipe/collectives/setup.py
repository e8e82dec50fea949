"""``fpipe.init``: from the environment of torchrun, or of nothing, to a group.

The only place that starts process groups. Knows devices and backends by their tables, and no schedule.
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
from .c10d import C10dGroup
from .capabilities import Capabilities
from .local import LocalGroup, local

TIMEOUT = 300.0


class MeshGroup(C10dGroup):
    """The pipeline axis of a mesh; ``dp`` and ``tp`` are the others as groups of their own, ``mesh`` has all three."""

    mesh: DeviceMesh
    dp: C10dGroup
    tp: C10dGroup


def init(
    pp: int | None = None,
    dp: int = 1,
    tp: int = 1,
    *,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout: float | timedelta | None = None,
) -> MeshGroup | LocalGroup:
    """The group of this process: one rank under torchrun, all of them where there is one process.

    ``pp`` ranks in a pipeline, ``dp`` copies of it, and ``tp`` processes that share each stage by the collectives in
    it: together as many as there are processes. ``pp`` left out takes what the others leave. Device and backend are
    found where they are not given. A process group that stands already is used as it is, and a second call gives the
    group of the first, with its ``timeout``; at first that is five minutes.

    >>> init().size, init(pp=4).size  # no torchrun here: all ranks live in this process
    (1, 4)
    """
    given = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    seconds = TIMEOUT if given is None else float(given)
    _refuse(pp, dp, tp, seconds)
    started = dist.is_initialized()
    if not started and not _launched():
        if dp * tp != 1:
            asked = f"dp={dp}" + (f" x tp={tp}" if tp != 1 else "")
            needed = dp * tp * (pp or 1)
            raise GroupError(f"{asked} needs {needed} processes and there is one; start them with torchrun")
        return local(devices=[pick(device)] * (pp or 1))
    where = pick(device, int(os.environ.get("LOCAL_RANK", "0")))
    if not started:
        _start(where, backend, seconds)
    pp = _shape(pp, dp, tp)
    key = (pp, dp, tp, where, dist.group.WORLD)
    found = _MADE.get(key)
    if found is None or (given is not None and found.timeout != seconds):
        _MADE.clear()  # of a process group that is gone, or of another shape
        found = _MADE[key] = _build((pp, dp, tp), where, seconds)
    return found


#: The one group that this process has made, by what it was asked for: ``init`` may be called again anywhere.
_MADE: dict[tuple[object, ...], MeshGroup] = {}


def adopt(
    pg: dist.ProcessGroup,
    device: str | torch.device = "cpu",
    *,
    timeout: float = TIMEOUT,
    capabilities: Capabilities | None = None,
    purpose: str = "pp",
    kind_of_group: type[C10dGroup] = C10dGroup,
) -> C10dGroup:
    """A Group over a process group of one's own; every rank of it must call this.

    ``capabilities`` stands in for the table's where a backend is not in it.
    """
    device = torch.device(device)
    backends = _backends(pg)
    if device.type not in backends:
        raise GroupError(
            f"the process group carries {', '.join(backends)} and this rank is on {device.type}; start it with "
            f"backend={kind(device.type).backends!r}"
        )
    can = capabilities or Capabilities.of(device.type, backends[device.type])
    cpu = Capabilities.of("cpu", backends["cpu"]) if "cpu" in backends and device.type != "cpu" else None
    apart = not can.habit("crossed") and pg.size() > 1
    back = _twin(pg) if apart else None
    store = of_group(pg, purpose)
    return kind_of_group(pg, device, timeout=timeout, store=store, capabilities=can, cpu=cpu, back=back)


def _twin(pg: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another process group of the same ranks and backends."""
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


def _refuse(pp: object, dp: object, tp: object, seconds: float) -> None:
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
    found = world // (dp * tp) if pp is None else pp
    if found * dp * tp != world:
        asked = "(what is left)" if pp is None else pp
        shape = f"pp={asked} x dp={dp}" + (f" x tp={tp}" if tp != 1 else "")
        raise GroupError(
            f"{shape} is not the {world} processes that were started; start {max(found, 1) * dp * tp}, or leave pp out"
        )
    return found


def _build(shape: tuple[int, int, int], device: torch.device, seconds: float) -> MeshGroup:
    # Neighbours of a pipeline are apart, copies of a stage are together, and what shares a stage more so: the traffic
    # grows in that order.
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "tp"))
    group = adopt(mesh.get_group("pp"), device, timeout=seconds, kind_of_group=MeshGroup)
    assert isinstance(group, MeshGroup)
    group.mesh = mesh
    group.dp = adopt(mesh.get_group("dp"), device, timeout=seconds, purpose="dp")
    group.tp = adopt(mesh.get_group("tp"), device, timeout=seconds, purpose="tp")
    return group

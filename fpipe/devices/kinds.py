# SPDX-License-Identifier: Apache-2.0
"""The table of device types, the device of this process, through ``torch.accelerator``, and what
the C library of a CPU rank does with freed memory.

A type that is not in the table has a conservative record. This module must not know groups and
stages.
"""

from __future__ import annotations

import ctypes
import os
import sys
from importlib import import_module
from types import MappingProxyType
from typing import NamedTuple

import torch

from ..errors import GroupError


class DeviceKind(NamedTuple):
    """The properties of a type of device.

    Args:
        type: of ``torch.device``.
        backend: the default of torch.distributed.
        visible: the environment variable that selects the devices that a process can use.
        package: the package to import where support is not part of torch.
        name: for people.
        double: whether it has float64.

    >>> kind("xpu").backend
    'xccl'
    """

    type: str
    backend: str
    visible: str | None = None
    package: str | None = None
    name: str = ""
    double: bool = False

    @property
    def backends(self) -> str:
        """The backend string of a process group that carries CPU tensors too.

        >>> kind("cuda").backends, kind("cpu").backends
        ('cpu:gloo,cuda:nccl', 'gloo')
        """
        return (
            self.backend
            if self.type == "cpu" or self.backend == "gloo"
            else f"cpu:gloo,{self.type}:{self.backend}"
        )


_ROWS = (
    DeviceKind("cpu", "gloo", name="CPU", double=True),
    DeviceKind("cuda", "nccl", "CUDA_VISIBLE_DEVICES", name="NVIDIA or AMD GPU", double=True),
    # The device selector of oneAPI is read and never set: it can hide a device that attention
    # kernels need.
    DeviceKind("xpu", "xccl", "ZE_AFFINITY_MASK", name="Intel GPU"),
    DeviceKind("npu", "hccl", "ASCEND_RT_VISIBLE_DEVICES", "torch_npu", name="Ascend NPU"),
    DeviceKind("hpu", "hccl", "HABANA_VISIBLE_MODULES", "habana_frameworks.torch", name="Gaudi"),
    DeviceKind("mps", "gloo", name="Apple GPU"),
)
KINDS = MappingProxyType({row.type: row for row in _ROWS})


def kind(type: str) -> DeviceKind:
    """The record of a ``type`` of ``torch.device``; one with gloo for a type that is not in the
    table.

    >>> kind("cuda").visible, kind("newcomer").backend
    ('CUDA_VISIBLE_DEVICES', 'gloo')
    """
    return KINDS.get(type) or DeviceKind(type, "gloo", name=f"unknown device {type!r}")


def wide(device: torch.device) -> torch.dtype:
    """The dtype in which a device adds numbers up: float64 where it has that.

    Args:
        device: the device; tensors on ``meta`` have any dtype.

    Returns:
        float64 or float32.

    >>> wide(torch.device("cpu")), wide(torch.device("mps"))
    (torch.float64, torch.float32)
    """
    if device.type == "meta" or kind(device.type).double:
        return torch.float64
    return torch.float32


def pick(device: str | torch.device | None = None, local_rank: int = 0) -> torch.device:
    """The device of this process: the argument, else the accelerator of the machine, else the CPU.

    A missing index is 0 if exactly one device is visible (one was assigned to each process), else
    ``local_rank``.

    Args:
        device: a device or its name; by default the accelerator.
        local_rank: the number of the process on its machine.

    Raises:
        GroupError: if the machine has no such device.

    >>> pick("cpu")
    device(type='cpu')
    """
    picked = (
        _parse(device)
        if device is not None
        else torch.accelerator.current_accelerator(check_available=True)
    )
    if picked is None or picked.type == "cpu":
        return torch.device("cpu")
    if picked.type == "meta":
        return picked
    count = _count(picked.type)
    index = picked.index if picked.index is not None else (0 if count == 1 else local_rank)
    if index >= count:
        raise GroupError(
            f"device '{picked.type}:{index}' is not available: {count} of its type are visible; "
            "start at most one process per device, or set "
            f"{kind(picked.type).visible or 'the visible devices'} so that more are visible"
        )
    return torch.device(picked.type, index)


def current(device: str | torch.device) -> torch.device:
    """A device with the index that it has in this process: ``cuda`` is its current device,
    ``cpu:0`` is the CPU.

    Args:
        device: a device or its name.

    Returns:
        The device, with an index where its type has several.

    >>> current("cpu:0") == current("cpu") == torch.device("cpu")
    True
    """
    accelerator = torch.accelerator.current_accelerator()
    same = accelerator is not None and accelerator.type == _parse(device).type
    return pick(device, torch.accelerator.current_device_index() if same else 0)


def _parse(device: str | torch.device) -> torch.device:
    type = str(device).split(":")[0]
    package = kind(type).package
    try:
        if package is not None:
            import_module(package)  # first: it registers the name with torch
    except ImportError as error:
        raise GroupError(
            f"device {type!r} needs the package {package}, which cannot be imported ({error})"
        ) from error
    try:
        return torch.device(device)
    except RuntimeError as error:
        types = ", ".join(KINDS)
        raise GroupError(
            f"{device!r} is not a device; name a type, as in {types}, or one with an index"
        ) from error


def _count(type: str) -> int:
    try:
        return int(torch.get_device_module(type).device_count())
    except (RuntimeError, AttributeError) as error:
        raise GroupError(
            f"device {type!r} is not available in this build of torch; leave device= out"
        ) from error


def identity(device: torch.device) -> str:
    """What tells a device from all others, in every process; empty where nothing does.

    Args:
        device: with its index in this process.

    Returns:
        The number that its maker gave it.

    >>> identity(torch.device("cpu"))
    ''
    """
    if device.type in ("cpu", "meta"):
        return ""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return str(getattr(properties(device), "uuid", "")) if properties is not None else ""


def cores() -> int:
    """The cores of the processor that this process may use.

    Returns:
        Their number, at least 1.

    >>> cores() > 0
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


#: The environment variable that leaves the C library as it is: ``FPIPE_KEEP_FREED=0``.
SWITCH = "FPIPE_KEEP_FREED"
_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of mallopt(3)


def keep_freed() -> bool:
    """Keep up to 1 GiB of freed memory, in blocks of less than 32 MiB, where the C library is
    glibc's; whether it does.

    Without this, glibc returns blocks of 128 KiB or more to the system as soon as they are freed,
    and the next step faults every page in again. Blocks of 32 MiB or more go back, because kept
    ones leave fragments. The documented variables of glibc (``MALLOC_TRIM_THRESHOLD_``) are read
    when a process is loaded, which is too late in a forked one. Settings for malloc in the
    environment take precedence.
    """
    if os.environ.get(SWITCH) == "0" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    if sys.platform != "linux" or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_TRIM, 1 << 30)) and bool(mallopt(_MMAP, 32 << 20))

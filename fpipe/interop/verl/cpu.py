# SPDX-License-Identifier: Apache-2.0
"""A platform "cpu" for verl, which has none: to try a configuration, and to test, without an
accelerator.

``VERL_PLATFORM=cpu`` selects it. Importing this module registers it. This module must not know
engines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

platforms: Any = import_module("verl.plugin.platform.platform_manager")
base: Any = import_module("verl.plugin.platform.platform_base")

#: What verl asks the module of a device for, and the answer.
_ANSWERS = {
    "set_device": None,
    "synchronize": None,
    "empty_cache": None,
    "ipc_collect": None,
    "manual_seed": None,
    "reset_peak_memory_stats": None,
    "current_device": 0,
    "memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_allocated": 0,
    "max_memory_reserved": 0,
    "is_available": True,
    "device_count": 1,
    "get_device_name": "cpu",
    "mem_get_info": (0, 0),
    "set_rng_state": None,
    "get_rng_state": None,
}


def _device_module() -> ModuleType:
    module = ModuleType("cpu")
    for name, answer in _ANSWERS.items():
        setattr(module, name, lambda *args, answer=answer, **keywords: answer)
    return module


@platforms.PlatformRegistry.register(platform="cpu")
class PlatformCPU(base.PlatformBase):
    """The CPU, with gloo."""

    device_name, vendor_name, device_module = "cpu", "cpu", _device_module()

    def is_available(self) -> bool:
        """Always."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Not by itself: only where VERL_PLATFORM names it."""
        return False

    def current_device(self) -> Any:
        """The device: verl passes it to ``Tensor.to``, where a number would be an accelerator."""
        return "cpu"

    def device_count(self) -> int:
        """One."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Nothing to do."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing to wait for."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The host's allocator has none."""

    def empty_cache(self) -> None:
        """The host's allocator has none."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """None."""
        return None, None

    def communication_backend_name(self) -> str:
        """gloo."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """A variable that nothing reads."""
        return "CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """A range without a name."""
        yield

    def profiler_start(self) -> None:
        """There is no profiler of the device."""

    def profiler_stop(self) -> None:
        """There is no profiler of the device."""

    def ray_resource_name(self) -> str:
        """That of Ray."""
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        """None."""
        return []

    def is_ipc_supported(self) -> bool:
        """Not for tensors."""
        return False

    def cudart(self) -> None:
        """There is none."""


if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    # verl composes the backends "cpu:gloo,<device>:<backend>", and torch refuses a device that is
    # named twice.
    distributed: Any = import_module("verl.utils.distributed")
    distributed.get_device_name = lambda: "cuda"

# SPDX-License-Identifier: Apache-2.0
"""A platform "cpu" for verl, which has none: to try a configuration without an accelerator.

``VERL_PLATFORM=cpu`` selects it. Importing this module registers it. This module must not know
engines.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

platforms = import_module("verl.plugin.platform.platform_manager")
base = import_module("verl.plugin.platform.platform_base")

#: What verl calls of a platform, and the results other than None, which methods of its base class
#: return. verl passes the current device to ``Tensor.to``, where a number would be an accelerator;
#: only VERL_PLATFORM makes the platform available.
_PLATFORM = {
    "is_available": True,
    "is_platform_available": False,
    "current_device": "cpu",
    "device_count": 1,
    "get_device_capability": (None, None),
    "communication_backend_name": "gloo",
    "visible_devices_envvar": "CPU_VISIBLE_DEVICES",
    "nvtx_range": nullcontext(),
    "ray_resource_name": "CPU",
    "ray_noset_envvars": [],
    "is_ipc_supported": False,
}
#: What verl calls of the module of a device, and the results.
_DEVICE_MODULE = {
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "ipc_collect", "manual_seed")),
    **dict.fromkeys(("reset_peak_memory_stats", "set_rng_state", "get_rng_state")),
    **dict.fromkeys(("memory_allocated", "memory_reserved", "current_device"), 0),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), 0),
    "is_available": True,
    "device_count": 1,
    "get_device_name": "cpu",
    "mem_get_info": (0, 0),
}


def _returning(result: object) -> Callable[..., object]:
    return lambda *args, **keywords: result


def _platform() -> type:
    """Return the class of the platform."""
    module = ModuleType("cpu")
    for name, result in _DEVICE_MODULE.items():
        setattr(module, name, _returning(result))
    names = {"device_name": "cpu", "vendor_name": "cpu", "device_module": module}
    methods = {name: _returning(result) for name, result in _PLATFORM.items()}
    seeds = dict.fromkeys(
        ("manual_seed", "manual_seed_all"), lambda _, seed: torch.manual_seed(seed)
    )
    platform = type("PlatformCPU", (base.PlatformBase,), {**names, **methods, **seeds})
    platform.__abstractmethods__ = frozenset()
    return platform


PlatformCPU = platforms.PlatformRegistry.register(platform="cpu")(_platform())

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    # verl composes the backends "cpu:gloo,<device>:<backend>", and torch refuses a device that is
    # named twice.
    distributed: Any = import_module("verl.utils.distributed")
    distributed.get_device_name = lambda: "cuda"

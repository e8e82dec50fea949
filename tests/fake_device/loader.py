"""A fake accelerator: a device of torch that computes on the CPU as a GPU does, behind its host.

``load()`` compiles it, registers it as ``torch.fakegpu`` and returns that module. A stream is a
thread, a kernel is the CPU's in a stream, and the host cannot read the memory of a device. So a
missing wait shows as wrong bits or NaN, and an access from the host ends the process. Knows nothing
of fpipe.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

NAME = "fakegpu"
SOURCES = Path(__file__).parent / "csrc"


def missing() -> str:
    """Why the device cannot be compiled here; "" where it can."""
    if sys.platform != "linux":
        return "the fake device needs memfd_create and mmap of Linux"
    lacking = [tool for tool in (os.environ.get("CXX", "g++"), "ninja") if not shutil.which(tool)]
    return f"the fake device needs {' and '.join(lacking)}" if lacking else ""


def compiled() -> ModuleType:
    """The extension, compiled where there is none yet for this torch and these sources."""
    from torch.utils import cpp_extension

    files = sorted(SOURCES.iterdir())
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    name = f"{NAME}_{torch.__version__}_{digest}".replace(".", "_").replace("+", "_")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fpipe-fake-device"
    cache.mkdir(parents=True, exist_ok=True)
    library = cache / f"{name}.so"
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with its process
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                made = cpp_extension.load(
                    name,
                    [str(file) for file in files if file.suffix == ".cpp"],
                    extra_cflags=["-O1", "-Wall"],
                    build_directory=folder,
                )
                shutil.copy(Path(folder) / f"{name}.so", library)
                return made
    spec = spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load() -> ModuleType:
    """The module ``torch.fakegpu``: registered by the first call of a process."""
    known = getattr(torch, NAME, None)
    if known is not None:
        return known
    torch.utils.rename_privateuse1_backend(NAME)
    from . import module

    module.extension = compiled()
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return module


def register_backend(name: str = "fakeccl", faults: str = "", link: float = 0.0) -> None:
    """A backend of torch.distributed for tensors of the device, with the faults that it shall have:
    no-avg, no-max, max-is-sum, no-scatter, no-tags, ordered (one order for both directions of a
    pair), drops (keeps no tensor of a collective). It takes coalesced calls with "coalescing".
    ``link`` are the seconds that a message takes.
    """
    device = load()

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        return device.extension.backend(inner, faults, link)

    dist.Backend.register_backend(name, create, devices=[NAME])

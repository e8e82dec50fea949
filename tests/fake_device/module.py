"""``torch.fakegpu``: the functions that torch, and programs, ask of the module of a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .loader import NAME

#: The other half, in C++; set by ``load``.
extension: Any = None


# ---- devices ----
def is_available() -> bool:
    """Whether there is a device."""
    return device_count() > 0


def is_initialized() -> bool:
    """Whether the device is in use."""
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    """Called by torch before the first tensor; torch 2.11 synchronizes only where it is there."""


def device_count() -> int:
    """The number of devices, of the variable FAKE_DEVICES."""
    return extension.device_count()


def current_device() -> int:
    """The index of the current device."""
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    """Make a device the current one."""
    torch.accelerator.set_device_index(_index(device))


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes of autocast."""
    return [torch.float16, torch.bfloat16]


def _index(device: Any) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


class _Properties(NamedTuple):
    uuid: str


def get_device_properties(device: Any = None) -> _Properties:
    """The number of a device: one for all processes, as they would share it."""
    return _Properties(f"GPU-{_index(device)}")


# ---- random numbers ----
def _generator(device: Any) -> torch.Generator:
    return extension.default_generator(_index(device))


def get_rng_state(device: Any = NAME) -> torch.Tensor:
    """The state of the generator of a device."""
    return _generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: Any = NAME) -> None:
    """Set the state of the generator of a device."""
    _generator(device).set_state(state)


def initial_seed() -> int:
    """The seed of the generator of the current device."""
    return _generator(None).initial_seed()


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    _generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for device in range(device_count()):
        _generator(device).manual_seed(seed)


# ---- streams and memory ----
def synchronize(device: Any = None) -> None:
    """Wait for all streams of a device; raise what a kernel raised."""
    torch.accelerator.synchronize(_index(device))


def current_stream(device: Any = None) -> torch.Stream:
    """The stream into which kernels are put."""
    return torch.accelerator.current_stream(_index(device))


def memory_allocated(device: Any = None) -> int:
    """The bytes of live tensors of a device."""
    return _allocated(device, "current")


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes of live tensors of a device since the last reset."""
    return _allocated(device, "peak")


def reset_peak_memory_stats(device: Any = None) -> None:
    """Start to count the peak anew."""
    torch.accelerator.reset_peak_memory_stats(_index(device))


def _allocated(device: Any, what: str) -> int:
    return torch.accelerator.memory_stats(_index(device))[f"allocated_bytes.all.{what}"]


class device:  # noqa: N801
    """The current device, inside of a ``with``."""

    def __init__(self, device: Any):
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = current_device()
        set_device(self.index)

    def __exit__(self, *_: object) -> None:
        set_device(self.before)


# ---- graphs ----
class CUDAGraph:  # fpipe knows the names of the classes of torch's devices
    """Work of a thread that is recorded once, and started again as a whole."""

    def __init__(self) -> None:
        self.recorded = extension.Graph()

    def replay(self) -> None:
        """Start it."""
        self.recorded.replay()


@contextmanager
def graph(recording: CUDAGraph) -> Iterator[None]:
    """Record what this thread starts; none of it runs."""
    recording.recorded.begin()
    try:
        yield
    finally:
        recording.recorded.end()


# ---- faults on purpose ----
def set_delays(seed: int = -1, share: float = 0.2, most: int = 200) -> None:
    """From here on each stream pauses before some of its tasks, up to ``most`` microseconds; the
    same for the same seed. -1: no pauses.
    """
    extension.set_delays(seed, share, most)


def host_waits() -> int:
    """How often the host has waited for a stream, an event or a device."""
    return extension.host_waits()


def tasks_run(device: Any = None) -> int:
    """How many tasks the streams of a device have run."""
    return extension.tasks_run(_index(device))


def sleep(seconds: float, device: Any = None) -> None:
    """Keep the current stream busy."""
    extension.sleep(_index(device), seconds)

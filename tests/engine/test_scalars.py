"""Scalars through Python have torch's bits; and a process that fpipe starts keeps the memory that
it frees.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

import fpipe
from fpipe.collectives.codec import to_bytes
from fpipe.collectives.wire import wire_format
from fpipe.engine.parts import added
from fpipe.tree import Spec

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
#: any bits that are a float32: subnormal, infinite and no numbers among them
SINGLE = st.integers(0, 2**32 - 1).map(lambda bits: struct.unpack("=f", struct.pack("=I", bits))[0])


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    numbers=st.lists(SINGLE, min_size=1, max_size=9),
    weight=st.none() | st.sampled_from([1.0, 1 / 3, 0.125, 1e-40]),
)
def test_added_as_torch_adds_them(dtype: torch.dtype, numbers: list[float], weight: float | None):
    values = [torch.tensor(number).to(dtype) for number in numbers]
    wanted = values[0] if weight is None else values[0] * weight
    for value in values[1:]:
        wanted = wanted + (value if weight is None else value * weight)
    found = added(values, weight)
    assert found.dtype is dtype and found.shape == ()
    assert torch.equal(found, wanted) or (found.isnan() and wanted.isnan())


@given(numbers=st.lists(SINGLE, min_size=1, max_size=4), dtype=st.sampled_from(DTYPES))
def test_there_and_back_in_a_message(numbers: list[float], dtype: torch.dtype):
    values = tuple(torch.tensor(number).to(dtype) for number in numbers)
    form = wire_format(tuple(map(Spec.of, values)))
    found = form.unpack([buffer.clone() for buffer in form.pack(values, 0, 1)])
    assert [value.dtype for value in found] == [value.dtype for value in values]
    assert [to_bytes(value) for value in found] == [to_bytes(value) for value in values]


def test_scalars_stay_on_the_cpu_whatever_the_default_device_is():
    values = [torch.tensor(1.0), torch.tensor(2.0)]
    with torch.device("meta"):
        assert added(values, 0.5).item() == 1.5


def test_a_lazy_minus_is_sent_as_what_it_means():
    lazy = torch.tensor(2.0 - 3.0j).conj().imag
    assert lazy.is_neg()
    assert wire_format((Spec.of(lazy),)).pack((lazy,), 0, 1)[0].view(torch.float32) == 3.0


def faults() -> int:
    """Page faults of five steps that allocate and free 120 MiB, after two such steps."""
    import resource

    libc, size = ctypes.CDLL(None), 24 << 20
    libc.malloc.restype = ctypes.c_void_p

    def step() -> None:
        for pointer in [ctypes.c_void_p(libc.malloc(size)) for _ in range(5)]:
            libc.memset(pointer, 1, size)
            libc.free(pointer)

    before = 0
    for number in range(7):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt if number == 2 else before
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.skipif(
    "MALLOC" in str(os.environ.keys()).upper(), reason="memory is ruled by the environment"
)
def test_processes_that_are_launched_keep_what_they_free():
    kept, given_back = (
        fpipe.launch(faults, ranks=1, env=env)[0] for env in ({}, {"MALLOC_ARENA_MAX": "8"})
    )
    assert kept < 1_000 < given_back, "one page has some KiB"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.skipif(
    "MALLOC" in str(os.environ.keys()).upper(), reason="memory is ruled by the environment"
)
@pytest.mark.long
def test_a_process_group_that_init_starts_keeps_what_its_rank_frees():
    """As under torchrun, whose processes are started with glibc as it comes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    code = (
        "import fpipe, test_scalars; before = test_scalars.faults(); fpipe.init(); "
        "print(before, test_scalars.faults())"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env, "PYTHONPATH": paths},
        capture_output=True,
        check=True,
    )
    given_back, kept = map(int, done.stdout.split())
    assert kept < 1_000 < given_back

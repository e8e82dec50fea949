"""The library works without what is built on it: pictures, search, training and other people's
trainers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fpipe

ROOT = Path(fpipe.__file__).resolve().parent.parent
#: Tests of the library that use neither products nor interop.
CORE = (
    "tests/lowering/test_builder.py",
    "tests/lowering/test_slots.py",
)
PLAIN = """
import sys, torch, fpipe
layer = lambda p, x: torch.tanh(x @ p)
pipe = fpipe.pipeline([layer] * 4, "ZBV", loss=torch.sum, microbatches=4, group=fpipe.local(2))
loss, grads = fpipe.value_and_grad(pipe)([torch.eye(3)] * 4, torch.ones(8, 3))
parts = {name.split(".")[1] for name in sys.modules if name.startswith("fpipe.")}
print(len(grads), *sorted(parts))
try:
    pipe.schedule(4).simulate().draw()
except fpipe.errors.UnsupportedError as error:
    print(error)
"""


@pytest.fixture
def core(tmp_path: Path) -> Path:
    """A folder with the library alone."""
    shutil.copytree(
        ROOT / "fpipe",
        tmp_path / "fpipe",
        ignore=shutil.ignore_patterns("products", "interop"),
    )
    return tmp_path


@pytest.mark.long
def test_tests_of_the_core_pass_without_products(core: Path):
    shutil.copytree(ROOT / "tests", core / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", core)
    env = {**os.environ, "PYTHONPATH": str(core)}
    command = [sys.executable, "-m", "pytest", "-qx", *CORE]
    done = subprocess.run(
        command, cwd=core, env=env, capture_output=True, text=True, check=False, timeout=115
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_core_works_without_products(core: Path):
    env = {**os.environ, "PYTHONPATH": str(core)}
    plain = subprocess.run(
        [sys.executable, "-c", PLAIN],
        cwd=core,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded, message = plain.stdout.splitlines()
    assert loaded.startswith("4 ")
    assert "products" not in loaded.split() and "interop" not in loaded.split()
    assert "has no fpipe/products/pictures" in message

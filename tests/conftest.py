"""What every test shares: one thread per process, repeatable hypothesis runs, golden files, a word where no GPU is."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: small tensors, and tests run side by side

hypothesis.settings.register_profile("house", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("house")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs an accelerator where there is none, without importing torch for the rest."""
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.accelerator.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="no accelerator on this machine"))


# ---- golden files ---------------------------------------------------------------------------------------------------
def pytest_addoption(parser: pytest.Parser) -> None:
    """The one flag that rewrites golden files."""
    parser.addoption("--update-golden", action="store_true", help="write what is made over the files it is held to")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden", default=False))


@pytest.fixture
def golden(update_golden: bool) -> Callable[..., None]:
    """Hold what was made to a file of the repository, or write it there."""

    def hold(path: Path, made: str, update: bool = update_golden) -> None:
        kept = path.read_text(encoding="utf-8") if path.exists() else ""
        if kept == made:
            return
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made, encoding="utf-8")
            return
        lines = difflib.unified_diff(kept.splitlines(), made.splitlines(), "kept", "made", lineterm="", n=1)
        told = "\n".join(line[:160] for line in islice(lines, 30))
        pytest.fail(f"{path.name} is not what is made now; if that is meant: make golden\n{told}", pytrace=False)

    return hold

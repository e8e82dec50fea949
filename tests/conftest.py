"""What every test shares: one thread per process, repeatable hypothesis runs, and a word where a GPU is missing."""

from __future__ import annotations

import os

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

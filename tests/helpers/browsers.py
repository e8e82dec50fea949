"""A browser for tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for all tests of a file: the one of the machine, or playwright's."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_api.sync_playwright() as p:
        path = path or (
            p.chromium.executable_path if Path(p.chromium.executable_path).exists() else None
        )
        if path is None:
            pytest.skip("no chromium on this machine")
        found = p.chromium.launch(executable_path=path, args=FLAGS.split())
        yield found
        found.close()

"""Ranks of a pipeline in Ray Train, on a real Ray of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import doc_pages

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.xdist_group("ray"),
]  # warnings are Ray's own


@pytest.fixture(autouse=True)
def _cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000)
    yield
    ray.shutdown()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_ranks_meet_as_the_docs_say():
    """``fit`` raises what a rank raises."""
    doc_pages.run(doc_pages.ROOT / "docs" / "howto" / "ray.md")

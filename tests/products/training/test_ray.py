"""Ranks of a pipeline in Ray Train, on a real Ray of this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_example_of_a_cluster_has_the_losses_of_one_process():
    import ray

    def losses(file: str) -> list[str]:
        address = ray.get_runtime_context().gcs_address
        done = subprocess.run(
            [sys.executable, f"examples/{file}", "--ranks", "2", "--steps", "2"],
            cwd=doc_pages.ROOT,
            env={**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(doc_pages.ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return sorted(set(re.findall(r"step \d loss [\d.]+", done.stdout)))

    found = losses("cluster/ray_train.py")
    assert len(found) == 2 and found == losses("train.py")

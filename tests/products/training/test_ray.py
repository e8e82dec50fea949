"""``fpipe.launch(on="ray")`` on a real Ray of this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from fpipe import launch
from fpipe.errors import LaunchError
from fpipe.products.training import ray as _ray
from fpipe.products.training.ray import _adjacent, _environments

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.xdist_group("ray"),
]  # warnings are Ray's own


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        num_cpus=2,
        resources={"XPU": 1},
        include_dashboard=False,
        object_store_memory=80_000_000,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


class _UserError(Exception):
    pass


def _meet(how: str) -> None:
    if os.environ["RANK"] == "1":
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise _UserError("boo")
    time.sleep(60)


def test_ranks_meet_and_results_come_by_rank_as_the_docs_say():
    import doc_pages  # not at the top: an actor imports this file without tests/helpers on its path

    doc_pages.run(doc_pages.ROOT / "docs" / "howto" / "ray.md")


@pytest.mark.parametrize(
    ("how", "raised", "message"),
    [
        ("raise", _UserError, "boo"),
        pytest.param("kill", LaunchError, "rank 1 ended by", marks=pytest.mark.long),
    ],
)
def test_first_failure_is_raised_and_the_rest_ended(
    how: str, raised: type[Exception], message: str
):
    begin = time.monotonic()
    with pytest.raises(raised, match=message) as caught:
        launch(_meet, how, ranks=2, on="ray:CPU", timeout=55)
    assert time.monotonic() - begin < 40
    if how == "raise":
        cause = str(caught.value.__cause__)
        assert "on rank 1:" in cause
        assert 'raise _UserError("boo")' in cause


def test_late_ranks_are_ended():
    with pytest.raises(LaunchError, match=r"ranks \[0\] did not finish within timeout=1 seconds"):
        launch(time.sleep, 60, ranks=1, on="ray:CPU", timeout=1)


def test_what_the_cluster_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_ray, "_RELEASE", 0.0)
    with pytest.raises(
        LaunchError, match="ranks=2 need 2 CPU, 2 XPU and the Ray cluster has 2 CPU, 1 XPU"
    ):
        launch(
            os.getpid, ranks=2, on="ray", timeout=1
        )  # the cluster has an XPU, which is the default


def test_ranks_of_a_node_are_neighbours():
    class Store:
        host, port = "10.0.0.1", 7

    nodes = ["b", "a", "b", "a", "a"]
    assert _adjacent(nodes) == [0, 2, 1, 3, 4]
    envs = _environments([nodes[index] for index in _adjacent(nodes)], Store, {"A": "1"})
    assert [env["LOCAL_RANK"] for env in envs] == ["0", "1", "0", "1", "2"]
    assert [env["LOCAL_WORLD_SIZE"] for env in envs] == ["2", "2", "3", "3", "3"]
    assert {
        (env["MASTER_ADDR"], env["MASTER_PORT"], env["WORLD_SIZE"], env["A"]) for env in envs
    } == {("10.0.0.1", "7", "5", "1")}

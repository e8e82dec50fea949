# SPDX-License-Identifier: Apache-2.0
"""``fpipe.launch(..., on="ray")``: one actor of a Ray cluster for each rank.

A placement group reserves a bundle for each rank, all or none; ranks of one node are adjacent. Ray
is imported when it is used. Knows nothing of the function.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from ...errors import LaunchError
from .outcome import Report, call, collect, environment, results, store

ACCELERATORS = ("GPU", "NPU", "XPU", "HPU")  #: resources of Ray, in order of preference
_RESERVATION = 60.0  #: seconds to wait for free resources, which a growing cluster needs
#: Seconds to wait at least: Ray releases the resources of an earlier run with a delay.
_RELEASE = 5.0


def launch(
    fn: Callable[[], object],
    ranks: int,
    timeout: float | None,
    env: dict[str, str],
    resource: str | None,
) -> list[Any]:
    """See ``fpipe.launch``. This process holds the store, so it must be on the cluster's
    network.
    """
    ray = _ray()
    if not ray.is_initialized():
        ray.init()
    bundle = {"CPU": 1.0, resource or _accelerator(ray.cluster_resources()): 1.0}
    group = ray.util.placement_group([bundle] * ranks, strategy="PACK")
    actors: list[Any] = []
    try:
        patience = _RESERVATION if timeout is None else max(timeout, _RELEASE)
        if not group.wait(min(patience, _RESERVATION)):
            raise LaunchError(_insufficient(ranks, bundle, ray.cluster_resources()))
        actors = [_actor(ray, group, index, bundle) for index in range(ranks)]
        nodes = ray.get([actor.node.remote() for actor in actors])
        actors = [actors[index] for index in _adjacent(nodes)]
        tcp_store = store(ray.util.get_node_ip_address())
        envs = _environments(sorted(nodes, key=nodes.index), tcp_store, env)
        sent = ray.put(fn)  # once, not once for each rank
        refs = [actor.run.remote(sent, env) for actor, env in zip(actors, envs, strict=True)]
        reports = collect(
            {ref: partial(_read, ray, ref) for ref in refs},
            lambda left, seconds: ray.wait(left, timeout=seconds)[0],
            timeout,
        )
        return results(reports, ranks, timeout)
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)


def _ray() -> Any:
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise LaunchError(
            f"on='ray' needs Ray ({error}); pip install '.[ray]' in a checkout of fpipe"
        ) from error
    if import_module("ray.util.client").ray.is_connected():
        raise LaunchError(
            "this process is a client outside the Ray cluster; submit the script as a job of the "
            "cluster"
        )
    return ray


def _accelerator(resources: dict[str, float]) -> str:
    """The accelerator of a cluster, or CPU.

    >>> _accelerator({"CPU": 8.0, "NPU": 2.0}), _accelerator({"CPU": 8.0})
    ('NPU', 'CPU')
    """
    return next((name for name in ACCELERATORS if resources.get(name, 0) > 0), "CPU")


def _insufficient(ranks: int, bundle: dict[str, float], has: dict[str, float]) -> str:
    wanted = ", ".join(f"{count * ranks:g} {name}" for name, count in bundle.items())
    there = ", ".join(f"{has.get(name, 0):g} {name}" for name in bundle)
    return (
        f"ranks={ranks} need {wanted} and the Ray cluster has {there}, or they are taken; start "
        "fewer ranks, wait for the jobs that run there, or name the resource of each rank, "
        "as in on='ray:CPU'"
    )


def _actor(ray: Any, group: Any, index: int, bundle: dict[str, float]) -> Any:
    where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=index
    )
    rank = ray.remote(_Rank).options(
        num_cpus=1,
        num_gpus=bundle.get("GPU", 0),
        resources={name: n for name, n in bundle.items() if name not in ("CPU", "GPU")},
        max_restarts=0,
        scheduling_strategy=where,
    )
    return rank.remote()


class _Rank:
    """One rank, in a process of Ray, which makes only its own accelerator visible."""

    def node(self) -> str:
        return import_module("ray").get_runtime_context().get_node_id()

    def run(self, fn: Callable[[], object], env: dict[str, str]) -> bytes:
        # Classes of the user's script are pickled by value, since that script is not imported here.
        dumps = import_module("ray.cloudpickle").dumps
        os.environ.update(env)
        return call(fn, int(env["RANK"]), dumps)


def _adjacent(nodes: Sequence[str]) -> list[int]:
    """The order in which ranks of one node are adjacent.

    >>> _adjacent(["a", "b", "a"])
    [0, 2, 1]
    """
    return sorted(range(len(nodes)), key=lambda index: nodes.index(nodes[index]))


def _environments(
    nodes: Sequence[str], tcp_store: Any, more: dict[str, str]
) -> list[dict[str, str]]:
    """The environment of each rank; local ranks count from 0 on each node."""
    return [
        environment(rank, len(nodes), tcp_store)
        | {"LOCAL_RANK": str(nodes[:rank].count(node)), "LOCAL_WORLD_SIZE": str(nodes.count(node))}
        | more
        for rank, node in enumerate(nodes)
    ]


def _read(ray: Any, ref: Any) -> Report:
    try:
        return pickle.loads(ray.get(ref))
    except ray.exceptions.RayActorError as error:
        return Report(how=f"the death of its actor ({str(error).strip().splitlines()[0]})")
    except ray.exceptions.RayError as error:
        return Report(text=str(error))

"""Checkpoints of trees whose containers are the user's classes, registered as pytree nodes."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import fpipe
from common import same
from fpipe.errors import CheckpointError

FOREIGN = object()


@optree.dataclasses.dataclass(namespace="fpipe")
class Linear:
    """Parameters with a constant."""

    w: Tensor
    b: Tensor
    power: float = optree.dataclasses.field(pytree_node=False, default=1.0)


class Pair:
    """A class whose entries have numbers."""

    def __init__(self, first: Any, second: Any):
        self.parts = (first, second)


def register() -> None:
    flatten = lambda pair: (pair.parts, None, (0, 1))
    optree.register_pytree_node(Pair, flatten, lambda _, parts: Pair(*parts), namespace="fpipe")


register()


def stage(p: Pair, x: Tensor) -> Tensor:
    inner = p.parts[0]
    return torch.tanh(x @ inner.w + inner.b) ** inner.power * p.parts[1]["scale"][0]


def pipeline(ranks: int = 2) -> Any:
    stages = [fpipe.Stage(stage, name=name) for name in "ab"]
    return fpipe.pipeline(stages, loss=torch.mean, microbatches=2, group=fpipe.local(ranks))


def weights(seed: int = 0) -> list[Pair]:
    torch.manual_seed(seed)
    return [
        Pair(Linear(torch.randn(3, 3), torch.randn(3), power), {"scale": deque([torch.randn(1)])})
        for power in (1.0, 3.0)
    ]


def step(pipe: Any, tx: Any, params: Any, state: Any) -> Any:
    grads = fpipe.grad(pipe)(params, torch.ones(4, 3))
    updates, state = tx.update(grads, state, params)
    return fpipe.apply_updates(params, updates), state


def comparable(tree: Any) -> Any:
    leaves, spec = optree.tree_flatten(tree, namespace="fpipe")
    return leaves, str(spec)


@pytest.mark.parametrize("like", [False, True])
def test_classes_come_back(tmp_path: Path, like: bool):
    pipe, tx, params = pipeline(), fpipe.adamw(0.1), weights()
    params, state = step(pipe, tx, params, tx.init(params))
    fpipe.save(tmp_path / "c", pipe, params=params, state=state)
    names = [name for name, _ in fpipe.stream(pipe, params)]
    assert names == ["a.0.w", "a.0.b", "a.1.scale.0", "b.0.w", "b.0.b", "b.1.scale.0"]
    got = fpipe.load(
        tmp_path / "c", pipeline(1), "params", "state", like=weights(1) if like else None
    )
    assert same(comparable(got), comparable((params, state))) and got[0][1].parts[0].power == 3.0
    after, want = step(pipeline(1), tx, *got), step(pipe, tx, params, state)
    assert same(comparable(after), comparable(want))


def test_a_class_that_is_not_registered_is_named(tmp_path: Path):
    fpipe.save(tmp_path / "c", pipeline(), params=weights())
    optree.unregister_pytree_node(Pair, namespace="fpipe")
    try:
        with pytest.raises(
            CheckpointError,
            match=r"a \S*test_classes\.Pair, which is not registered as a pytree node",
        ):
            fpipe.load(tmp_path / "c", pipeline(), "params")
    finally:
        register()


def test_a_constant_that_no_checkpoint_holds_is_named(tmp_path: Path):
    params = weights()
    params[1].parts[0].power = FOREIGN  # type: ignore[assignment]
    with pytest.raises(
        CheckpointError, match=r"a constant of Linear,\S* is of type builtins.object"
    ):
        fpipe.save(tmp_path / "c", pipeline(), params=params)

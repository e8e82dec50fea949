"""New sizes: the interfaces of all stages are expected, confirmed in one message, and exchanged
where they differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from fpipe.testing import run
from sample import also

Fn = Callable[[Any, Any], Any]


def layer(p: Tensor, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p)


def twice_and_one(p: Tensor, x: Tensor) -> Tensor:
    return torch.cat([x, x[:, :1], x * p.sum()], 1)


def halved(p: Tensor, x: Tensor) -> Tensor:
    return x[:, : x.shape[1] // 2] * p.sum()


def bounded(p: Tensor, x: Tensor) -> Tensor:
    return x[:, : min(x.shape[1], 10)] * p.sum()


def unused_output(p: Tensor, x: Tensor) -> dict[str, Tensor]:
    return {"y": x @ p, "unused": (x * p.sum()).sqrt()}


def of_dict(p: Tensor, x: dict[str, Tensor]) -> Tensor:
    return x["y"] @ p


def branch(p: Tensor, x: Tensor) -> Tensor:
    return x @ p if x.shape[1] > 6 else torch.cat([x, x @ p], 2).sum(2, keepdim=True)


def squared(y: Tensor) -> Tensor:
    return y.square().mean()


#: Stages, and the numbers of gathers from the third length on where the expectation holds.
MODELS: dict[str, list[Fn]] = {
    "same": [layer, layer],
    "other size": [layer, twice_and_one],
    "half": [halved, layer],
    "bounded": [bounded, layer],
    "unused output": [unused_output, of_dict],
    "branch": [layer, branch],
}
LENGTHS = (4, 6, 8, 9, 14, 12)


def steps(group: Any, stages: list[Fn], lengths: tuple[int, ...]) -> list[tuple[int, Tensor, Any]]:
    """For each length: how often all ranks exchanged something, the loss and the gradients."""
    count, gather = [0], group.gather_objects

    def counted(value: Any) -> list[Any]:
        count[0] += 1
        return gather(value)

    group.gather_objects = counted
    pipe = fpipe.pipeline(stages, "1F1B", loss=squared, microbatches=2, group=group)
    params, found = pipe.place([torch.eye(3), torch.eye(3) / 2]), []
    for length in lengths:
        before = count[0]
        x = torch.arange(2.0 * length * 3).reshape(2, length, 3) / 50
        loss, grads = fpipe.value_and_grad(pipe)(params, x)
        found.append((count[0] - before, loss, grads))
    return found


@pytest.mark.parametrize(
    "name", ["other size", "unused output", "branch", *also("same", "half", "bounded")]
)
def test_new_lengths_are_those_of_autograd(name: str):
    found = run(lambda group: steps(group, MODELS[name], LENGTHS), ranks=2)
    for number, length in enumerate(LENGTHS):
        params = [torch.eye(3).requires_grad_(), (torch.eye(3) / 2).requires_grad_()]
        x = torch.arange(2.0 * length * 3).reshape(2, length, 3) / 50
        total = sum(
            squared(MODELS[name][1](params[1], MODELS[name][0](params[0], part))) / 2
            for part in x.chunk(2)
        )
        total.backward()  # type: ignore[union-attr]
        for rank in (0, 1):
            torch.testing.assert_close(found[rank][number][1], total)
            torch.testing.assert_close(found[rank][number][2][rank], params[rank].grad)


@pytest.mark.parametrize("name", ["same", "other size", "unused output"])
def test_a_new_length_costs_one_message(name: str):
    gathers = [
        each for each, _, _ in run(lambda group: steps(group, MODELS[name], LENGTHS), ranks=2)[0]
    ]
    assert min(gathers[:2]) > 2
    assert gathers[-3:] == [1, 1, 1]


def test_a_wrong_expectation_costs_an_exchange():
    gathers = [
        each
        for each, _, _ in run(
            lambda group: steps(group, MODELS["bounded"], (4, 6, 8, 12)), ranks=2
        )[0]
    ]
    assert gathers[2] == 1
    assert gathers[3] > 1, "10 rows of 12, where 4, 6 and 8 were all"


def test_one_rank_with_another_length_is_named():
    def fn(group: Any) -> None:
        steps(group, MODELS["same"], (4, 6, 8, 9 + group.here[0]))

    with pytest.raises(fpipe.errors.MismatchError, match="the shape of x"):
        run(fn, ranks=2)

# ruff: noqa: RUF012
"""One rank differs from the others: every rank raises MismatchError that names the difference, cold and warm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fpipe
from fpipe.testing import outcomes


def layer(p: Tensor, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p)


def other_layer(p: Tensor, x: Tensor) -> Tensor:
    return x + torch.sin(x @ p)


def squared(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def absolute(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).abs().mean()


def counted(target: Tensor) -> Tensor:
    return (target > 0).sum() + 1


def all_counted(target: Tensor) -> Tensor:
    return (target > -9).sum() + 1


class Kind(NamedTuple):
    """How one rank differs: options of its pipeline, arguments of its call, or another call."""

    name: str  # a word of the message
    options: dict[str, Any] = {}
    base: dict[str, Any] = {}  # options of every rank
    call: dict[str, Any] = {}
    rows: int = 8
    dtype: torch.dtype = torch.float32
    kind: str = "grad"
    parts: list[int] | None = None
    around: Callable[[], Any] = contextlib.nullcontext
    argnums: Any = 0


KINDS = {
    "loss": Kind("loss", {"loss": absolute}),
    "stage function": Kind("stage", {"stages": [layer, other_layer]}),
    "schedule": Kind("schedule", {"schedule": "GPipe"}),
    "reduction": Kind("reduction", {"reduction": "sum"}),
    "weighted function": Kind(
        "weighted", {"reduction": fpipe.weighted(all_counted)}, {"reduction": fpipe.weighted(counted)}
    ),
    "pipeline seed": Kind("seed", {"seed": 2}, {"seed": 1}),
    "call seed": Kind("seed", call={"seed": 5}, base={"seed": 1}),
    "loss scale": Kind("loss_scale", call={"loss_scale": 8.0}),
    "has_aux": Kind("has_aux", call={"has_aux": True}),
    "argnums": Kind("argnums", argnums=(0, 1)),
    "forward": Kind("forward", kind="forward"),
    "microbatches": Kind("microbatches", {"microbatches": 2}),
    "rows": Kind("shape", rows=16),
    "dtype": Kind("dtype|shape", dtype=torch.float64),
    "microbatch shapes": Kind("microbatch", parts=[1, 3, 2, 2]),
    "accumulate": Kind("accumulat", {"accumulate": torch.float64}),
    "tied": Kind("tied", {"tied": [("0", "1")]}),
    "frozen": Kind("frozen", {"frozen": ["0"]}),
    "engine": Kind("engine", {"engine": "eager"}),
    "overlap": Kind("overlap", {"overlap": "sequential"}),
    "autocast": Kind("autocast", around=lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "debug": Kind("debug", around=fpipe.debug),
    "outputs": Kind("outputs", {"outputs": "everywhere"}, {"loss": None}, kind="forward"),
    "each": Kind("each", {}, {"loss": None}, call={"each": lambda m, y: m}, kind="forward"),
    "compile": Kind("compile", {"compile": "aot_eager"}),
}


def pipeline(group: Any, **options: Any) -> fpipe.Pipeline:
    chosen = {"stages": [layer, layer], "schedule": "1F1B", "loss": squared, "microbatches": 4} | options
    return fpipe.pipeline(chosen.pop("stages"), chosen.pop("schedule"), group=group, **chosen)


def call(pipe: fpipe.Pipeline, kind: Kind | None, base: Kind) -> None:
    rows, dtype = (kind.rows, kind.dtype) if kind else (8, torch.float32)
    x: Any = torch.linspace(-1, 1, rows * 4, dtype=dtype).view(rows, 4)
    if kind is not None and kind.parts:
        x = fpipe.Microbatches(list(torch.split(x, kind.parts)))
    params = pipe.place([torch.eye(4, dtype=dtype)] * 2)
    how = kind.kind if kind else "forward" if base.base.get("loss", 0) is None else "grad"
    more = dict(kind.call) if kind else {}
    with (kind.around if kind else contextlib.nullcontext)():
        if base.base.get("loss", 0) is None:
            pipe(params, x, **more)
        elif how == "forward":
            pipe(params, x, x)
        else:
            has_aux = more.pop("has_aux", False)
            fpipe.value_and_grad(pipe, kind.argnums if kind else 0, has_aux=has_aux)(params, x, x, **more)


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("name", KINDS)
def test_one_rank_differs(name: str, warm: bool):
    kind = KINDS[name]

    def work(group: Any) -> None:
        usual = pipeline(group, **kind.base)
        odd = pipeline(group, **(kind.base | kind.options)) if kind.options else usual
        for _ in range(2 if warm else 0):
            call(usual, None, kind)
        if group.rank == 1:
            call(odd, kind, kind)
        else:
            call(usual, None, kind)

    ended = outcomes(work, 2)
    assert [type(outcome.error).__name__ for outcome in ended] == ["MismatchError"] * 2
    for outcome in ended:
        assert outcome.error is not None
        assert (
            outcome.match(kind.name)
            if hasattr(outcome, "match")
            else any(word in str(outcome.error) for word in kind.name.split("|"))
        )


def test_pipelines_called_in_another_order_on_one_rank():
    def work(group: Any) -> None:
        first, second = pipeline(group), pipeline(group, stages=[other_layer, other_layer])
        pair = (first, second) if group.rank == 0 else (second, first)
        for _ in range(2):
            call(first, None, KINDS["loss"])
            call(second, None, KINDS["loss"])
        for pipe in pair:
            call(pipe, None, KINDS["loss"])

    ended = outcomes(work, 2)
    assert [type(outcome.error).__name__ for outcome in ended] == ["MismatchError"] * 2


def test_a_rank_that_skips_a_call():
    def work(group: Any) -> None:
        pipe = pipeline(group)
        for step in range(4):
            if group.rank == 1 and step == 2:
                continue
            call(pipe, None, KINDS["loss"])

    ended = outcomes(work, 2)
    assert all(isinstance(outcome.error, fpipe.FpipeError) or outcome.rank == 1 for outcome in ended)
    assert any(isinstance(outcome.error, fpipe.FpipeError) for outcome in ended)

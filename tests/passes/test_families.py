"""One trace for all sizes: the programs of a new size equal those of a trace of that size, and
plain autograd.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fpipe
from fpipe.programs import tracing
from fpipe.programs.internals import PLAIN
from fpipe.stage import Stage
from sample import mostly
from sized_stages import FUNCTIONS, WIDTH, attention, inputs, leaves, masked, parameters, rotary


def by_autograd(
    fn: Callable[..., Any], params: Any, x: torch.Tensor, side: Any, dy: list[torch.Tensor]
) -> Any:
    leaves, spec = torch.utils._pytree.tree_flatten(params)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    x = x.clone().requires_grad_()
    y = torch.utils._pytree.tree_leaves(
        fn(torch.utils._pytree.tree_unflatten(leaves, spec), x, **side)
    )
    grads = torch.autograd.grad(y, [x, *leaves], dy, allow_unused=True)
    return y, [
        torch.zeros_like(t) if g is None else g for t, g in zip([x, *leaves], grads, strict=True)
    ]


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was traced: "plain" or "symbolic", one entry for each trace. A symbolic trace that
    succeeds is followed by a plain one of its sizes, with which it is compared.
    """
    found: list[str] = []
    joint = tracing.joint_graph

    def counted(stage: Any, signature: Any, outputs: Any, sizes: Any) -> Any:
        found.append("plain" if sizes is PLAIN else "symbolic")
        return joint(stage, signature, outputs, sizes)

    monkeypatch.setattr(tracing, "joint_graph", counted)
    return found


#: They have the operations of the others.
ALIKE = ("rotary", "statistics", "pieces", "gathered")


@pytest.mark.parametrize(
    "fn",
    mostly(FUNCTIONS, lambda fn: fn.__name__ in ALIKE),
    ids=lambda fn: fn.__name__,
)
def test_programs_of_other_sizes_equal_a_trace_of_that_size(
    fn: Callable[..., Any], traces: list[str], long: bool
):
    torch.manual_seed(0)
    draw = random.Random(fn.__name__)
    params = parameters()
    stage = lambda p, x, **side: fn(p, x, **side)
    if fn is masked:
        stage = lambda p, x, *, keep: fn(p, x, keep=keep)
    for number in range(12 if long else 3):
        x, side = inputs(fn, draw.randint(2, 5), draw.randint(2, 33))
        programs = fpipe.trace(stage, params, x, **side)
        alone = fpipe.trace(lambda p, x, **side: fn(p, x, **side), params, x, **side)
        assert programs.outputs == alone.outputs
        assert (programs.saved_bytes, programs.kept_bytes) == (alone.saved_bytes, alone.kept_bytes)
        y, saved = programs.forward(params, x, **side)
        dy = [torch.randn_like(leaf) for leaf in leaves(y)]
        cotangents = torch.utils._pytree.tree_unflatten(dy, torch.utils._pytree.tree_flatten(y)[1])
        expected, grads = by_autograd(fn, params, x, side, dy)
        both = programs.backward(saved, cotangents)
        dx, kept = programs.backward_input(saved, cotangents)
        for found in (both, (dx, programs.backward_weight(kept))):
            assert all(map(torch.equal, leaves(*found), grads)), f"size {number}: {tuple(x.shape)}"
        assert all(map(torch.equal, leaves(y), expected))
    assert traces.count("symbolic") == 1, "one trace serves all sizes"


def test_instances_share_their_code():
    stage = lambda p, x: attention(p, x)
    params = parameters()
    runs = [
        fpipe.trace(stage, params, torch.randn(2, length, WIDTH)).f.run for length in (5, 6, 7, 8)
    ]
    assert runs[1].__code__ is runs[2].__code__ is runs[3].__code__
    assert runs[0].__code__ is not runs[1].__code__


def test_a_branch_on_a_size_is_a_condition(traces: list[str]):
    def stage(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ p["out"]) if x.shape[1] > 10 else torch.relu(x @ p["out"])

    params = parameters()
    for length in (4, 5, 6, 20, 21, 7, 30):
        x = torch.randn(2, length, WIDTH)
        assert torch.equal(fpipe.trace(stage, params, x).forward(params, x)[0], stage(params, x))
    assert traces == ["plain", "symbolic", "plain", "symbolic", "plain"]


def test_sizes_0_and_1_have_traces_of_their_own(traces: list[str]):
    stage = lambda p, x: x.sum(1, keepdim=True) @ p["out"] + x
    params = parameters()
    for length in (4, 5, 1, 0, 6):
        x = torch.randn(2, length, WIDTH)
        assert torch.equal(fpipe.trace(stage, params, x).forward(params, x)[0], stage(params, x))
    assert traces == ["plain", "symbolic", "plain", "plain", "plain"]


def test_a_size_as_a_python_number_is_traced_for_each_with_one_warning(traces: list[str]):
    def stage(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ p["out"] * float(bytes(int(x.shape[1])).__len__())

    params = parameters()

    def run() -> None:
        for length in (4, 5, 6):
            x = torch.randn(2, length, WIDTH)
            assert torch.equal(
                fpipe.trace(stage, params, x).forward(params, x)[0], stage(params, x)
            )

    with pytest.warns(UserWarning, match=r"traced for every new size.*fpipe\.pad") as warned:
        run()
    assert len(warned) == 1
    assert "test_families.py" in str(warned[0].message), "it names the line"
    assert traces.count("plain") == 3


def test_a_size_that_is_one_after_a_shift_does_not_end_the_search(traces: list[str]):
    """Warnings are errors here: a stage that is traced for every size warns."""

    def shifted(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x[:, :-1] * p).flatten(0, 1).cumsum(0)

    for length in (9, 2, 12, 7, 5):
        fpipe.trace(shifted, torch.ones(3), torch.ones(2, length, 3))
    assert traces == ["plain", "symbolic", "symbolic", "plain", "symbolic", "plain"], (
        "at 2 two attempts fail, at 12 one succeeds"
    )


def test_dynamic_false_traces_every_size_and_named_axes_are_symbols_at_once(traces: list[str]):
    params = parameters()
    fixed = Stage(lambda p, x: attention(p, x), dynamic=False)
    for length in (4, 5, 6):
        fpipe.trace(fixed, params, torch.randn(2, length, WIDTH))
    assert traces == ["plain"] * 3
    traces.clear()
    for dynamic in (True, (1,), {"x": (1,)}):
        named = Stage(lambda p, x: attention(p, x), dynamic=dynamic)
        for length in (4, 5, 6):
            fpipe.trace(named, params, torch.randn(2, length, WIDTH))
        assert traces == ["symbolic", "plain"]
        traces.clear()


def test_dynamic_false_uses_no_symbolic_trace_of_another_stage(traces: list[str]):
    fn, params = lambda p, x: attention(p, x), parameters()
    for dynamic in (True, False):
        for length in (4, 5, 6):
            fpipe.trace(Stage(fn, dynamic=dynamic), params, torch.randn(2, length, WIDTH))
    assert traces == ["symbolic", *["plain"] * 4]


def test_memory_layouts_of_inputs_may_differ_from_contiguous():
    stage = lambda p, x: (x @ p["out"], x * 2)
    params = parameters()
    for length in (4, 5, 6, 7):
        for x in (
            torch.randn(length, 3, WIDTH).transpose(0, 1),
            torch.randn(3, 9, WIDTH)[:, :length],
        ):
            y, _ = fpipe.trace(stage, params, x).forward(params, x)
            expected, _ = fpipe.trace(lambda p, x: stage(p, x), params, x).forward(params, x)
            assert all(map(torch.equal, y, expected))
            assert [t.stride() for t in y] == [t.stride() for t in expected]


def test_inputs_with_gaps_in_memory_share_one_trace(traces: list[str]):
    """``tokens[:, :-1]``: the strides vary with the length, and are no product of sizes of the
    input.
    """
    params = {"out": torch.randn(WIDTH, WIDTH)}
    fn = lambda p, x: torch.tanh(x @ p["out"]).cumsum(1)
    for length in (4, 6, 9, 5):
        x = torch.randn(2, length + 1, WIDTH)[:, :-1]
        programs = fpipe.trace(fn, params, x)
        y, saved = programs.forward(params, x)
        live, leaf = {"out": params["out"].clone().requires_grad_()}, x.detach().requires_grad_()
        out = fn(live, leaf)  # of a leaf with gaps: without a gradient torch takes another product
        assert torch.equal(y, out)
        out.sum().backward()
        dx, dparams = programs.backward(saved, torch.ones_like(y))
        assert torch.equal(dx, leaf.grad) and torch.equal(dparams["out"], live["out"].grad)
    assert traces == ["plain", "symbolic", "plain"]


def test_two_axes_that_were_equal_by_chance_may_part(traces: list[str]):
    stage = lambda p, x: attention(p, x)
    params = parameters()
    for batch, length in ((2, 2), (3, 3), (4, 4), (3, 5), (6, 2), (7, 9)):
        x = torch.randn(batch, length, WIDTH)
        assert torch.equal(fpipe.trace(stage, params, x).forward(params, x)[0], stage(params, x))
    assert traces == ["plain", "symbolic", "plain", "symbolic", "plain"]


def test_a_function_for_other_widths_is_not_traced_with_symbols(traces: list[str]):
    stage = lambda p, x: torch.tanh(x @ p)
    for width in (3, 4, 5):
        fpipe.trace(stage, torch.randn(width, width), torch.randn(2, width))
    assert traces == ["plain"] * 3


def test_a_pipeline_of_mixed_lengths_equals_autograd(traces: list[str]):
    torch.manual_seed(0)
    params = [parameters() for _ in range(4)]
    blocks = [lambda p, x: attention(p, x), lambda p, x: rotary(p, x)] * 2
    loss = lambda y, target: ((y - target) ** 2).sum()
    pipe = fpipe.pipeline(blocks, "ZBV", loss=loss, microbatches=4, group=fpipe.local(2))
    step = fpipe.value_and_grad(pipe)

    def check(lengths: list[int]) -> None:
        xs = [torch.randn(2, length, WIDTH) for length in lengths]
        ys = [torch.randn(2, length, WIDTH) for length in lengths]
        value, grads = step(params, fpipe.Microbatches(xs), fpipe.Microbatches(ys))
        flat, spec = torch.utils._pytree.tree_flatten(params)
        flat = [leaf.clone().requires_grad_() for leaf in flat]
        total = torch.zeros(())
        for x, y in zip(xs, ys, strict=True):
            for block, p in zip(
                blocks, torch.utils._pytree.tree_unflatten(flat, spec), strict=True
            ):
                x = block(p, x)
            total = total + loss(x, y) / 4
        expected = torch.autograd.grad(total, flat, allow_unused=True)
        torch.testing.assert_close(value, total)
        for found, wanted in zip(leaves(grads), expected, strict=True):
            torch.testing.assert_close(found, torch.zeros_like(found) if wanted is None else wanted)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for lengths in ([4, 4, 4, 4], [5, 5, 5, 5], [6, 7, 8, 9], [3, 10, 11, 2]):
            check(lengths)
    assert traces.count("symbolic") == 4, (
        "the first stage, two functions of later stages, and the loss"
    )

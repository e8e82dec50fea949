"""A block is traced once for all its calls, and the programs are those without blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fpipe
from fpipe import Programs, tree
from sample import also

WIDTH = 4


def residual(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.layer_norm(x, (WIDTH,), p["scale"]).view(*x.shape[:-1], 2, -1).transpose(-2, -3)
    a = F.scaled_dot_product_attention(h, h, h).transpose(-2, -3).reshape(x.shape)
    return x + torch.tanh(a @ p["w"])


def dropping(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + F.dropout(x @ p["w"], 0.5)


def in_place(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = x @ p["w"]
    y[:, ::2] *= 2
    return y.add_(1)


def recomputing(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + fpipe.remat(lambda p, x: torch.tanh(x @ p["w"]).exp())(p, x)


def transforming(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(lambda row: torch.tanh(row @ p["w"]))(x) + torch.func.grad(
        lambda x: x.sin().sum()
    )(x)


def capturing(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, CONSTANT.expand_as(x)], -1)[..., ::2] @ p["w"]


def routed(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, x @ p["w"]) * x.detach().abs().amax(-1, keepdim=True)


CONSTANT = torch.linspace(0, 1, WIDTH)
LAYERS = [dropping, in_place, recomputing, capturing, *also(residual, transforming, routed)]


def repeated(layer: Callable[..., Any]) -> Callable[..., Any]:
    def stage(params: Any, x: Any) -> Any:
        for p in params:
            x = layer(p, x)
        return x

    return stage


def parameters(count: int) -> list[Any]:
    return [{"w": torch.randn(WIDTH, WIDTH), "scale": torch.rand(WIDTH)} for _ in range(count)]


def traced(fn: Callable[..., Any], params: Any, x: Any) -> Programs:
    return fpipe.trace(fn, params, x)


def facts(programs: Programs) -> Any:
    """All that a plan reads of programs, without names."""
    order = {name: n for n, name in enumerate(programs.memory)}
    held = [(order[h.root], h.nbytes, h.given) for h in programs.memory.values()]
    letters = (programs.f, programs.b, programs.i, programs.w)
    operations = [[one.target for one in program.operations] for program in letters]
    sizes = [(len(program.inputs), len(program.outputs)) for program in letters]
    fresh = [name in programs.fresh for name in programs.dps]
    return (
        operations,
        sizes,
        held,
        fresh,
        programs.saved_bytes,
        programs.kept_bytes,
        programs.outputs,
    )


def results(programs: Programs, params: Any, x: Any) -> list[Any]:
    torch.manual_seed(0)
    y, saved = programs.forward(params, x)
    dy = tree.tree_map(lambda t: torch.linspace(-1, 1, t.numel()).view(t.shape), y)
    both = programs.backward(saved, dy)
    dx, kept = programs.backward_input(saved, dy)
    return tree.leaves((y, both, dx, programs.backward_weight(kept)))


def assert_same(
    plain: Callable[..., Any],
    blocks: Callable[..., Any],
    params: Any,
    x: Any,
    in_order: bool = True,
) -> None:
    one, other = traced(plain, params, x), traced(blocks, params, x)
    for fact, wanted in zip(facts(other), facts(one), strict=True) if in_order else ():
        assert fact == wanted
    assert all(map(torch.equal, results(one, params, x), results(other, params, x)))


@pytest.mark.parametrize("layer", LAYERS, ids=lambda f: f.__name__)
def test_programs_are_those_without_blocks(layer: Callable[..., Any]):
    x = torch.randn(2, 3, WIDTH)
    # Writes are removed block by block, which leaves out a view between two blocks.
    assert_same(
        repeated(layer),
        repeated(fpipe.block(layer)),
        parameters(3),
        x,
        in_order=layer is not in_place,
    )


def test_a_block_of_several_inputs_and_outputs():
    def layer(p: Any, x: Any, factor: float, *, other: Any) -> Any:
        a, b = x["a"], x["b"]
        return {"a": (a @ p["w"]) * factor, "b": b, "c": [a.sum(), 3], "n": torch.arange(2)}, other

    def stage(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(params: Any, x: Any) -> Any:
            y = {"a": x, "b": x.sin()}
            for n, p in enumerate(params):
                y, other = fn(p, y, float(n // 2), other=(x, None))
                y["b"] = y["b"] + other[0]
            return y["a"], y["b"], y["c"][0]

        return run

    assert_same(stage(layer), stage(fpipe.block(layer)), parameters(4), torch.randn(3, WIDTH))


def test_a_block_inside_a_recomputed_part_and_inside_a_block():
    inner = fpipe.block(residual)
    outer = fpipe.block(lambda p, x: inner(p, x) * 2)
    plain = lambda p, x: residual(p, x) * 2
    for wrap in (fpipe.remat, lambda fn: fn):
        assert_same(
            repeated(wrap(plain)), repeated(wrap(outer)), parameters(3), torch.randn(2, 3, WIDTH)
        )


def test_an_equal_call_does_not_run_the_function_again():
    calls: list[int] = []

    def counted(p: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(len(p))
        return residual(p, x)

    layer = fpipe.block(counted)
    traced(repeated(layer), parameters(6), torch.randn(2, 3, WIDTH))
    assert (
        len(calls) == 4
    )  # on an argument and on what was computed: for the shapes of its results, and for its trace
    traced(repeated(layer), parameters(9), torch.randn(2, 3, WIDTH))
    assert len(calls) == 4
    traced(repeated(layer), parameters(2), torch.randn(2, 5, WIDTH))
    assert len(calls) > 4


def test_gradients_that_would_be_added_in_another_order_are_traced_without_blocks():
    """A block uses x three times, and the residual once more: (residual + a) + b is not residual +
    (a + b).
    """

    def attention(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax((x @ p["w"]) @ (x * p["scale"]).transpose(-1, -2), -1) @ x

    plain = repeated(lambda p, x: x + attention(p, x))
    block = fpipe.block(attention)
    assert_same(
        plain, repeated(lambda p, x: x + block(p, x)), parameters(3), torch.randn(2, 3, WIDTH)
    )


def test_a_parameter_of_two_calls():
    """Its two gradients are added behind the operations of a block, and not among them."""
    twice = lambda fn: lambda p, x: fn(p, fn(p, x))
    x = torch.randn(2, 3, WIDTH)
    assert_same(twice(residual), twice(fpipe.block(residual)), parameters(1)[0], x, in_order=False)


def test_another_value_in_the_closure_is_another_block():
    factor = 1.0

    def scaled(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x * factor

    block = fpipe.block(scaled)

    def stage(p: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal factor
        y = x
        for number in (2.0, 3.0, 5.0):
            factor = number
            y = block(p, y)
        return y

    y, _ = traced(stage, torch.ones(1), torch.ones(1, 2)).forward(torch.ones(1), torch.ones(1, 2))
    assert y.tolist() == [[30.0, 30.0]]


def test_a_block_that_is_differentiated_twice():
    def penalty(fn: Callable[..., Any]) -> Callable[..., Any]:
        def stage(p: Any, x: torch.Tensor) -> torch.Tensor:
            y = fn(p, x)
            (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True) if x.requires_grad else (x,)
            return y + dx

        return stage

    assert_same(
        penalty(routed), penalty(fpipe.block(routed)), parameters(1)[0], torch.randn(2, 3, WIDTH)
    )


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_block_under_autocast(where: str, cached: bool):
    """Without a cache, too: its graph is traced with its backward, where autocast is off."""

    def twice(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x + ((x @ p["w"]) @ p["w"]).float()

    def cast(p: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            return twice(p, x)

    layer = twice if where == "outside" else cast
    outside = where == "outside"
    with torch.autocast("cpu", torch.bfloat16, enabled=outside, cache_enabled=cached):
        assert_same(
            repeated(layer), repeated(fpipe.block(layer)), parameters(3), torch.randn(3, WIDTH)
        )


def test_a_block_that_writes_into_its_argument_runs_without_block():
    def writes(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) @ p["w"]

    stage = lambda fn: lambda p, x: fn(p[0], x * 1) + fn(p[1], x * 3)
    assert_same(stage(writes), stage(fpipe.block(writes)), parameters(2), torch.randn(3, WIDTH))


def test_an_error_inside_a_block_is_that_of_the_function():
    def wrong(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ p["w"].sum(0)[None]

    for fn in (wrong, fpipe.block(wrong)):
        with pytest.raises(fpipe.errors.ActionError, match="reduction dim"):
            traced(repeated(fn), parameters(1), torch.ones(2, WIDTH))


def test_sizes_that_vary():
    stage = repeated(fpipe.block(residual))
    params = parameters(3)
    for length in (3, 5, 7, 4):
        x = torch.randn(2, length, WIDTH)
        one, other = traced(repeated(residual), params, x), traced(stage, params, x)
        assert facts(one)[0] == facts(other)[0] and facts(one)[2:6] == facts(other)[2:6]
        assert all(map(torch.equal, results(one, params, x), results(other, params, x)))


def test_a_pipeline_equals_autograd():
    params, x = [parameters(3), parameters(3)], torch.randn(4, 3, WIDTH)
    stages = [repeated(fpipe.block(residual))] * 2
    pipe = fpipe.pipeline(
        stages, "1F1B", loss=lambda y: y.square().mean(), microbatches=2, group=fpipe.local(2)
    )
    _, grads = fpipe.value_and_grad(pipe)(params, x)
    live = tree.tree_map(lambda t: t.clone().requires_grad_(), params)
    for part in x.chunk(2):
        (stages[1](live[1], stages[0](live[0], part)).square().mean() / 2).backward()
    wanted = [leaf.grad for leaf in tree.leaves(live)]
    assert all(map(torch.equal, tree.leaves(grads), wanted))


# ---- layers of modules ----
class Layer(nn.Module):
    """A layer that counts its calls, and whose forward may use its number."""

    calls = 0

    def __init__(self, number: int, scales: Any = None):
        super().__init__()
        self.linear, self.layer_idx, self.scales = nn.Linear(WIDTH, WIDTH), number, scales

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Layer.calls += 1
        y = x + torch.tanh(self.linear(x))
        return y if self.scales is None else y * self.scales[self.layer_idx]


SCALES = [2, 3, 5, 7, 11, 13]


@pytest.mark.parametrize(
    "scales",
    [None, SCALES, torch.tensor(SCALES), dict(enumerate(SCALES))],
    ids=["none", "list", "tensor", "dict"],
)
def test_equal_layers_of_a_module_are_traced_once(scales: Any):
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Sequential(*(Layer(n, scales) for n in range(6)))
    )
    x = torch.randn(2, WIDTH)
    stages, params = fpipe.from_module(model)
    Layer.calls = 0
    y, _ = traced(stages[0], params[0], x).forward(params[0], x)
    assert Layer.calls <= 4 if scales is None else Layer.calls >= 12
    assert torch.equal(y, model(x))


def test_layers_that_differ_are_not_one_block():
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(p)) for p in (0.0, 0.9, 0.5))
    )
    model[2].eval()
    model.get_submodule("1.0").register_forward_hook(lambda module, args, y: y.mul(2))
    stages, params = fpipe.from_module(model)
    programs = traced(stages[0], params[0], torch.ones(3, WIDTH))
    torch.manual_seed(0)
    y, _ = programs.forward(params[0], torch.ones(3, WIDTH))
    torch.manual_seed(0)
    assert torch.equal(y, model(torch.ones(3, WIDTH)))


class Table(nn.Module):
    """A layer that holds a tensor in a dict of its own."""

    def __init__(self, value: float):
        super().__init__()
        self.linear, self.table = nn.Linear(WIDTH, WIDTH), {"scale": torch.tensor(value)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.table["scale"]


def test_layers_that_hold_other_tensors_are_not_one_block():
    model = nn.Sequential(nn.Sequential(Table(2.0), Table(3.0)))
    x = torch.randn(2, WIDTH)
    stages, params = fpipe.from_module(model)
    y, _ = traced(stages[0], params[0], x).forward(params[0], x)
    assert torch.equal(y, model(x))

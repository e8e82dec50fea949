"""Gradients are those of autograd on the whole model, where torch treats special values in a
special way.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fpipe

ENGINES = ["trace", "eager"]
X = torch.linspace(-1, 1, 12).view(4, 3)


def step(
    stages: list[Any],
    params: list[Any],
    loss: Any,
    engine: Any,
    microbatches: int = 1,
    **options: Any,
) -> Any:
    pipe = fpipe.pipeline(
        stages,
        loss=loss,
        microbatches=microbatches,
        group=fpipe.local(len(stages)),
        engine=engine,
        **options,
    )
    return fpipe.value_and_grad(pipe, (0, 1))(params, X, X)


def plainly(
    stages: list[Any], params: list[Tensor], loss: Any, microbatches: int = 1
) -> tuple[list[Tensor], Tensor]:
    """The gradients of autograd on the whole model."""
    live = [p.clone().requires_grad_() for p in params]
    xs = [rows.clone().requires_grad_() for rows in X.chunk(microbatches)]
    for x, target in zip(xs, X.chunk(microbatches), strict=True):
        y: Any = x
        for stage, p in zip(stages, live, strict=True):
            y = stage(p, y)
        (loss(y, target) / microbatches).backward()
    grads, dxs = (
        [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves] for leaves in (live, xs)
    )
    return grads, torch.cat(dxs)


@pytest.mark.parametrize("engine", ENGINES)
def test_autocast_with_a_weight_used_twice_has_the_gradients_of_autograd(engine: Any):
    """Autocast casts a weight once for both uses, so its gradient is summed in bfloat16 before it
    is cast back.
    """
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(3, 3, generator=generator)

    def stage(p: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ((x @ p).tanh() @ p).float()

    loss = lambda y, t: (y - t).square().mean()
    _, (grads, dx) = step([stage], [w], loss, engine)
    expected, dx_expected = plainly([stage], [w], loss)
    assert torch.equal(grads[0], expected[0])
    assert torch.equal(dx, dx_expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_autocast_casts_a_value_of_another_stage_at_every_use(engine: Any):
    """Autocast keeps its casts of leaves alone: x of the second stage is none, that of the first
    stage is one.
    """
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(3, 3, generator=generator) for _ in range(2)]

    def stage(p: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (torch.mm(x, p).tanh() + torch.mm(x, p.T).sigmoid()).float()

    loss = lambda y, t: (y - t).square().mean()
    _, (grads, dx) = step([stage] * 2, weights, loss, engine)
    expected, dx_expected = plainly([stage] * 2, weights, loss)
    assert all(map(torch.equal, grads, expected))
    assert torch.equal(dx, dx_expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_accumulate_leaves_complex_parameters_complex(engine: Any):
    stage = lambda p, x: x * p["used"]
    params = [{"used": torch.ones(3), "unused": torch.ones(2, dtype=torch.complex64)}]
    _, (grads, _) = step([stage], params, lambda y, t: y.sum(), engine, accumulate=torch.float32)
    assert grads[0]["unused"].dtype.is_complex


@pytest.mark.parametrize("engine", ENGINES)
def test_conjugates_between_local_ranks_are_what_they_are_between_processes(engine: Any):
    """A message over a backend carries resolved numbers; between local ranks the lazy conjugate bit
    was handed on.
    """
    seen: list[bool] = []

    def second(p: Tensor, x: Tensor) -> Tensor:
        return torch.view_as_real(x.resolve_conj()).sum(-1) * p

    def each(number: int, y: Tensor) -> None:
        seen.append(y.is_conj())

    first = lambda p, x: torch.complex(x * p, x).conj()
    pipe = fpipe.pipeline([first], microbatches=1, group=fpipe.local(1), engine=engine)
    pipe([torch.ones(3)], X, each=each)
    assert seen == [False]
    stages = [first, second]
    value, _ = step(stages, [torch.ones(3)] * 2, lambda y, t: y.sum(), engine)
    assert math.isclose(float(value), 0.0, abs_tol=1e-5)


def rooted(p: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The second output has an infinite derivative where x is negative."""
    return x * p, torch.where(x > 0, (x * p).sqrt(), 0.0)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_output_that_the_loss_ignores_has_no_cotangent(engine: Any):
    _, (grads, dx) = step(
        [rooted], [torch.ones(3)], lambda y, t: (y[0] - t).square().mean(), engine
    )
    assert grads[0].isfinite().all()
    assert dx.isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_output_that_the_next_stage_drops_has_no_cotangent(engine: Any):
    stages = [rooted, lambda p, x: x[0] * p]
    _, (grads, dx) = step(stages, [torch.ones(3)] * 2, lambda y, t: (y - t).square().mean(), engine)
    assert grads[0].isfinite().all()
    assert dx.isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_output_that_the_next_stage_drops_has_no_cotangent_without_a_loss(engine: Any):
    stages = [rooted, lambda p, x: x[0] * p]
    pipe = fpipe.pipeline(stages, microbatches=2, group=fpipe.local(2), engine=engine)
    y, pullback = fpipe.vjp(pipe, [torch.ones(3)] * 2, X)
    (grads, dx) = pullback(torch.ones_like(y))
    assert grads[0].isfinite().all()
    assert dx.isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_output_that_the_next_stage_detaches_has_no_cotangent(engine: Any):
    stages = [rooted, lambda p, x: x[0] * p + x[1].detach()]
    _, (grads, dx) = step(stages, [torch.ones(3)] * 2, lambda y, t: (y - t).square().mean(), engine)
    assert grads[0].isfinite().all()
    assert dx.isfinite().all()


class Two(torch.autograd.Function):
    """Two outputs; the gradient of one that nothing uses is None."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        a, b = grads
        return a * 2 if b is None else a * 2 + b * 1000


@pytest.mark.parametrize("engine", ENGINES)
def test_a_custom_function_sees_none_for_an_unused_output(engine: Any):
    stage = lambda p, x: Two.apply(x * p)
    _, (grads, _) = step([stage], [torch.ones(3)], lambda y, t: y[0].sum(), engine)
    assert torch.equal(grads[0], 2 * X.sum(0))


def looking(small: bool) -> Any:
    """Expands its output where the data is small, or where it is not; the plan knows invented data
    alone.
    """
    return lambda p, x: (
        (x * p).mean(1, keepdim=True).expand_as(x) if (x.sum().item() < 0.5) == small else x * p
    )


@pytest.mark.parametrize("schedule", ["GPipe", "ZBH1"])
@pytest.mark.parametrize(
    ("engine", "first"),
    [
        *((engine, lambda p, x: (x * p).mean(1, keepdim=True).expand_as(x)) for engine in ENGINES),
        *((engine, lambda p, x: p.expand(x.shape[0], 3)) for engine in ENGINES),
        ("eager", looking(True)),
        ("eager", looking(False)),
    ],
)
def test_expanded_outputs(engine: Any, first: Any, schedule: str):
    """The output may be expanded in one run and not in another, or be the memory of a parameter."""
    stages, params, loss = (
        [first, lambda p, x: x * p],
        [torch.ones(3)] * 2,
        lambda y, t: (y - t).square().mean(),
    )
    pipe = fpipe.pipeline(
        stages, schedule, loss=loss, microbatches=2, group=fpipe.local(2), engine=engine
    )
    _, (grads, dx) = fpipe.value_and_grad(pipe, (0, 1))(params, X, X)
    expected, dx_expected = plainly(stages, params, loss, 2)
    assert all(map(torch.equal, grads, expected))
    assert torch.equal(dx, dx_expected)


@pytest.mark.parametrize("schedule", ["GPipe", "ZBH1"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_non_reentrant_checkpoint_under_inference_mode(engine: Any, schedule: str):
    """The checkpoint records its region in the backward, which inference mode would prevent."""
    stages = [lambda p, x: checkpoint(lambda t: (t * p).tanh(), x, use_reentrant=False)] * 2
    params, loss = [torch.ones(3)] * 2, lambda y, t: (y - t).square().mean()
    pipe = fpipe.pipeline(
        stages, schedule, loss=loss, microbatches=2, group=fpipe.local(2), engine=engine
    )
    with torch.inference_mode():
        _, (grads, dx) = fpipe.value_and_grad(pipe, (0, 1))(params, X, X)
    expected, dx_expected = plainly(stages, params, loss, 2)
    assert all(map(torch.equal, grads, expected))
    assert torch.equal(dx, dx_expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_checkpoint_inside_functional_call_is_refused(engine: Any):
    """It computes again in the backward, when the module has its own parameters back: gradients
    would be wrong.
    """
    inner = nn.Linear(3, 3)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda t: self.inner(t).tanh(), x, use_reentrant=False)

    module = Checkpointed()
    params = {name: leaf.detach() * 2 for name, leaf in module.named_parameters()}
    call = lambda p, x: torch.func.functional_call(module, p, (x,))
    with pytest.raises(fpipe.errors.TraceError, match=r"put fpipe\.remat around"):
        step([call], [params], lambda y, t: y.sum(), engine)


def chain(p: Tensor, x: Any) -> Any:
    """Reads the first leaf and passes the second on as it is."""
    return (x[0] * p, x[1])


@pytest.mark.covering
@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1", "Interleaved1F1B"])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_output_that_later_stages_pass_on_and_nothing_uses_has_no_cotangent(
    engine: Any, schedule: str
):
    """The leaf passes through two stages; one of its two readers uses it, the other detaches it."""
    drop = lambda p, x: x[0] * p + x[1].detach()
    both = lambda p, x: ((x[0] * p, x[1] * p), x[0] * 2)
    stages = [
        rooted,
        chain,
        chain,
        lambda p, x: both(p, x)[0],
        chain,
        drop,
        chain_of_one,
        chain_of_one,
    ]
    params = [torch.ones(3) + n / 8 for n in range(8)]
    ranks = 4 if schedule == "Interleaved1F1B" else 8
    loss = lambda y, t: (y - t).square().mean()
    pipe = fpipe.pipeline(
        stages, schedule, loss=loss, microbatches=2, group=fpipe.local(ranks), engine=engine
    )
    _, (grads, dx) = fpipe.value_and_grad(pipe, (0, 1))(params, X, X)
    expected, dx_expected = plainly(stages, params, loss, 2)
    assert all(map(torch.equal, grads, expected))
    assert torch.equal(dx, dx_expected)
    assert "ZERO" not in str(pipe.plan(params, X, X))


def chain_of_one(p: Tensor, x: Tensor) -> Tensor:
    return x * p


@pytest.mark.parametrize("engine", ENGINES)
def test_processes_agree_on_the_outputs_that_have_no_cotangent(engine: Any):
    """Stages of other processes are traced again there; an auxiliary loss keeps its cotangent."""
    drop = lambda p, x: (x[0] * p, x[0] * 2)
    aux = lambda p, x: (x * p, (x * p).sum() / 8)
    first = lambda y: y[0] if isinstance(y, tuple) else y
    stages: list[Any] = [rooted, chain, drop, lambda p, x: first(x) * p]
    params = [torch.ones(3) + n / 8 for n in range(4)]
    loss = lambda y, t: (y - t).square().mean()
    expected, dx_expected = plainly(stages, params, loss, 2)

    def work(group: Any) -> tuple[Any, Any, int]:
        pipe = fpipe.pipeline(stages, "1F1B", loss=loss, microbatches=2, group=group, engine=engine)
        _, (grads, dx) = fpipe.value_and_grad(pipe, (0, 1))(pipe.place(params), X, X)
        return grads, dx, pipe.here[0]

    for grads, dx, stage in fpipe.testing.run(work, ranks=4):
        assert torch.equal(grads[stage], expected[stage])
        assert stage or torch.equal(dx, dx_expected)
    pipe = fpipe.pipeline(
        [fpipe.Stage(aux, aux_loss=True)],
        loss=lambda y: y.detach().sum(),
        group=fpipe.local(1),
        microbatches=1,
        engine=engine,
    )
    assert torch.equal(fpipe.grad(pipe)([torch.ones(3)], X)[0], X.sum(0) / 8)


def test_an_eager_stage_that_reaches_another_input_than_on_fakes_is_refused():
    """The previous stage has no cotangent for it."""
    calls: list[int] = []

    def second(p: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        calls.append(1)
        return x[0] * p if len(calls) == 1 else x[0] * p + x[1]

    pipe = fpipe.pipeline(
        [rooted, second],
        loss=lambda y: y.sum(),
        group=fpipe.local(2),
        microbatches=1,
        engine="eager",
    )
    with pytest.raises(fpipe.FpipeError, match="the gradient of its input 1"):
        fpipe.grad(pipe)([torch.ones(3)] * 2, X)


@pytest.mark.covering
@pytest.mark.parametrize("schedule", ["GPipe", "ZBH1"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: type[nn.Module], engine: Any, schedule: str):
    """On the CPU an LSTM keeps what its backward needs only where autograd records."""
    module = kind(3, 3, num_layers=2, batch_first=True)
    params = {name: leaf.detach().clone() for name, leaf in module.named_parameters()}
    stage = lambda p, x: torch.func.functional_call(module, p, (x[:, None],))[0][:, 0]
    loss = lambda y, t: (y - t).square().mean()
    pipe = fpipe.pipeline(
        [stage] * 2, schedule, loss=loss, microbatches=2, group=fpipe.local(2), engine=engine
    )
    _, grads = fpipe.value_and_grad(pipe)([params] * 2, X, X)
    live = [
        {name: leaf.clone().requires_grad_() for name, leaf in params.items()} for _ in range(2)
    ]
    for x, t in zip(X.chunk(2), X.chunk(2), strict=True):
        (loss(stage(live[1], stage(live[0], x)), t) / 2).backward()
    for found, plain in zip(grads, live, strict=True):
        assert all(
            leaf.grad is not None and torch.equal(found[name], leaf.grad)
            for name, leaf in plain.items()
        )


@pytest.mark.parametrize("schedule", ["GPipe", "ZBH1"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_leaf_that_is_returned_twice_has_the_bits_of_one_tensor(engine: Any, schedule: str):
    """The gradients of its uses are added one after the other, as autograd does, and not leaf by
    leaf.
    """
    twice = lambda p, x: (y := (x * p).sin(), y)
    three = lambda p, x: (x[0] * p + x[1].exp() - x[0].cos() * x[1].tanh(), x[1], x[0])
    last = lambda p, x: x[0] * p + x[1].exp() * x[2].sigmoid() - x[2].sin() + x[1].atan()
    copies = lambda p, x: (x[0].add_(x[1]), x[1])  # both are one tensor
    stages, params = (
        [twice, three, last, twice, copies, lambda p, x: x[0] * p + x[1]],
        [torch.rand(3) for _ in range(6)],
    )
    loss = lambda y, t: (y - t).square().mean()
    pipe = fpipe.pipeline(
        stages[:3], schedule, loss=loss, microbatches=2, group=fpipe.local(3), engine=engine
    )
    _, (grads, dx) = fpipe.value_and_grad(pipe, (0, 1))(params[:3], X, X)
    expected, dx_expected = plainly(stages[:3], params[:3], loss, 2)
    assert all(map(torch.equal, grads, expected))
    assert torch.equal(dx, dx_expected)
    pipe = fpipe.pipeline(stages[3:], schedule, microbatches=1, group=fpipe.local(3), engine=engine)
    y: Any = X
    for stage, p in zip(stages[3:], params[3:], strict=True):
        y = stage(p, y)
    assert torch.equal(pipe(params[3:], X), y)


@pytest.mark.parametrize("engine", ["trace", "eager"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_zeros_without_memory_are_numbers_when_they_are_returned(engine: Any, microbatches: int):
    """The backward of sgn returns zeros that have no memory: no address, and nothing can be added
    to them in place.
    """
    stages = [lambda p, x: x + torch.sgn(p), lambda p, x: torch.sgn(x) * p]
    pipe = fpipe.pipeline(
        stages,
        loss=lambda y: y.sum(),
        reduction="sum",
        microbatches=microbatches,
        group=fpipe.local(2),
        engine=engine,
    )
    _, (grads, dx) = fpipe.value_and_grad(pipe, (0, 1))([torch.ones(3)] * 2, torch.ones(2, 3))
    assert [g.tolist() for g in grads] == [[0.0] * 3, [2.0] * 3] and not dx.any()
    assert all(g.add_(1).data_ptr() for g in (*grads, dx))


def test_a_place_in_the_memory_of_an_argument_is_refused_in_a_trace():
    """The second microbatch begins elsewhere in the same memory: as_strided of the trace read the
    first one again.
    """
    window = lambda p, x: p * x.as_strided((1, 2, 2), (4, 1, 1), x.storage_offset() + 1)
    x, loss = torch.arange(8.0).view(2, 4), lambda y: y.sum()
    pipe = lambda engine: fpipe.pipeline(
        [window], loss=loss, microbatches=2, group=fpipe.local(1), engine=engine
    )
    with pytest.raises(
        fpipe.errors.TraceError, match="as_strided with storage_offset= on an argument"
    ):
        fpipe.value_and_grad(pipe("trace"))([torch.ones(1)], x)
    value, _ = fpipe.value_and_grad(pipe("eager"))([torch.ones(1)], x)
    assert value == (x[:, 1] + 2 * x[:, 2] + x[:, 3]).mean()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_output_in_another_order_of_memory_keeps_it_where_an_axis_has_one_element(engine: Any):
    """Axes of one element have any stride and are no gaps: a copy is added up in another order."""

    def transposed(p: Tensor, x: Tensor) -> Tensor:
        return (x.flatten(0, 1) * p).T.contiguous().T.unflatten(0, x.shape[:2])

    mean = lambda y, t: (y - t).square().mean()
    pipe = fpipe.pipeline(
        [transposed], loss=mean, microbatches=1, group=fpipe.local(1), engine=engine
    )
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        x, t = torch.randn(2, 1, 8, 6, generator=draw)
        assert torch.equal(pipe([torch.tensor(1.3)], x, t), mean(transposed(1.3, x), t))

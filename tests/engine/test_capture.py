"""``pipe.captured()``, with a stand-in for graphs of a device: it runs a step anew, and refuses
what waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fpipe
from fpipe.passes.capture import graphs, steps as capture

WAITS = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.lift_fresh.default"}


class Recording(TorchDispatchMode):
    """Refuses operations that wait for the device, or that read memory of the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in WAITS:
            raise RuntimeError(f"{func} is not permitted while a stream is recorded")
        return func(*args, **(kwargs or {}))


class Recorder:
    """Counts recordings and replays."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, fn: Callable[[], Any]) -> graphs.Recorded[Any]:
        self.recorded += 1
        with Recording():
            results = fn()
        leaves = [leaf for leaf in optree.tree_leaves(results) if isinstance(leaf, Tensor)]
        for leaf in leaves:
            leaf.fill_(float("nan"))  # nothing runs while a graph is recorded

        def replay() -> None:
            self.replayed += 1
            again = (leaf for leaf in optree.tree_leaves(fn()) if isinstance(leaf, Tensor))
            for leaf, new in zip(leaves, again, strict=True):
                leaf.copy_(new)

        return graphs.Recorded(results, replay)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    one = Recorder()
    monkeypatch.setattr(graphs, "recorder", lambda device: one)
    # On a device, a mean of losses needs no number on the host.
    monkeypatch.setattr("fpipe.engine.parts._NARROW", {})
    return one


def layer(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"]) + p["b"]


def square(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean()


def params_of(stages: int = 4) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    return [{"w": torch.randn(3, 3), "b": torch.randn(3)} for _ in range(stages)]


def pipes(schedule: str = "ZBV", **options: Any) -> tuple[Any, Any]:
    """The step with a graph, and without."""
    how: dict[str, Any] = {"loss": square, "microbatches": 4, **options}
    without = fpipe.pipeline([layer] * 4, schedule, group=fpipe.local(2), **how)
    with_graph = without.captured()
    return fpipe.value_and_grad(with_graph), fpipe.value_and_grad(without)


def equal(a: Any, b: Any) -> bool:
    return all(
        torch.equal(x, y) for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True)
    )


@pytest.mark.parametrize("schedule", ["ZBV", "Interleaved1F1B", "DualPipeV"])
def test_bits_of_steps_whose_parameters_are_new_in_each(recorder: Recorder, schedule: str):
    step, plain = pipes(schedule)
    params = params_of()
    before = None
    for number in range(5):
        x, t = torch.randn(8, 3), torch.randn(8, 3)
        value, grads = step(params, x, t)
        assert equal((value, grads), plain(params, x, t))
        assert before is None or equal(*before), "a later step wrote into results of an earlier one"
        before = grads, optree.tree_map(Tensor.clone, grads)
        params = optree.tree_map(lambda p, g: p - 0.1 * g, params, grads)
        assert recorder.recorded == (number > 0)
    assert recorder.replayed == 4


def test_parameters_that_are_written_in_place_are_read_where_they_are(recorder: Recorder):
    step, plain = pipes()
    params = params_of()
    for _ in range(4):
        x, t = torch.randn(8, 3), torch.randn(8, 3)
        value, grads = step(params, x, t)
        assert equal((value, grads), plain(params, x, t))
        optree.tree_map_(lambda p, g: p.sub_(g, alpha=0.1), params, grads)
    (graph,) = fpipe_graphs(step)
    assert recorder.recorded == 1
    assert [fixed is None for fixed in graph.fixed[:8]] == [True] * 8


def fpipe_graphs(step: Any) -> list[capture.Graph]:
    cells = [cell.cell_contents for cell in step.__closure__]
    (pipe,) = (value for value in cells if isinstance(value, fpipe.Pipeline))
    return list(pipe.cache.graphs.values())


def test_parameters_that_move_later_are_copied_from_then_on(recorder: Recorder):
    step, plain = pipes()
    params, x, t = params_of(), torch.randn(8, 3), torch.randn(8, 3)
    for number in range(7):
        if number in (3, 5):
            params = optree.tree_map(Tensor.clone, params)
        assert equal(step(params, x, t), plain(params, x, t))
    assert recorder.recorded == 2


def test_a_signature_has_a_graph_of_its_own_and_few_have_one(recorder: Recorder):
    step, plain = pipes()
    params = params_of()
    for rows in (4, 8, 12, 16, 20, 24):
        x, t = torch.randn(rows, 3), torch.randn(rows, 3)
        for _ in range(3):
            assert equal(step(params, x, t), plain(params, x, t))
    assert recorder.recorded == capture.KEPT


@pytest.mark.parametrize(
    "scales",
    [(2.0, 2.0, 4.0, 4.0), (2, 2, 4, 4), tuple(torch.tensor(float(n)) for n in (8, 16, 32))],
    ids=["float", "int", "tensor"],
)
def test_loss_scales(recorder: Recorder, scales: tuple[Any, ...]):
    step, plain = pipes()
    params, x, t = params_of(), torch.randn(8, 3), torch.randn(8, 3)
    for scale in scales:
        assert equal(step(params, x, t, loss_scale=scale), plain(params, x, t, loss_scale=scale))


def test_gradients_of_the_input_and_a_second_value(recorder: Recorder):
    how = {"loss": lambda y, t: (square(y, t), y.mean()), "tied": [("0.w", "3.w")]}
    group = fpipe.local(2)
    plain = fpipe.pipeline([layer] * 4, microbatches=4, group=group, **how)
    both = [
        fpipe.value_and_grad(
            plain.captured() if captured else plain,
            (0, 1),
            has_aux=True,
        )
        for captured in (True, False)
    ]
    params, x, t = params_of(), torch.randn(8, 3), torch.randn(8, 3)
    params[3]["w"] = params[0]["w"].clone()
    for _ in range(3):
        assert equal(both[0](params, x, t), both[1](params, x, t))
    assert recorder.replayed == 2


def test_threads_take_turns(recorder: Recorder):
    step, plain = pipes()
    params, batches = params_of(), [torch.randn(8, 3) for _ in range(24)]
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda x: step(params, x, x), batches))
    assert all(
        equal(result, plain(params, x, x)) for result, x in zip(results, batches, strict=True)
    )


def dropped(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(layer(p, x), 0.5)


def asked(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return layer(p, x) if x.sum().item() > 1e6 else 2 * layer(p, x)


@pytest.mark.parametrize(
    ("fn", "options", "reason"),
    [
        (dropped, {"seed": 1}, "dropped.* draws random numbers"),
        (asked, {"engine": "eager"}, "asked has engine=.eager., whose Python runs in every step"),
        (layer, {"reduction": fpipe.weighted(lambda t: 1)}, "is not permitted"),
    ],
    ids=["random", "waits", "numbers"],
)
def test_a_step_that_cannot_be_recorded_runs_without_a_graph(
    recorder: Recorder, fn: Any, options: dict[str, Any], reason: str
):
    plain = fpipe.pipeline([fn] * 2, loss=square, microbatches=2, group=fpipe.local(2), **options)
    with_graph, without = map(fpipe.value_and_grad, (plain.captured(), plain))
    params, x, t = params_of(2), torch.randn(4, 3), torch.randn(4, 3)
    with pytest.warns(UserWarning, match=f"captured: steps run without a graph, since .*{reason}"):
        steps = [with_graph(params, x, t) for _ in range(3)]
    assert all(equal(step, without(params, x, t)) for step in steps)
    assert recorder.replayed == 0


def test_each_runs_in_every_step(recorder: Recorder):
    pipe = fpipe.pipeline([layer] * 2, loss=square, microbatches=2, group=fpipe.local(2))
    pipe = pipe.captured()
    step = fpipe.value_and_grad(pipe, each=lambda number, y, loss: number)
    with pytest.warns(UserWarning, match="each= is a function of Python that every step calls"):
        results = [step(params_of(2), torch.ones(4, 3), torch.ones(4, 3))[0][1] for _ in range(3)]
    assert results == [[0, 1]] * 3


def test_a_profile_sees_the_instructions(recorder: Recorder):
    step, _ = pipes()
    args = params_of(), torch.randn(8, 3), torch.randn(8, 3)
    for _ in range(3):
        step(*args)
    profile = fpipe.profile(step)
    profile(*args)
    assert "F" in str(profile)
    with fpipe.debug():
        step(*args)
    assert recorder.replayed == 2


def test_an_error_of_the_first_step_is_raised(recorder: Recorder):
    step, _ = pipes()
    with pytest.raises(fpipe.FpipeError):
        step(params_of(), torch.randn(8, 4), torch.randn(8, 4))


def test_without_a_gpu_it_is_refused():
    with pytest.raises(
        fpipe.errors.StageError, match=r'on it, as fpipe.local\(devices=.*compile="cudagraphs"'
    ):
        fpipe.pipeline([layer] * 2, microbatches=2, group=fpipe.local(2)).captured()


def test_a_plan_has_the_memory_of_the_graph(recorder: Recorder):
    group, params, x = fpipe.local(2), params_of(), torch.randn(8, 3)
    pipe = fpipe.pipeline([layer] * 4, loss=square, microbatches=4, group=group).captured()
    plan = pipe.plan(params, x, x)
    parameters, batch = 4 * (9 + 3) * 4, 8 * 3 * 4
    assert plan.graph == sum(plan.peak.values()) + 2 * parameters + 2 * batch
    assert f"its graph keeps {plan.graph:,} bytes allocated at most" in str(plan)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["ZBV", "1F1B", "DualPipeV"])
def test_on_a_gpu(schedule: str):
    device = torch.accelerator.current_accelerator()
    group = fpipe.local(devices=[f"{device}:0"] * 2)
    pipe = fpipe.pipeline([layer] * 4, schedule, loss=square, microbatches=4, group=group)
    with_graph, plain = map(fpipe.value_and_grad, (pipe.captured(), pipe))
    params = optree.tree_map(lambda p: p.to(device), params_of())
    for _ in range(5):
        x, t = torch.randn(8, 3), torch.randn(8, 3)
        value, grads = with_graph(params, x, t)
        assert equal((value, grads), plain(params, x, t))
        params = optree.tree_map(lambda p, g: p - 0.1 * g, params, grads)
    assert all(isinstance(each, capture.Graph) for each in fpipe_graphs(with_graph))

"""``from_module`` and ``to_module``: an nn.Module cut into pure stages gives what the module
gives.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe import tree
from fpipe.interop.module_function import clone
from fpipe.programs.trace_one import trace
from module_model import CUTS, LanguageModel, batch, cross_entropy, language_model


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


@pytest.mark.covering
@pytest.mark.parametrize(
    ("schedule", "ranks"), [("1F1B", 4), ("ZBV", 2), ("DualPipeV", 2), ("DualPipe", 4)]
)
@pytest.mark.parametrize("masked", [False, True])
def test_pipeline_equals_module(schedule: str, ranks: int, masked: bool):
    model = language_model()
    tokens, targets = batch()
    keep = (tokens > 2).float() if masked else None
    stages, params = fpipe.from_module(model, CUTS, side=["keep"] if masked else [])
    pipe = fpipe.pipeline(
        stages, schedule, loss=cross_entropy, microbatches=2, group=fpipe.local(ranks)
    )
    loss, grads = fpipe.value_and_grad(pipe)(
        params, tokens, targets, **({"keep": keep} if masked else {})
    )

    want = cross_entropy(
        model(tokens, keep), targets
    )  # one microbatch's mean is as good as the other's: equal sizes
    want.backward()
    assert relative(loss, want.detach()) < 1e-6
    named = dict(model.named_parameters())
    seen = set()
    for own in grads:
        for name, grad in own.items():
            seen.add(name)
            assert (grad is None) == (not named[name].requires_grad), name
            assert grad is None or relative(grad, named[name].grad) < 1e-6, name
    assert seen == set(named)
    assert torch.equal(
        grads[0]["embed.weight"], grads[-1]["embed.weight"]
    )  # tied by identity, each copy gets the sum


def test_what_the_stages_carry():
    model = language_model()
    stages, params = fpipe.from_module(model, CUTS, side=["keep"])
    assert [stage.frozen for stage in stages] == [(), (), ("blocks.2.mix.weight",), ("norm.bias",)]
    assert stages[0].ties == stages[3].ties == (("embed.weight", "embed.weight"),)
    assert [stage.sides for stage in stages] == [("keep",), ("keep",), ("keep",), ()]
    assert (
        params[0]["embed.weight"].data_ptr() == model.embed.weight.data_ptr()
    )  # the module's tensors, not copies
    assert not any(p.requires_grad for own in params for p in own.values())
    assert not any(stage.state for stage in stages)


def test_stages_trace_and_leave_the_module_alone():
    model = language_model()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    x: Any = batch()[0]
    for stage, own in zip(*fpipe.from_module(model, CUTS), strict=True):
        x, _ = trace(stage, own, x).forward(own, x)
    assert torch.allclose(x, model(batch()[0]))
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert type(torch.arange(2)) is Tensor
    assert torch.arange.__name__ == "arange"
    assert not hasattr(torch.arange, "__wrapped__")


def test_one_stage_and_nested_cuts():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), nn.ReLU(), nn.Linear(3, 2)
    )
    x = torch.randn(2, 3)
    for cuts in ([], ["0.2"], ["0.1", "0.2", "1", "2"]):
        stages, params = fpipe.from_module(model, cuts)
        y = x
        for stage, own in zip(stages, params, strict=True):
            y = stage(own, y)
        assert len(stages) == len(cuts) + 1
        assert torch.equal(y, model(x))


def test_parameters_shared_inside_one_stage_are_one_leaf():
    layer = nn.Linear(3, 3)
    twice = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(3, 3))
    twice[3].weight = layer.weight
    stages, params = fpipe.from_module(twice)
    assert sorted(params[0]) == ["0.bias", "0.weight", "3.bias"]
    x = torch.ones(2, 3)
    assert torch.equal(stages[0](params[0], x), twice(x))


class Checked(nn.Module):
    """Checks of sizes in the forms that they take: each has one way that only raises."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        if width != 2 or rows < 1:
            message = "wrong size"
            raise ValueError(message)
        if not rows or not width:
            raise ValueError("empty")
        assert rows and width == 2, "empty"
        if width == 2:
            x = self.a(x)
        else:
            raise ValueError("wide")
        return self.last(x, width)

    def last(self, x: Tensor, width: int) -> Tensor:
        if width == 2:
            return self.b(x)
        raise ValueError("wide")


def test_checks_of_sizes_are_no_choices():
    model, x = Checked(), torch.ones(3, 2)
    stages, params = fpipe.from_module(model, ["b"])
    assert torch.equal(stages[1](params[1], stages[0](params[0], x)), model(x))


class ChoiceBeforeCheck(nn.Module):
    """A choice between two computations, followed by a check of the same value."""

    def __init__(self, several: bool):
        super().__init__()
        self.a, self.b, self.several = nn.Linear(2, 2), nn.Linear(2, 2), several

    def forward(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        if rows > 2 and width > 1 if self.several else rows > 2:
            x = self.a(x)
        if rows < 1:
            raise ValueError("empty")
        return self.b(x)


@pytest.mark.parametrize("several", [False, True])
def test_a_choice_is_no_check_of_what_follows(several: bool):
    with pytest.raises(fpipe.errors.StageError, match="a value decides what it computes"):
        fpipe.from_module(ChoiceBeforeCheck(several), ["b"])


# ---- state ----
def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)
    )


def test_running_statistics_are_state():
    model, x = convolutions(), torch.randn(4, 1, 5, 5)
    stages, params = fpipe.from_module(model, ["2"])
    assert [sorted(stage.initial_state or ()) for stage in stages] == [
        ["1.num_batches_tracked", "1.running_mean", "1.running_var"],
        ["4.num_batches_tracked", "4.running_mean", "4.running_var"],
    ]
    moved = stages[0](params[0], stages[0].initial_state, x)[1]
    assert not torch.equal(moved["1.running_mean"], torch.zeros(2))
    assert torch.equal(
        stages[0].initial_state["1.running_mean"], torch.zeros(2)
    )  # what was passed is not changed
    square = lambda y, t: (y - t).square().mean()
    pipe = fpipe.pipeline(stages, "1F1B", loss=square, microbatches=2, group=fpipe.local(2))
    (loss, state), grads = fpipe.value_and_grad(pipe)(params, x, torch.zeros(4, 2, 3, 3))
    want = sum(
        square(model(part), torch.zeros(2, 2, 3, 3)) / 2 for part in x.split(2)
    )  # updates its statistics
    want.backward()
    for name, grad in {**grads[0], **grads[1]}.items():
        assert torch.allclose(grad, model.get_parameter(name).grad, rtol=1e-5, atol=1e-6), name
    assert torch.allclose(loss, want)
    for name, value in {**state[0], **state[1]}.items():
        assert torch.allclose(value, model.get_buffer(name)), name
    fresh = convolutions()
    fpipe.to_module(fresh, params, state)
    assert torch.equal(fresh[1].running_mean, model[1].running_mean)
    assert int(fresh[4].num_batches_tracked) == 2


def test_statistics_are_constants_in_eval():
    model = convolutions().eval()
    stages, params = fpipe.from_module(model, ["2"])
    assert not any(stage.state for stage in stages)
    x = torch.randn(2, 1, 5, 5)
    assert torch.equal(stages[1](params[1], stages[0](params[0], x)), model(x))


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x * self.calls


def test_a_buffer_that_forward_replaces():
    model = nn.Sequential(nn.Linear(2, 2), Counter())
    stages, params = fpipe.from_module(model)
    with pytest.raises(
        fpipe.errors.StageError, match=r"replaces its buffer '1\.calls'.*state=\['1\.calls'\]"
    ):
        stages[0](params[0], torch.ones(1, 2))
    assert int(model[1].calls) == 0  # the module itself was not touched
    stages, params = fpipe.from_module(model, state=["*.calls"])
    _, state = stages[0](params[0], stages[0].initial_state, torch.ones(1, 2))
    assert int(state["1.calls"]) == 1


def test_a_norm_that_runs_in_two_stages_is_refused():
    norm = nn.BatchNorm1d(3)
    with pytest.raises(fpipe.errors.StageError, match="changes in two stages"):
        fpipe.from_module(nn.Sequential(norm, nn.Linear(3, 3), norm), ["1"])


def test_constants_follow_the_parameters():
    """A stage on another device needs its buffers there, also when its first call is a trace."""
    model = language_model()
    stages, params = fpipe.from_module(model, CUTS)
    away = {name: torch.empty_like(p, device="meta") for name, p in params[0].items()}
    trace(stages[0], away, torch.empty(2, 5, dtype=torch.long, device="meta"))
    moved = stages[0].fn.constants_on(torch.device("meta"))["scale"]
    assert type(moved) is Tensor
    assert moved.device.type == "meta"
    assert stages[0].fn.constants_on(torch.device("cpu"))["scale"] is model.scale


def test_hooks_and_shared_modules_survive_cloning():
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    layer.register_forward_hook(lambda m, args, y: y + 1)
    stages, params = fpipe.from_module(model, ["1"])
    x = torch.ones(1, 2)
    assert torch.equal(stages[1](params[1], stages[0](params[0], x)), model(x))
    copy = clone(model)
    assert stages[0].ties == stages[1].ties != ()
    assert copy[0] is copy[2]
    assert copy[0]._forward_hooks is not layer._forward_hooks


# ---- mistakes ----
class Chooser(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.never = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else self.b(x)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            LanguageModel(),
            {"cuts": ["block.1"]},
            "'block.1', which is no submodule of LanguageModel; near names: blocks.1",
        ),
        (
            LanguageModel(),
            {"cuts": ["blocks.2", "blocks.1"]},
            "'blocks.1' after 'blocks.2', but forward runs it first",
        ),
        (LanguageModel(), {"cuts": ["embed"]}, "the first stage would be empty"),
        (LanguageModel(), {"cuts": ["norm", "norm"]}, "names a submodule twice"),
        (LanguageModel(), {"cuts": "norm"}, r"cuts='norm'; give a list"),
        (LanguageModel(), {"cuts": ["blocks"]}, None),  # all blocks begin one stage
        (
            LanguageModel(),
            {"cuts": ["norm"], "side": ["mask"]},
            r"side=\['mask'\] are no arguments.*it has keep",
        ),
        (Chooser(), {"cuts": ["b"]}, "cannot be read as a chain"),
        (
            nn.Sequential(Chooser(), nn.Linear(2, 2)),
            {"cuts": ["0.never"]},
            "cannot be read as a chain",
        ),
        (
            nn.BatchNorm1d(2),
            {"state": ["mean"]},
            "state='mean' matches no buffer; near names: running_mean",
        ),
        (
            nn.ModuleDict({"a": nn.Linear(2, 2)}),
            {},
            "cannot be read as a chain|no arguments|has no forward",
        ),
        (lambda x: x, {}, "takes an nn.Module, not a function"),
    ],
)
def test_mistakes(model: Any, options: dict[str, Any], message: str | None):
    if message is None:
        assert len(fpipe.from_module(model, **options)[0]) == 2
        return
    with pytest.raises(fpipe.errors.StageError, match=message):
        fpipe.from_module(model, **options)


def test_never_called():
    class Idle(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x)

    with pytest.raises(fpipe.errors.StageError, match="'1', but forward never calls it"):
        fpipe.from_module(Idle(nn.Linear(2, 2), nn.Linear(2, 2)), ["1"])


def test_to_module_refuses_what_does_not_fit():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    _, params = fpipe.from_module(model, ["1"])
    assert fpipe.to_module(model, [{}, {"1.bias": torch.ones(2), "1.weight": None}]) is model
    assert model[1].bias.tolist() == [1, 1]
    with pytest.raises(
        fpipe.errors.StageError, match=r"stage 0 hold '5\.bias', which the module does not have"
    ):
        fpipe.to_module(model, [{"5.bias": torch.ones(2)}, {}])
    with pytest.raises(
        fpipe.errors.StageError, match=r"'1\.bias' has shape \[3\], the module's has \[2\]"
    ):
        fpipe.to_module(model, [params[0], {"1.bias": torch.ones(3)}])


# ---- processes ----
class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def _stale(group: Any) -> str:
    model = Tiny()
    stages, params = fpipe.from_module(model, cuts=["layers.2"])
    pipe = fpipe.pipeline(stages, group=group, microbatches=1)
    try:
        fpipe.to_module(model, pipe.place(params))
    except fpipe.FpipeError as error:
        return str(error)
    return ""


def test_to_module_refuses_stages_of_other_ranks():
    messages = fpipe.testing.run(_stale, ranks=2)
    assert all("gather" in message for message in messages), messages


def test_to_module_gathers():
    def work(group: Any) -> bool:
        torch.manual_seed(0)
        model = Tiny()
        stages, params = fpipe.from_module(model, cuts=["layers.2"])
        pipe = fpipe.pipeline(stages, group=group, microbatches=1)
        changed = tree.tree_map(lambda t: t + 1, pipe.place(params))
        before = [p.clone() for p in model.parameters()]
        fpipe.to_module(model, changed, gather=pipe)
        return all(torch.equal(p, q + 1) for p, q in zip(model.parameters(), before, strict=True))

    assert fpipe.testing.run(work, ranks=2) == [True, True]


def test_to_module_gathers_statistics():
    def work(group: Any) -> bool:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
        stages, params = fpipe.from_module(model, cuts=["2"])
        pipe = fpipe.pipeline(stages, group=group, microbatches=1)
        own = stages[0].initial_state if group.rank == 0 else None
        state = [None if own is None else {n: t + 3 for n, t in own.items()}, None]
        fpipe.to_module(model, pipe.place(params), state, gather=pipe)
        return torch.equal(model[1].running_mean, torch.full((2,), 3.0))

    assert fpipe.testing.run(work, ranks=2) == [True, True]


# ---- what other libraries do ----
class Output(dict):
    """A mapping with attributes, as transformers' ModelOutput."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class WithOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Output:
        h = self.a(x)
        return Output(y=self.b(h), hidden=(h,))


def test_a_model_output_keeps_its_class():
    stages, params = fpipe.from_module(model := WithOutput(), cuts=["b"])
    x = torch.randn(4, 2)
    pipe = fpipe.pipeline(stages, microbatches=2, group=fpipe.local(2))
    y = pipe(params, x)
    assert type(y) is Output
    torch.testing.assert_close((y.y, y.hidden[0]), (model(x).y, model(x).hidden[0]))
    pipe = fpipe.pipeline(
        stages, loss=lambda y: y.y.sum() + y.hidden[0].sum(), microbatches=2, group=fpipe.local(2)
    )
    loss, _ = fpipe.value_and_grad(pipe)(params, x)
    torch.testing.assert_close(loss, (model(x).y.sum() + model(x).hidden[0].sum()).detach() / 2)


def test_a_forward_that_cannot_be_read_shows_no_internals():
    with pytest.raises(
        fpipe.errors.StageError,
        match=r"a value decides what it computes, at .*test_modules\.py:\d+",
    ):
        fpipe.from_module(nn.Sequential(Chooser(), nn.Linear(2, 2)), cuts=["0.never"])


class Noted(nn.Module):
    """Keeps a loss of its own as an attribute, as some routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        x = self.b(self.a(x))
        return x, self.a.noted


def decorated(forward: Any) -> Any:
    """As libraries decorate: other arguments, and a look at the keywords."""

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("keep") is not None:
            raise ValueError("keep")
        return forward(self, *args, **kwargs)

    return wrapper


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    @decorated
    def forward(self, x: Tensor, keep: Any = None, *, scale: Tensor, **more: Any) -> Tensor:
        return self.b(self.a(x) * scale)


class ByPosition(Decorated):
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, scale: Tensor, /, keep: Any = None
    ) -> Tensor:
        return self.b(self.a(x) * scale)


class ByName(Decorated):
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *, x: Tensor, scale: Tensor
    ) -> Tensor:
        return self.b(self.a(x) * scale)


@pytest.mark.parametrize("kind", [Decorated, ByPosition, ByName])
def test_a_forward_is_cut_however_it_gets_its_arguments(kind: Any):
    """Of a decorated one torch.fx confused them: 'NoneType' object has no attribute 'get'."""
    model = kind()
    stages, params = fpipe.from_module(model, cuts=["b"])
    x, scale = torch.randn(2, 4, 2)
    y = stages[1](params[1], stages[0](params[0], x, scale=scale))
    assert torch.equal(y, model.b(model.a(x) * scale))


def test_a_forward_of_the_module_itself_is_not_ignored():
    """Stages computed what its class computes."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.forward = lambda input: 2 * model[1](model[0](input))
    with pytest.raises(
        fpipe.errors.StageError, match=r"at .*test_modules\.py:\d+.*module is not installed"
    ):
        fpipe.from_module(model, cuts=["1"])


def test_an_attribute_that_a_forward_sets_is_named_with_the_line_of_the_user():
    with pytest.raises(
        fpipe.errors.StageError,
        match=r"no attribute 'noted', at .*test_modules\.py:\d+ \(return x, .*aux_loss=True",
    ):
        fpipe.from_module(Noted(), cuts=["b"])


def test_modules_that_return_a_loss_of_their_stage():
    """bind, and aux_loss=True: as autograd on the modules."""

    class Router(nn.Linear):
        def forward(self, x: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            y = super().forward(x)
            return y, y.square().mean()

    torch.manual_seed(0)
    layers, (x, t) = [Router(3, 3) for _ in range(2)], torch.randn(2, 4, 3)
    bound = fpipe.interop.bind(layers)
    stages = [dataclasses.replace(stage, aux_loss=True) for stage in bound.stages]
    pipe = fpipe.pipeline(stages, loss=nn.functional.mse_loss, microbatches=1, group=fpipe.local(2))
    loss, grads = fpipe.value_and_grad(pipe)(bound.params, x, t)
    y, first = layers[0](x)
    y, second = layers[1](y)
    whole = nn.functional.mse_loss(y, t) + first + second
    whole.backward()
    torch.testing.assert_close(loss, whole.detach())
    torch.testing.assert_close(grads[0]["weight"], layers[0].weight.grad)

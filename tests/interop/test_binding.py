"""``bind``: pipelines over modules against ``module.backward``; modes, models on "meta", and
running statistics.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe import testing
from fpipe.interop import bind
from module_model import CUTS, batch, cross_entropy, language_model

X, T = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))


def squared(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean()


def layers(count: int = 4) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(count)]


def backward(modules: list[nn.Module], parts: int = 4) -> Tensor:
    """The mean loss over microbatches, and its gradients in ``.grad``, by autograd."""
    losses = [
        squared(nn.Sequential(*modules)(x), t)
        for x, t in zip(X.chunk(parts), T.chunk(parts), strict=True)
    ]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.detach()


def grads_of(modules: list[nn.Module]) -> list[Tensor | None]:
    return [p.grad for module in modules for p in module.parameters()]


def check(ours: list[nn.Module], theirs: list[nn.Module]) -> None:
    for a, b in zip(grads_of(ours), grads_of(theirs), strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["1F1B", "ZBV", "Interleaved1F1B"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_with_a_torch_optimizer(schedule: str, optimizer: Any):
    """Three steps with an LR scheduler of torch, gradients accumulated over two calls: as without a
    pipeline.
    """
    ours, theirs = layers(), layers()
    ranks = 4 if schedule == "1F1B" else 2
    bound = bind(ours)
    pipe = fpipe.pipeline(
        bound.stages, schedule, loss=squared, microbatches=4, group=fpipe.local(ranks)
    )
    step = fpipe.value_and_grad(pipe)
    pairs = []
    for modules in (ours, theirs):
        made = optimizer(nn.ModuleList(modules).parameters(), lr=0.1)
        pairs.append((made, torch.optim.lr_scheduler.ExponentialLR(made, 0.5)))
    for _ in range(3):
        for _ in range(2):
            loss, grads = step(bound.params, X, T)
            bound.add_grads(grads)
            assert torch.allclose(loss, backward(theirs))
        check(ours, theirs)
        for made, scheduler in pairs:
            made.step()
            made.zero_grad()
            scheduler.step()
    for a, b in zip(
        nn.ModuleList(ours).parameters(), nn.ModuleList(theirs).parameters(), strict=True
    ):
        assert torch.allclose(a, b, atol=1e-5)
    assert len(pipe.cache.plans) == 1


def test_frozen_and_tied_parameters():
    def build() -> list[nn.Module]:
        modules = layers()
        modules[3][0].weight = modules[0][0].weight  # type: ignore[index, union-attr]
        modules[1][2].bias.requires_grad_(False)  # type: ignore[index, union-attr]
        return modules

    ours, theirs = build(), build()
    bound = bind(ours)
    pipe = fpipe.pipeline(bound.stages, "ZBV", loss=squared, microbatches=4, group=fpipe.local(2))
    assert pipe.tied == (("0.0.weight", "3.0.weight"),)
    loss, grads = fpipe.value_and_grad(pipe)(bound.params, X, T)
    bound.add_grads(grads)
    assert torch.allclose(loss, backward(theirs))
    check(ours, theirs)
    assert ours[1][2].bias.grad is None  # type: ignore[index, union-attr]


def test_a_whole_module_by_cuts():
    ours, theirs = language_model(), language_model()
    bound = bind(ours, cuts=CUTS, side=["keep"])
    tokens, targets = batch()
    pipe = fpipe.pipeline(
        bound.stages, "ZBV", loss=cross_entropy, microbatches=1, group=fpipe.local(2)
    )
    loss, grads = fpipe.value_and_grad(pipe)(
        bound.params, tokens, targets, keep=(tokens > 2).float()
    )
    bound.add_grads(grads)
    want = cross_entropy(theirs(tokens, (tokens > 2).float()), targets)
    want.backward()
    assert torch.allclose(loss, want.detach())
    check([ours], [theirs])


def test_running_statistics_are_written_back():
    def build() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4)]

    ours, theirs = build(), build()
    bound = bind(ours)
    pipe = fpipe.pipeline(bound.stages, loss=squared, microbatches=4, group=fpipe.local(2))
    (_, state), grads = fpipe.value_and_grad(pipe)(bound.params, X, T, state=bound.state)
    bound.add_grads(grads)
    bound.write_state(state)
    backward(theirs)
    check(ours, theirs)
    for a, b in zip(ours[0].buffers(), theirs[0].buffers(), strict=True):
        assert torch.equal(a, b)
    assert int(ours[0][1].num_batches_tracked) == 4  # type: ignore[index, union-attr, arg-type]


def test_ranks_that_have_their_own_modules():
    theirs = layers(2)
    loss = backward(theirs, 2)

    def rank(group: Any) -> Any:
        ours = layers(2)
        bound = bind([module if s == group.here[0] else None for s, module in enumerate(ours)])
        pipe = fpipe.pipeline(bound.stages, loss=squared, microbatches=2, group=group)
        value, grads = fpipe.value_and_grad(pipe)(bound.params, X, T)
        bound.add_grads(grads)
        assert ours[1 - group.here[0]][0].weight.grad is None  # type: ignore[index, union-attr]
        return value, ours[group.here[0]]

    for stage, (value, module) in enumerate(testing.run(rank, ranks=2, order="buffered", seed=0)):
        assert torch.allclose(value, loss)
        check([module], [theirs[stage]])


class Masked(nn.Linear):
    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        return super().forward(x * scale if mask is None else x * mask * scale)


def test_arguments_of_forward_as_side_inputs():
    torch.manual_seed(0)
    ours = [Masked(4, 4), Masked(4, 4)]
    bound, mask = bind(ours, side=["mask"]), torch.arange(8.0).reshape(8, 1)
    pipe = fpipe.pipeline(bound.stages, microbatches=2, group=fpipe.local(2))
    assert torch.allclose(
        pipe(bound.params, X, mask=mask, scale=2.0),
        ours[1](ours[0](X, mask, scale=2.0), mask, scale=2.0).detach(),
    )


def test_gradients_that_do_not_fit_are_refused():
    bound = bind(layers(2))
    with pytest.raises(fpipe.errors.StageError, match="1 entries of gradients for 2 stages"):
        bound.add_grads([{}])
    with pytest.raises(fpipe.errors.StageError, match=r"'0\.weight' in stage 1 has shape \[3\]"):
        bound.add_grads([None, {"0.weight": torch.ones(3)}])
    for wrong in ([], 3, "layers"):
        with pytest.raises(fpipe.errors.StageError, match="or a list with a module"):
            bind(wrong)  # type: ignore[arg-type]
    with pytest.raises(fpipe.errors.StageError, match="cuts=3; give a list"):
        fpipe.from_module(torch.nn.Linear(1, 1), cuts=3)  # type: ignore[arg-type]


# ---- modes ----
class Noisy(nn.Module):
    """What training changes: dropout of everything, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(1.0), nn.Linear(4, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("cut", ["from_module", "bind"])
@pytest.mark.parametrize("engine", ["trace", "eager"])
def test_a_mode_is_chosen_after_cutting(cut: str, engine: str):
    model = Noisy()
    if cut == "bind":
        bound = (
            bind(model, cuts=["layers.2"])
            if engine == "trace"
            else bind([model.layers[:2], model.layers[2:]])
        )
        stages, params, state = bound.stages, bound.params, bound.state
    else:
        stages, params = fpipe.from_module(model, cuts=["layers.2"])
        state = [stage.initial_state for stage in stages]
    pipe = fpipe.pipeline(stages, microbatches=1, group=fpipe.local(2), engine=engine)  # type: ignore[arg-type]
    in_training, _ = pipe(params, X, state=state)
    in_eval, kept = pipe.eval()(params, X, state=state)
    assert torch.equal(in_training, copy.deepcopy(model)(X).detach())
    assert torch.equal(in_eval, copy.deepcopy(model).eval()(X).detach())
    assert all(torch.equal(a, b) for a, b in zip(kept[0].values(), state[0].values(), strict=True))  # type: ignore[union-attr]
    assert torch.equal(pipe.eval().train()(params, X, state=state)[0], in_training)
    assert model.training
    assert pipe.eval().cache is pipe.eval().cache  # its traces are kept


def test_ranks_with_their_own_modules_choose_a_mode():
    whole = [nn.Sequential(module, nn.Dropout(1.0)) for module in layers(2)]

    def rank(group: Any) -> Any:
        bound = bind([module if s == group.here[0] else None for s, module in enumerate(whole)])
        pipe = fpipe.pipeline(bound.stages, microbatches=2, group=group, outputs="everywhere")
        return pipe(bound.params, X), pipe.eval()(bound.params, X)

    for in_training, in_eval in testing.run(rank, ranks=2, seed=0):
        assert not in_training[:, :0].any()
        assert torch.allclose(in_eval, nn.Sequential(*whole).eval()(X).detach())
        assert not torch.allclose(in_training, in_eval)
        nn.Sequential(*whole).train()


def test_ranks_in_different_modes_are_reported():
    def rank(group: Any) -> str:
        bound = bind([module if s == group.here[0] else None for s, module in enumerate(layers(2))])
        pipe = fpipe.pipeline(bound.stages, microbatches=2, group=group)
        pipe = pipe.eval() if group.here == (0,) else pipe.train()
        with pytest.raises(fpipe.errors.MismatchError) as caught:
            pipe(bound.params, X)
        return str(caught.value)

    assert all(
        "in evaluation" in text and "in training" in text
        for text in testing.run(rank, ranks=2, seed=0)
    )


# ---- on "meta" ----
class Rotary(nn.Module):
    """A model with a buffer that is computed, not stored, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.register_buffer("angles", torch.arange(4.0) / 4, persistent=False)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x * self.angles.cos()).tanh()
        return self.head(x * self.angles.sin())


def test_a_model_on_meta_is_cut_and_filled_by_rank():
    torch.manual_seed(0)
    model = Rotary()
    tokens = torch.arange(8).reshape(4, 2)
    with torch.device("meta"):
        empty = Rotary()
    stages, params = fpipe.from_module(empty, cuts=["blocks.0", "blocks.1"])
    assert all(leaf.is_meta for row in params for leaf in row.values())
    weights = dict(model.named_parameters()) | {"angles": model.angles}
    assert "head.weight" not in weights  # the tied parameter under its first name

    def rank(group: Any) -> Any:
        pipe = fpipe.pipeline(stages, loss=lambda y: y.square().mean(), microbatches=2, group=group)
        mine = fpipe.receive(pipe, weights)
        assert [s for s, row in enumerate(mine) if row is not None] == list(pipe.here)
        loss, grads = fpipe.value_and_grad(pipe)(mine, tokens)
        return loss, grads

    want = model(tokens).square().mean()
    want.backward()
    found = testing.run(rank, ranks=3, order="buffered", seed=0)
    assert all(torch.allclose(loss, want.detach()) for loss, _ in found)
    assert torch.allclose(found[0][1][0]["embed.weight"], model.embed.weight.grad)  # type: ignore[arg-type]
    assert torch.allclose(found[1][1][1]["blocks.0.weight"], model.blocks[0].weight.grad)  # type: ignore[arg-type]
    assert found[1][1][1]["angles"] is None


def test_modules_that_are_materialized_after_they_were_bound():
    """As torchtitan does: parts on "meta", then ``to_empty`` and initialisation, then the first
    step.
    """
    ours, theirs = layers(2), layers(2)
    parts = [copy.deepcopy(module).to("meta") for module in ours]
    bound = bind(parts)
    pipe = fpipe.pipeline(bound.stages, loss=squared, microbatches=4, group=fpipe.local(2))
    for part, module in zip(parts, ours, strict=True):
        part.to_empty(device="cpu").load_state_dict(module.state_dict())
    loss, grads = fpipe.value_and_grad(pipe)(bound.params, X, T)
    bound.add_grads(grads)
    assert torch.allclose(loss, backward(theirs))
    check(list(parts), theirs)


def test_a_state_that_lacks_a_buffer_is_refused_before_anything_is_written():
    norms = [nn.BatchNorm1d(1), nn.BatchNorm1d(1)]
    bound = bind(norms)
    whole = {name: value + 1 for name, value in (bound.state[0] or {}).items()}
    with pytest.raises(fpipe.errors.StageError, match="the state of stage 1 has no 'running_var'"):
        bound.write_state(
            [whole, {key: value for key, value in whole.items() if key != "running_var"}]
        )
    with pytest.raises(fpipe.errors.StageError, match="1 states for 2 stages"):
        bound.write_state([whole])
    assert norms[0].running_mean == 0


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_of_a_model_that_is_cut_are_refused(register: str):
    """They were dropped without a word: the loss was another one."""
    model = nn.Sequential(*layers())
    getattr(model, register)(lambda module, args, *y: None)
    with pytest.raises(fpipe.errors.StageError, match=r"Sequential has forward.*hooks, which do"):
        bind(model, cuts=["2"])


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_refused(register: str):
    """They were dropped without a word: the gradient was another one."""
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    bound = bind(modules)
    pipe = fpipe.pipeline(bound.stages, loss=torch.sum, microbatches=2, group=fpipe.local(2))
    grads = fpipe.grad(pipe)(bound.params, torch.ones(4, 2))
    getattr(modules[1].weight, register)(lambda t: None)
    with pytest.raises(fpipe.errors.StageError, match=r"parameter .weight. has hooks.*add_grads"):
        bound.add_grads(grads)
    assert modules[0].weight.grad is None

"""``chunked_cross_entropy``: the oracle is torch's cross entropy of whole logits, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe
from fpipe import chunked_cross_entropy
from fpipe.errors import StageError

TOKENS, WIDTH, VOCABULARY = 24, 8, 37


def drawn(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Large logits, and targets of which some do not count."""
    generator = torch.Generator().manual_seed(0)
    hidden = 3 * torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    weight = 2 * torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    targets[::5] = -100
    return hidden.to(dtype), weight.to(dtype), targets


def exact(hidden: Tensor, weight: Tensor, targets: Tensor, **more: Any) -> tuple[Tensor, ...]:
    """The loss and gradients of whole logits in float64."""
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    loss = F.cross_entropy(hidden @ weight.T, targets, **more)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def found(hidden: Tensor, weight: Tensor, targets: Tensor, **more: Any) -> tuple[Tensor, ...]:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = chunked_cross_entropy(hidden, weight, targets, **more)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("chunk", [1, 5, 36, 37, 4096])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_and_gradients_are_those_of_whole_logits(chunk: int, reduction: str):
    for dtype, rtol in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        args = drawn(dtype)
        pairs = zip(
            found(*args, chunk=chunk, reduction=reduction),
            exact(*args, reduction=reduction),
            strict=True,
        )
        for ours, theirs in pairs:
            assert ours.dtype == dtype
            torch.testing.assert_close(ours.double(), theirs, rtol=rtol, atol=rtol)


def test_each_token_and_another_index_that_is_ignored():
    hidden, weight, targets = drawn(torch.float64)
    targets = targets.clamp(min=0).reshape(4, 6)
    ours = chunked_cross_entropy(
        hidden.reshape(4, 6, WIDTH), weight, targets, chunk=5, ignore_index=0, reduction="none"
    )
    theirs = F.cross_entropy(
        hidden @ weight.T, targets.flatten(), ignore_index=0, reduction="none"
    ).reshape(4, 6)
    torch.testing.assert_close(ours, theirs)
    assert (ours[targets == 0] == 0).all() and (targets == 0).any()


def test_where_no_token_counts_loss_and_gradients_are_zero():
    hidden, weight, targets = drawn()
    for value in found(hidden, weight, torch.full_like(targets, -100), chunk=5):
        assert (value == 0).all()


def test_the_mean_is_over_the_tokens_that_count():
    hidden, weight, targets = drawn(torch.float64)
    for count in (1, 2, 3):
        few = torch.where(torch.arange(TOKENS) < count, targets.clamp(min=0), -100)
        ours, theirs = found(hidden, weight, few, chunk=5), exact(hidden, weight, few)
        torch.testing.assert_close(ours, theirs)


def test_under_autocast_products_are_in_bfloat16_and_sums_in_float32():
    hidden, weight, targets = drawn()
    with torch.autocast("cpu", torch.bfloat16):
        ours = found(hidden, weight, targets, chunk=5)
        leaves = hidden.requires_grad_(), weight.requires_grad_()
        loss = F.cross_entropy(hidden @ weight.T, targets)
        theirs = loss.detach(), *torch.autograd.grad(loss, leaves)
    assert ours[0].dtype == torch.float32
    for a, b, c in zip(ours, theirs, exact(hidden, weight, targets), strict=True):
        assert a.dtype == b.dtype
        scale = c.abs().max()
        assert (a - c).abs().max() <= max(1.5 * (b - c).abs().max(), 1e-3 * scale)


def test_torch_func():
    hidden, weight, targets = drawn(torch.float64)
    loss = lambda h, w, t: chunked_cross_entropy(h, w, t, chunk=5)
    grads = torch.func.grad(loss, (0, 1))(hidden, weight, targets)
    for ours, theirs in zip(grads, exact(hidden, weight, targets)[1:], strict=True):
        torch.testing.assert_close(ours, theirs)
    rows = hidden.reshape(4, 6, WIDTH), weight, targets.reshape(4, 6)
    each = torch.func.vmap(torch.func.grad(loss, (0, 1)), (0, None, 0))(*rows)
    for row in range(4):
        theirs = exact(rows[0][row], weight, rows[2][row])[1:]
        torch.testing.assert_close([e[row] for e in each], list(theirs))
    weights = torch.stack([weight, 2 * weight])
    both = torch.func.vmap(loss, (None, 0, None))(hidden, weights, targets)
    for ours, w in zip(both, weights, strict=True):
        torch.testing.assert_close(ours, exact(hidden, w, targets)[0])


def test_the_derivative_of_its_gradient_is_refused():
    hidden, weight, targets = drawn()
    hidden.requires_grad_()
    loss = chunked_cross_entropy(hidden, weight, targets)
    (dhidden,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(StageError, match="gradient of chunked_cross_entropy is differentiated"):
        torch.autograd.grad(dhidden.sum(), hidden)


# ---- in pipelines ----
def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w"])


def head(p: Any, x: Tensor, *, labels: Tensor) -> Tensor:
    return chunked_cross_entropy(x, p["head"], labels, chunk=5)


def whole(p: Any, x: Tensor, *, labels: Tensor) -> Tensor:
    return F.cross_entropy((x @ p["head"].T).flatten(0, -2), labels.flatten())


def model() -> tuple[list[Any], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    params: list[Any] = [{"w": draw(WIDTH, WIDTH) / 3} for _ in range(3)]
    params.append({"head": draw(VOCABULARY, WIDTH)})
    labels = torch.randint(VOCABULARY, (8, 3), generator=generator)
    labels[0, 0] = -100
    return params, draw(8, 3, WIDTH), labels


@pytest.mark.parametrize("engine", ["trace", "eager"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBV"])
def test_as_the_last_stage_of_a_pipeline(engine: Any, schedule: str):
    params, x, labels = model()
    answers = []
    for last in (head, whole):
        pipe = fpipe.pipeline(
            [block, block, block, last],
            schedule,
            loss=lambda value, y: value,
            reduction=fpipe.weighted(lambda y: (y >= 0).sum()),
            microbatches=4,
            engine=engine,
            group=fpipe.local(2),
        )
        step = fpipe.value_and_grad(pipe, argnums=(0, 1))
        answers.append(step(params, x, labels, labels=labels))
    torch.testing.assert_close(answers[0], answers[1])
    loss = F.cross_entropy(_logits(params, x).flatten(0, -2), labels.flatten())
    torch.testing.assert_close(answers[0][0], loss)


def _logits(params: list[Any], x: Tensor) -> Tensor:
    for p in params[:-1]:
        x = block(p, x)
    return x @ params[-1]["head"].T


def test_parts_of_the_backward_have_the_bits_of_the_whole_and_hold_no_logits():
    params, x, labels = model()
    stage = lambda p, x: chunked_cross_entropy(x, p["head"], labels, chunk=5)
    programs = fpipe.trace(stage, params[-1], x)
    loss, saved = programs.forward(params[-1], x)
    one = torch.ones_like(loss)
    dx, dparams = programs.backward(saved, one)
    again, kept = programs.backward_input(saved, one)
    assert torch.equal(dx, again)
    assert torch.equal(dparams["head"], programs.backward_weight(kept)["head"])
    assert programs.kept_bytes < labels.numel() * VOCABULARY * 8
    logits = 24 * VOCABULARY * 8
    assert programs.saved_bytes < logits


def test_a_pipeline_of_other_lengths_and_one_row_at_a_time():
    params, x, labels = model()
    pipe = fpipe.pipeline(
        [block, head], "1F1B", loss=lambda value: value, microbatches=2, group=fpipe.local(2)
    )
    params = [params[0], params[-1]]
    for length in (3, 2, 1):
        y = labels[:, :length]
        loss, _ = fpipe.value_and_grad(pipe)(params, x[:, :length], labels=y)
        parts = [
            whole(params[1], block(params[0], a), labels=b)
            for a, b in zip(x[:, :length].chunk(2), y.chunk(2), strict=True)
        ]
        torch.testing.assert_close(loss, sum(parts) / 2)


# ---- mistakes ----
MISTAKES: dict[str, tuple[Any, ...]] = {
    "weight.T": (lambda h, w, t: (h, w.T, t), {}),
    "targets that are integers": (lambda h, w, t: (h, w, t.float()), {}),
    "give a tensor": (lambda h, w, t: (h, w, [0] * TOKENS), {}),
    r"targets int64\[23\]": (lambda h, w, t: (h, w, t[1:]), {}),
    "chunk=0": (lambda h, w, t: (h, w, t), {"chunk": 0}),
    "reduction='max'": (lambda h, w, t: (h, w, t), {"reduction": "max"}),
    "the target 37, and weight has 37 rows": (
        lambda h, w, t: (h, w, torch.full_like(t, VOCABULARY)),
        {},
    ),
    "the target -1,": (lambda h, w, t: (h, w, torch.full_like(t, -1)), {}),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes(message: str):
    change, more = MISTAKES[message]
    with pytest.raises(StageError, match=message) as caught:
        chunked_cross_entropy(*change(*drawn()), **more)
    assert len(str(caught.value)) < 1000

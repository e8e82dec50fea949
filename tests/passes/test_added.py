"""Gradients added to sums without a table of zeros, and large products in memory that is kept."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy, embedding

import fpipe
from fpipe.passes import added

ROWS, WIDTH, MICROBATCHES = 2200, 256, 4


def looked_up(p, tokens):
    return embedding(tokens, p["table"])


def padded(p, tokens):
    return embedding(tokens, p["table"], padding_idx=3)


def indexed(p, tokens):
    return p["table"][tokens]


def from_the_end(p, tokens):
    return p["table"][torch.where(tokens % 2 == 0, tokens, tokens - ROWS)]


def twice(p, tokens):
    return p["table"][tokens] + embedding(tokens + 1, p["table"])


def square(y, t):
    return (y.float() * t).square().mean()


def run(stages, params, x, t, loss=square, schedule="1F1B"):
    pipe = fpipe.pipeline(
        stages,
        schedule,
        loss=loss,
        microbatches=MICROBATCHES,
        group=fpipe.local(len(stages) // 2 or 1),
    )
    return pipe, fpipe.value_and_grad(pipe)(params, x, t)[1]


def by_autograd(stages, params, x, t, loss=square):
    """The gradients of one process, microbatch by microbatch."""
    params = [{k: v.clone().requires_grad_() for k, v in p.items()} for p in params]
    for a, b in zip(x.chunk(MICROBATCHES), t.chunk(MICROBATCHES), strict=True):
        for stage, p in zip(stages, params, strict=True):
            a = stage(p, a)
        (loss(a, b) / MICROBATCHES).backward()
    return [{k: v.grad for k, v in p.items()} for p in params]


@pytest.fixture
def calls(monkeypatch):
    """The names of the functions of the pass that programs call."""
    seen = []
    for name in ("add_embedding", "add_indexed", "product"):
        before = getattr(added, name)

        def noting(*args, name=name, before=before):
            seen.append(name)
            return before(*args)

        monkeypatch.setattr(added, name, noting)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [looked_up, indexed, from_the_end])
def test_rows_are_added_with_the_bits_of_whole_tables(stage, dtype, calls):
    params = [{"table": torch.randn(ROWS, WIDTH).to(dtype)}]
    x = torch.randint(0, 9, (MICROBATCHES * 3, 5))  # rows that are read several times
    t = torch.randn(len(x), 5, WIDTH)
    _, grads = run([stage], params, x, t)
    assert len(calls) == MICROBATCHES - 1
    assert torch.equal(grads[0]["table"], by_autograd([stage], params, x, t)[0]["table"])


@pytest.mark.parametrize("stage", [padded, twice])
def test_other_tables_are_added_whole(stage, calls):
    params = [{"table": torch.randn(ROWS, WIDTH)}]
    x = torch.randint(0, 9, (MICROBATCHES * 3, 5))
    t = torch.randn(len(x), 5, WIDTH)
    _, grads = run([stage], params, x, t)
    assert calls == []
    assert torch.equal(grads[0]["table"], by_autograd([stage], params, x, t)[0]["table"])


def test_a_table_of_which_many_rows_are_read_is_added_whole(calls):
    params = [{"table": torch.randn(ROWS, WIDTH)}]
    x = torch.randint(0, ROWS, (MICROBATCHES * 120, 5))
    t = torch.randn(len(x), 5, WIDTH)
    _, grads = run([indexed], params, x, t)
    assert calls == []
    assert torch.equal(grads[0]["table"], by_autograd([indexed], params, x, t)[0]["table"])


@pytest.mark.parametrize("schedule", ["1F1B", "ZBV"])
def test_large_products_of_several_stages_share_memory_and_keep_their_bits(
    schedule, calls, monkeypatch
):
    monkeypatch.setattr(added, "LARGE", 1 << 20)

    def head(p, x):
        return x @ p["out"].T

    stages = [looked_up, head] if schedule == "1F1B" else [looked_up, mixed, mixed, head]
    params = [{"table": torch.randn(ROWS, WIDTH)}, {"out": torch.randn(ROWS, WIDTH)}]
    if schedule == "ZBV":
        middle = [{"w": torch.randn(WIDTH, 5 * WIDTH), "v": torch.randn(5 * WIDTH, WIDTH)}] * 2
        params = [params[0], *middle, params[1]]
    x, t = torch.randint(0, ROWS, (MICROBATCHES * 2, 3)), torch.randint(0, ROWS, (8, 3))

    def loss(y, t):
        return cross_entropy(y.flatten(0, 1), t.flatten())

    _, grads = run(stages, params, x, t, loss, schedule)
    assert calls.count("product") >= MICROBATCHES - 1
    for mine, theirs in zip(grads, by_autograd(stages, params, x, t, loss), strict=True):
        for key, value in mine.items():
            assert torch.equal(value, theirs[key]), key


def mixed(p, x):
    return x + torch.tanh(x @ p["w"]) @ p["v"] / WIDTH


def test_plans_do_not_count_tables_that_are_not_made():
    """A table is held as the sum, and no second one beside it."""
    params = [{"table": torch.randn(ROWS, WIDTH)}]
    x, t = torch.randint(0, 9, (MICROBATCHES, 5)), torch.randn(MICROBATCHES, 5, WIDTH)
    (peak,) = run([indexed], params, x, t)[0].plan(params, x, t).peak.values()
    table = params[0]["table"].nbytes
    assert peak < 2.5 * table, "zeros and the table of the first microbatch"
    (whole,) = run([twice], params, x, t)[0].plan(params, x, t).peak.values()
    assert whole > 2.9 * table

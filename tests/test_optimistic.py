"""The optimizer step that guesses: the same bits as the one that waits, whatever is clipped and skipped."""

from __future__ import annotations

import random
from typing import Any

import optree
import torch
from torch import Tensor

import fpipe
from fpipe import transforms as T

STAGES, STEPS = 4, 200


def layer(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"])


def squares(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().sum()


def train(group: Any, guess: bool, steps: int = STEPS) -> dict[str, Any]:
    """Steps of which some are clipped and some are left out, by chance alone."""
    pipe = fpipe.pipeline([layer] * STAGES, "1F1B", loss=squares, microbatches=2, group=group)
    clip = fpipe.clip_by_global_norm(1.0, over=pipe)
    tx = fpipe.chain(T.scale(1.0), fpipe.chain(fpipe.skip_nonfinite(over=pipe), clip), fpipe.adamw(0.01))
    draw, dice = torch.Generator().manual_seed(0), random.Random(0)
    params = pipe.place([{"w": torch.randn(3, 3, generator=draw)} for _ in range(STAGES)])
    opt = T.optimistic(tx, over=pipe)
    step, state = opt.first(params), tx.init(params)
    rights = clips = 0
    for _ in range(steps):
        x, t = torch.randn(2, 3, generator=draw), torch.randn(2, 3, generator=draw)
        chance, size, at = dice.random(), dice.choice([1e-3, 1e-3, 0.02, 3.0]), dice.randrange(STAGES)

        def value_and_grad(params: Any, x: Tensor, t: Tensor, *how: Any) -> tuple[Tensor, Any]:
            chance, size, at = how
            value, grads = fpipe.value_and_grad(pipe)(params, x, t)
            grads = T.scale(size).update(grads, ())[0]
            if chance < 0.15 and grads[at] is not None:
                grads[at]["w"][0, 0] = torch.inf if chance < 0.07 else torch.nan
            return value, grads

        if guess:
            _, step = opt.step(value_and_grad, step, x, t, chance, size, at)
            rights += step.settle() if step is not None and chance < 0.5 else 0  # sometimes at once
        else:
            updates, state = tx.update(value_and_grad(params, x, t, chance, size, at)[1], state, params)
            params = fpipe.apply_updates(params, updates)
            clips += int(state[1][1].norm > 1)
    params, state = (step.params, step.state) if guess else (params, state)
    if guess:
        step.settle()
        params, state = step.params, step.state
    return {"params": params, "state": state, "rights": rights, "clips": clips}


def bits(run: dict[str, Any]) -> list[bytes]:
    return [leaf.numpy().tobytes() for leaf in optree.tree_leaves((run["params"], run["state"]))]


def test_on_a_local_group():
    plain, guessed = train(fpipe.local(2 * 2), False), train(fpipe.local(4), True)
    assert bits(plain) == bits(guessed)
    assert plain["state"][1][0].skipped.item() > 10 and plain["clips"] > 10 and guessed["rights"] > 10


def on_a_process() -> tuple[Any, Any]:
    group = fpipe.init(timeout=60)
    return train(group, False), train(group, True)


def test_on_four_processes():
    for plain, guessed in fpipe.launch(on_a_process, ranks=4, timeout=140):
        assert bits(plain) == bits(guessed)
        assert plain["state"][1][0].skipped.item() > 10 and plain["clips"] > 10


def test_what_cannot_be_late_is_waited_for():
    """A clip hidden in another transform, and gradients gathered over steps."""
    tx = fpipe.chain(
        fpipe.accumulate(2), fpipe.masked(fpipe.clip_by_global_norm(1.0), lambda p: [True]), fpipe.sgd(1.0)
    )
    params = [torch.zeros(2)]
    opt, state, want = T.optimistic(tx), tx.init(params), params
    step = opt.first(params)
    for _ in range(4):
        grads = [torch.full((2,), 3.0)]
        updates, state = tx.update(grads, state, want)
        want = fpipe.apply_updates(want, updates)
        step = opt.update(grads, step.state, step.params)
        assert step.settle()
    assert torch.equal(step.params[0], want[0]) and want[0].abs().max() > 1

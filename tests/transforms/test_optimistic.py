"""The optimizer step that guesses: the same bits as the one that waits, whatever is clipped and
skipped.
"""

from __future__ import annotations

import random
import time
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import optree
import pytest
import torch
from torch import Tensor

import fpipe
from fpipe import transforms as T
from fpipe.collectives.shared_memory import _native
from fpipe.errors import TransformError

STAGES, STEPS = 4, 200


def layer(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"])


def squares(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().sum()


def train(group: Any, guess: bool, steps: int = STEPS) -> dict[str, Any]:
    """Steps of which some are clipped and some are left out, by chance alone."""
    pipe = fpipe.pipeline([layer] * STAGES, "1F1B", loss=squares, microbatches=2, group=group)
    clip = fpipe.clip_by_global_norm(1.0, over=pipe)
    tx = fpipe.chain(
        T.scale(1.0), fpipe.chain(fpipe.skip_nonfinite(over=pipe), clip), fpipe.adamw(0.01)
    )
    draw, dice = torch.Generator().manual_seed(0), random.Random(0)
    params = pipe.place([{"w": torch.randn(3, 3, generator=draw)} for _ in range(STAGES)])
    opt = T.optimistic(tx, over=pipe)
    step, state = opt.first(params), tx.init(params)
    rights = clips = 0
    for _ in range(steps):
        x, t = torch.randn(2, 3, generator=draw), torch.randn(2, 3, generator=draw)
        chance, size, at = (
            dice.random(),
            dice.choice([1e-3, 1e-3, 0.02, 3.0]),
            dice.randrange(STAGES),
        )

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
            updates, state = tx.update(
                value_and_grad(params, x, t, chance, size, at)[1], state, params
            )
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
    assert (
        plain["state"][1][0].skipped.item() > 10 and plain["clips"] > 10 and guessed["rights"] > 10
    )


# ---- what a rank waits for ----
RANKS, MICROBATCHES, LOOPS = 4, 4, 3


class Sight:
    """What a process has counted and seen: for the two operators below, which are Python to no
    trace.
    """

    begun = ended = 0
    folder, patience = Path(), 0.0
    seen: ClassVar[list[bool]] = []


@torch.library.custom_op("test_optimistic::begin", mutates_args=())
def begin(x: Tensor) -> Tensor:
    """Part of F of the first stage; records when a step begins."""
    step, place = divmod(Sight.begun, MICROBATCHES)
    Sight.begun += 1
    if place == 0:
        (Sight.folder / str(step)).touch()
    return x.clone()


@torch.library.custom_op("test_optimistic::end", mutates_args=())
def end(x: Tensor) -> Tensor:
    """Part of W of the last stage: the last one of a step does not end before the next step has
    begun, if it can.
    """
    Sight.ended += 1
    step, place = divmod(Sight.ended, MICROBATCHES)
    if place == 0 and step < LOOPS:
        until = time.monotonic() + Sight.patience
        while not (there := (Sight.folder / str(step)).exists()) and time.monotonic() < until:
            time.sleep(0.002)
        Sight.seen.append(there)
    return x.clone()


begin.register_fake(torch.empty_like)
end.register_fake(torch.empty_like)


class Watched(torch.autograd.Function):
    """``x * p`` between the two operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor, stage: int) -> Tensor:
        ctx.save_for_backward(x, p)
        ctx.stage = stage
        return (begin(x) if stage == 0 else x) * p

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, Tensor, None]:
        x, p = ctx.saved_tensors
        dp = dys[0] * x
        return dys[0] * p, (end(dp) if ctx.stage == STAGES - 1 else dp).sum(), None


def overlapping(
    group: Any, guess: bool, folder: Path, patience: float, near: bool = True
) -> list[bool]:
    """Whether each step had begun on the first rank while the last one waited, in a W, for just
    that.
    """
    Sight.begun = Sight.ended = 0
    Sight.folder, Sight.patience, Sight.seen = folder, patience, []
    stages = [lambda p, x, s=stage: Watched.apply(x, p, s) for stage in range(STAGES)]
    pipe = fpipe.pipeline(
        stages, "ZBH2", loss=lambda y: y.sum(), microbatches=MICROBATCHES, group=group
    )
    params, x = pipe.place([torch.ones(())] * STAGES), torch.ones(MICROBATCHES)
    tx = fpipe.chain(
        fpipe.skip_nonfinite(over=pipe),
        fpipe.clip_by_global_norm(1e6, over=pipe),
        fpipe.adamw(0.01),
    )
    if guess:
        opt = T.optimistic(tx, over=pipe)
        step = opt.first(params)
        alone = lambda params, x: (
            None,
            fpipe.grad(pipe)(params, x),
        )  # over a network no rank waits for a gradient
        for _ in range(LOOPS):
            _, step = opt.step(fpipe.value_and_grad(pipe) if near else alone, step, x)
        assert step.settle()
        return Sight.seen
    state = tx.init(params)
    for _ in range(LOOPS):
        updates, state = tx.update(fpipe.grad(pipe)(params, x), state, params)
        params = fpipe.apply_updates(params, updates)
    return Sight.seen


def on_a_process() -> tuple[Any, Any]:
    """Both ways to step."""
    group = fpipe.init(timeout=60)
    return train(group, False, 60), train(group, True, 60)


def waiting_and_guessing(folder: str, near: bool) -> list[list[bool]]:
    """What each way waits for, on one host or as over a network."""
    group, found = fpipe.init(timeout=60), []
    assert group.at_once == near
    for guess in (False, True):
        place = Path(folder, str(guess))
        place.mkdir(exist_ok=True)
        found.append(overlapping(group, guess, place, 20.0 if guess else 0.4, near))
    return found


def test_on_four_processes():
    for plain, guessed in fpipe.launch(on_a_process, ranks=RANKS, timeout=110):
        assert bits(plain) == bits(guessed)
        assert plain["state"][1][0].skipped.item() > 3 and plain["clips"] > 3


@pytest.mark.parametrize("near", [*([True] if _native.AVAILABLE else []), False])
def test_the_next_step_begins_before_the_last_one_has_ended(near: bool, tmp_path: Path):
    """The last rank stays in the last W of a step until the first rank is in an F of the next one.

    No clock decides: with any wait of all for all between two steps this could not come to pass.
    """
    env = {"FPIPE_SHARED_MEMORY": str(int(near))}
    waiting, guessing = fpipe.launch(
        waiting_and_guessing, str(tmp_path), near, ranks=RANKS, timeout=80, env=env
    )[-1]
    assert waiting == [False] * (LOOPS - 1)
    assert guessing == [True] * (LOOPS - 1)


@pytest.mark.parametrize(
    ("name", "ratio"), [("1F1B", 1.0), ("ZBH2", 195 / 216), ("ZBVZeroBubble", 387 / 408)]
)
def test_spans_in_the_simulator(name: str, ratio: float, monkeypatch: pytest.MonkeyPatch):
    """Eight steps on four ranks, as in the benchmark: p - 1 units less for each step that another
    follows.
    """
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    bench = import_module("benchmarks.bench_optimistic")
    waiting, guessing = bench.spans(name, ranks=4, microbatches=8, steps=8)
    assert guessing / waiting == pytest.approx(ratio, abs=1e-12)
    assert waiting - guessing == (0 if name == "1F1B" else 3 * 7)


def test_what_a_guess_cannot_go_back_from_is_refused():
    for tx in (
        fpipe.adamw(0.1, donate=True),
        fpipe.masked(fpipe.sgd(0.1, 0.9, donate=True), lambda p: [True]),
    ):
        with pytest.raises(TransformError, match="leave donate=True out"):
            T.optimistic(
                fpipe.chain(fpipe.clip_by_global_norm(1.0), fpipe.partition({"a": tx}, {"*": "a"}))
            )
    pipe = fpipe.pipeline([layer] * 2, loss=squares, microbatches=1, group=fpipe.local(2))
    opt = T.optimistic(fpipe.clip_by_global_norm(1.0, over=pipe))
    with pytest.raises(TransformError, match=r"optimistic\(tx, over=pipe\)"):
        opt.update([torch.ones(1)] * 2, opt.init([torch.ones(1)] * 2), [torch.ones(1)] * 2)


def test_what_cannot_be_late_is_waited_for():
    """A clip hidden in another transform, and gradients gathered over steps."""
    tx = fpipe.chain(
        fpipe.accumulate(2),
        fpipe.masked(fpipe.clip_by_global_norm(1.0), lambda p: [True]),
        fpipe.sgd(1.0),
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

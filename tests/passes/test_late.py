"""Microbatches that come late: bits of the same batch given at once, and iterators that fail."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import fpipe
from common import layer, same, squared
from fpipe.collectives.c10d import C10dGroup
from fpipe.errors import BatchError, MismatchError, PeerError
from sample import also

COUNT = 8
NAMES = ["1F1B", "GPipe", "ZBV", "DualPipeV", "Interleaved1F1B", "DualPipe"]


def masked(p, x, *, mask):
    return layer(p, x) * mask


def tokens_of(t):
    return (t > 0).sum()


def drawn(copy: int = 0) -> tuple[list, dict[str, list]]:
    """Parameters, and microbatches of x, targets and a side input; x and targets of a copy."""
    draws = torch.Generator().manual_seed(1)
    normal = partial(torch.randn, generator=draws)
    params = [normal(4, 4) / 2 for _ in range(4)]
    mask = [normal(4) for _ in range(COUNT)]
    for _ in range(copy):
        normal(99)
    x, t = ([normal(2, 4) for _ in range(COUNT)] for _ in range(2))
    return params, {"x": x, "t": t, "mask": mask}


Faults = dict[str, Callable[[list], Iterator]]


def step(
    group: Any,
    schedule: Any = "1F1B",
    late: Sequence[str] = (),
    *,
    faults: Faults | None = None,
    weights: Any = None,
    stages: Any = None,
    copy: int = 0,
    of_step: Any = (),
    times: int = 1,
    **options: Any,
) -> Any:
    """What a step returns. ``late`` names the arguments that come late; ``faults`` are what their
    iterators do.
    """
    options = {"loss": squared, "group": group, **options}
    params, batch = drawn(copy)
    stages = stages or [layer] * getattr(schedule, "stages", 4)
    pipe = fpipe.pipeline(stages, schedule, **options)
    if pipe.tied:
        params[3] = params[0].clone()
    params = pipe.place(params[: len(stages)])
    if pipe.parts is not None:
        params = pipe.shard(params)
    run = fpipe.value_and_grad(pipe, **dict(of_step))
    found = None
    for _ in range(times):
        args: dict[str, Any] = {}
        for name in ("x", "t", "mask") if masked in stages else ("x", "t"):
            parts = batch[name]
            if name in late:
                fault = (faults or {}).get(name, iter)
                known = weights if name == "t" else None
                args[name] = fpipe.Microbatches(fault(parts), COUNT, known)
            else:
                args[name] = fpipe.Microbatches(parts)
        found = run(params, args.pop("x"), args.pop("t"), **args)
    return plain(found)


def plain(found: Any) -> Any:
    """A result with lists in place of ``Microbatches``."""
    if isinstance(found, (tuple, list, fpipe.Microbatches)):
        return [*map(plain, found)]
    return found


def by_stage(ranks: list) -> tuple:
    """The value, which all ranks have, and the gradients of all stages."""
    value, _ = ranks[0]
    assert all(same(value, other) for other, _ in ranks)
    return value, {s: g for _, grads in ranks for s, g in enumerate(grads) if g is not None}


# ---- bits ----
SIDES = [layer, masked, layer, masked]
LATE = [("x",), ("t",), ("x", "t"), ("x", "t", "mask")]


@pytest.mark.covering
@pytest.mark.parametrize("late", LATE, ids="+".join)
@pytest.mark.parametrize("name", NAMES)
def test_bits(name, late):
    """In one process, and on ranks with messages of their own in two orders."""
    stages = SIDES if "mask" in late else None
    ranks = 2 if name in ("ZBV", "DualPipeV", "Interleaved1F1B") else 4
    fn = partial(step, schedule=name, stages=stages)
    want = by_stage([fn(fpipe.local(ranks))])
    assert same(by_stage([fn(fpipe.local(ranks), late=late)]), want)
    for order in ("buffered", "lockstep"):
        found = fpipe.testing.run(partial(fn, late=late), ranks=ranks, order=order, seed=1)
        assert same(by_stage(found), want)


def with_aux(y, t):
    return squared(y, t), y.mean()


def stateful(p, state, x):
    y = layer(p, x)
    return y, state * 0.5 + y.mean()


def doubled(p, x):
    return {"y": layer(p, x), "x": x}


def joined(p, both):
    return layer(p, both["y"] + both["x"])


#: What else changes a plan: options of the pipeline, and of ``value_and_grad``.
OTHERS: dict[str, dict[str, Any]] = {
    "tied": {"tied": [("0", "3")]},
    "aux": {"loss": with_aux, "of_step": {"has_aux": True}},
    "dx": {"of_step": {"argnums": (0, 1)}},
    "each": {"of_step": {"each": lambda number, y, value: (number, float(value))}},
    "eager": {"engine": "eager"},
    "state": {"stages": [fpipe.Stage(stateful, state=True, initial_state=torch.zeros(()))] * 4},
    "sum": {"reduction": "sum"},
    "accumulate": {"accumulate": torch.float64},
    "ready": {"order": "ready"},
    "replicas": {"schedule": fpipe.make_schedule("1F1B", 4, COUNT, replicas=(3, 1))},
    "x is passed on": {"stages": [doubled, joined, layer, layer]},
    "weights of what is there": {"late": ("x",), "reduction": fpipe.weighted(tokens_of)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_bits_with_other_features(name):
    more = {"schedule": "ZBV", **OTHERS[name]}
    late = more.pop("late", ("x", "t"))
    ranks = 4 if name == "replicas" else 2
    fn = partial(step, **more)
    want = fn(fpipe.local(ranks))
    assert same(fn(fpipe.local(ranks), late=late), want)
    at_once = fpipe.testing.run(fn, ranks=ranks, order="buffered", seed=2)
    assert same(fpipe.testing.run(partial(fn, late=late), ranks=ranks, seed=2), at_once)


def forward(group: Any, late: bool, **options: Any) -> Any:
    """What a call of a pipeline without a loss returns."""
    params, batch = drawn()
    pipe = fpipe.pipeline([layer] * 4, "ZBV", group=group, **options)
    x = fpipe.Microbatches(iter(batch["x"]), COUNT) if late else fpipe.Microbatches(batch["x"])
    each = {"each": lambda number, y: (number, y.sum())} if not options else {}
    y = pipe(pipe.place(params), x, **each)
    return None if y is None else list(y)


@pytest.mark.parametrize("outputs", ["zeros", "everywhere", "last", None])
def test_forwards_alone(outputs):
    fn = partial(forward, **({} if outputs is None else {"outputs": outputs}))
    assert same(fn(fpipe.local(2), True), fn(fpipe.local(2), False))
    at_once, late = (
        fpipe.testing.run(partial(fn, late=flag), ranks=2, seed=3) for flag in (False, True)
    )
    assert same(late, at_once)


def sliced(group: Any, late: bool) -> Any:
    draws = torch.Generator().manual_seed(1)
    x, t = ([torch.randn(2, 6, 4, generator=draws) for _ in range(4)] for _ in range(2))
    pipe = fpipe.pipeline([layer] * 4, "1F1B", loss=squared, group=group, slices=3)
    args = [
        fpipe.Microbatches(iter(parts), 4) if late else fpipe.Microbatches(parts)
        for parts in (x, t)
    ]
    return plain(fpipe.value_and_grad(pipe, (0, 1))(pipe.place(drawn()[0]), *args))


def test_bits_of_slices():
    assert same(sliced(fpipe.local(4), True), sliced(fpipe.local(4), False))


# ---- copies ----
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bits_of_copies(zero):
    def run(group, late):
        return step(
            fpipe.local(2),
            "ZBV",
            late,
            copy=group.here[0],
            dp=fpipe.copies(group, zero=zero),
        )

    at_once, late = (
        fpipe.testing.run(partial(run, late=names), ranks=2, seed=1) for names in ((), ("x", "t"))
    )
    assert same(late, at_once)


# ---- weights ----
WEIGHTS = [3.0, 1, 4, 0, 5, 9, 2, 6]


def weighted_step(group: Any, late: bool, weights: Any, counted: Any, dp: Any = None, **more: Any):
    """A step whose targets have numbers beside them, which are their weights."""
    params, batch = drawn()
    reduction = fpipe.weighted(lambda t: t["n"])

    def loss(y, t):
        return squared(y, t["t"])

    name = "ZBV" if group.size == 2 else "1F1B"
    pipe = fpipe.pipeline([layer] * 4, name, loss=loss, reduction=reduction, group=group, dp=dp)
    t = [{"t": t, "n": torch.tensor(float(n))} for t, n in zip(batch["t"], counted, strict=True)]
    args: list[Any] = [fpipe.Microbatches(batch["x"]), fpipe.Microbatches(t)]
    if late:
        args = [
            fpipe.Microbatches(iter(batch["x"]), COUNT),
            fpipe.Microbatches(iter(t), COUNT, weights),
        ]
    return plain(fpipe.value_and_grad(pipe, (0, 1))(pipe.place(params), *args, **more))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("counted", [WEIGHTS, [3.0] * COUNT, [0.0] * 3 + [1.0] * 5], ids=str)
def test_weights(counted, known):
    """Of known weights the bits are those of all at once. Else the value has them, and the
    gradients if all weights are alike.
    """
    fn = partial(weighted_step, weights=counted if known else None, counted=counted)
    alike = len(set(counted)) == 1
    pairs = [(fn(fpipe.local(2), late=True), fn(fpipe.local(2), late=False))]
    late, at_once = (
        fpipe.testing.run(partial(fn, late=flag), ranks=2, seed=3) for flag in (True, False)
    )
    pairs += zip(late, at_once, strict=True)
    for found, want in pairs:
        assert same(found[0], want[0])
        if known or alike:
            assert same(found, want)
        torch.testing.assert_close(found, want)


def test_weights_with_a_loss_scale_over_copies():
    def run(group, late, weights):
        counted = [n + 10 * group.here[0] for n in WEIGHTS]
        known = counted if weights else None
        dp = fpipe.copies(group, zero=0)
        return weighted_step(fpipe.local(2), late, known, counted, dp, loss_scale=8.0)

    at_once = fpipe.testing.run(partial(run, late=False, weights=False), ranks=2, seed=1)
    known = fpipe.testing.run(partial(run, late=True, weights=True), ranks=2, seed=1)
    after = fpipe.testing.run(partial(run, late=True, weights=False), ranks=2, seed=1)
    assert same(known, at_once)
    for found, want in zip(after, at_once, strict=True):
        assert same(found[0], want[0])
        torch.testing.assert_close(found, want)


def replicated(group: Any, late: bool) -> Any:
    """The last rank counts microbatches after the first ranks have run all of theirs."""
    params, batch = drawn()
    schedule = fpipe.make_schedule("1F1B", 4, COUNT, replicas=(3, 1))
    reduction = fpipe.weighted(tokens_of)
    pipe = fpipe.pipeline([layer] * 2, schedule, loss=squared, reduction=reduction, group=group)
    x, t = given(batch["x"], late), given(batch["t"], late)
    params = pipe.place(params[:2])
    return pipe(params, x, t), plain(fpipe.value_and_grad(pipe)(params, x, t))


def given(parts: list, late: bool) -> fpipe.Microbatches:
    return fpipe.Microbatches(iter(parts), len(parts)) if late else fpipe.Microbatches(parts)


def test_weights_that_the_last_rank_counts():
    found, want = (replicated(fpipe.local(4), late) for late in (True, False))
    assert same(found[0], want[0])
    torch.testing.assert_close(found, want)
    ranks = fpipe.testing.run(partial(replicated, late=True), ranks=4, seed=1)
    assert same([one for one, _ in ranks], [want[0]] * 4)


# ---- when microbatches are taken ----
def test_a_process_takes_what_its_stages_read():
    def run(group):
        params, batch = drawn()
        pipe = fpipe.pipeline([layer] * 4, loss=squared, group=group)
        x, t = given(batch["x"], True), given(batch["t"], True)
        fpipe.value_and_grad(pipe)(pipe.place(params), x, t)
        return str(x), str(t)

    one, all_of_them = (f"Microbatches(..., count=8), of which {n} were taken" for n in (1, 8))
    assert fpipe.testing.run(run, ranks=4, seed=1) == [
        (all_of_them, one),
        (one, one),
        (one, one),
        (one, all_of_them),
    ]


@pytest.mark.parametrize("enabled", [True, False])
def test_an_iterator_computes_gradients_where_its_caller_does(enabled):
    params, batch = drawn()
    pipe = fpipe.pipeline([layer] * 4, "ZBV", loss=squared, group=fpipe.local(2))
    seen = []

    def rollouts():
        for part in batch["x"]:
            seen.append(torch.is_grad_enabled())
            yield part

    with torch.set_grad_enabled(enabled):
        pipe(params, fpipe.Microbatches(rollouts(), COUNT), given(batch["t"], False))
    assert seen == [enabled] * COUNT


def test_a_microbatch_is_taken_right_before_its_first_action():
    """GPipe and 1F1B on one rank, whose stages record when they run."""
    for name in ("GPipe", "1F1B"):
        seen: list[str] = []

        def noting(p, x, seen=seen):
            seen.append("run")
            return layer(p, x)

        def parts(name, batch, seen=seen):
            for number, part in enumerate(batch):
                seen.append(f"{name}{number}")
                yield part

        params, batch = drawn()
        pipe = fpipe.pipeline([noting], name, loss=squared, group=fpipe.local(1), engine="eager")
        run = fpipe.value_and_grad(pipe)
        x, t = fpipe.Microbatches(batch["x"]), fpipe.Microbatches(batch["t"])
        run(params[:1], x, t)
        late = [fpipe.Microbatches(parts(n, batch[n]), COUNT) for n in ("x", "t")]
        run(params[:1], *late)
        seen.clear()
        late = [fpipe.Microbatches(parts(n, batch[n]), COUNT) for n in ("x", "t")]
        run(params[:1], *late)
        want = ["x0", "t0", "run"]
        for number in range(1, COUNT):
            want += [f"x{number}", f"t{number}", "run"]
        assert seen == want


def test_ranks_of_one_process_go_on_before_a_microbatch_is_taken():
    """The caller may wait long for it."""
    seen: list[str] = []
    params, batch = drawn()

    def last(p, x):
        seen.append("last")
        return layer(p, x)

    def rollouts():
        for number, part in enumerate(batch["x"]):
            seen.append(f"x{number}")
            yield part

    pipe = fpipe.pipeline(
        [layer, last], "GPipe", loss=squared, group=fpipe.local(2), engine="eager"
    )
    for _ in range(2):
        seen.clear()
        x = fpipe.Microbatches(rollouts(), COUNT)
        fpipe.value_and_grad(pipe)(params[:2], x, given(batch["t"], False))
    for number in range(1, COUNT):
        assert seen.index(f"x{number}") > number, "the last stage ran all before it"
    assert seen[:4] == ["x0", "last", "x1", "last"]


def test_microbatches_that_were_taken_are_kept():
    params, batch = drawn()
    pipe = fpipe.pipeline([layer] * 4, "ZBV", loss=squared, group=fpipe.local(2))
    run = fpipe.value_and_grad(pipe)
    endless = itertools.cycle(batch["x"])
    x = fpipe.Microbatches(endless, COUNT)
    t = fpipe.Microbatches(batch["t"])
    first = run(params, x, t)
    assert same(run(params, x, t), first)
    assert next(endless) is batch["x"][0], "further items stay in the iterator"
    assert len(x) == COUNT
    assert [part is one for part, one in zip(x, batch["x"], strict=True)] == [True] * COUNT
    assert x[-1] is batch["x"][-1]
    autoencoder = fpipe.Microbatches(iter(batch["x"]), COUNT)
    assert same(run(params, autoencoder, autoencoder), run(params, x, x))


# ---- iterators that fail ----
def ends(parts):
    yield from parts[:5]


def raises(parts):
    yield from parts[:5]
    raise KeyError("no rollout")


def grows(parts):
    yield from parts[:5]
    yield torch.ones(3, 4)


def changes(parts):
    yield from parts[:5]
    yield {"tokens": parts[5]}


def transposes(parts):
    yield from parts[:5]
    yield parts[5].t().contiguous().t()


FAULTS: dict[str, tuple[Any, str]] = {
    "ends": (ends, "ended before microbatch 5 of 8; give"),
    "raises": (raises, "raised KeyError in place of microbatch 5 of 8: 'no rollout'; make"),
    "grows": (grows, r"microbatch 5 of 8 is float32\[3, 4\]"),
    "changes": (changes, "microbatch 5 of 8 is"),
    "transposes": (transposes, "stride"),
}


def fails_and_goes_on(group: Any, name: str, argument: str, rank: int | None, **more: Any) -> Any:
    """The error of a step whose iterator fails on one rank or on all, and a good step after it."""
    fault, _ = FAULTS[name]
    mine = rank is None or rank in group.here
    faults = {argument: fault} if mine else None
    try:
        step(group, late=("x", "t"), faults=faults, times=2, **more)
    except BatchError as error:
        text = str(error)
        cause = type(error.__cause__).__name__
    for one in filter(None, (group, getattr(group, "dp", None))):
        if isinstance(one, C10dGroup):
            assert not any(one._sent), "all sends are complete"
            assert one._monitor.journal.cause is None, "no failure is published"
    return text, cause, step(group, late=("x", "t"), **more)


@pytest.mark.covering
@pytest.mark.parametrize("argument", ["x", "t"])
@pytest.mark.parametrize("name", FAULTS)
def test_iterators_that_fail(name, argument):
    want = step(fpipe.local(2), "ZBV")
    text, cause, found = fails_and_goes_on(fpipe.local(2), name, argument, None, schedule="ZBV")
    assert same(found, want)
    _, message = FAULTS[name]
    target = "x" if argument == "x" else "target 0"
    with pytest.raises(BatchError, match=f"^{target}: .*{message}.*All ranks raise this"):
        raise BatchError(text)
    assert cause == ("KeyError" if name == "raises" else "NoneType")
    fn = partial(fails_and_goes_on, name=name, argument=argument, schedule="1F1B")
    want = step(fpipe.local(4), "1F1B")
    rank = 0 if argument == "x" else 3
    for order in ("buffered", "lockstep"):
        ranks = fpipe.testing.run(partial(fn, rank=rank), ranks=4, order=order, seed=1)
        texts = {text for text, _, _ in ranks}
        assert len(texts) == 1
        assert texts.pop().startswith(f"rank {rank}, {target}: ")
        assert same(by_stage([found for *_, found in ranks]), by_stage([want]))


def first_fails(group: Any) -> Any:
    """What each rank raises where the first microbatch of one rank is missing, and a good step."""
    try:
        step(group, late=("x",), faults={"x": lambda _: iter(())} if group.here == (1,) else None)
    except (BatchError, PeerError) as error:
        text = f"{type(error).__name__}: {error}"
    return text, step(group, late=("x",))


def test_an_iterator_without_a_first_microbatch():
    """Its rank refuses the call, as any other wrong argument."""
    ranks = fpipe.testing.run(first_fails, ranks=4, seed=1)
    first = "the iterator ended before microbatch 0 of 8"
    assert [text.partition(":")[0] for text, _ in ranks] == [
        "PeerError",
        "BatchError",
        "PeerError",
        "PeerError",
    ]
    assert all(first in text for text, _ in ranks)
    want = by_stage([step(fpipe.local(4))])
    assert same(by_stage([found for _, found in ranks]), want)


def test_an_iterator_that_fails_in_one_copy():
    """Both copies raise its error."""

    def run(group):
        fails = partial(
            fails_and_goes_on, fpipe.local(2), schedule="ZBV", dp=group, copy=group.here[0]
        )
        return fails("raises", "x", None) if group.here == (1,) else fails("raises", "none", None)

    texts = [text for text, *_ in fpipe.testing.run(run, ranks=2, seed=1)]
    assert texts[0] == texts[1]
    assert texts[0].startswith("rank 1, x: the iterator raised KeyError")


def test_weights_that_cannot_be_counted():
    def run(group):
        params, batch = drawn()
        reduction = fpipe.weighted(lambda t: t if t.sum() > 90 else t.square().sum())
        pipe = fpipe.pipeline([layer] * 4, loss=squared, reduction=reduction, group=group)
        t = [*batch["t"][:5], torch.full((2, 4), 90.0), *batch["t"][6:]]
        x, t = fpipe.Microbatches(batch["x"]), fpipe.Microbatches(iter(t), COUNT)
        with pytest.raises(BatchError, match=r"shape.*for microbatch 5.*All ranks raise this"):
            fpipe.value_and_grad(pipe)(pipe.place(params), x, t)

    run(fpipe.local(4))
    fpipe.testing.run(run, ranks=4, seed=1)


# ---- processes ----
def on_processes(dp: int) -> Any:
    group = fpipe.init(dp=dp, timeout=60) if dp > 1 else fpipe.init(timeout=60)
    more: dict[str, Any] = {}
    if dp > 1:
        more = {"dp": fpipe.copies(group.dp, zero=2), "copy": group.dp.here[0]}
    names = ("1F1B", "GPipe") if dp == 1 else ("ZBV",)
    results = []
    for name in names:
        at_once, late = (step(group, name, late, times=2, **more) for late in ((), ("x", "t")))
        assert same(late, at_once), name
        results.append(late)
    for name in ("ends", "raises", "grows"):
        texts = [
            fails_and_goes_on(group, name, argument, rank, schedule=names[0], **more)
            for argument, rank in (("x", 0), ("t", None))
        ]
        for text, _, found in texts:
            assert same(found, results[0]), name
            results.append(text)
    counted = [n + 10 * more.get("copy", 0) for n in WEIGHTS]
    weighted = partial(weighted_step, group, counted=counted, dp=more.get("dp"))
    if dp == 1:
        assert same(weighted(late=True, weights=counted), weighted(late=False, weights=None))
        torch.testing.assert_close(
            weighted(late=True, weights=None), weighted(late=False, weights=None)
        )
    return results


@pytest.mark.parametrize(
    ("ranks", "dp", "shared"),
    [(4, 2, "1"), *also((2, 1, "0"), (2, 1, "1"), (4, 1, "0"))],
)
def test_on_processes(ranks, dp, shared):
    """Bits of all at once; iterators that fail end on all ranks, which go on."""
    env = {"FPIPE_SHARED_MEMORY": shared}
    found = fpipe.launch(on_processes, dp, ranks=ranks, env=env, timeout=120)
    for results in zip(*found, strict=True):
        if isinstance(results[0], str):
            assert len(set(results)) == 1, "all ranks raise the same error"
    if dp == 1:
        name = "1F1B"
        assert same(by_stage([one[0] for one in found]), by_stage([step(fpipe.local(ranks), name)]))


#: Set by the first backward of this process.
RAN = threading.Event()


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        RAN.set()
        return grads[0].clone()


def noted(p, x):
    return Noted.apply(layer(p, x))


def late_for_a_backward(order: Any, seconds: float) -> Any:
    """A step in which the last microbatch waits for a backward; whether that came."""
    group = fpipe.init(timeout=60)
    came = []

    def waits(parts):
        yield from parts[:-1]
        RAN.clear()
        came.append(RAN.wait(seconds))
        yield parts[-1]

    more: dict[str, Any] = {"stages": [noted] * 4, "engine": "eager", "order": order, "seed": 0}
    faults = {"x": waits}
    found = step(group, "GPipe", ("x", "t"), faults=faults, **more)
    return came, found


@pytest.mark.parametrize(
    ("order", "shared"),
    [(("ready", 40), "1"), *also(("row", "0"), (("ready", 40), "0"), ("row", "1"))],
)
def test_backwards_run_while_a_microbatch_is_missing(order, shared):
    """In the ready order. Over gloo a rank cannot look whether a message has arrived."""
    env = {"FPIPE_SHARED_MEMORY": shared}
    early = order != "row" and shared == "1"
    fn = partial(late_for_a_backward, order, 20 if early else 0.5)
    ranks = fpipe.launch(fn, ranks=2, env=env, timeout=120)
    came, _ = ranks[0]
    assert came == [early]
    want = step(fpipe.local(2), "GPipe", stages=[noted] * 4, engine="eager", seed=0)
    assert same(by_stage([found for _, found in ranks]), by_stage([want]))


# ---- what is refused ----
def test_wrong_arguments():
    wrong: Any
    for wrong in (0, -1, True, 2.0, "4"):
        with pytest.raises(BatchError, match="give the number of microbatches"):
            fpipe.Microbatches(iter([]), wrong)
    for wrong in (3, "rollouts", {"x": 1}, None):
        with pytest.raises(BatchError, match="takes an iterator of microbatches"):
            fpipe.Microbatches(wrong, count=4)
    with pytest.raises(BatchError, match="count=None"):
        fpipe.Microbatches([1], weights=[1.0])
    pipe = fpipe.pipeline([layer] * 2, loss=squared, group=fpipe.local(2))
    params, batch = drawn()
    params = params[:2]
    run = fpipe.value_and_grad(pipe)
    one = iter(batch["x"])
    with pytest.raises(BatchError, match=r"itertools\.tee"):
        run(params, fpipe.Microbatches(one, 4), fpipe.Microbatches(one, 4))
    with pytest.raises(BatchError, match=r"hold \[4, 8\] microbatches"):
        run(params, fpipe.Microbatches(iter(batch["x"]), 4), fpipe.Microbatches(batch["t"]))
    forwards = fpipe.pipeline([layer] * 2, group=fpipe.local(2))
    with pytest.raises(BatchError, match=r"cannot be in fpipe\.vjp.*give all at once"):
        fpipe.vjp(forwards, params, fpipe.Microbatches(iter(batch["x"]), 4))
    with pytest.raises(BatchError, match=r"cannot be in fpipe\.vjp.*give all at once"):
        torch.func.grad(
            lambda p: forwards([p, p], fpipe.Microbatches(iter(batch["x"]), 4))[0].sum()
        )(params[0])


def test_a_captured_step_is_refused():
    """Its graph reads fixed memory."""
    params, batch = drawn()
    pipe = fpipe.pipeline([layer] * 4, "ZBV", loss=squared, group=fpipe.local(2))
    captured = type(pipe)(replace(pipe.config, capture=True))
    with pytest.raises(BatchError, match=r"in a captured step.*give all at once"):
        fpipe.value_and_grad(captured)(params, given(batch["x"], True), given(batch["t"], False))


@pytest.mark.gpu
def test_microbatches_are_moved_to_the_device():
    device = torch.accelerator.current_accelerator()
    group = fpipe.local(devices=[f"{device}:0"] * 2)
    params, batch = drawn()
    params = [p.to(device) for p in params]
    more = {"loss": squared, "group": group, "reduction": fpipe.weighted(tokens_of)}
    run = fpipe.value_and_grad(fpipe.pipeline([layer] * 4, "ZBV", **more))
    late, at_once = (
        run(params, given(batch["x"], flag), given(batch["t"], flag)) for flag in (True, False)
    )
    assert same(late[0], at_once[0])
    torch.testing.assert_close(late[1], at_once[1])


def test_weights_must_fit():
    params, batch = drawn()
    x = fpipe.Microbatches(batch["x"])
    t = fpipe.Microbatches(iter(batch["t"]), COUNT, weights=[1.0, 2.0])
    reduction = fpipe.weighted(tokens_of)
    pipe = fpipe.pipeline([layer] * 4, loss=squared, reduction=reduction, group=fpipe.local(4))
    with pytest.raises(BatchError, match="weights= has 2 numbers for 8 losses"):
        fpipe.value_and_grad(pipe)(params, x, t)
    with pytest.raises(BatchError, match="give a number for each microbatch"):
        fpipe.Microbatches(iter([]), COUNT, weights=["three"])
    plain_mean = fpipe.pipeline([layer] * 4, loss=squared, group=fpipe.local(4))
    with pytest.raises(BatchError, match="the reduction of the pipeline is 'mean'"):
        fpipe.value_and_grad(plain_mean)(params, x, t)

    def with_loss(p, x):
        return layer(p, x), x.sum()

    stages = [fpipe.Stage(with_loss, aux_loss=True), layer]
    pipe = fpipe.pipeline(stages, loss=squared, reduction=reduction, group=fpipe.local(2))
    t = fpipe.Microbatches(iter(batch["t"]), COUNT)
    with pytest.raises(BatchError, match=r"auxiliary loss.*weights="):
        fpipe.value_and_grad(pipe)(params[:2], x, t)
    t = fpipe.Microbatches(iter(batch["t"]), COUNT, weights=[1.0] * COUNT)
    fpipe.value_and_grad(pipe)(params[:2], x, t)


def elsewhere(group: Any, good: bool) -> Any:
    params, batch = drawn()
    pipe = fpipe.pipeline([layer] * 4, loss=squared, group=group)
    nothing = fpipe.Microbatches(fpipe.elsewhere(), COUNT) if good else fpipe.elsewhere()
    first, last = 0 in pipe.here, 3 in pipe.here
    x = fpipe.Microbatches(iter(batch["x"]), COUNT) if first else nothing
    t = fpipe.Microbatches(iter(batch["t"]), COUNT) if last else nothing
    if not good and not first and not last:
        x = fpipe.Microbatches(fpipe.elsewhere((2, 4)) for _ in range(COUNT))
    return fpipe.value_and_grad(pipe)(pipe.place(params), x, t)


def test_elsewhere():
    found = fpipe.testing.run(partial(elsewhere, good=True), ranks=4, seed=1)
    assert same(by_stage(found), by_stage([step(fpipe.local(4))]))
    outcomes = fpipe.testing.outcomes(partial(elsewhere, good=False), ranks=4, seed=1)
    for outcome in outcomes:
        assert isinstance(outcome.error, MismatchError)
        assert "Taking(names=" in str(outcome.error)


# ---- beside other parts of fpipe ----
def test_a_plan_a_profile_and_a_debugged_step():
    params, batch = drawn()
    pipe = fpipe.pipeline([layer] * 4, "ZBV", loss=squared, group=fpipe.local(2))
    run = fpipe.value_and_grad(pipe)

    def late():
        return [fpipe.Microbatches(iter(batch[name]), COUNT) for name in ("x", "t")]

    want = run(params, *late())
    text = str(pipe.plan(params, *late())[0])
    assert text.count("TAKE x") == text.count("TAKE targets") == COUNT
    assert text.count("TAKEN") == 1
    assert "TAKE" not in str(pipe.plan(params, *map(fpipe.Microbatches, (batch["x"], batch["t"]))))
    with fpipe.debug():
        assert same(run(params, *late()), want)
    profiled = fpipe.profile(run)
    assert same(profiled(params, *late()), want)
    assert "0F0" in str(profiled.timeline.rows)
    assert "microbatches" in str(pipe.explain(params, *late()))

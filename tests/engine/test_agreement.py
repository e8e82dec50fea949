# ruff: noqa: RUF012
"""One rank differs from the others: every rank raises MismatchError that names the difference, cold
and warm.

On fake ranks every kind of difference, on processes those that take ways of their own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
from carriers import FIRST, OVER
from fpipe.collectives._store import default_store
from fpipe.collectives.setup import adopt
from fpipe.testing import outcomes
from fpipe.tree import Spec


def layer(p: Tensor, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p)


def other_layer(p: Tensor, x: Tensor) -> Tensor:
    return x + torch.sin(x @ p)


def squared(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def absolute(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).abs().mean()


def counted(target: Tensor) -> Tensor:
    return (target > 0).sum() + 1


def all_counted(target: Tensor) -> Tensor:
    return (target > -9).sum() + 1


class Kind(NamedTuple):
    """How one rank differs: options of its pipeline, arguments of its call, or another call."""

    name: str  # a word of the message
    options: dict[str, Any] = {}
    base: dict[str, Any] = {}  # options of every rank
    call: dict[str, Any] = {}
    rows: int = 8
    dtype: torch.dtype = torch.float32
    kind: str = "grad"
    parts: list[int] | None = None
    around: Callable[[], Any] = contextlib.nullcontext
    argnums: Any = 0


KINDS = {
    "loss": Kind("loss", {"loss": absolute}),
    "stage function": Kind("stage", {"stages": [layer, other_layer]}),
    "schedule": Kind("schedule", {"schedule": "GPipe"}),
    "reduction": Kind("reduction", {"reduction": "sum"}),
    "weighted function": Kind(
        "weighted",
        {"reduction": fpipe.weighted(all_counted)},
        {"reduction": fpipe.weighted(counted)},
    ),
    "pipeline seed": Kind("seed", {"seed": 2}, {"seed": 1}),
    "call seed": Kind("seed", call={"seed": 5}, base={"seed": 1}),
    "loss scale": Kind("loss_scale", call={"loss_scale": 8.0}),
    "has_aux": Kind("has_aux", call={"has_aux": True}),
    "argnums": Kind("argnums", argnums=(0, 1)),
    "forward": Kind("forward", kind="forward"),
    "microbatches": Kind("microbatches", {"microbatches": 2}),
    "rows": Kind("shape", rows=16),
    "dtype": Kind("dtype|shape", dtype=torch.float64),
    "microbatch shapes": Kind("microbatch", parts=[1, 3, 2, 2]),
    "accumulate": Kind("accumulat", {"accumulate": torch.float64}),
    "tied": Kind("tied", {"tied": [("0", "1")]}),
    "frozen": Kind("frozen", {"frozen": ["0"]}),
    "engine": Kind("engine", {"engine": "eager"}),
    "overlap": Kind("overlap", {"overlap": "sequential"}),
    "autocast": Kind("autocast", around=lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "debug": Kind("debug", around=fpipe.debug),
    "outputs": Kind("outputs", {"outputs": "everywhere"}, {"loss": None}, kind="forward"),
    "each": Kind("each", {}, {"loss": None}, call={"each": lambda m, y: m}, kind="forward"),
    "compile": Kind("compile", {"compile": "aot_eager"}),
}


def pipeline(group: Any, **options: Any) -> fpipe.Pipeline:
    chosen = {
        "stages": [layer, layer],
        "schedule": "1F1B",
        "loss": squared,
        "microbatches": 4,
    } | options
    return fpipe.pipeline(chosen.pop("stages"), chosen.pop("schedule"), group=group, **chosen)


def call(pipe: fpipe.Pipeline, kind: Kind | None, base: Kind) -> None:
    rows, dtype = (kind.rows, kind.dtype) if kind else (8, torch.float32)
    x: Any = torch.linspace(-1, 1, rows * 4, dtype=dtype).view(rows, 4)
    if kind is not None and kind.parts:
        x = fpipe.Microbatches(list(torch.split(x, kind.parts)))
    params = pipe.place([torch.eye(4, dtype=dtype)] * 2)
    how = kind.kind if kind else "forward" if base.base.get("loss", 0) is None else "grad"
    more = dict(kind.call) if kind else {}
    with (kind.around if kind else contextlib.nullcontext)():
        if base.base.get("loss", 0) is None:
            pipe(params, x, **more)
        elif how == "forward":
            pipe(params, x, x)
        else:
            has_aux = more.pop("has_aux", False)
            fpipe.value_and_grad(pipe, kind.argnums if kind else 0, has_aux=has_aux)(
                params, x, x, **more
            )


def differ(kind: Kind, warm: bool, group: Any) -> None:
    usual = pipeline(group, **kind.base)
    odd = pipeline(group, **(kind.base | kind.options)) if kind.options else usual
    for _ in range(2 if warm else 0):
        call(usual, None, kind)
    if group.rank == 1:
        call(odd, kind, kind)
    else:
        call(usual, None, kind)


def names(kind: Kind, error: BaseException | None) -> bool:
    return isinstance(error, fpipe.errors.MismatchError) and any(
        word in str(error) for word in kind.name.split("|")
    )


@pytest.mark.covering
@pytest.mark.parametrize("order", ["buffered", "lockstep"])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("name", KINDS)
def test_one_rank_differs(name: str, warm: bool, order: str):
    ended = outcomes(partial(differ, KINDS[name], warm), 2, order=order)
    assert all(names(KINDS[name], outcome.error) for outcome in ended), [
        outcome.error for outcome in ended
    ]
    assert len({str(outcome.error) for outcome in ended}) == 1


def test_one_of_four_ranks_differs():
    """The first ranks of a forward without a loss only send: they too learn that the last one
    differs.
    """

    def work(group: Any) -> None:
        pipes = [
            pipeline(group, stages=[layer] * 4, loss=None, outputs=outputs)
            for outputs in ("zeros", "everywhere")
        ]
        params, x = pipes[0].place([torch.eye(4)] * 4), torch.ones(8, 4)
        for _ in range(2):
            pipes[0](params, x)
        pipes[group.rank == 3](params, x)

    ended = outcomes(work, 4)
    assert {str(outcome.error) for outcome in ended} == {
        "ranks disagree about outputs=: rank 0 has zeros, rank 3 has everywhere; pass the same "
        "arguments and options "
        "on every rank. This group cannot be used again"
    }


def two_pipelines(first: Any, second: Any, group: Any) -> None:
    """Both are known to all ranks; in the end rank 1 calls them in the other order."""
    for _ in range(2):
        call(first, None, KINDS["loss"])
        call(second, None, KINDS["loss"])
    for pipe in (first, second) if group.rank == 0 else (second, first):
        call(pipe, None, KINDS["loss"])


def test_pipelines_called_in_another_order_on_one_rank():
    def work(group: Any) -> None:
        two_pipelines(pipeline(group), pipeline(group, stages=[other_layer, other_layer]), group)

    ended = outcomes(work, 2)
    assert all(names(KINDS["stage function"], outcome.error) for outcome in ended)


def test_equal_pipelines_called_in_another_order_on_one_rank():
    """Nothing differs but the values in the closures of the stages."""

    def work(group: Any) -> None:
        scaled = lambda factor: lambda p, x: factor * layer(p, x)
        first, second = (pipeline(group, stages=[scaled(factor)] * 2) for factor in (1.0, 2.0))
        two_pipelines(first, second, group)

    ended = outcomes(work, 2)
    assert {str(outcome.error) for outcome in ended} == {
        "ranks disagree about plans: rank 0 has those prepared for call 0, rank 1 has those "
        "prepared for call 1; make "
        "the same calls in the same order on every rank, with arguments of the same shapes and "
        "strides. This group "
        "cannot be used again"
    }


def test_pullbacks_called_in_another_order_on_one_rank():
    def work(group: Any) -> None:
        pipe = pipeline(group, loss=None)
        params, x = pipe.place([torch.eye(4)] * 2), torch.ones(8, 4)
        pullbacks = [fpipe.vjp(pipe, params, x)[1] for _ in range(2)]
        for pullback in pullbacks if group.rank == 0 else reversed(pullbacks):
            pullback(torch.ones(8, 4))

    ended = outcomes(work, 2)
    assert all(
        names(KINDS["has_aux"]._replace(name="the pullback of call 1"), outcome.error)
        for outcome in ended
    )


def test_strides_differ_once_warm():
    def work(group: Any) -> None:
        pipe = pipeline(group, loss=None)
        params, x = pipe.place([torch.eye(4)] * 2), torch.ones(8, 4)
        pipe(params, x)
        pipe(params, x.t().contiguous().t() if group.rank else x)

    ended = outcomes(work, 2)
    assert all(
        names(KINDS["loss"]._replace(name="the strides of x"), outcome.error) for outcome in ended
    )


def test_a_rank_that_skips_a_call():
    def work(group: Any) -> None:
        pipe = pipeline(group)
        for step in range(4):
            if group.rank == 1 and step == 2:
                continue
            call(pipe, None, KINDS["loss"])

    ended = outcomes(work, 2)
    assert all(
        isinstance(outcome.error, fpipe.FpipeError) or outcome.rank == 1 for outcome in ended
    )
    assert any(isinstance(outcome.error, fpipe.FpipeError) for outcome in ended)


def test_a_new_signature_on_all_ranks_is_no_difference():
    def work(group: Any) -> float:
        pipe = pipeline(group)
        for kind in (None, KINDS["rows"], None, KINDS["dtype"], KINDS["rows"]):
            call(pipe, kind, KINDS["loss"])
        return 1.0

    assert [outcome.value for outcome in outcomes(work, 2)] == [1.0, 1.0]


# ---- processes ----
def rows_differ(warm: bool, group: Any) -> None:
    """Forward only, with batches that both ranks have plans for if warm."""
    pipe = pipeline(group, loss=None)
    params = pipe.place([torch.eye(4)] * 2)
    for rows in (8, 16) if warm else ():
        pipe(params, torch.ones(rows, 4))
    pipe(params, torch.ones(16 if group.rank else 8, 4))


ON_PROCESSES: dict[str, Callable[[Any], None]] = {
    **{
        f"{name}, {warm}": partial(differ, KINDS[name], warm == "warm")
        for name in ("loss", "call seed", "dtype", "forward", "outputs")
        for warm in ("cold", "warm")
    },
    "rows, of new shapes": partial(rows_differ, False),
    "rows, of known shapes": partial(rows_differ, True),
}


def everything(over: str) -> Iterator[tuple[str, str, float]]:
    """The error and the seconds of each case; every one has a group of its own, since it ends the
    group.
    """
    fpipe.init(timeout=60)
    world = dist.group.WORLD
    assert world is not None
    for case, work in ON_PROCESSES.items():
        group = adopt(world, timeout=60)
        assert group.at_once == (over == "memory")
        start = time.monotonic()
        try:
            work(group)
        except fpipe.FpipeError as error:
            yield case, f"{type(error).__name__}: {error}", time.monotonic() - start
        else:
            yield case, "no error", 0.0


def listed(over: str) -> list[tuple[str, str, float]]:
    return list(everything(over))


@pytest.mark.parametrize("over", FIRST)
def test_processes_differ(over: str):
    for first, second in zip(
        *fpipe.launch(listed, over, ranks=2, timeout=200, env=OVER[over]), strict=True
    ):
        assert first[:2] == second[:2]
        assert first[1].startswith("MismatchError: ranks disagree about"), first
        assert any(
            word in first[1]
            for word in KINDS.get(first[0].split(", ")[0], KINDS["rows"]).name.split("|")
        )
        assert max(first[2], second[2]) < 20, "of a time-out of 60"


def seconds_to_receive() -> float:
    """Rank 2 announces its call late; how long rank 1 waits for a message of rank 0."""
    group = fpipe.init(timeout=60)
    row = torch.ones(4)
    if group.rank == 2:
        time.sleep(2.0)
    group.enter(1, dict)
    start = time.monotonic()
    if group.rank == 0:
        group.send((row,), 0, 1).wait()
    elif group.rank == 1:
        assert group.recv((Spec.of(row),), 0, 1).wait()[0].equal(row)
    waited = time.monotonic() - start
    group.confirm()
    return waited


def test_a_message_does_not_wait_for_the_calls_of_other_ranks():
    _, waited, _ = fpipe.launch(seconds_to_receive, ranks=3, timeout=60, env=OVER["gloo"])
    assert waited < 1.0, "of the two seconds by which rank 2 is late"


# ---- arguments that one rank refuses ----
def bad_batch(pipe: fpipe.Pipeline, params: Any) -> None:
    fpipe.value_and_grad(pipe)(params, torch.ones(7, 4), torch.ones(7, 4))


def bad_seed(pipe: fpipe.Pipeline, params: Any) -> None:
    fpipe.value_and_grad(pipe)(params, torch.ones(8, 4), torch.ones(8, 4), seed="one")


def bad_params(pipe: fpipe.Pipeline, params: Any) -> None:
    fpipe.value_and_grad(pipe)(params[:1], torch.ones(8, 4), torch.ones(8, 4))


def bad_leaf(pipe: fpipe.Pipeline, params: Any) -> None:
    pipe(params, [torch.ones(8, 4), bytearray()], torch.ones(8, 4))


REFUSED = {"batch": bad_batch, "seed": bad_seed, "params": bad_params, "leaf": bad_leaf}


def refuses(
    group: Any, refusing: tuple[int, ...], warm: bool, bad: Callable[..., None]
) -> tuple[list[str], float]:
    """The errors of two calls that some ranks refuse, the seconds of the first, and the loss of a
    call after them.
    """
    pipe = pipeline(group, stages=[layer] * group.size)
    params, x = pipe.place([torch.eye(4)] * group.size), torch.linspace(-1, 1, 32).view(8, 4)
    step = partial(fpipe.value_and_grad(pipe), params, x, x)
    seen, start = [], time.monotonic()
    for _ in range(2 if warm else 0):
        step()
    for _ in range(2):
        try:
            bad(pipe, params) if group.rank in refusing else step()
        except fpipe.FpipeError as error:
            seen.append(f"{type(error).__name__}: {error}")
    seen.append(f"loss {step()[0].item():.6f}")
    return seen, time.monotonic() - start


@pytest.mark.covering
@pytest.mark.parametrize("order", ["buffered", "lockstep"])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_one_rank_refuses(name: str, warm: bool, order: str):
    ended = outcomes(lambda group: refuses(group, (1,), warm, REFUSED[name]), 3, order=order)
    assert [outcome.error for outcome in ended] == [None] * 3
    first, refusing, last = (outcome.value[0] for outcome in ended)
    assert first == last
    assert [error.split(":")[0] for error in first[:2]] == ["PeerError", "PeerError"]
    assert all(
        f"rank 1 refused the arguments of this call, so no rank completes it: {error}" in seen
        for error, seen in zip(refusing[:2], first[:2], strict=True)
    )
    assert first[2] == refusing[2]


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_one_rank_refuses_of_an_automatic_schedule(name: str):
    """Its gathering came before the call was announced: the others waited."""

    def calls(group: Any) -> list[str]:
        pipe = pipeline(group, stages=[layer] * group.size, schedule="auto")
        params, x = pipe.place([torch.eye(4)] * group.size), torch.ones(8, 4)
        seen = []
        for bad in (True, False):
            try:
                if bad and group.rank == 1:
                    REFUSED[name](pipe, params)
                else:
                    seen.append(f"{fpipe.value_and_grad(pipe)(params, x, x)[0].item():.6f}")
            except fpipe.FpipeError as error:
                seen.append(f"{type(error).__name__}: {error}")
        return seen

    ended = outcomes(calls, 3)
    assert [outcome.error for outcome in ended] == [None] * 3
    first, refusing, last = (outcome.value for outcome in ended)
    assert first == last and first[1] == refusing[1]
    assert first[0].startswith("PeerError") and refusing[0] in first[0]


def test_arguments_that_all_ranks_refuse():
    ended = outcomes(lambda group: refuses(group, (0, 1, 2), True, bad_batch), 3)
    assert all(outcome.value[0][0].startswith("BatchError") for outcome in ended)
    assert len({outcome.value[0][2] for outcome in ended}) == 1


def fewest_keys() -> int:
    """How many keys the store has while no process announces anything."""
    counts = list[int]()
    for _ in range(6):
        time.sleep(0.05)
        counts.append(default_store().num_keys())
    return min(counts)


def keys_after_refused_calls(group: Any) -> list[int]:
    """How many keys the store has after each of some refused calls."""
    pipe = pipeline(group, stages=[layer] * group.size)
    params, counts = pipe.place([torch.eye(4)] * group.size), list[int]()
    step = partial(fpipe.value_and_grad(pipe), params, torch.ones(8, 4), torch.ones(8, 4))
    for _ in range(5):
        with contextlib.suppress(fpipe.FpipeError):
            bad_batch(pipe, params) if group.rank == 1 else step()
        for _ in range(3):  # no rank is in a round, and each has deleted its keys of the one before
            group.barrier()
        counts.append(fewest_keys())
        group.barrier()
    return counts


def refused_on_processes(over: str) -> tuple[list[tuple[list[str], float]], list[int]]:
    world = fpipe.init(timeout=60)
    assert world.at_once == (over == "memory")
    pg = dist.group.WORLD
    assert pg is not None
    cases = [
        refuses(adopt(pg, timeout=60), refusing, warm, bad_batch)
        for refusing, warm in (((1,), True), ((0,), False), ((0, 1), True), ((2,), True))
    ]
    return cases, keys_after_refused_calls(world)


@pytest.mark.parametrize("over", FIRST)
def test_arguments_that_a_process_refuses(over: str):
    found = fpipe.launch(refused_on_processes, over, ranks=3, timeout=200, env=OVER[over])
    for case, refusing in enumerate(((1,), (0,), (0, 1), (2,))):
        for rank, (cases, keys) in enumerate(found):
            assert keys[-1] < keys[1] + 3, "each refused call left 16 keys in the store"
            seen, seconds = cases[case]
            assert all(
                error.startswith("BatchError" if rank in refusing else "PeerError")
                for error in seen[:2]
            )
            assert rank in refusing or f"rank {refusing[0]} refused" in seen[0]
            assert seen[2] == found[0][0][case][0][2]
            assert seconds < 20, "of a time-out of 60"


@pytest.mark.parametrize(
    ("what", "values"),
    [
        ("seed", (-1, -2)),
        ("seed", (3, 3 + 2**61 - 1)),
        ("seed", (0, 2**61 - 1)),
        ("loss_scale", (1.0, float.fromhex("0x1.0000000000001p0"))),
    ],
)
def test_numbers_with_equal_hashes_are_different_calls(what: str, values: tuple[Any, Any]):
    def rank(group: Any) -> None:
        pipe = fpipe.pipeline([layer] * 2, loss=squared, microbatches=2, group=group)
        params = pipe.place([torch.eye(4)] * 2)
        step = fpipe.value_and_grad(pipe)
        step(params, torch.ones(8, 4), torch.ones(8, 4), **{what: values[0]})
        step(params, torch.ones(8, 4), torch.ones(8, 4), **{what: values[group.rank]})

    for outcome in outcomes(rank, ranks=2):
        assert isinstance(outcome.error, fpipe.errors.MismatchError)
        assert f"ranks disagree about the {what}" in str(outcome.error).replace("=", "").replace(
            "about loss", "about the loss"
        )


@pytest.mark.parametrize("scales", [(2, 2.0), (torch.tensor(torch.nan), torch.tensor(torch.nan))])
def test_equal_loss_scales_are_one_call(scales: tuple[Any, Any]):
    def rank(group: Any) -> None:
        pipe = fpipe.pipeline([layer] * 2, loss=squared, microbatches=2, group=group)
        params = pipe.place([torch.eye(4)] * 2)
        step = fpipe.value_and_grad(pipe)
        for _ in range(2):
            step(params, torch.ones(8, 4), torch.ones(8, 4), loss_scale=scales[group.rank])

    assert [outcome.error for outcome in outcomes(rank, ranks=2)] == [None, None]

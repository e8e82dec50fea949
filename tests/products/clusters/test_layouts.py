"""The search over layouts: properties, an exhaustive oracle, and what it says where nothing
fits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fpipe.errors import PlanError, ScheduleError
from fpipe.products.clusters.hardware import GIB, TABLE, find_gpu
from fpipe.products.clusters.layout import Job, Layout, even_layers
from fpipe.products.clusters.layouts import candidates, search
from fpipe.products.clusters.model import Model
from fpipe.products.clusters.prediction import least, predict

MODEL = Model(
    "small",
    "llama",
    hidden=2048,
    layers=16,
    heads=16,
    vocabulary=32000,
    feed_forward=5632,
    kv_heads=4,
)


def few(layout: Layout) -> bool:
    schedules = ("1F1B", "Interleaved1F1B", "ZBH1", "ZBVZeroBubble")
    return layout.schedule in schedules and layout.microbatch <= 2


def job(gpus: int = 16, memory: float = 12, batch: int = 64) -> Job:
    return Job(MODEL, gpus, find_gpu("a100", memory=memory * GIB), batch, 2048)


def test_the_best_is_that_of_all_layouts():
    """Bounds leave out no layout that is among the best."""
    steps = []
    for layout in filter(few, candidates(job())):
        try:
            found = predict(job(), layout)
        except ScheduleError:
            continue
        seconds, nbytes = least(job(), layout)
        assert seconds <= found.step * (1 + 1e-9) and nbytes <= found.fullest.total * (1 + 1e-9), (
            layout
        )
        steps += [found.step] if found.fits else []
    best = search(job(), few)
    assert best.best[0].step == min(steps) and best.predicted < len(steps)
    assert [each.step for each in best.best] == sorted(each.step for each in best.best)
    assert (
        len({(p.layout.tp, p.layout.pp, p.layout.schedule) for p in best.best})
        == len(best.best)
        == 5
    )


def test_more_memory_is_never_slower():
    steps = [search(job(memory=memory), few).best[0].step for memory in (4, 8, 16, 80)]
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1]


def test_more_gpus_are_never_slower():
    steps = [search(job(gpus), few).best[0].step for gpus in (2, 4, 8, 16, 32)]
    assert steps == sorted(steps, reverse=True) and steps[0] > 4 * steps[-1]


def test_faster_parts_are_never_slower():
    base = search(job(), few).best[0].step
    for part in ("flops", "bandwidth", "link", "network"):
        faster = replace(job().gpu, **{part: 2 * getattr(job().gpu, part)})
        assert search(replace(job(), gpu=faster), few).best[0].step <= base


def test_long_schedules_are_extended():
    """Steps and peaks of many microbatches are those of fewer, with more periods."""
    many, layout = job(4, 80, batch=96), Layout(1, 4, 1, 0, "GPipe")
    for schedule, per_rank in (
        ("1F1B", 1),
        ("Interleaved1F1B", 2),
        ("ZBVZeroBubble", 2),
        ("GPipe", 1),
    ):
        short = replace(layout, schedule=schedule, per_rank=per_rank)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fpipe.products.clusters.prediction.PERIODS", 1000)
            exact = predict(many, short)
        found = predict(many, short)
        assert found.step == pytest.approx(exact.step, rel=0.002)
        totals = [[memory.total for memory in each.memory] for each in (found, exact)]
        assert totals[0] == pytest.approx(totals[1], rel=0.002)


def test_copies_share_the_optimizer():
    layouts = [Layout(1, 2, 8, zero, "Interleaved1F1B", 4) for zero in (0, 1, 3)]
    layers = [predict(job(), layout).memory[0].layers for layout in layouts]
    assert layers[0] > layers[1] > layers[2]


def test_layers_are_even_with_the_head_counted():
    heavy = replace(MODEL, vocabulary=256_000)
    assert even_layers(replace(MODEL, vocabulary=1000), 4) == (4, 4, 4, 4)
    assert even_layers(heavy, 4)[-1] < 4 and sum(even_layers(heavy, 4)) == 16
    timed = [
        predict(replace(job(4), model=heavy), Layout(1, 4, 1, 0, layers=layers)).step
        for layers in ((), (4,) * 4)
    ]
    assert timed[0] < timed[1]


def test_nothing_fits():
    """What comes nearest, and what would make it fit; it does."""
    with pytest.raises(PlanError, match="no layout fits 1 GiB; nearest is tp ") as refused:
        search(job(2, memory=1), few)
    words = str(refused.value).split()
    memory = words[words.index("--memory") + 1]
    assert search(job(2, memory=float(memory.removesuffix("GiB;"))), few).best


def test_no_layout():
    with pytest.raises(PlanError, match=r"no layout of 23 GPUs divides small.*such as 16 GPUs"):
        search(job(23))
    with pytest.raises(PlanError, match="leave out some"):
        search(job(), lambda layout: layout.tp == 3)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(2, 2, 2), "must be the 16 GPUs"),
        (Layout(16, 1, 1), "key-value heads"),
        (Layout(1, 1, 16, microbatch=8), "must divide 64 sequences"),
        (Layout(1, 16, 1, layers=(1,) * 15 + (2,)), "sum 16"),
    ],
)
def test_layouts_that_do_not_fit(layout: Layout, message: str):
    with pytest.raises(PlanError, match=message):
        predict(job(), layout)


def test_names_of_gpus_in_any_case():
    assert [find_gpu(name.upper()).name for name in TABLE] == list(TABLE)


@pytest.mark.parametrize("name", ["h1000", "", None])
def test_a_gpu_that_is_not_known_is_named(name: Any):
    with pytest.raises(PlanError, match=f"gpu {name!r} is not known, and known are a100, h100"):
        find_gpu(name)

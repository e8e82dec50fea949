"""The interactive page of the docs: its orders are those of the generators, its times those of the
simulator.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from operator import sub
from pathlib import Path
from typing import Any

import pytest

from fpipe.actions.costs import Costs
from fpipe.errors import ScheduleError
from fpipe.generators import schedule_names
from fpipe.products.pictures import labels
from fpipe.products.pictures.scene import scenes
from fpipe.schedule import Schedule

sys.path.insert(0, str(Path(__file__).parents[3] / "docs"))
import explorer

pytestmark = [
    pytest.mark.docs,
    pytest.mark.xdist_group("explorer"),  # the page is built once
]
COSTS = (Costs(), Costs(F=1.3, I=0.7, W=0.2, comm=0.15))


@pytest.fixture(scope="module", autouse=True)
def _counts(long: bool) -> Iterator[None]:
    """A page with fewer counts: the whole one takes five seconds, if no test has built it yet."""
    with pytest.MonkeyPatch.context() as patch:
        if not long and not explorer.page.cache_info().currsize:
            patch.setattr(explorer, "MICROBATCHES", (1, 2, 3, 5, 8, 12))
            patch.setattr(explorer, "PER_RANK", (1, 2))
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explorer") / "fpipe.html"
    path.write_text(explorer.page(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def page(browser: Any, file: Path) -> Iterator[Any]:
    """The page; there must be no errors and no requests."""
    complaints: list[str] = []
    page = browser.new_page(viewport={"width": 1200, "height": 700})
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request",
        lambda request: (
            request.url.startswith(("file:", "data:")) or complaints.append(request.url)
        ),
    )
    page.goto(file.as_uri())
    page.wait_for_function("!!(window.fpipe && window.fpipe.scene)")
    yield page
    page.close()
    assert complaints == []


@pytest.mark.long
def test_it_is_one_small_file(file: Path):
    assert file.stat().st_size < 600_000


def cases(long: bool) -> Iterator[tuple[str, int, int, int]]:
    for name in schedule_names():
        for at, ranks in enumerate(explorer.RANKS):
            for microbatches in (
                explorer.MICROBATCHES if long else explorer.MICROBATCHES[at % 4 :: 5]
            ):
                for per_rank in explorer.PER_RANK:
                    yield name, ranks, microbatches, per_rank


def test_times_are_those_of_the_simulator(page: Any, long: bool):
    """Every start and every end, of all schedules, for many counts and for costs that differ from
    case to case.
    """
    asked, expected, refusals = [], [], 0
    for name, ranks, microbatches, per_rank in cases(long):
        key = f"{ranks},{microbatches},{per_rank}"
        schedule, reason = found_or_refused(name, ranks, microbatches, per_rank)
        if schedule is None:
            assert page.evaluate("([n, k]) => fpipe.orders[n][k]", [name, key]) == reason
            refusals += 1
            continue
        for costs in COSTS if long else COSTS[len(asked) % 2 :][:1]:
            t = schedule.simulate(costs, per="rank")
            asked.append(
                [name, key, {"F": costs.F, "I": costs.I, "W": costs.W, "comm": costs.comm}]
            )
            expected.append(
                [[list(starts), list(ends)] for starts, ends in zip(t.starts, t.ends, strict=True)]
            )
    found = page.evaluate("asked => asked.map((one) => fpipe.simulate(...one))", asked)
    assert {name for name, _, _ in asked} == set(schedule_names())
    assert len(asked) > 200 and refusals > 20
    for what, times, real in zip(asked, found, expected, strict=True):
        for lane, other in zip(times, real, strict=True):
            for one, two in zip(lane, other, strict=True):
                assert max(map(abs, map(sub, one, two))) < 1e-9, what


def found_or_refused(name: str, *counts: int) -> tuple[Schedule | None, str]:
    try:
        return explorer.built(name, *counts), ""
    except ScheduleError as error:
        return None, str(error).splitlines()[0]


@pytest.mark.parametrize("name", schedule_names())
def test_figures_idle_times_and_names_are_those_of_the_pictures(page: Any, name: str):
    costs = COSTS[1]
    per_rank = next(n for n in (1, 2) if found_or_refused(name, 4, 8, n)[0])
    schedule = explorer.built(name, 4, 8, per_rank)
    t = schedule.simulate(costs, per="rank")
    (scene,) = scenes(t)
    found = page.evaluate(
        "([n, k, c]) => fpipe.scene(n, k, c)",
        [name, f"4,8,{per_rank}", {"F": costs.F, "I": costs.I, "W": costs.W, "comm": costs.comm}],
    )
    assert found["figures"] == dict(labels.facts(scene))
    assert found["units"] == labels.units(scene)
    assert found["paler"] == labels.paler_stages([scene])
    assert found["peaks"] == pytest.approx([lane.peak for lane in scene.lanes])
    for rank, causes in enumerate(found["causes"]):
        waits = [(k, t.waited_for(rank, k)) for k in range(len(schedule[rank]))]
        assert causes == [[k, wait.rank, wait.position] for k, wait in waits if wait]
    for lane, idle, names in zip(scene.lanes, found["idle"], found["names"], strict=True):
        assert names == [";".join(map(str, bar.action.parts)) for bar in lane.bars]
        assert [gap["cause"] for gap in idle] == [gap.cause for gap in lane.gaps]
        assert [gap["start"] for gap in idle] == pytest.approx([gap.start for gap in lane.gaps])


def set_slider(page: Any, name: str, value: float) -> None:
    page.evaluate(
        "([id, value]) => { const s = document.getElementById(id); s.value = value;"
        " s.dispatchEvent(new Event('input')); }",
        [name, value],
    )


def test_hover_tells_the_times_of_an_action(page: Any):
    """Its lanes are made by the page, and have no shifts from another timeline."""
    at = page.evaluate("fpipe.where(fpipe.find('0F0')[0])")
    page.mouse.move(at["x"], at["y"])
    page.wait_for_selector("#tip:not([hidden])", timeout=5000)
    assert "forward of stage 0, microbatch 0" in page.inner_text("#tip")


def test_sliders_redraw_and_say_why_there_is_no_schedule(page: Any):
    assert "ZBVZeroBubble: 4 ranks, 8 microbatches" in page.inner_text("#figures")
    set_slider(page, "ranks", explorer.RANKS.index(5))
    set_slider(page, "comm", 0.5)
    assert "1F1B: 5 ranks, 8 microbatches" in page.inner_text("#figures")
    assert "idle: message on the way" in page.inner_text("#legend")
    page.select_option("#second", "DualPipe")
    assert "an even number of ranks, not 5" in page.inner_text("#refused")
    assert "DualPipe" not in page.inner_text("#figures")
    set_slider(page, "ranks", explorer.RANKS.index(6))
    set_slider(page, "microbatches", explorer.MICROBATCHES.index(12))
    assert page.inner_text("#refused") == ""
    assert "DualPipe: 6 ranks, 12 microbatches" in page.inner_text("#figures")


def test_a_phone_shows_the_lanes_below_the_sliders(browser: Any, file: Path):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(file.as_uri())
    page.wait_for_function("!!(window.fpipe && window.fpipe.scene)")
    assert page.evaluate("fpipe.where(fpipe.find('0F0')[0]).y") < 844 / 2
    shown = "[...document.querySelectorAll('#controls input')].filter(e => e.checkVisibility())"
    widths = f"{shown}.map(e => e.offsetWidth)"
    assert len(page.evaluate(widths)) == 3, "costs are folded"
    page.click("#costs summary")
    found = page.evaluate(widths)
    assert len(found) == 7 and set(found) == {found[0]} and found[0] > 150
    page.set_viewport_size({"width": 1200, "height": 700})
    page.wait_for_function("!document.querySelector('#costs summary').offsetWidth")
    rows = "new Set([...document.querySelectorAll('#controls input')].map(e => e.offsetTop)).size"
    assert page.evaluate(rows) == 2
    page.close()

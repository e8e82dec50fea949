"""The page that ``.html`` pictures are, in a real browser: hovered, zoomed, searched, by mouse and
by keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fpipe.actions.action import Action
from fpipe.actions.costs import Costs
from fpipe.actions.timeline import Timeline
from fpipe.generators import make_schedule
from fpipe.products import pictures
from fpipe.products.pictures import html

pytestmark = pytest.mark.xdist_group("browser")
Open = Callable[..., Any]


@pytest.fixture
def view(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Open a page of timelines; afterwards there must be no errors and no requests."""
    pages, complaints, fetched = [], [], []

    def show(*timelines: Timeline, **context: Any) -> Any:
        file = tmp_path / f"page{len(pages)}.html"
        pictures.save(timelines, file)
        page = browser.new_page(viewport={"width": 1200, "height": 700}, **context)
        pages.append(page)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console", lambda message: "Canvas2D" in message.text or complaints.append(message.text)
        )
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_function("window.fpipe")
        page.set_default_timeout(5000)
        return page

    yield show
    for page in pages:
        page.close()
    assert complaints == []
    assert [url for url in fetched if not url.startswith(("file:", "data:"))] == []


def zbv(costs: str = "comm=0.2,I=1.2,saved=3000000") -> Timeline:
    return make_schedule("ZBV", 4, 8).simulate(Costs.parse(costs))


def where(page: Any, name: str, scene: int = 0) -> dict[str, float]:
    return page.evaluate(f"fpipe.where(fpipe.find('{name}').find((a) => a.scene === {scene}))")


def hover(page: Any, name: str, scene: int = 0, dx: float = 0, dy: float = 0) -> str:
    at = where(page, name, scene)
    page.mouse.move(at["x"] + dx, at["y"] + dy)
    page.wait_for_selector("#tip:not([hidden])")
    return page.inner_text("#tip")


def window(page: Any) -> tuple[float, float]:
    start, end = page.evaluate("[fpipe.state.from, fpipe.state.to]")
    return start, end


# ---- displayed text ----
def test_hover_tells_the_action_its_times_and_what_it_waited_for(view: Open):
    t = zbv()
    page = view(t)
    spans = {str(span.action): span for span in t}
    span = spans["5I0"]
    wait = t.waited_for(span.rank, span.position)
    assert wait is not None
    text = hover(page, "5I0")
    assert text.startswith("5I0")
    assert "input gradient of stage 5, microbatch 0" in text
    assert f"rank {span.rank}" in text
    assert f"start {span.start:g}, end {span.end:g} (1.2)" in text
    assert f"waited {wait.time:.4g} for 6I0 of rank 1; 0.2 on the way" in text
    held = next(amount for time, amount in reversed(t.curve(span.rank)) if time <= span.start)
    assert f"rank holds {held / 2**20:.1f} MiB" in text
    assert "started as soon as its rank was free" in hover(page, "0F1")


def test_hover_over_nothing_tells_how_long_and_why(view: Open):
    text = hover(view(zbv()), "5I0", dx=-20)
    assert text.startswith("idle ")
    assert "before 5I0" in text
    assert "for 6I0 of rank 1" in text


def test_hover_over_a_memory_curve_tells_what_is_held(view: Open):
    page = view(zbv())
    row = page.evaluate("(() => { const r = fpipe.state.rows[0]; return [r.bar, r.curve]; })()")
    text = hover(page, "0F3", dy=row[0] / 2 + row[1] / 2)
    assert text.startswith("rank 0 holds 11.4 MiB")
    assert "at most 22.9 MiB" in text


def test_fused_actions_tell_both_parts(view: Open):
    page = view(make_schedule("DualPipeV", 4, 10).simulate(Costs(overlap=3)))
    text = hover(page, "7B3")
    assert text.startswith("0F7 with 7B3")
    assert "forward of stage 0, microbatch 7" in text
    assert "backward of stage 7, microbatch 3" in text


def test_the_head_has_the_figures_of_every_timeline(view: Open):
    simulated = replace(zbv("comm=0"), unit="ms")
    spans = [(s.rank, s.action, s.start, s.end) for s in zbv("comm=0.3")]
    page = view(simulated, Timeline.measured(spans, name="measured", unit="ms"))
    text = page.inner_text("#figures")
    assert "ZBVZeroBubble: 4 ranks, 8 microbatches" in text
    assert "measured: 4 ranks, 8 microbatches" in text
    assert "bubble 0%" in text
    assert "total 51 ms" in text


def test_measured_and_simulated_stand_on_one_axis_and_tell_of_each_other(view: Open):
    measured = Timeline.measured(
        [(s.rank, s.action, s.start, s.end) for s in zbv("comm=0.3")], name="measured", unit=""
    )
    page = view(zbv("comm=0"), measured)
    one, two = where(page, "0F3", 0), where(page, "0F3", 1)
    assert one["x"] == pytest.approx(two["x"], abs=1)
    assert one["y"] < two["y"]
    text = hover(page, "3F0", 1)
    assert "rank 3, measured" in text
    assert "ZBVZeroBubble: 3 to 4 (1)" in text
    page.keyboard.press("g")
    assert where(page, "1F0", 0)["y"] < where(page, "1F0", 1)["y"] < where(page, "2F0", 0)["y"]
    assert page.get_attribute("#group", "aria-pressed") == "true"


# ---- moving ----
def test_wheel_zooms_where_the_mouse_is_and_drag_moves(view: Open):
    page = view(zbv())
    total = window(page)[1]
    at = where(page, "5I3")
    page.mouse.move(at["x"], at["y"])
    for _ in range(6):
        page.mouse.wheel(0, -120)
    page.wait_for_function(f"fpipe.state.to - fpipe.state.from < {total / 3}")
    there = where(page, "5I3")
    assert abs(there["x"] - at["x"]) < 25
    assert there["width"] > 3 * at["width"]
    start, end = window(page)
    page.mouse.down()
    page.mouse.move(at["x"] - 200, at["y"], steps=4)
    page.mouse.up()
    moved = window(page)
    assert moved[0] > start
    assert moved[1] - moved[0] == pytest.approx(end - start)
    assert page.inner_text("#chosen").startswith("Click or tap")  # a drag is no click


def test_keys_zoom_move_and_fit(view: Open):
    page = view(zbv())
    total = window(page)[1]
    page.keyboard.press("+")
    page.keyboard.press("+")
    start, end = window(page)
    assert end - start == pytest.approx(total / 2.25)
    page.keyboard.press("ArrowLeft")
    assert window(page)[0] == pytest.approx(start - 0.2 * (end - start))
    page.keyboard.press("ArrowRight")
    assert window(page)[0] == pytest.approx(start)
    page.keyboard.press("Shift+ArrowRight")
    assert window(page)[1] == pytest.approx(total)
    page.keyboard.press("-")
    assert window(page)[1] - window(page)[0] == pytest.approx(total / 1.5)
    page.keyboard.press("0")
    assert window(page) == pytest.approx((0, total))
    page.click("#closer")
    assert window(page)[1] - window(page)[0] == pytest.approx(total / 1.5)
    page.click("#fit")
    assert window(page) == pytest.approx((0, total))


def test_the_overview_moves_the_window(view: Open):
    page = view(zbv())
    for _ in range(4):
        page.keyboard.press("+")
    box = page.locator("#map").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 20, box["y"] + 10)
    assert window(page)[1] == pytest.approx(page.evaluate("fpipe.state.total"))


# ---- choosing and finding ----
def test_a_chosen_action_leads_to_what_it_waited_for(view: Open):
    page = view(zbv())
    at = where(page, "5I0")
    page.mouse.click(at["x"], at["y"])
    assert page.inner_text("#chosen").startswith("5I0")
    page.keyboard.press("w")
    assert page.inner_text("#chosen").startswith("6I0")
    page.keyboard.press("]")
    assert page.inner_text("#chosen").startswith("6W0")
    page.keyboard.press("[")
    page.click("#chosen button")
    assert page.inner_text("#chosen").startswith("7I0")
    page.keyboard.press("Escape")
    assert page.inner_text("#chosen").startswith("Click or tap")


def test_search_finds_marks_and_goes_to_an_action(view: Open):
    page = view(zbv())
    page.keyboard.press("/")
    page.keyboard.type("3f2")
    assert page.inner_text("#found") == "1 found"
    page.keyboard.press("Enter")
    assert page.inner_text("#found") == "1 of 1"
    assert page.inner_text("#chosen").startswith("3F2")
    start, end = window(page)
    assert start < 6 < end < 20
    page.fill("#query", "W7")
    assert page.inner_text("#found") == "8 found"
    page.press("#query", "Shift+Enter")
    assert page.inner_text("#found") == "8 of 8"
    page.press("#query", "Enter")
    assert page.inner_text("#found") == "1 of 8"
    for text, shown in (("3F99", "none"), ("zzz", "like 3F2"), ("", "")):
        page.fill("#query", text)
        assert page.inner_text("#found") == shown
    page.fill("#query", "+-0m")  # no key of the picture is pressed while one types
    assert page.get_attribute("#memory", "aria-pressed") == "true"
    page.press("#query", "Escape")
    assert page.input_value("#query") == ""


def test_what_is_not_found_is_dimmed(view: Open):
    page = view(zbv())
    at = where(page, "0F3")

    canvas = page.locator("#lanes").bounding_box()
    left, top = canvas["x"], canvas["y"]

    def colour() -> list[int]:
        x, y = at["x"] - at["width"] / 2 + 2, at["y"] - 12
        point = f"{x - left}, {y - top}, 1, 1"
        return page.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => "
            "done(Array.from("
            f"document.getElementById('lanes').getContext('2d').getImageData({point}).data)))))"
        )

    plain = colour()
    page.fill("#query", "0F3")
    assert colour() == plain
    page.fill("#query", "0F4")
    assert sum(colour()) > sum(plain) + 60
    pixels = "Array.from(new Set(document.getElementById('lanes').getContext('2d').getImageData("
    box = f"{at['x'] - 9 - left}, {at['y'] - 6 - top}, 18, 12).data.filter((_, k) => k % 4 < 1)))"
    assert min(page.evaluate(pixels + box)) < 130, "its name has gone"


def test_help_lists_the_keys(view: Open):
    page = view(zbv())
    page.keyboard.press("?")
    assert "what the chosen action waited for" in page.inner_text("#help")
    page.keyboard.press("Escape")
    assert page.is_hidden("#help")
    page.keyboard.press("m")
    assert page.get_attribute("#memory", "aria-pressed") == "false"
    assert page.is_hidden("#group")


def test_help_on_a_touch_screen_begins_with_gestures(view: Open):
    """They stood below the keys, cut off, and then above a list of keys that a phone lacks."""
    for mobile in (False, True):
        page = view(zbv(), is_mobile=mobile, has_touch=mobile)
        page.set_viewport_size({"width": 390, "height": 780})
        page.click("#ask")
        top, keys = (page.locator(f"#help {tag}").bounding_box()["y"] for tag in ("p", "summary"))
        assert (top < keys) is mobile and page.is_hidden("#help dl") is mobile
        page.click("#help summary")
        assert page.is_visible("#help dl") is mobile
        page.click("#ask")
        assert page.is_hidden("#help")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_follows_the_readers_light(view: Open, scheme: str):
    page = view(zbv(), color_scheme=scheme)
    pixel = (
        "Array.from(document.getElementById('lanes').getContext('2d').getImageData(4, 60, 1, "
        "1).data)"
    )
    assert (sum(page.evaluate(pixel)[:3]) > 600) == (scheme == "light")


# ---- what stays in place, and what is shown on demand ----
def boxes(page: Any) -> list[dict[str, float]]:
    return [page.locator(name).bounding_box() for name in ("#lanes", "#chosen", "#map")]


def test_choosing_an_action_moves_nothing(view: Open):
    """The line of a chosen action pushed the lanes up."""
    page = view(zbv(), zbv("comm=0"))
    before = boxes(page)
    at = where(page, "5I0")
    page.mouse.click(at["x"], at["y"])
    assert page.inner_text("#chosen").startswith("5I0")
    assert boxes(page) == before


def test_the_box_under_the_mouse_follows_the_picture(view: Open):
    """After a key the box described the action that had been there before."""
    page = view(zbv())
    assert hover(page, "0F3").startswith("0F3")
    page.keyboard.press("+")
    page.keyboard.press("Shift+ArrowRight")
    text, under = page.evaluate(
        "(() => { fpipe.paint(); const {hover, scenes} = fpipe.state;"
        " const name = hover && scenes[0].lanes[hover.rank].names[hover.index];"
        " return [document.getElementById('tip').innerText, name]; })()"
    )
    assert not text.startswith("0F3")
    assert text.startswith(under or "idle")
    page.mouse.move(600, 5)
    page.wait_for_selector("#tip", state="hidden")


def test_lanes_by_rank_have_the_rank_above_and_whole_names(view: Open):
    page = view(zbv(), zbv("comm=0"))
    page.click("#group")
    rows = page.evaluate(
        "fpipe.paint() || fpipe.state.rows.map((row) => row.title || `${row.rank} ${row.scene}`)"
    )
    assert rows[:6] == ["rank 0", "0 0", "0 1", "rank 1", "1 0", "1 1"]


def test_the_bubble_of_a_lane_is_named_by_rank_too_where_ranks_differ(view: Open):
    """It was a bare 27.3% there, the same on each lane."""
    uneven = make_schedule("1F1B", 4, 8).simulate(Costs(F=[1, 1, 1, 2]))
    page = view(uneven, zbv())
    page.evaluate(
        "CanvasRenderingContext2D.prototype.fillText = "
        "function (text) { (window.said ??= []).push(text); }"
    )
    page.click("#group")
    page.evaluate("() => fpipe.paint()")
    said = [text for text in page.evaluate("window.said") if "%" in str(text)]
    assert len(set(said)) > 1 and all(text.startswith("bubble ") for text in said)
    assert "bubble 0%" not in said, "that of ZBV is the same on all ranks"


def test_the_overview_follows_the_margin(view: Open):
    """By rank its lanes began 32 pixels left of its frame."""
    page = view(make_schedule("1F1B", 4, 8).simulate(), zbv())
    page.click("#group")
    stale = page.evaluate(
        "() => {const map = document.querySelector('#map'); fpipe.paint(); const was = "
        "map.toDataURL(); fpipe.state.loads += 1; fpipe.paint(); return was !== map.toDataURL()}"
    )
    assert not stale, "painted again it is another one"


def test_a_note_of_several_lines_has_one_below_the_other(view: Open):
    """What a profile says to mend was one paragraph."""
    noted = replace(make_schedule("1F1B", 4, 8).simulate(), note="Split stage 1.\nMeasure again.")
    page = view(noted)
    lines = page.locator("#figures p")
    assert lines.all_inner_texts()[:2] == ["Split stage 1.", "Measure again."]
    places = [one.bounding_box() for one in lines.all()]
    assert len({place["x"] for place in places}) == 1
    assert all(above["y"] < below["y"] for above, below in pairwise(places))


def test_the_legend_names_shades_idle_time_and_lines(view: Open):
    page = view(zbv())
    text = page.inner_text("#legend")
    for word in (
        "forward",
        "input gradient",
        "weight gradient",
        "paler: stages 4-7",
        "idle: warm-up",
        "idle: message on the way",
        "idle: tail",
        "memory held",
    ):
        assert word in text
    assert "critical path" not in text
    page.keyboard.press("c")
    page.keyboard.press("e")
    page.keyboard.press("m")
    text = page.inner_text("#legend")
    assert "critical path" in text and "message\n" in text + "\n" and "memory that" not in text


def test_the_legend_says_what_the_height_means_where_shares_are_drawn(view: Open):
    page = view(make_schedule("1F1B", 4, 400).simulate())
    legend = lambda: page.inner_text("#legend")
    assert "height: share of the time" in legend()
    at = page.locator("#lanes").bounding_box()
    page.mouse.move(at["x"] + at["width"] / 2, at["y"] + at["height"] / 2)
    for _ in range(6):
        page.mouse.wheel(0, -300)
    page.wait_for_function("!fpipe.state.dense")
    assert "height" not in legend()


#: the left ends of what is painted in the lanes: of bars they are times, of shares whole pixels
LEFT_ENDS = """(() => {
    const pen = CanvasRenderingContext2D.prototype, fill = pen.fillRect, ends = [];
    pen.fillRect = function (x) {
        if (this.canvas.id === "lanes") ends.push(x);
    };
    fpipe.paint();
    pen.fillRect = fill;
    return ends;
})()"""


def test_all_lanes_of_a_page_are_bars_or_shares(view: Open):
    """On a phone those of the shorter timeline alone were shares of the time."""
    schedule = make_schedule("ZBV", 4, 8)
    page = view(schedule.simulate(), schedule.simulate(Costs(F=5, I=5, W=5)))
    assert any(x % 1 for x in page.evaluate(LEFT_ENDS))
    page.set_viewport_size({"width": 390, "height": 844})
    assert not any(x % 1 for x in page.evaluate(LEFT_ENDS))
    assert "height: share of the time" in page.inner_text("#legend")


def test_on_a_phone_the_hint_takes_no_more_than_its_lines(view: Open):
    """It had the height of a chosen action, and covered the last lane of two timelines."""
    page = view(zbv())
    page.set_viewport_size({"width": 390, "height": 844})
    height = "document.querySelector('#chosen').clientHeight"
    assert page.evaluate(height) < 60
    page.click("#lanes", position={"x": 60, "y": 60})
    assert page.evaluate(height) > 100


def test_short_actions_leave_the_others_drawn_one_by_one(view: Open):
    """Measured steps were bands, because some actions took less than two pixels."""
    spans = [
        (span.rank, span.action, span.start, span.start + 1e-3 if k % 3 == 1 else span.end)
        for k, span in enumerate(zbv())
    ]
    page = view(Timeline.measured(spans))
    assert not page.evaluate("fpipe.state.dense")
    assert "height" not in page.inner_text("#legend")


#: the texts in the bars of each lane, by the timeline
WRITTEN = """(() => {
    const pen = CanvasRenderingContext2D.prototype, write = pen.fillText, texts = [];
    pen.fillText = function (text, x, y) {
        if (y > 26 && this.textAlign === "center") texts.push(String(text));
    };
    fpipe.paint();
    pen.fillText = write;
    return texts;
})()"""


def test_boxes_tell_more_in_a_wider_window_and_all_in_one_way(view: Open):
    """At 1230 pixels they had 0F over 0, at 1440 F0; and F alone in a difference."""
    page = view(zbv(""), make_schedule("1F1B", 4, 8).simulate())
    before = 0
    for width in range(360, 2400, 120):
        page.set_viewport_size({"width": width, "height": 900})
        texts = page.evaluate(WRITTEN)
        kinds = {re.sub(r"\d+", "0", text) for text in texts}
        kinds = {re.sub("[FBIW]", "F", kind) for kind in kinds}
        forms = [set(), {"0"}, {"0F", "0"}, {"0F0"}]
        assert kinds in forms, (width, kinds)
        now = min(forms.index(kinds), 2)
        assert now >= before, (width, kinds)
        before = now
    assert before == 2


def test_the_critical_path_and_the_messages_are_those_of_the_timeline(view: Open):
    t = zbv("comm=0.2,I=1.2,send=0.05")
    page = view(t)
    path = page.evaluate(
        "fpipe.criticalPath(fpipe.state.scenes[0]).map((one) => [one.rank, one.index])"
    )
    assert path == [[span.rank, span.position] for span in t.critical_path]
    sent = page.evaluate("fpipe.messagesOf(fpipe.state.scenes[0]).flat().length")
    assert sent == t.messages


def test_lines_are_not_drawn_over_the_names_of_ranks(view: Open):
    page = view(zbv(""))
    margin = "fpipe.paint(), Array.from(document.getElementById('lanes').getContext('2d')" + (
        ".getImageData(0, 40, 80, 300).data)"
    )
    page.keyboard.press("/")
    page.keyboard.type("6I3")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    plain = page.evaluate(margin)
    page.keyboard.press("e")
    page.keyboard.press("c")
    assert page.evaluate("fpipe.state.messages && fpipe.state.critical && fpipe.state.from > 0")
    assert page.evaluate(margin) == plain


def test_a_difference_has_its_own_legend_and_figures(browser: Any, tmp_path: Path):
    first, second = (
        make_schedule(name, 4, 8).simulate(Costs(saved=1)) for name in ("1F1B", "ZBH1")
    )
    second.save(tmp_path / "a.html", against=first)
    page = browser.new_page()
    page.goto((tmp_path / "a.html").as_uri())
    page.wait_for_function("!!window.fpipe")
    legend, figures = page.inner_text("#legend"), page.inner_text("#figures")
    page.close()
    for meaning in (
        "1F1B:",
        "earlier or later than in 1F1B (I and W as B):",
        "6 or more earlier",
        "at the same time",
    ):
        assert meaning in legend
    assert " actions end earlier, " in figures
    assert legend.index("memory held") < legend.index("letters:") < legend.index("1F0: F of")
    assert "F\nforward" in legend
    assert "ZBH1 against 1F1B: 4 ranks" in figures and "total 27 (-18.2%)" in figures


def test_the_head_of_a_difference_is_short_on_a_phone(browser: Any, tmp_path: Path):
    """Header and legend took 37% of the screen, and what a rank gains was folded."""
    costs = ("", "F=.5,I=.5,W=.5")
    first, second = (
        make_schedule(name, 4, 8).simulate(Costs.parse(cost))
        for name, cost in zip(("1F1B", "ZBV"), costs, strict=True)
    )
    second.save(tmp_path / "a.html", against=first)
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto((tmp_path / "a.html").as_uri())
    page.wait_for_function("!!window.fpipe")
    shown = lambda: [one.inner_text() for one in page.locator("#figures p:visible").all()]
    titles = lambda: [one.inner_text() for one in page.locator("#figures h1").all()]
    sizes = ": 4 ranks, 8 microbatches"
    line = "175 of 192 actions end earlier, 2 later; ranks end 9, 6.5, 4, 1.5 earlier."
    assert shown() == [line]
    assert titles() == [f"1F1B{sizes}", "ZBVZeroBubble against 1F1B"]
    assert page.locator("#stage").bounding_box()["y"] < 0.36 * 844
    page.click("#more")
    assert len(shown()) == 4 and titles()[1] == f"ZBVZeroBubble against 1F1B{sizes}"
    page.close()


def compared(browser: Any, folder: Path, width: int, height: int) -> Any:
    """The page of ZBV against 1F1B."""
    first, second = (make_schedule(name, 4, 8).simulate() for name in ("1F1B", "ZBV"))
    second.save(folder / "a.html", against=first)
    page = browser.new_page(viewport={"width": width, "height": height})
    page.goto((folder / "a.html").as_uri())
    page.wait_for_function("!!window.fpipe")
    return page


def test_names_in_a_difference_have_letters_small_ones_for_the_other_stage(
    browser: Any, tmp_path: Path
):
    """Boxes had microbatches alone, and their colours do not tell F from W there."""
    page = compared(browser, tmp_path, 1200, 700)
    shorts = "fpipe.state.scenes[1].lanes[0].parts_.flat().map((part) => part.short)"
    assert {"F0", "f0", "I0", "i0", "W0", "w0"} <= {*page.evaluate(shorts)}
    assert "small letters: a rank's other stage" in page.inner_text("#legend")
    page.set_viewport_size({"width": 390, "height": 844})  # names do not fit
    page.evaluate("() => fpipe.paint()")
    assert "small letters" not in page.inner_text("#legend")
    page.close()


def test_the_colours_of_a_difference_can_be_those_of_kinds_of_work(browser: Any, tmp_path: Path):
    """On a phone bars have no letters, so nothing told F from W."""
    page = compared(browser, tmp_path, 390, 844)
    keys = lambda: [*page.evaluate("fpipe.state.scenes[1].keys.map((one) => one.key[0])")]
    legend = lambda: page.inner_text("#legend")
    before = legend()
    assert {*keys()} == {"t"} and "weight gradient" not in before
    page.click("#shifts")
    assert {*keys()} == {*"FIW"} and "weight gradient" in legend() and "earlier" not in legend()
    assert "paler: stages 4-7" in legend()
    page.keyboard.press("d")
    assert {*keys()} == {"t"} and legend() == before
    make_schedule("ZBV", 4, 8).simulate().save(tmp_path / "b.html")
    page.goto((tmp_path / "b.html").as_uri())
    page.wait_for_function("!!window.fpipe")
    assert page.locator("#shifts").is_hidden() and page.locator("#memory").is_visible()
    page.close()


def test_the_panel_of_a_difference_begins_with_the_shift(browser: Any, tmp_path: Path):
    """On a phone it was cut off below the panel."""
    page = compared(browser, tmp_path, 390, 844)
    at = where(page, "5I3", 1)
    page.mouse.click(at["x"], at["y"])
    told = page.inner_text("#chosen").splitlines()
    page.close()
    assert told[:2] == ["5I3", "ends 10 later than in 1F1B"]


def test_times_have_four_digits(view: Open):
    """A start was 33.3333 ms."""
    text = hover(view(zbv("F=1.23456789,I=0.333333,W=1")), "5I3")
    digits = [re.sub(r"^0\.0*|\.", "", one) for one in re.findall(r"\d+\.\d+", text)]
    assert digits and all(len(one) <= 4 for one in digits), text


@pytest.mark.parametrize("name", ["ZBV", "DualPipeV", "Seq1F1B"])
def test_the_page_has_the_times_of_the_timeline(view: Open, name: str):
    t = make_schedule(name, 4, 10).simulate(Costs.parse("comm=0.3,I=1.1,overlap=2.7,send=0.07"))
    page = view(t)
    found = page.evaluate(
        "fpipe.state.scenes[0].lanes.map("
        "(l) => [[...l.start], [...l.end], l.names, l.times, l.held, [...l.cause.entries()]])"
    )
    for rank, (starts, ends, names, times, held, causes) in enumerate(found):
        spans = t.of_rank(rank)
        assert starts == pytest.approx([span.start for span in spans], abs=1e-6)
        assert ends == pytest.approx([span.end for span in spans], abs=1e-6)
        assert names == [";".join(map(str, span.action.parts)) for span in spans]
        curve = dict(t.curve(rank))
        each = t.placement.stages // t.ranks  # what is held is counted in microbatches
        assert all(
            curve[min(curve, key=lambda at: abs(at - time))] == pytest.approx(each * amount)
            for time, amount in zip(times, held, strict=True)
        )
        waits = {k: t.waited_for(rank, k) for k in range(len(spans))}
        assert {k: (one["rank"], one["index"]) for k, one in causes} == {
            k: (wait.rank, wait.position) for k, wait in waits.items() if wait
        }


@pytest.mark.parametrize("size", [(4, 8), (16, 64)])
def test_a_phone_shows_lanes_and_nothing_beyond_its_width(view: Open, size: tuple[int, int]):
    page = view(make_schedule("ZBV", *size).simulate(), make_schedule("1F1B", *size).simulate())
    page.set_viewport_size({"width": 390, "height": 800})
    page.evaluate("() => fpipe.paint()")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    lanes = page.locator("#lanes").bounding_box()
    assert lanes["height"] > 200 and lanes["x"] + lanes["width"] <= 390
    assert page.evaluate("getComputedStyle(document.getElementById('map')).display") == "block"


# ---- size ----
#: draws a frame, and returns how many calls of the canvas it takes
CANVAS_CALLS = """(() => {
    const canvas = CanvasRenderingContext2D.prototype;
    let calls = 0;
    for (const name of Object.getOwnPropertyNames(canvas)) {
        const call = Object.getOwnPropertyDescriptor(canvas, name).value;
        if (typeof call === "function")
            canvas[name] = function (...all) { calls++; return call.apply(this, all); };
    }
    fpipe.where({scene: 0, rank: 0, index: 0});
    return calls;
})()"""


@pytest.mark.long
def test_a_hundred_thousand_actions_stay_fluent(view: Open):
    page = view(make_schedule("ZBH1", 64, 512).simulate())
    assert (
        page.evaluate(
            "fpipe.state.scenes[0].lanes.reduce((sum, lane) => sum + lane.names.length, 0)"
        )
        == 98304
    )
    assert page.evaluate(CANVAS_CALLS) < 40_000, "narrow neighbours are drawn as one"
    page.fill("#query", "7F300")
    page.press("#query", "Enter")
    assert page.inner_text("#chosen").startswith("7F300")
    at = where(page, "7F300")
    assert at["width"] > 40
    page.mouse.move(at["x"], at["y"])
    assert page.inner_text("#tip").startswith("7F300")
    page.keyboard.press("ArrowDown")


def test_a_timeline_of_one_action_can_be_viewed(view: Open):
    page = view(Timeline.measured([(0, Action(0, "F", 0), 0.0, 0.002)], name="one", unit="s"))
    assert "start 0 ms, end 2 ms" in hover(page, "0F0")


def test_on_a_phone_the_notes_of_the_first_timeline_stay(view: Open):
    """All of them folded, also what a profile says to mend; then the causes of its bubble."""
    noted = replace(make_schedule("1F1B", 4, 8).simulate(), note="Rank 0 computes longer.")
    page = view(noted)
    shown = lambda: [one.is_visible() for one in page.locator("#figures p").all()]
    assert shown() == [True, True, True] and not page.locator("#more").is_visible()
    page.set_viewport_size({"width": 390, "height": 844})
    assert shown() == [True, True, False] and not page.locator("#messages").is_visible()
    note, causes = page.locator("#figures p:visible").all_inner_texts()
    assert note == "Rank 0 computes longer." and causes.startswith("Bubble by cause: warm-up ")
    page.click("#more")
    assert shown() == [True, True, True] and page.locator("#messages").is_visible()
    assert page.get_attribute("#more", "aria-expanded") == "true"


def test_on_a_phone_no_line_of_the_head_is_cut(view: Open):
    """With two timelines the notes were in a box that cut a line in half."""
    note = "Ranks share cores, and most waits are for a core. " * 3
    noted = replace(make_schedule("1F1B", 4, 8).simulate(), note=note)
    page = view(noted, zbv())
    page.set_viewport_size({"width": 390, "height": 844})
    page.evaluate("() => fpipe.paint()")
    shown = [one.is_visible() for one in page.locator("#figures p").all()]
    assert shown == [True, True, *[False] * (len(shown) - 2)]
    sizes = "((box) => [box.scrollHeight, box.clientHeight])(document.getElementById('{}'))"
    for part in ("figures", "legend") * 2:
        high, seen = page.evaluate(sizes.format(part))
        assert high == seen, part
        page.click("#more")


# ---- tables of cells and of pages ----
WIDE = pictures.table([f"column {k}" for k in range(12)], range(12))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_table_fades_out_where_it_goes_on(browser: Any, scheme: str):
    """On a phone nothing told that a cell's table had more columns."""
    page = browser.new_page(viewport={"width": 390, "height": 400}, color_scheme=scheme)
    page.set_content(WIDE + pictures.table(["one"], [1]))
    masks = """async () => {
        await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
        const tables = [...document.querySelectorAll("table")];
        return tables.map((table) => getComputedStyle(table).maskImage.split("(")[0]);
    }"""
    assert page.evaluate(masks) == ["linear-gradient", "none"]
    page.evaluate("document.querySelector('table').scrollLeft = 2000")
    assert page.evaluate(masks) == ["none", "none"]
    page.set_content(html.page("title", WIDE))  # has a shadow, in all browsers
    assert page.evaluate(masks) == ["none"]
    page.close()


def test_on_a_phone_sentences_and_heads_of_a_table_wrap(browser: Any):
    """The causes of a bubble ended at the edge of the window."""
    head = "rank", "a share of the whole span", "cause"
    row = 0, "2.6%", "waits for the output of stage 2 on rank 1"
    page = browser.new_page(viewport={"width": 390, "height": 400})
    page.set_content(html.page("title", pictures.table(head, row)))
    widths = "[...document.querySelectorAll('table')].map((t) => t.scrollWidth - t.clientWidth)"
    assert page.evaluate(widths) == [0]
    page.close()

"""What notebooks show: pictures of values, and a step that is replaced by the next."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import fpipe
from fpipe.lowering.plan import KEY
from fpipe.products.pictures import output, svg


def texts(html: str) -> list[str]:
    """The texts of well-formed HTML."""
    return [
        "".join(one.itertext())
        for one in ElementTree.fromstring(f"<div>{html}</div>").iter()
        if one.text
    ]


def test_a_schedule_is_shown_with_the_figures_of_compare():
    html = fpipe.make_schedule("ZBV", 4, 8)._repr_html_()
    assert "total 25.5, bubble 0%, peak 4 microbatches" in texts(html)


def test_a_schedule_that_cannot_run_is_shown_as_its_error():
    html = fpipe.Schedule.parse("[0B0, 0F0]")._repr_html_()
    assert "move 0F0 before it" in " ".join(texts(html))


def test_pictures_of_one_page_keep_their_own_colours():
    one, two = (
        fpipe.make_schedule(name, 2, 2).simulate()._repr_html_() for name in ("1F1B", "ZBV")
    )
    names = [re.findall(r'<svg[^>]* id="(fp\w+)"', html) for html in (one, two)]
    (first, _), _ = names
    assert len({*names[0], *names[1]}) == 4  # each cell has a picture for a phone
    style = re.findall(r"<style>(.*?)</style>", one)[1]
    for place, _ in svg.PLACES:
        style = style.replace(place + "{", "")
    rules = [rule for rule in style.split("}") if rule]
    assert rules and all(rule.startswith(f"#{first} ") for rule in rules)


@pytest.mark.xdist_group("browser")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_picture_follows_the_theme_of_the_notebook_or_else_the_system(browser: Any, scheme: str):
    """A white notebook on a dark system had a black picture."""
    page = browser.new_page(color_scheme=scheme)
    picture = fpipe.make_schedule("1F1B", 2, 2).simulate()._repr_html_()
    for theme, paper in {
        "": scheme,
        "data-jp-theme-light=true": "light",
        "data-jp-theme-light=false": "dark",
        "class=vscode-light": "light",
        "class=vscode-dark": "dark",
    }.items():
        page.set_content(f"<body {theme}>{picture}</body>")
        fill = page.evaluate("getComputedStyle(document.querySelector('.paper')).fill")
        assert (fill == "rgb(255, 255, 255)") == (paper == "light"), theme
    page.close()


def pipe_and_batch() -> tuple[Any, tuple[Any, ...]]:
    layer = lambda p, x: torch.tanh(x @ p)
    pipe = fpipe.pipeline(
        [layer] * 4, "ZBV", loss=lambda y: y.sum(), microbatches=4, group=fpipe.local(2)
    )
    return pipe, ([torch.eye(2)] * 4, torch.ones(8, 2))


def test_a_pipeline_and_its_plans_are_shown():
    pipe, batch = pipe_and_batch()
    words = texts(pipe._repr_html_())
    assert any("ZBVZeroBubble: 2 ranks, 4 microbatches" in word for word in words)
    assert "<br/>microbatches 4, loss &lt;lambda&gt;</p>" in pipe._repr_html_()
    assert "<table" not in pipe._repr_html_()  # its heading wraps
    plans = pipe.plan(*batch)
    words = texts(plans._repr_html_())
    assert words[0] == "Plan of 2 ranks, 4 microbatches"
    assert "<br/>Open a rank for its instructions, which scroll.<br/>" in plans._repr_html_()
    for rank in range(2):
        head = f"rank {rank}: {len(plans[rank].instructions)} instructions, "
        assert sum(word.startswith(head) for word in words) == 1  # the line that folds
    assert "0F0" in "".join(texts(plans[0]._repr_html_()))


def test_the_cell_of_a_plan_has_a_key_and_readable_bytes():
    """It said ``peak 69,644 bytes`` and nothing of what its instructions mean."""
    pipe, _ = pipe_and_batch()
    plan = pipe.plan([torch.eye(64)] * 4, torch.ones(64, 64))[0]
    head, *lines = "\n".join(texts(plan._repr_html_())[-2:]).splitlines()
    assert head.endswith(f"peak {plan.peak / 1024:.1f} KiB")
    assert "  -> [4]: slots written" in lines
    assert "\n".join(lines).startswith(KEY)
    assert all(len(line) < 44 for line in KEY.splitlines())  # fits a phone
    explained = set(re.findall("[A-Z]{2,}", KEY))
    assert {ins.kind for ins in plan.instructions} <= {*explained, *"FBIW"}
    assert f"peak {plan.peak:,} bytes" in str(plan)


@pytest.mark.xdist_group("browser")
def test_an_open_plan_leaves_the_notebook_in_place(browser: Any):
    """A rank inserted a hundred lines, and long ones went on below their numbers."""
    pipe, batch = pipe_and_batch()
    cell = pipe.plan(*batch)[0]._repr_html_().replace("<details>", "<details open>")
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.set_content(cell)
    height, wide, lines = page.evaluate(
        "[document.querySelector('details').offsetHeight, document.documentElement.scrollWidth, "
        "getComputedStyle(document.querySelector('pre')).whiteSpace]"
    )
    assert height < 600 and wide == 390 and lines == "pre"
    page.close()


def test_long_text_is_cut():
    lines = texts(output.folded("\n".join(["many", *map(str, range(1000))])))[-1].splitlines()
    assert len(lines) == output.MOST_LINES + 1
    assert lines[-1] == "... and 600 more lines"


def test_a_profile_shows_its_last_step():
    pipe, batch = pipe_and_batch()
    step = fpipe.profile(fpipe.value_and_grad(pipe))
    for number in (1, 2):
        step(*batch)
        shown = step._repr_html_()
        words = "one step" if number == 1 else "the median of 2 steps"
        assert ">simulated, ranks at once: " in shown
        assert shown.startswith(f"<h3>ZBVZeroBubble, profiled: {words}</h3><p>simulated, ")
        assert "<svg" in shown
    assert len(texts(shown)) > 10
    assert "<details" not in shown and ">stage</th>" in shown
    assert "peak 2 microbatches" in " ".join(texts(shown))
    assert fpipe.profile()._repr_html_().startswith("<details>")

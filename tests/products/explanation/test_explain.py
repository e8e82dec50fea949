"""``pipe.explain`` and ``fpipe explain``: figures are those of plans, parameters and a schedule
counted by hand.
"""

from __future__ import annotations

import re
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import fpipe
from fpipe.errors import FpipeError
from fpipe.products.command.cli import main
from fpipe.products.explanation.reasons import idle_of

WIDTH = 4
EXAMPLES = Path(fpipe.__file__).parents[1] / "examples"


def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p)


def explained(schedule: Any = "1F1B", ranks: int = 2, stages: int = 2, **more: Any) -> Any:
    """A page, and the plans of the same call."""
    pipe = fpipe.pipeline(
        [layer] * stages, schedule, loss=torch.sum, microbatches=2, group=fpipe.local(ranks)
    )
    args = [torch.eye(WIDTH)] * stages, torch.ones(6, WIDTH)
    return pipe.explain(*args, **more), pipe.plan(*args)


def rows(page: Any, title: str) -> list[str]:
    """The lines of a table of the page, below its head."""
    lines = str(page).partition(f"\n{title}\n")[2].partition("\n\n")[0].splitlines()
    heads = [at for at, line in enumerate(lines) if line.startswith(("rank ", "direction "))]
    return lines[heads[0] + 1 :]


@pytest.mark.parametrize(
    ("loss", "without"),
    [
        (torch.sum, False),
        (lambda y: y.mean(), False),
        (torch.nn.functional.mse_loss, True),
        (torch.nn.MSELoss(), True),
        (fpipe.Stage(lambda y, target: y.mean(), engine="eager"), True),
    ],
)
def test_without_targets_the_page_is_of_the_stages(loss: Any, without: bool):
    pipe = fpipe.pipeline([layer] * 2, loss=loss, microbatches=2, group=fpipe.local(2))
    page = pipe.explain([torch.eye(WIDTH)] * 2, torch.ones(6, WIDTH))
    assert page.facts.title.endswith("2 microbatches" + ", no targets, so no loss" * without)


def test_parameters_and_messages_are_those_of_the_plan():
    page, plans = explained()
    where = rows(page, "What runs where")
    assert [line.split()[:5] for line in where] == [
        [str(rank), str(rank), "layer", "16", "(64"] for rank in (0, 1)
    ]
    assert "\ndevices: cpu\n" in str(page) and ", eager" not in str(page)
    nbytes = 3 * WIDTH * 4  # rows of a microbatch
    sent = [line.split() for line in rows(page, "Messages of a step")]
    assert sent == [
        ["forward", "0", "0", "to", "1", "2", str(nbytes), "B"],
        ["backward", "1", "1", "to", "0", "2", str(nbytes), "B"],
    ]
    assert page.facts.peaks == plans.peak


def test_a_stage_that_runs_eagerly_is_marked():
    stages = [layer, fpipe.Stage(layer, engine="eager")]
    pipe = fpipe.pipeline(stages, loss=torch.sum, microbatches=2, group=fpipe.local(2))
    page = pipe.explain([torch.eye(WIDTH)] * 2, torch.ones(6, WIDTH))
    assert [", eager" in line for line in rows(page, "What runs where")] == [False, True]
    assert "\neager: runs on autograd" in str(page)


def test_messages_of_a_v_are_told_apart_by_direction():
    page, plans = explained("ZBV", 2, 4)
    counted = {(e.rank, e.to, e.stage, e.direction): e.messages for e in page.facts.edges}
    assert counted == {
        (0, 1, 0, "forward"): 2,
        (0, 1, 3, "backward"): 2,
        (1, 0, 2, "forward"): 2,
        (1, 0, 1, "backward"): 2,
    }
    sends = sum(i.kind == "SEND" for plan in plans.by_rank.values() for i in plan.instructions)
    assert sum(counted.values()) == sends


@pytest.mark.parametrize(
    ("name", "ranks", "sent"),
    [
        ("1F1B", 8, ["forward 0-6 0 to 1 ... 6 to 7", "backward 1-7 1 to 0 ... 7 to 6"]),
        ("Interleaved1F1B", 2, ["forward 0-6 0 to 1 ... 0 to 1", "backward 1-7 1 to 0 ... 1 to 0"]),
        ("Interleaved1F1B", 4, ["forward 0-6 0 to 1 ... 2 to 3", "backward 1-7 1 to 0 ... 3 to 2"]),
    ],
)
def test_equal_messages_are_one_row(name: str, ranks: int, sent: list[str]):
    """Fourteen rows said the same. One that had ``0-6 1-7`` left open which rank sends to which."""
    page, _ = explained(name, ranks, 8)
    found = [" ".join(line.split()) for line in rows(page, "Messages of a step")]
    assert found == [f"{one} 2 {3 * WIDTH * 4} B" for one in sent]
    assert len(page.facts.edges) == 14


def test_messages_of_other_sizes_have_rows_of_their_own():
    pipe = fpipe.pipeline([layer] * 4, loss=torch.sum, microbatches=2, group=fpipe.local(4))
    params = [
        torch.eye(WIDTH),
        torch.ones(WIDTH, 2 * WIDTH),
        torch.eye(2 * WIDTH),
        torch.eye(2 * WIDTH),
    ]
    found = [
        re.split("  +", line)[:3]
        for line in rows(pipe.explain(params, torch.ones(6, WIDTH)), "Messages of a step")
    ]
    assert found == [
        ["forward", "1-2", "1 to 2 ... 2 to 3"],
        ["backward", "2-3", "2 to 1 ... 3 to 2"],
        ["forward", "0", "0 to 1"],
        ["backward", "1", "1 to 0"],
    ]


def test_idle_time_and_its_causes():
    """F, I and W take 1: rank 1 begins after 1, rank 0 waits for two gradients."""
    costs = fpipe.Costs(F=1, I=1, W=1)
    timeline = fpipe.make_schedule("1F1B", 2, 2).simulate(costs)
    # 0: F0 F1 . B0 B0 . B1 B1     1: . F0 B0 B0 F1 B1 B1 . .
    assert timeline.total == 9
    found = [[(round(9 * share), why) for share, why in idle_of(timeline, r)] for r in (0, 1)]
    assert found[0] == [(3, "waits for the gradient of stage 1 on rank 1")]
    assert found[1] == [(3, "its own span is shorter than the longest one")]
    page, _ = explained(costs=costs)
    first, _ = rows(page, "Bubble by rank")
    assert first.endswith("33.3%  waits for the gradient of stage 1 on rank 1")
    head = " ".join(str(page).splitlines()[1:3]).rstrip()
    assert head == (
        "A step takes 9 units of the costs, with a bubble of 33.3%. Times are the given costs."
    )


def test_a_wait_names_the_stage_where_the_chain_of_waits_begins():
    """Rank 0 was said to wait for stage 1 alone, which waits for stage 2, and that for stage 3."""
    times = [1, 1, 1, 4, 1]
    costs = fpipe.Costs(F=times, I=times, W=times)
    timeline = fpipe.make_schedule("1F1B", 5, 12).simulate(costs)
    found = [why for rank in range(5) for _, why in idle_of(timeline, rank)]
    for waits in (
        "gradient of stage 1 on rank 1, held up by stage 3",
        "gradient of stage 2 on rank 2, held up by stage 3",
        "gradient of stage 3 on rank 3",
        "output of stage 3 on rank 3",
    ):
        assert f"waits for the {waits}" in found
    assert "its own span is shorter than the longest one" in found


@pytest.mark.parametrize("name", ["1F1B", "ZBV", "DualPipeV", "GPipe"])
def test_causes_of_all_ranks_add_up_to_the_bubble(name: str):
    """ZBV had a bubble of 0% above ranks that were idle 6% of the step."""
    timeline = fpipe.make_schedule(name, 4, 8).simulate(fpipe.Costs(comm=0.3 * (name != "ZBV")))
    shares = [share for rank in range(4) for share, _ in idle_of(timeline, rank)]
    assert sum(shares) / 4 == pytest.approx(timeline.bubble, abs=1e-3)


def test_of_one_light_rank_the_advice_is_to_give_it_more():
    """The first of three busy ranks was told to have fewer layers."""
    pipe = fpipe.pipeline([torch.mul] * 4, loss=torch.sum, microbatches=32, group=fpipe.local(4))
    times = [0.5, 1, 1, 1]
    costs = fpipe.Costs(F=times, I=times, W=times)
    page = pipe.explain([torch.ones(())] * 4, torch.ones(32), costs=costs)
    said = (
        "Move work to rank 0 (0.57 times the mean work), idle while the others compute. An even "
        "split saves at most 11.6% of a step.\ncuts = fpipe.balance("
    )
    advice = next(text for text in page.advice if text.startswith("Move"))
    assert advice.startswith(said)
    (call,) = re.findall(r"fpipe\.balance\(.*\)\.cuts", advice)
    assert eval(call, {"fpipe": fpipe, "pipe": pipe, "parts": [1, 2, 2, 2, 1, 1]}) == (2, 3, 4)


def uneven(costs: fpipe.Costs | None = None) -> Any:
    """A page of which one stage has too much work, its pipeline, parameters and batch."""
    thrice = lambda p, x: layer(p, layer(p, layer(p, x)))
    loss = lambda y, target: (y - target).sum()
    pipe = fpipe.pipeline([layer, thrice], loss=loss, microbatches=4, group=fpipe.local(2))
    params, x = [torch.eye(64)] * 2, torch.ones(256, 64)
    return pipe.explain(params, x, x, costs=costs), pipe, params, x


@pytest.mark.parametrize("costs", [None, fpipe.Costs(F=[1, 3], I=[1, 3], W=[1, 3])])
def test_calls_in_advice_run(costs: fpipe.Costs | None):
    """With estimates one had ``costs=costs``, which the caller did not have."""
    page, pipe, params, x = uneven(costs)
    assert " and move a part of it to rank 0 (" in page.advice[0]
    (call,) = re.findall(r"<code>schedule=(fpipe\.auto.*?)</code>", page._repr_html_())
    assert ("measure_costs" in call) == (costs is None)
    names = {"fpipe": fpipe, "pipe": pipe, "params": params, "x": x, "y": x}
    assert eval(call, names | {"costs": costs} if costs else names) is not None


@pytest.mark.parametrize("costs", [None, fpipe.Costs(F=[1, 3], I=[1, 3], W=[1, 3])])
def test_calls_in_advice_begin_lines(costs: fpipe.Costs | None):
    """The call of ``fpipe.balance`` was inside of ten lines of text."""
    page, *_ = uneven(costs)
    lines = str(page).splitlines()
    call = lines.index("   cuts = fpipe.balance(parts, 2, pipe.schedule(4)).cuts")
    assert lines[call - 1].endswith(" step.") and "Split stage" in lines[call - 3]


def test_advice_names_all_overloaded_ranks_and_those_with_room():
    times = [3, 3, 1, 1, 0.2]
    costs = fpipe.Costs(F=times, I=times, W=times)
    pipe = fpipe.pipeline([torch.mul] * 5, loss=torch.sum, microbatches=8, group=fpipe.local(5))
    first = pipe.explain([torch.ones(())] * 5, torch.ones(8), costs=costs).advice[0]
    assert first.startswith(
        "Move work from ranks 0 and 1 (1.8 times the mean work), for which the others wait, to "
        "ranks 2, 3 and 4 (0.12 to 0.61 times the mean work). An even split saves at most 40.3% of "
        "a step.\n"
    )


def test_of_one_big_stage_the_advice_is_to_split_or_copy_it():
    """The advice was to move work; ``fpipe.balance`` then gained nothing."""
    times = [1, 1, 1, 1, 1, 1, 1, 8]
    costs = fpipe.Costs(F=times, I=times, W=times)
    page, _ = explained("Interleaved1F1B", 4, 8, costs=costs)
    busy, mean, total = 2 * 27, 2 * 45 / 4, page.timeline.total
    assert page.advice[0].startswith(
        "Split stage 7 of rank 3 (2.4 times the mean work), for which the others wait, and move a "
        "part of it to ranks 0, 1 and 2 (0.53 times the mean work). An even split saves at most "
        f"{(busy - mean) / total:.1%} of a step.\n"
    )
    assert "<code>schedule=fpipe.auto(costs=costs, replicate=True)</code>." in page._repr_html_()
    copied = fpipe.auto(costs=costs, replicate=True)
    pipe = fpipe.pipeline([layer] * 8, copied, loss=torch.sum, microbatches=4, group=fpipe.local(4))
    assert len(pipe.placement.ranks_of(7)) > 1


def test_a_big_stage_beside_more_other_work_is_no_reason_to_split():
    times = [1, 1, 1, 3, 1, 1, 1, 3]
    costs = fpipe.Costs(F=times, I=times, W=times)
    page, _ = explained("Interleaved1F1B", 4, 8, costs=costs)
    first = next(text for text in page.advice if "balance" in text)
    assert first.startswith("Move work from rank 3 (2 times") and "copies" not in first


def test_advice_names_the_change_that_saves_most():
    page, _ = explained(costs=fpipe.Costs(F=[1, 3], I=[1, 3], W=[1, 3]))
    assert "stage 1 of rank 1 (1.5 times the mean work), for which" in page.advice[0]
    page, _ = explained(costs=fpipe.Costs(F=1, I=1, W=1))
    assert len(page.advice) == 2
    said = next(text for text in page.advice if "microbatches=4" in text)
    # 2 microbatches take 9, 4 take 15
    assert "16.7% less time than with 2." in said
    named = next(text for text in page.advice if text.startswith("With schedule="))
    name = named.split('"')[1]
    assert name == "ZBH1", "no interleaved one of one stage a rank"
    total = fpipe.make_schedule(name, 2, 2, 2).simulate(fpipe.Costs(F=1, I=1, W=1)).total
    assert total < 9 and f"takes {round(100 * (1 - total / 9), 1):g}% less time" in named


def test_advice_names_messages_that_take_long():
    costs = fpipe.Costs(F=1, I=1, W=1, comm=2)
    page, _ = explained(costs=costs)
    found = next(text for text in page.advice if text.startswith("Use larger microbatches"))
    # 2 microbatches take 9 without messages
    saved = 100 * (1 - 9 / page.timeline.total)
    assert found.endswith(f" without its messages a step takes {round(saved, 1):g}% less time.")


def test_a_schedule_that_needs_more_memory_says_how_many_times():
    """8.5 times the memory for 3.3% of the time looked like a gain."""
    page, _ = explained("1F1B", 4, 4, costs=fpipe.Costs())
    text = next(text for text in page.advice if text.startswith("With schedule="))
    name = text.split('"')[1]
    peaks = [
        max(fpipe.make_schedule(one, 4, 2).simulate(page.facts.costs).peak_bytes)
        for one in (name, "1F1B")
    ]
    assert 1.05 * peaks[1] < peaks[0] <= 2 * peaks[1]
    times = peaks[0] / peaks[1]
    assert text.endswith(f"less time at these costs for {times:.1f} times the memory.")
    page, _ = explained("Interleaved1F1B", 4, 8, costs=fpipe.Costs())
    text = next(text for text in page.advice if text.startswith("With schedule="))
    assert text.endswith(" at these costs."), "no more memory than now"


def test_a_schedule_that_needs_much_more_memory_is_no_advice():
    """One of 16.5 times the memory was advice for 2.7% of the time."""
    times = [1, 1, 1, 9]
    costs = fpipe.Costs(F=times, I=times, W=times)
    pipe = fpipe.pipeline([layer] * 4, loss=torch.sum, microbatches=8, group=fpipe.local(4))
    params = [torch.eye(WIDTH)] * 3 + [torch.ones(WIDTH, 64 * WIDTH)]
    page = pipe.explain(params, torch.ones(32, WIDTH), costs=costs)
    before, other = (
        fpipe.make_schedule(name, 4, 8).simulate(page.facts.costs) for name in ("1F1B", "ZBH1")
    )
    assert other.total < 0.98 * before.total
    assert max(other.peak_bytes) > 2 * max(before.peak_bytes)
    assert not any("With schedule=" in text for text in page.advice)


def test_one_rank_has_nothing_to_change():
    page, _ = explained("1F1B", 1, 1)
    assert page.advice == ()
    assert "Nothing stands out" in str(page)


def test_a_schedule_of_one_number_of_microbatches():
    page, _ = explained(fpipe.make_schedule("1F1B", 2, 2), costs=fpipe.Costs(F=1, I=1, W=1))
    assert len(page.advice) == 1 and page.advice[0].startswith("With schedule=")


def test_memory_over_the_step():
    page, _ = explained(costs=fpipe.Costs(F=1, I=1, W=1))
    (first, second) = rows(page, "Memory against time")
    curve = re.findall(r"\[(.{24})\]", first + second)
    assert len(curve) == 2 and "@" in curve[0]
    assert curve[1][:2] == "  ", "rank 1 holds nothing before its first microbatch"


def _scaled(factor: float, p: Any, x: torch.Tensor) -> torch.Tensor:
    return factor * x @ p


class _Layers:
    def first(self, p: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ p


def test_a_stage_has_the_name_of_the_function_that_is_wrapped():
    def inner(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ p

    stages = {
        "_scaled": partial(_scaled, 2.0),
        "layer": torch.func.vmap(partial(layer), in_dims=(None, 0)),
        "_Layers.first": _Layers().first,
        "inner": inner,
    }
    pipe = fpipe.pipeline(
        list(stages.values()), "1F1B", loss=torch.sum, microbatches=1, group=fpipe.local(4)
    )
    page = pipe.explain([torch.eye(WIDTH)] * 4, torch.ones(6, WIDTH))
    assert [line.split()[2] for line in rows(page, "What runs where")] == list(stages)


def test_times_have_the_unit_that_suits_them():
    page, _ = explained(costs=fpipe.Costs(F=90, I=80, W=70, unit="us"))
    assert "A step takes 720 us" in str(page)
    assert "\nWhat runs where\nF: forward; I and W: " in str(page)
    assert str(page).count("F us") == 1 and re.search(" 90 +80 +70\n", str(page))
    page, _ = explained(costs=fpipe.Costs(F=9000, I=800, W=700, unit="us"))
    assert "F ms" in str(page) and re.search(r" 9 +0\.8 +0\.7\n", str(page))


def test_the_page_shows_advice_and_the_step_first_and_memory_as_a_picture():
    page, _ = explained()
    html = page._repr_html_()
    order = [html.index(word) for word in ("What to change", "<svg", "What runs")]
    assert order == sorted(order)
    assert (
        html.count(">total ") == 2 * html.count("1F1B: 2") == 2 and html.count("A step takes") == 1
    )
    assert ", peak 192 B" in html, "the picture of a small model had units of saved="
    assert html.count("</h3><p") == 5, "what heads say stood left of the page"
    memory = html.partition("Memory against time")[2].partition("<table")[2].partition("<h3>")[0]
    assert memory.count("<path") == 2 and "@" not in memory


def test_times_of_none_are_as_in_a_profile_and_heads_stay_in_one_line():
    """Stage 0 had ``I us 0``, and a phone broke ``F us`` but not ``I us``."""
    page, _ = explained(costs=fpipe.Costs(F=2, I=[0, 2], W=2, unit="us"))
    assert re.search(r" 2 +- +2$", rows(page, "What runs where")[0])
    assert [page._repr_html_().count(f">{op}&nbsp;us<") for op in "FIW"] == [1, 1, 1]


@pytest.mark.parametrize("make", [partial(explained, "ZBV", 4, 8), uneven])
def test_the_page_follows_its_reader_and_fits_a_phone(make: Any, tmp_path: Path, browser: Any):
    page, *_ = make()
    page.save(tmp_path / "page.html")
    grounds = []
    for scheme in ("light", "dark"):
        view = browser.new_page(color_scheme=scheme, viewport={"width": 390, "height": 800})
        view.goto((tmp_path / "page.html").as_uri())
        grounds.append(view.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert view.evaluate("document.documentElement.scrollWidth") == 390
    assert grounds == ["rgb(255, 255, 255)", "rgb(20, 24, 29)"]


def test_the_cell_of_a_notebook_fits_a_phone(tmp_path: Path, browser: Any):
    """A call made it 438 pixels wide, and its tables showed the beginning of each cause alone."""
    page, *_ = uneven()
    viewport = '<!doctype html><meta name="viewport" content="width=device-width">'
    (tmp_path / "cell.html").write_text(viewport + page._repr_html_(), encoding="utf-8")
    view = browser.new_page(viewport={"width": 390, "height": 800})
    view.goto((tmp_path / "cell.html").as_uri())
    assert view.evaluate("document.documentElement.scrollWidth") == 390
    tables = "[...document.querySelectorAll('table')].map(t => t.scrollWidth <= t.clientWidth)"
    assert view.evaluate(tables)[1:] == [True] * 3


class Tags(HTMLParser):
    """Which elements are open at the end of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "br", "img", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_saved_pages(tmp_path: Path):
    page, _ = explained()
    page.save(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert Tags(text).open == []
    assert (
        "What to change first" in text
        and "<svg" in text
        and "http" not in text.lower().replace("http://www.w3.org", "")
    )
    page.save(str(tmp_path / "page.txt"))
    assert (tmp_path / "page.txt").read_text(encoding="utf-8") == str(page)
    with pytest.raises(FpipeError, match=r"use \.html or \.txt"):
        page.save("page.gif")
    with pytest.raises(FpipeError, match="a path that can be written"):
        page.save(tmp_path / "none" / "page.html")
    with pytest.raises(FpipeError, match=r"costs='unit'; give fpipe\.Costs"):
        explained(costs="unit")


def _page(group: Any) -> str:
    pipe = fpipe.pipeline(
        [layer] * 4, "Interleaved1F1B", loss=torch.sum, microbatches=2, group=group
    )
    params = pipe.place([torch.eye(WIDTH)] * 4)
    return str(pipe.explain(params, torch.ones(6, WIDTH)))


def test_every_process_has_the_same_page():
    pages = fpipe.testing.run(_page, ranks=2)
    assert pages[0] == pages[1]
    alone = _page(fpipe.local(2))
    assert "What to change first" in alone
    for title in ("What runs where", "Messages of a step", "Bubble by rank"):
        assert rows(pages[0], title) == rows(alone, title) != []


# ---- the command ----
def run(*args: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = main(["explain", *args])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_script_runs_up_to_its_first_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    status, out, _ = run(str(EXAMPLES / "quickstart.py"), capsys=capsys)
    assert status == 0
    assert (
        out.startswith("ZBVZeroBubble: 8 stages on 4 ranks, 8 microbatches") and "loss" not in out
    )
    path = tmp_path / "page.html"
    status, out, _ = run("--out", str(path), str(EXAMPLES / "quickstart.py"), capsys=capsys)
    assert status == 0 and path.exists()
    other = path.with_suffix(".txt")
    status, out, _ = run(str(EXAMPLES / "quickstart.py"), "--out", str(other), capsys=capsys)
    assert (
        status == 0 and out.startswith(f"wrote {other} (") and other.read_text().startswith("ZBV")
    )


SCRIPTS = {
    "called no pipeline in this process": "",
    "raised ZeroDivisionError before its first call": "1 / 0",
    "ended with status 'give a file'": "raise SystemExit('give a file')",
}


@pytest.mark.parametrize("message", SCRIPTS)
def test_scripts_without_a_call(message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "script.py"
    path.write_text(SCRIPTS[message], encoding="utf-8")
    status, _, err = run(str(path), capsys=capsys)
    assert status == 2 and message in err and len(err) < 1000
    status, _, err = run(str(tmp_path / "none.py"), capsys=capsys)
    assert status == 2 and "there is no file" in err


def test_help_lists_the_command():
    from fpipe.products.command.cli import fpipe as group

    assert "explain" in CliRunner().invoke(group, ["--help"]).output

